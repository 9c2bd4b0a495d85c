"""The text layer: what comes out never depends on how the tokens arrived."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from spec_core.errors import InvalidValueError
from spec_server.errors import ContextLengthError, ModelLoadError
from spec_server.text import AnswerText, Detokeniser, StopMatcher, ThinkingSplit, Tokeniser
from spec_server.text.thinking import ThinkingMarkers

MARKERS = ThinkingMarkers("<think>", "</think>")


def cuts(text: str, sizes: Sequence[int]) -> list[str]:
    pieces, rest = [], text
    for size in sizes:
        pieces.append(rest[:size])
        rest = rest[size:]
    return [*pieces, rest]


class ByteLevel:
    """One token a byte, decoded as byte-level BPE does."""

    byte_tokens: frozenset[int] = frozenset()

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode("utf-8", "replace")


class ByteFallback:
    """A sentencepiece-like vocabulary: ids 0..255 are bytes, then a few words."""

    def __init__(self) -> None:
        words = ["▁the", "▁", "cat", "é"]
        names = [f"<0x{byte:02X}>" for byte in range(256)] + words
        vocab = {name: i for i, name in enumerate(names)}
        self.tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
        self.tokenizer.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
        self.byte_tokens = frozenset(range(256))

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(list(ids))
        return text


TEXTS = st.text(st.sampled_from("aé漢😀 \n<"), max_size=40)
SIZES = st.lists(st.integers(1, 5), max_size=60)


@given(st.one_of(TEXTS.map(str.encode), st.binary(max_size=90)), SIZES)
def test_pieces_join_to_the_decoding_of_all_ids(data: bytes, sizes: list[int]) -> None:
    ids, detokeniser, pieces = list(data), Detokeniser(ByteLevel()), []
    rest = ids
    for size in sizes:
        pieces.append(detokeniser.feed(rest[:size]))
        rest = rest[size:]
    pieces += [detokeniser.feed(rest), detokeniser.finish()]
    assert "".join(pieces) == ByteLevel().decode(ids)


@given(TEXTS)
def test_a_character_is_never_split(text: str) -> None:
    detokeniser = Detokeniser(ByteLevel())
    pieces = [detokeniser.feed([byte]) for byte in text.encode()]
    assert "".join(pieces) == text
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)


@given(st.lists(st.one_of(st.integers(0, 255), st.integers(256, 259)), max_size=60))
def test_byte_fallback_joins_to_the_decoding_of_all_ids(ids: list[int]) -> None:
    decoder = ByteFallback()
    detokeniser = Detokeniser(decoder)
    pieces = [detokeniser.feed([i]) for i in ids]
    assert "".join([*pieces, detokeniser.finish()]) == decoder.decode(ids)


def test_byte_fallback_shows_complete_words_at_once() -> None:
    decoder = ByteFallback()
    detokeniser = Detokeniser(decoder)
    ids = [256, 257, *"漢".encode(), 258]
    assert [detokeniser.feed([i]) for i in ids] == ["the", " ", "", "", "", "漢cat"]


def test_an_answer_cut_inside_a_character_has_no_replacement_character() -> None:
    detokeniser = Detokeniser(ByteLevel())
    shown = detokeniser.feed("hi 😀".encode()[:-1])
    assert shown + detokeniser.finish(complete=False) == "hi "


@pytest.mark.parametrize(
    ("stops", "expected"),
    [
        (["beta gamma"], "alpha "),
        (["pha"], "al"),
        (["eta"], "alpha b"),
        (["delta2"], "alpha beta gamma "),
        (["ga", "beta"], "alpha "),
        (["nowhere", "a gamma delta3"], "alpha beta gamma delta2"),
        (["alpha beta gamma delta2"], ""),
    ],
)
@given(sizes=SIZES)
def test_the_text_ends_right_before_the_first_stop_string(
    stops: list[str], expected: str, sizes: list[int]
) -> None:
    matcher, shown, stop = StopMatcher(stops), "", None
    for piece in cuts("alpha beta gamma delta2", sizes):
        match = matcher.feed(piece)
        shown += match.text
        assert expected.startswith(shown)
        if (stop := match.stop) is not None:
            break
    if stop is None:
        shown += matcher.finish()
    assert shown == expected
    assert (stop is None) == (stops[0] == "nowhere")


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_the_stop_string_that_is_complete_first_wins(text: str, stops: list[str]) -> None:
    ends = [
        (end, -len(stop))
        for end in range(len(text) + 1)
        for stop in stops
        if text[:end].endswith(stop)
    ]
    expected = text if not ends else text[: min(ends)[0] + min(ends)[1]]
    matcher, shown = StopMatcher(stops), ""
    for character in text:
        match = matcher.feed(character)
        shown += match.text
        if match.stop is not None:
            break
    else:
        shown += matcher.finish()
    assert shown == expected


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="stop"):
        StopMatcher(["ok", ""])


THOUGHTS = [
    ("plain  text\n", False, "plain  text\n", ""),
    ("\n\nplain", False, "\n\nplain", ""),
    ("<think>\nwhy\n</think>\n\nanswer ", False, "answer ", "why"),
    ("\n<think>\nwhy not\n</think>\n\nanswer", False, "answer", "why not"),
    ("why\n</think>\n\nanswer", True, "answer", "why"),
    ("cut off  \n", True, "", "cut off"),
    ("<think>cut o", False, "", "cut o"),
    ("<think>\n\n</think>\n\n", False, "", ""),
    ("a < b <thin", False, "a < b <thin", ""),
    ("say <think>x</think> more", False, "say more", "x"),
]


@pytest.mark.parametrize(("text", "inside", "content", "reasoning"), THOUGHTS)
@given(sizes=SIZES)
def test_thought_and_content_are_told_apart_however_the_text_arrives(
    text: str, inside: bool, content: str, reasoning: str, sizes: list[int]
) -> None:
    split = ThinkingSplit(MARKERS, inside)
    parts = [split.feed(piece) for piece in cuts(text, sizes)]
    parts.append(split.finish())
    assert "".join(part.content for part in parts) == content
    assert "".join(part.reasoning for part in parts) == reasoning


def test_a_model_without_thoughts_keeps_every_character() -> None:
    split = ThinkingSplit(None)
    assert split.feed(" <think> ").content + split.finish().content == " <think> "


@pytest.fixture(scope="module")
def tokeniser(chain: Path) -> Tokeniser:
    return Tokeniser.load(chain)


def script_ids(tokeniser: Tokeniser, pieces: Sequence[str]) -> list[int]:
    return [i for piece in pieces for i in tokeniser.encode(piece).ids]


@pytest.mark.parametrize(
    ("stops", "expected", "used"),
    [
        (["beta gamma"], "alpha ", 5),
        (["pha"], "al", 2),
        (["eta"], "alpha b", 4),
        (["delta2"], "alpha beta gamma ", 7),
        (["ga", "beta"], "alpha ", 4),
        ([], "alpha beta gamma delta2", 7),
    ],
)
@given(sizes=SIZES)
def test_a_stop_string_also_ends_the_tokens(
    tokeniser: Tokeniser, stops: list[str], expected: str, used: int, sizes: list[int]
) -> None:
    ids = script_ids(tokeniser, ["al", "pha ", "be", "ta ga", "mma ", "del", "ta2"])
    answer, shown, count = AnswerText(tokeniser, stops=stops), "", 0
    for size in [*sizes, len(ids)]:
        segment = answer.feed(ids[:size])
        ids, shown, count = ids[size:], shown + segment.content, count + segment.used
        if segment.stop is not None:
            break
    else:
        shown += answer.finish(complete=True).content
    assert (shown, count) == (expected, used)


def test_special_tokens_have_no_text_but_markers_do(tokeniser: Tokeniser) -> None:
    ids = tokeniser.encode("<|im_start|>a<think>b</think>c<|im_end|>").ids
    assert tokeniser.decode(ids) == "a<think>b</think>c"
    assert tokeniser.markers == MARKERS


def test_the_prompt_is_the_template_s_own_rendering(tokeniser: Tokeniser) -> None:
    messages = [{"role": "system", "content": "brief"}, {"role": "user", "content": "a S"}]
    prompt = tokeniser.render(messages)
    expected = (
        "<|im_start|>system\nbrief<|im_end|>\n<|im_start|>user\na S<|im_end|>\n"
        "<|im_start|>assistant\nS"
    )
    assert prompt.ids == tokeniser.encode(expected).ids
    assert not prompt.opens_thought


def test_a_thought_that_the_template_opened_is_noticed(tokeniser: Tokeniser) -> None:
    opened = tokeniser.render([{"role": "user", "content": ""}], thinking=True)
    assert opened.opens_thought
    quoted = tokeniser.render([{"role": "user", "content": "what is <think>"}], thinking=False)
    assert not quoted.opens_thought


def test_a_text_far_beyond_the_context_is_refused_without_being_tokenised(
    chain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokeniser = Tokeniser.load(chain)
    assert len(tokeniser.encode("x" * 300, limit=200).ids) == 300
    monkeypatch.setattr(tokeniser, "_encode", None)
    with pytest.raises(ContextLengthError, match="at least"):
        tokeniser.encode("x" * 10_000, limit=200)
    with pytest.raises(ContextLengthError, match="at least"):
        tokeniser.render([{"role": "user", "content": "x" * 10_000}], limit=200)


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(ModelLoadError, match="has no tokenizer: none of"):
        Tokeniser.load(tmp_path)
