"""The engine on scripted checkpoints: the text is known, whatever drafts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import mlx.core as mx
import pytest

from spec_core import Drafter, FixedLength, InvalidValueError, SpecError
from spec_core.testing import ScriptedDrafter
from spec_drafters.lookup import Lookup
from spec_server import Completion, Engine, Facts, Limits, LoadOptions, Tokeniser
from spec_server.errors import ModelLoadError, TemplateError
from spec_server.job import Labels
from spec_server.loading import MaxDraft
from spec_server.worker import Models, Worker
from spec_targets import load_target

TEXT = "alpha beta gamma delta2"
EARLIER = [
    {"role": "user", "content": "S"},
    {"role": "assistant", "content": TEXT},
    {"role": "user", "content": "S"},
]


def ids_of(tokeniser: Tokeniser, *texts: str) -> list[int]:
    return [i for text in texts for i in tokeniser.encode(text).ids]


def knowing(tokeniser: Tokeniser) -> Drafter:
    """A drafter that knows the scripts: its blocks are accepted whole."""
    whole = [
        *ids_of(tokeniser, "S" + TEXT + "<|im_end|>"),
        *ids_of(tokeniser, "Uhi 😀漢!<|im_end|>"),
        *ids_of(tokeniser, "K<think>\nadd them\n</think>\n\n42.<|im_end|>"),
    ]

    def script(text: tuple[int, ...]) -> Sequence[int]:
        """What follows the text's longest ending that is in the scripts."""
        for size in range(12, 0, -1):
            for at in range(len(whole) - size):
                if tuple(whole[at : at + size]) == text[-size:]:
                    return whole[at + size :]
        return ()

    return ScriptedDrafter(script, max_block=6)


@pytest.fixture(scope="module", params=["baseline", "lookup", "knowing"])
def engine(request: pytest.FixtureRequest, chain: Path) -> Iterator[Engine]:
    tokeniser = Tokeniser.load(chain)
    drafters = {"baseline": None, "lookup": Lookup(), "knowing": knowing(tokeniser)}

    def load() -> Models:
        return Models(load_target(chain).target, drafters[request.param], FixedLength())

    worker = Worker(load, Limits())
    worker.start()
    facts = Facts("chain", Labels(request.param), 2048, "float32", 6)
    with Engine(worker, tokeniser, facts) as made:
        yield made


def both(engine: Engine, prompt: object, **options: object) -> Completion:
    """The answer; that its stream says the same is checked on the way."""
    chunks = list(engine.stream(prompt, **options))  # type: ignore[arg-type]
    answer = chunks[-1].completion
    assert answer is not None
    assert "".join(chunk.text for chunk in chunks) == answer.text
    assert "".join(chunk.reasoning for chunk in chunks) == answer.reasoning
    again = engine.generate(prompt, **options)  # type: ignore[arg-type]
    assert (again.text, again.token_ids) == (answer.text, answer.token_ids)
    return answer


@pytest.mark.parametrize(
    ("stop", "text", "tokens"),
    [
        ("beta gamma", "alpha ", 5),
        ("pha", "al", 2),
        ("eta", "alpha b", 4),
        ("delta2", "alpha beta gamma ", 7),
        (["ga", "beta"], "alpha ", 4),
        ("al", "", 1),
    ],
)
def test_the_answer_ends_right_before_the_first_stop_string(
    engine: Engine, stop: str | list[str], text: str, tokens: int
) -> None:
    answer = both(engine, EARLIER, stop=stop)
    assert (answer.text, answer.finish_reason) == (text, "stop")
    assert answer.completion_tokens == tokens
    assert answer.stop in ([stop] if isinstance(stop, str) else stop)


def test_text_that_might_have_become_a_stop_string_is_not_lost(engine: Engine) -> None:
    answer = both(engine, EARLIER, stop=["delta2!", "gamma delt2"])
    assert (answer.text, answer.stop, answer.finish_reason) == (TEXT, None, "stop")


@pytest.mark.parametrize(
    ("budget", "text", "reason"), [(3, "alpha be", "length"), (4, "alpha ", "stop")]
)
def test_a_stop_string_beyond_the_budget_does_not_count(
    engine: Engine, budget: int, text: str, reason: str
) -> None:
    answer = both(engine, EARLIER, stop="beta", max_tokens=budget)
    assert (answer.text, answer.finish_reason) == (text, reason)


@pytest.mark.parametrize("budget", range(1, 14))
def test_characters_arrive_whole_under_every_budget(engine: Engine, budget: int) -> None:
    full = "hi 😀漢!"
    answer = both(engine, "say U", max_tokens=budget)
    natural = len(full.encode()) + 1
    assert answer.completion_tokens == min(budget, natural)
    assert answer.text == full.encode()[:budget].decode(errors="ignore")
    assert answer.finish_reason == ("stop" if budget >= natural else "length")


def test_thought_and_answer_are_told_apart(engine: Engine) -> None:
    answer = both(engine, "sum K")
    assert (answer.reasoning, answer.text) == ("add them", "42.")


@pytest.mark.parametrize(("budget", "reasoning"), [(1, ""), (2, "add"), (3, "add them")])
def test_a_thought_that_is_cut_stays_a_thought(engine: Engine, budget: int, reasoning: str) -> None:
    answer = both(engine, "sum K", max_tokens=budget)
    assert (answer.reasoning, answer.text, answer.finish_reason) == (reasoning, "", "length")


def test_plain_continuation_keeps_every_character(engine: Engine) -> None:
    answer = both(engine, "K", chat=False)
    assert (answer.text, answer.reasoning) == ("<think>\nadd them\n</think>\n\n42.", "")


def test_chat_options_need_the_chat_template(engine: Engine) -> None:
    with pytest.raises(InvalidValueError, match="chat"):
        engine.generate("K", chat=False, system="brief")


def test_a_template_that_refuses_is_quoted(engine: Engine) -> None:
    with pytest.raises(TemplateError, match=r"refused .*: The conversation must begin with"):
        engine.generate([{"role": "assistant", "content": "S"}])


def test_a_model_without_a_template_says_how_to_go_on(chain: Path, tmp_path: Path) -> None:
    for file in chain.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with Engine.load(tmp_path, mode="baseline") as one:
        with pytest.raises(TemplateError, match="no chat template"):
            one.generate("S")
        assert one.generate("S", chat=False).text == TEXT


def drafter_folder(folder: Path, *, hidden: int, vocab: int, target_layers: int = 2) -> Path:
    """A random one-layer drafter of DeepSpec's DFlash kind, with borrowed embedding and head."""
    folder.mkdir()
    config = {
        "architectures": ["Qwen3DSparkModel"],
        "block_size": 5,
        "mask_token_id": 1,
        "target_layer_ids": [0],
        "num_target_layers": target_layers,
        "hidden_size": hidden,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "markov_rank": 0,
        "enable_confidence_head": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    layer = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (64, hidden),
        "self_attn.k_proj": (32, hidden),
        "self_attn.v_proj": (32, hidden),
        "self_attn.o_proj": (hidden, 64),
        "self_attn.q_norm": (32,),
        "self_attn.k_norm": (32,),
        "mlp.gate_proj": (32, hidden),
        "mlp.up_proj": (32, hidden),
        "mlp.down_proj": (hidden, 32),
    }
    shapes = {f"layers.0.{name}": shape for name, shape in layer.items()}
    shapes |= {"fc": (hidden, hidden), "hidden_norm": (hidden,), "norm": (hidden,)}
    keys = mx.random.split(mx.random.key(0), len(shapes))
    weights = {
        f"{name}.weight": mx.random.normal(shape, key=key)
        for (name, shape), key in zip(shapes.items(), keys, strict=True)
    }
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


def test_a_drafter_that_knows_nothing_changes_nothing(chain: Path, tmp_path: Path) -> None:
    config = json.loads((chain / "config.json").read_text())
    folder = drafter_folder(
        tmp_path / "drafter", hidden=config["hidden_size"], vocab=config["vocab_size"]
    )
    with Engine.load(chain, drafter=folder) as one:
        mode = one.facts.labels.mode
        assert one.facts.labels == Labels(mode, str(folder))
        answer = both(one, EARLIER, stop="delta2")
    assert answer.text == "alpha beta gamma "
    assert answer.statistics.drafted > 0
    with Engine.load(chain, drafter=folder, lookup_drafts=True) as one:
        answer = both(one, EARLIER)
    assert (answer.text, answer.statistics.mode) == (TEXT, f"{mode}+lookup")


@pytest.mark.parametrize(("asked", "shown"), [(None, "full"), (2, "2"), (5, "5"), (999, "5")])
def test_the_draft_length_that_is_shown_is_in_force(
    chain: Path, tmp_path: Path, asked: int | None, shown: str
) -> None:
    config = json.loads((chain / "config.json").read_text())
    folder = drafter_folder(
        tmp_path / "drafter", hidden=config["hidden_size"], vocab=config["vocab_size"]
    )
    with Engine.load(chain, drafter=folder, max_draft=asked) as one:
        assert one.facts.max_block == 5
        caps = {cap: one.generate("S", max_draft=cap).statistics for cap in (None, 3, 5, 999)}
    assert [caps[cap].max_draft for cap in (None, 5, 999)] == [shown] * 3
    assert caps[3].max_draft == f"{shown}, at most 3"
    assert caps[999].drafted == caps[None].drafted


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"hidden": 128}, "hidden size of 128; the target's is"),
        ({"vocab": 77}, "vocabulary of 77; the target's is"),
        ({"target_layers": 9}, "layer count of 9; the target's is 2"),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused(
    chain: Path, tmp_path: Path, changes: dict[str, int], sentence: str
) -> None:
    config = json.loads((chain / "config.json").read_text())
    sizes = {"hidden": config["hidden_size"], "vocab": config["vocab_size"]} | changes
    folder = drafter_folder(tmp_path / "drafter", **sizes)
    with pytest.raises(SpecError, match=sentence):
        Engine.load(chain, drafter=folder)


def test_a_drafter_s_kind_must_be_the_mode_s(chain: Path, tmp_path: Path) -> None:
    folder = drafter_folder(tmp_path / "drafter", hidden=320, vocab=276)
    with pytest.raises(ModelLoadError, match="is a dflash drafter, but the mode is dspark"):
        Engine.load(chain, drafter=folder, mode="dspark")
    with pytest.raises(InvalidValueError, match="no confidence head"):
        Engine.load(chain, drafter=folder, confidence_threshold=0.5)


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_drafter_without_its_files_is_refused(chain: Path, tmp_path: Path, missing: str) -> None:
    folder = drafter_folder(tmp_path / "drafter", hidden=320, vocab=276)
    (folder / missing).unlink()
    with pytest.raises(SpecError, match="drafter"):
        Engine.load(chain, drafter=folder)


def test_a_target_is_no_drafter(chain: Path) -> None:
    with pytest.raises(SpecError):
        Engine.load(chain, drafter=chain)


def test_auto_takes_lookup_where_the_known_drafter_cannot_be_had(
    chain: Path, tmp_path: Path
) -> None:
    (tmp_path / "spec-tiny").symlink_to(chain)
    with Engine.load(tmp_path / "spec-tiny") as one:
        answer = one.generate("S")
    assert (answer.text, answer.statistics.mode) == (TEXT, "lookup")
    (fallback,) = answer.statistics.fallbacks
    assert fallback.startswith("spec-tiny-dspark: ")
    with pytest.raises(SpecError, match="spec-tiny-dspark"):
        Engine.load(tmp_path / "spec-tiny", mode="dspark")


def test_auto_reports_that_no_drafter_is_known(chain: Path) -> None:
    with Engine.load(chain) as one:
        answer = one.generate("S")
    assert (answer.text, answer.statistics.mode) == (TEXT, "lookup")
    (fallback,) = answer.statistics.fallbacks
    assert "no drafter is known" in fallback
    with pytest.raises(ModelLoadError, match="no drafter is known"):
        Engine.load(chain, mode="dspark")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"mode": "turbo"}, "mode"),
        ({"dtype": "float8"}, "dtype"),
        ({"kv_bits": 3}, "kv_bits"),
        ({"drafter_bits": 5}, "drafter_bits"),
        ({"max_draft": -1}, "max_draft"),
        ({"confidence_threshold": 0.0}, "confidence_threshold"),
        ({"mode": "baseline", "drafter": "x"}, "drafter"),
        ({"mode": "baseline", "lookup_drafts": True}, "lookup_drafts"),
        ({"mode": "lookup", "lookup_drafts": False}, "lookup_drafts"),
        ({"mode": "lookup", "confidence_threshold": 0.5}, "confidence_threshold"),
    ],
)
def test_options_out_of_range_are_named(options: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidValueError) as caught:
        LoadOptions("anything", **options)  # type: ignore[arg-type]
    assert caught.value.field == field


@pytest.mark.parametrize("max_draft", ["auto", None, 3])
@pytest.mark.parametrize("asked", [None, True, False])
def test_copies_stand_beside_a_drafter_where_asked_for_or_where_the_length_is_auto(
    max_draft: MaxDraft, asked: bool | None
) -> None:
    options = LoadOptions("anything", max_draft=max_draft, lookup_drafts=asked)
    assert options.copies == (max_draft == "auto" if asked is None else asked)


def test_a_cast_is_used(chain: Path) -> None:
    with Engine.load(chain, mode="baseline", dtype="bfloat16") as one:
        assert one.facts.dtype == "bfloat16"
        assert one.generate("S").text == TEXT
    with Engine.load(chain, mode="baseline", kv_bits=8) as one:
        assert one.facts.dtype == "float32"
        assert one.generate("S").text == TEXT
