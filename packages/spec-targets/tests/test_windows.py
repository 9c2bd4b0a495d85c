"""Sliding windows: however a text came in, the state is that of its tokens, wrapped or not.

Windows are 16 wide here, in rings of 64 slots. The yardstick is the same target fed one token at
a time, and that one is compared with mlx-lm's own caches and with the model without any.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from spec_core import SeamError, decode
from spec_core.conformance import check_target
from spec_core.seams import PerToken, StateImage
from spec_core.testing import ScriptedDrafter
from spec_targets import UnsupportedTargetError, build_target, load_target

WINDOW, SLOTS = 16, 64
TEXT = [(17 * i * i + 5 * i + 3) % 97 for i in range(300)]
OTHER = [(11 * i + 40) % 97 for i in range(300)]
FAMILIES = ("gemma4", "gemma4_large", "gemma3", "ministral3")
VARIANTS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": mx.bfloat16},
    "8-bit": {"weight_bits": 8},
    "8-bit bfloat16": {"weight_bits": 8, "dtype": mx.bfloat16},
}
slow = pytest.mark.slow


class Subject:
    """A target, and its logits for TEXT when it is fed one token at a time."""

    def __init__(self, target: Any, model: Any) -> None:
        self.target, self.model = target, model
        self.state = target.new_state(1)
        self.known: list[mx.array] = []

    def steps(self, count: int) -> mx.array:
        """[count, V] logits of the first tokens of TEXT."""
        while len(self.known) < count:
            token = TEXT[len(self.known)]
            self.known.append(self.feed(self.state, [token])[0])
            self.state.commit([1])
        return mx.stack(self.known[:count])

    def feed(self, state: Any, tokens: Sequence[int]) -> mx.array:
        """Evaluated logits [T, V] of provisional tokens."""
        logits = self.target.forward(mx.array([list(tokens)]), state).logits[0]
        mx.eval(logits)
        return logits

    def fresh(self, tokens: Sequence[int], chunk: int = 300) -> Any:
        """A state that was only ever given these tokens."""
        state = self.target.new_state(1)
        for start in range(0, len(tokens), chunk):
            piece = list(tokens[start : start + chunk])
            self.target.forward(mx.array([piece]), state, logits="none")
            state.commit([len(piece)])
        return state


@pytest.fixture(scope="module")
def subject(make_target: Any) -> Any:
    """Makes the subject of a family and variant; once."""
    return cache(lambda family, variant: Subject(*make_target(family, **VARIANTS[variant])))


def _equal(ours: mx.array, theirs: mx.array) -> bool:
    return ours.shape == theirs.shape and bool(mx.array_equal(ours, theirs).item())


def _off(ours: mx.array, theirs: mx.array) -> float:
    return mx.abs(ours - theirs).max().item()  # type: ignore[return-value]


# --- the contract ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "variant"),
    [
        ("gemma4", {}),
        pytest.param("gemma4_large", {}, marks=slow),
        pytest.param("gemma3", {}, marks=slow),
        pytest.param("ministral3", {}, marks=slow),
        pytest.param("mistral_sliding", {}, marks=slow),
        pytest.param("olmo3", {}, marks=slow),
        pytest.param("gpt_oss", {}, marks=slow),
        pytest.param("gemma4", {"dtype": mx.bfloat16}, marks=slow),
        pytest.param("gemma4", {"weight_bits": 8}, marks=slow),
        pytest.param("gemma4_large", {"kv_bits": 8}, marks=slow),
        pytest.param("gemma3", {"kv_bits": 4, "dtype": mx.bfloat16}, marks=slow),
    ],
    ids=str,
)
def test_windowed_families_conform(tiny_target: Any, family: str, variant: dict[str, Any]) -> None:
    target, _ = tiny_target(family, **variant)
    assert target.info.tappable
    assert target.batch_refused == ""
    assert target.lender is not None
    check_target(target, prompt_length=SLOTS + 2)


# --- how tokens come in --------------------------------------------------------------------------


def _check_chunks(subject: Subject, chunk: int, length: int) -> None:
    state, got = subject.target.new_state(1), []
    for start in range(0, length, chunk):
        piece = TEXT[start : min(start + chunk, length)]
        got.append(subject.feed(state, piece))
        state.commit([len(piece)])
    assert _equal(mx.concatenate(got), subject.steps(length))


@pytest.mark.parametrize("chunk", [7, 64, 120])
@pytest.mark.parametrize(
    ("family", "variant"),
    [("gemma4", "float32"), ("gemma4_large", "bfloat16"), ("gemma3", "8-bit")],
    ids=str,
)
def test_chunks_equal_single_steps(subject: Any, family: str, variant: str, chunk: int) -> None:
    _check_chunks(subject(family, variant), chunk, 120)


@slow
@pytest.mark.parametrize("chunk", [7, 49, 50, 64, 300])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_chunk_equals_single_steps(
    subject: Any, family: str, variant: str, chunk: int
) -> None:
    _check_chunks(subject(family, variant), chunk, 300)


# --- commit --------------------------------------------------------------------------------------


def _check_commits(subject: Subject, length: int, columns: int, keeps: Sequence[int]) -> None:
    """After each commit, three columns are those of a fresh state fed what was kept."""
    for keep in keeps:
        state = subject.fresh(TEXT[:length], chunk=13)
        subject.feed(state, TEXT[length : length + keep] + OTHER[: columns - keep])
        state.commit([keep])
        probe = OTHER[keep : keep + 3]
        alone = subject.fresh(TEXT[: length + keep])
        assert _equal(subject.feed(state, probe), subject.feed(alone, probe)), (length, keep)


@pytest.mark.parametrize(("length", "columns"), [(9, 8), (60, 8), (130, 16), (70, 60)])
@pytest.mark.parametrize("family", ["gemma4", "gemma3"])
def test_a_commit_equals_a_fresh_state(
    subject: Any, family: str, length: int, columns: int
) -> None:
    keeps = (0, 1, columns // 2, columns - 1)
    _check_commits(subject(family, "float32"), length, columns, keeps)


@slow
@pytest.mark.parametrize("length", [15, 63, 64, 190])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_more_commits_equal_a_fresh_state(
    subject: Any, family: str, variant: str, length: int
) -> None:
    for columns in (1, 2, 5, 9, 16, 17, 49, 50, 70):
        keeps = sorted({0, columns // 3, columns - 1, columns})
        _check_commits(subject(family, variant), length, columns, keeps)


def _walk(subject: Subject, length: int, seed: int, columns: Sequence[int]) -> None:
    """Along TEXT, with blocks of which any number is kept; kept columns are as single steps."""
    rng = random.Random(seed)
    state, at, expected = subject.target.new_state(1), 0, subject.steps(length)
    while at < length:
        width = rng.choice(columns)
        keep = min(rng.randrange(width + 1), length - at)
        wrong = [rng.randrange(97) for _ in range(width - keep)]
        got = subject.feed(state, TEXT[at : at + keep] + wrong)
        assert _equal(got[:keep], expected[at : at + keep]), (at, width, keep)
        state.commit([keep])
        at += keep


@pytest.mark.parametrize(("family", "variant"), [("gemma4", "bfloat16"), ("gemma3", "float32")])
def test_walks(subject: Any, family: str, variant: str) -> None:
    _walk(subject(family, variant), 120, seed=1, columns=(1, 5, 8, 17, 33, 55))


@slow
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_straddle_windows_at_every_offset(subject: Any, family: str, variant: str) -> None:
    one = subject(family, variant)
    for width in range(1, 17):
        state, expected = one.target.new_state(1), one.steps(WINDOW + SLOTS + 4)
        for at in range(WINDOW + SLOTS + 4):
            one.feed(state, OTHER[at : at + width])
            state.commit([0])
            assert _equal(one.feed(state, TEXT[at : at + 1])[0], expected[at]), (width, at)
            state.commit([1])
    for seed in range(6):
        _walk(one, 300, seed, columns=(1, 2, 5, 8, 16, 17, 33, 49, 50, 55, 120))


# --- decoding ------------------------------------------------------------------------------------


class Oracle:
    """Plain decoding's tokens, and a drafter that knows them, with errors."""

    def __init__(self, target: Any, prompt: Sequence[int], count: int) -> None:
        self.target, self.prompt, self.count = target, list(prompt), count
        self.tokens = self.prompt + self.decoded(None, 1)
        assert len(set(self.tokens[len(prompt) :])) > 20

    def decoded(self, block: int | None, chunk: int) -> list[int]:
        drafter = None if block is None else ScriptedDrafter(self._guesses, max_block=block)
        how: dict[str, Any] = {"max_tokens": self.count, "prefill_chunk": chunk}
        rounds = decode(self.target, drafter, self.prompt, **how)
        return [token for outcome in rounds for token in outcome.tokens]

    def check(self, block: int, chunk: int) -> None:
        assert self.decoded(block, chunk) == self.tokens[len(self.prompt) :], (block, chunk)

    def _guesses(self, text: tuple[int, ...]) -> list[int]:
        """What comes next, a fifth of it wrong, with stretches that are all right."""
        known = enumerate(self.tokens[len(text) :], start=len(text))
        wrong = {at for at in range(len(self.tokens)) if at % 100 >= 40 and (at * at) % 5 == 1}
        return [(token + 1) % 97 if at in wrong else token for at, token in known]


@pytest.mark.parametrize(
    ("family", "variant", "length", "block", "chunk"),
    [
        ("gemma4", "float32", 9, 5, 7),
        ("gemma4", "8-bit", 70, 16, 64),
        ("gemma3", "bfloat16", 30, 3, 300),
    ],
)
def test_drafts_do_not_change_greedy_tokens(
    subject: Any, family: str, variant: str, length: int, block: int, chunk: int
) -> None:
    Oracle(subject(family, variant).target, TEXT[:length], 80).check(block, chunk)


@slow
@pytest.mark.parametrize("length", [9, 150])
@pytest.mark.parametrize("variant", ["float32", "bfloat16", "8-bit"])
@pytest.mark.parametrize("family", ["gemma4", "gemma4_large", "gemma3"])
def test_every_draft_length_and_chunk(subject: Any, family: str, variant: str, length: int) -> None:
    oracle = Oracle(subject(family, variant).target, TEXT[:length], 300)
    for block in range(1, 17):
        oracle.check(block, (1, 7, 64, length)[block % 4])


# --- rows ----------------------------------------------------------------------------------------


def _check_rows(subject: Subject, seed: int, turns: int) -> None:
    """Rows join, leave, move, and keep what they like; each row is as if alone."""
    rng = random.Random(seed)
    texts = [TEXT[:5], TEXT[20:110], OTHER[:70]]
    state = subject.fresh(texts[0])
    for text in texts[1:]:
        state.join(subject.fresh(text))
    for turn in range(turns):
        width = rng.choice((1, 4, 9, 17, 52))
        keeps = [rng.randrange(width + 1) for _ in texts]
        drafts = [[rng.randrange(97) for _ in range(width)] for _ in texts]
        got = subject.target.forward(mx.array(drafts), state).logits
        for row, text in enumerate(texts):
            alone = subject.feed(subject.fresh(text, chunk=40), drafts[row])
            assert _equal(got[row], alone), (turn, row)
        state.commit(keeps)
        texts = [t + d[:n] for t, d, n in zip(texts, drafts, keeps, strict=True)]
        if turn % 3 == 2:
            order = rng.sample(range(len(texts)), len(texts) - 1)
            state.select(order)
            texts = [texts[row] for row in order] + [TEXT[50 : 50 + 40 * (turn % 4)]]
            state.join(subject.fresh(texts[-1]))


@pytest.mark.parametrize(("family", "variant"), [("gemma4", "float32"), ("gemma3", "bfloat16")])
def test_rows_of_different_length_equal_rows_alone(subject: Any, family: str, variant: str) -> None:
    _check_rows(subject(family, variant), seed=2, turns=4)


@slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_equal_rows_alone(subject: Any, family: str, variant: str, seed: int) -> None:
    _check_rows(subject(family, variant), seed, turns=12)


def test_padded_rows_prefill_together(subject: Any) -> None:
    one, lengths = subject("gemma4", "float32"), [120, 3, 66]
    state = one.target.new_state(3)
    padded = [TEXT[:n] + [TEXT[n - 1]] * (120 - n) for n in lengths]
    one.target.forward(mx.array(padded), state, logits="none", valid=lengths)
    state.commit(lengths)
    got = one.target.forward(mx.array([OTHER[:4]] * 3), state).logits
    for row, length in enumerate(lengths):
        assert _equal(got[row], one.feed(one.fresh(TEXT[:length]), OTHER[:4]))


# --- images --------------------------------------------------------------------------------------


def _sliding(image: StateImage) -> dict[str, PerToken]:
    return {name: each for name, each in image.per_token.items() if each.reach is not None}


def test_images_hold_a_window_and_no_more_than_the_ring(subject: Any) -> None:
    one = subject("gemma4", "float32")
    image = one.fresh(TEXT[:200], chunk=31).image(0)
    sliding = _sliding(image)
    assert set(sliding) == {"0.keys", "0.values"}  # layer 2 reads what layer 0 stored
    for each in sliding.values():
        assert each.reach == WINDOW - 1
        assert WINDOW - 1 <= each.array.shape[0] <= SLOTS
    assert image.per_token["1.keys"].array.shape[0] == 200


def test_images_cut_to_their_reach_go_on_exactly(subject: Any) -> None:
    one = subject("gemma3", "float32")
    for length in (5, 40, 64, 65, 110):
        image = one.fresh(TEXT[:length], chunk=17).image(0)
        cut = {n: PerToken(e.array[-(WINDOW - 1) :], e.reach) for n, e in _sliding(image).items()}
        state = one.target.new_state(2)
        state.restore(1, StateImage(0, length, {**image.per_token, **cut}, image.at_end))
        rows = mx.array([TEXT[length : length + 3]] * 2)
        got = one.target.forward(rows, state).logits[1]
        assert _equal(got, one.steps(length + 3)[length:])


def test_an_image_without_its_window_is_refused(subject: Any) -> None:
    one = subject("gemma3", "float32")
    image = one.fresh(TEXT[:40]).image(0)
    cut = {n: PerToken(e.array[-(WINDOW - 2) :], e.reach) for n, e in _sliding(image).items()}
    broken = StateImage(0, 40, {**image.per_token, **cut}, image.at_end)
    with pytest.raises(SeamError, match="window of 16 resumes at 40 only from the 15 positions"):
        one.target.new_state(1).restore(0, broken)


def test_what_a_window_remembers_stops_growing(tiny_target: Any) -> None:
    target, _ = tiny_target("mistral_sliding", layer_types=None, sliding_window=None)
    whole = _remembered(target, 400)
    target, _ = tiny_target("mistral_sliding")
    assert _remembered(target, 400) < 0.7 * whole
    assert _remembered(target, 100, sliding=True) == _remembered(target, 400, sliding=True)


def _remembered(target: Any, length: int, sliding: bool = False) -> int:
    """Bytes of the buffers of a state; of its sliding layers only."""
    state = target.new_state(1)
    for start in range(0, length, 40):
        target.forward(mx.array([TEXT[:40]]), state, logits="none")
        state.commit([min(40, length - start)])
    mx.eval(state.pending())
    layers = [layer for layer in state.layers if not sliding or hasattr(layer, "max_size")]
    return sum(array.nbytes for layer in layers for array in layer.pending())


# --- against others ------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gemma4", "gemma3", "ministral3", "mistral_sliding"])
def test_steps_equal_mlx_lms_own_up_to_summation_order(subject: Any, own: Any, family: str) -> None:
    """mlx-lm's rotation adds in another order: at most 1e-4 of logits of 4 to 12 in float32."""
    one = subject(family, "float32")
    reference = own(one.model)
    theirs = mx.concatenate([reference.feed([token]) for token in TEXT[:100]])
    assert _off(one.steps(100), theirs) < 1e-4


@pytest.mark.parametrize("family", ["gemma4", "gemma3", "ministral3"])
def test_steps_equal_the_model_without_caches(subject: Any, family: str) -> None:
    one = subject(family, "float32")
    assert _off(one.steps(100), one.model(mx.array([TEXT[:100]]))[0]) < 1e-4


# --- what is refused, and what is loaded ---------------------------------------------------------


def test_quantised_keys_and_values_are_those_of_full_attention(tiny_target: Any) -> None:
    target, _ = tiny_target("gemma3", kv_bits=8)
    one = Subject(target, None)
    names = {name.rpartition(".")[2] for name in one.fresh(TEXT[:9]).image(0).per_token}
    assert names == {"keys", "values", "packed", "scales", "biases"}
    _check_chunks(one, 30, 90)


def test_kv_bits_that_cannot_be_had_are_refused(tiny: Any) -> None:
    with pytest.raises(UnsupportedTargetError, match="share cannot be quantised"):
        build_target(*tiny("gemma4"), kv_bits=8)
    only = {"layer_types": ["sliding_attention"] * 4}
    model, config = tiny("mistral_sliding")
    for layer in model.layers:
        layer.use_sliding = True
    with pytest.raises(UnsupportedTargetError, match="no layer of this model has full attention"):
        build_target(model, {**config, **only}, kv_bits=4)


def test_first_positions_kept_beyond_a_window_are_refused(tiny: Any) -> None:
    from mlx_lm.models.cache import RotatingKVCache

    model, config = tiny("qwen3")
    cls = type(model)
    made = lambda self: [RotatingKVCache(max_size=16, keep=4) for _ in self.layers]  # noqa: E731
    model.__class__ = type(cls.__name__, (cls,), {"make_cache": made})
    with pytest.raises(UnsupportedTargetError, match="first 4 positions kept beyond a window"):
        build_target(model, config)


def test_a_model_that_forgets_its_window_is_refused(tiny: Any) -> None:
    """Right until the window is full: only a proof that wraps it can tell."""
    from mlx_lm.models.base import create_attention_mask

    model, config = tiny("mistral_sliding")

    def call(self: Any, inputs: mx.array, cache: Any = None, *rest: Any) -> mx.array:
        hidden = self.embed_tokens(inputs)
        for layer, each in zip(self.layers, cache, strict=True):
            hidden = layer(hidden, create_attention_mask(hidden, None), cache=each)
        return self.norm(hidden)

    inner = type(model.model)
    model.model.__class__ = type(inner.__name__, (inner,), {"__call__": call})
    with pytest.raises(UnsupportedTargetError, match="window"):
        build_target(model, config)


def test_a_multimodal_checkpoint_loads_as_text(tiny: Any, tmp_path: Path) -> None:
    import json

    model, text = tiny("gemma4", tie_word_embeddings=True)
    config = {
        "model_type": "gemma4_unified",
        "architectures": ["Gemma4UnifiedForConditionalGeneration"],
        "text_config": text,
        "vision_config": {"model_type": "gemma4_vision", "hidden_size": 8},
        "vocab_size": text["vocab_size"],
    }
    weights = {
        name.replace("model.", "model.language_model.", 1): array
        for name, array in tree_flatten(model.parameters())
    }
    weights["model.vision_tower.patch_embedder.weight"] = mx.zeros((8, 8))
    weights["model.embed_vision.embedding_projection.weight"] = mx.zeros((64, 8))
    (tmp_path / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)
    target = load_target(tmp_path).target
    assert (target.info.family, target.info.logit_softcap) == ("gemma4_unified", 30.0)
    assert target.info.tappable
    assert target.lender is not None
    got = target.forward(mx.array([TEXT[:40]]), target.new_state(1)).logits
    assert got is not None
    assert _off(got, model(mx.array([TEXT[:40]]))) < 1e-4
