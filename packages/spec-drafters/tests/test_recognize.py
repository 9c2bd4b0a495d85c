"""Every packaging is read or refused by name, from config and headers alone."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from spec_core.seams import DraftChoice
from spec_drafters.checkpoint import open_safetensors
from spec_drafters.config import Config
from spec_drafters.dflash import layer_attention, read_zlab
from spec_drafters.errors import CheckpointError, DrafterError, MisfitError
from spec_drafters.load import inspect_drafter, load_drafter
from spec_drafters.recognize import PACKAGINGS, compatibility
from spec_drafters.spec import LayerAttention

from .checkpoints import Edit, configured, copy, first_drafts, with_tensor, without_tensor
from .helpers import Golden, Greedy, Lender

Load = Callable[..., object]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    """load_drafter for a target that the DSpark golden fits, where reading weights is an error."""

    def fail(*args: object, **kwargs: object) -> None:
        raise AssertionError("weights were read")

    def load(folder: Path, **target: Any) -> object:
        fits = Golden.named("dspark_qwen3").target(**target)
        with monkeypatch.context() as patch:
            patch.setattr(mx, "load", fail)
            return load_drafter(folder, fits)  # type: ignore[arg-type]

    return load


# --- what is read -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "packaging", "mode", "first_slot", "max_block"),
    [
        ("dspark_qwen3", "DeepSpec", "dspark", 0, 7),
        ("dspark_gemma4", "DeepSpec", "dspark", 0, 7),
        ("deepspec_dflash_qwen3", "DeepSpec", "dflash", 0, 7),
        ("dflash_qwen3", "z-lab DFlash", "dflash", 1, 15),
    ],
)
def test_slots_and_modes(
    name: str, packaging: str, mode: str, first_slot: int, max_block: int
) -> None:
    spec = inspect_drafter(Golden.named(name).path)
    assert (spec.packaging, spec.mode) == (packaging, mode)
    assert (spec.first_slot, spec.max_block) == (first_slot, max_block)


def test_embedding_and_head_are_borrowed_where_the_file_has_none(tmp_path: Path) -> None:
    golden = Golden.named("dspark_gemma4")
    own = dict(mx.load(str(golden.path / "model.safetensors")))
    removed = without_tensor("embed_tokens.weight", "lm_head.weight")
    target = golden.target()
    target.lender = Lender(own["embed_tokens.weight"], own["lm_head.weight"])
    drafter = load_drafter(copy(tmp_path, "dspark_gemma4", removed), target)
    state = drafter.new_state(1)
    taps = golden.taps(0, len(drafter.taps))
    drafter.extend(state, mx.zeros((1, 23), dtype=mx.int32), taps, [23])
    proposal = drafter.propose(state, golden.inputs["anchor_0"], 7, Greedy())
    assert proposal.tokens.tolist() == golden.outputs["greedy_tokens_0"].tolist()


def test_shards_are_one_checkpoint(tmp_path: Path) -> None:
    folder = copy(tmp_path, "dspark_qwen3")
    tensors = dict(mx.load(str(folder / "model.safetensors")))
    mx.eval(tensors)
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"model-1-of-2.safetensors": names[:9], "model-2-of-2.safetensors": names[9:]}
    for file, held in parts.items():
        mx.save_safetensors(str(folder / file), {name: tensors[name] for name in held})
    index = {"weight_map": {name: file for file, held in parts.items() for name in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    golden = Golden.named("dspark_qwen3")
    assert load_drafter(folder, golden.target()).spec == golden.drafter().spec
    (folder / "model-2-of-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks model-2-of-2\.safetensors"):
        inspect_drafter(folder)


def test_leftovers_of_training_are_ignored(tmp_path: Path) -> None:
    folder = copy(tmp_path, "dspark_qwen3", with_tensor("verifier_norm.weight", 64))
    assert inspect_drafter(folder) == inspect_drafter(Golden.named("dspark_qwen3").path)


@pytest.mark.parametrize(
    "move",
    [
        lambda c: c.update(c.pop("dflash_config")),
        lambda c: c["dflash_config"].update(block_size=c.pop("block_size")),
        lambda c: c.update(rope_parameters={"rope_theta": c.pop("rope_theta")}),
    ],
)
def test_a_field_of_dflash_may_stand_in_either_place(
    tmp_path: Path, move: Callable[[dict[str, Any]], object]
) -> None:
    folder = copy(tmp_path, "dflash_qwen3", lambda config, tensors: move(config) and None)
    assert inspect_drafter(folder) == inspect_drafter(Golden.named("dflash_qwen3").path)


@pytest.mark.parametrize(
    ("depth", "layers", "taps"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (60, 6, (1, 12, 23, 35, 46, 57)),
        (48, 6, (1, 10, 19, 27, 36, 45)),
        (36, 1, (18,)),
    ],
)
def test_default_taps_are_the_published_ones(
    tmp_path: Path, depth: int, layers: int, taps: tuple[int, ...]
) -> None:
    edit = configured(
        dflash_config={"mask_token_id": 239},
        num_target_layers=depth,
        num_hidden_layers=layers,
        layer_types=None,
    )
    checkpoint = open_safetensors(copy(tmp_path, "dflash_qwen3", edit))
    assert read_zlab(checkpoint).taps == taps


FULL, CAUSAL = LayerAttention(), LayerAttention(causal=True)
SLIDES = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, (FULL, FULL)),
        (SLIDES, (LayerAttention(True, 8), FULL)),
        ({**SLIDES, "dflash_config": {"swa_window_size": 5}}, (LayerAttention(True, 5), FULL)),
        ({**SLIDES, "is_causal": False}, (LayerAttention(False, 8), FULL)),
        ({**SLIDES, "dflash_config": {"causal": True}}, (LayerAttention(True, 8), CAUSAL)),
        (
            {"is_causal": False, **SLIDES, "dflash_config": {"causal": True}},
            (LayerAttention(False, 8), FULL),
        ),
        (
            {"sliding_window": 8, "dflash_config": {"use_swa": True}},
            (LayerAttention(False, 8), LayerAttention(False, 8)),
        ),
    ],
)
def test_who_sees_whom(config: dict[str, Any], expected: tuple[LayerAttention, ...]) -> None:
    assert layer_attention(Config(config, "config"), 2) == expected


# --- one drafter in several packagings ----------------------------------------------------------


def as_specforge(config: dict[str, Any], tensors: dict[str, mx.array]) -> None:
    moved = {key: config.pop(key) for key in ("mask_token_id", "target_layer_ids", "markov_rank")}
    config["dflash_config"] = {"projector_type": "dspark", **moved}
    config["architectures"] = ["DSparkDraftModel"]


@pytest.mark.parametrize(
    ("edit", "packaging"),
    [
        (as_specforge, "SpecForge DSpark"),
        (configured(architectures=["DFlashDraftModel"]), "DFlash with a Markov head"),
    ],
)
def test_dspark_under_another_name_drafts_the_same(
    tmp_path: Path, edit: Edit, packaging: str
) -> None:
    golden = Golden.named("dspark_qwen3")
    drafter = load_drafter(copy(tmp_path, golden.path.name, edit), golden.target())
    assert (drafter.spec.packaging, drafter.name) == (packaging, "dspark")
    wanted = golden.outputs["greedy_tokens_0"]
    assert first_drafts(drafter, golden, Greedy()).tolist() == wanted.tolist()


def test_a_markov_head_behind_a_silent_anchor(tmp_path: Path) -> None:
    """DFlash's slots, previous token of slot 1 = the anchor, bias added after the softcap."""
    golden = Golden.named("hybrid_dflash_markov")
    silent = configured(sample_from_anchor=False)
    drafter = load_drafter(
        copy(tmp_path, golden.path.name, silent), golden.target(embed_scale=48**0.5)
    )
    assert (drafter.spec.first_slot, drafter.max_block) == (1, 15)
    state = drafter.new_state(1)
    for index in range(3):
        taps = golden.taps(index, len(drafter.taps))
        rows, chooser = taps[0].shape[1], Greedy()
        drafter.extend(state, mx.zeros((1, rows), dtype=mx.int32), taps, [rows])
        proposal = drafter.propose(state, golden.inputs[f"anchor_{index}"], 15, chooser)
        wanted = golden.outputs[f"markov_logits_{index}"]
        assert mx.abs(chooser.logits - wanted).max().item() < 2e-4
        assert proposal.tokens.tolist() == golden.outputs[f"markov_tokens_{index}"].tolist()


class Within(Greedy):
    """argmax among some token ids; where the logits are reduced to them, over all."""

    def __init__(self, allowed: mx.array) -> None:
        super().__init__()
        self.allowed = allowed

    def draft(
        self, logits: mx.array, slot: int, prefix: mx.array, token_ids: mx.array | None = None
    ) -> DraftChoice:
        if token_ids is None:
            logits = logits[:, self.allowed]
        else:
            assert token_ids.tolist() == self.allowed.tolist()
        return DraftChoice(self.allowed[mx.argmax(logits, axis=-1)], None)


def test_a_reduced_vocabulary_is_the_whole_one_restricted(tmp_path: Path) -> None:
    golden = Golden.named("dspark_qwen3")
    allowed = mx.array(sorted({(i * 37 + 5) % 300 for i in range(40)}), dtype=mx.int32)

    def reduce(config: dict[str, Any], tensors: dict[str, mx.array]) -> None:
        as_specforge(config, tensors)
        for name in ("lm_head.weight", "markov_head.markov_w2.weight"):
            tensors[name] = tensors[name][allowed]
        tensors["d2t"] = (allowed - mx.arange(allowed.size)).astype(mx.int64)
        tensors["t2d"] = mx.zeros((300,), dtype=mx.bool_)

    reduced = load_drafter(copy(tmp_path, golden.path.name, reduce), golden.target())
    got = first_drafts(reduced, golden, Within(allowed)).tolist()
    assert got == first_drafts(golden.drafter(), golden, Within(allowed)).tolist()
    assert got != golden.outputs["greedy_tokens_0"].tolist()


def test_every_packaging_is_read_or_says_why_not() -> None:
    assert all((row.read is None) != (row.refusal is None) for row in PACKAGINGS)
    assert len({row.name for row in PACKAGINGS}) == len(PACKAGINGS)


# --- what is damaged or contradictory -----------------------------------------------------------


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (configured(block_size="7"), "block_size is '7'; it must be an integer of at least 2"),
        (configured(block_size=1), "block_size is 1; it must be an integer of at least 2"),
        (configured(mask_token_id=None), "mask_token_id is missing; it must be an integer"),
        (configured(target_layer_ids=[]), "target_layer_ids is []; it must be a list of integers"),
        (configured(target_layer_ids=[1, "4"]), "it must be a list of integers"),
        (configured(rope_parameters=None), "rope_theta is missing; it must be a positive number"),
        (configured(rope_parameters=3), "rope_parameters is 3; it must be an object"),
        (configured(rms_norm_eps=-1), "rms_norm_eps is -1; it must be a positive number"),
        (configured(markov_head_type="lstm"), "markov_head_type is 'lstm'; it must be one of"),
        (configured(enable_confidence_head=1), "enable_confidence_head is 1; it must be true or"),
        (configured(architectures="x"), "architectures is 'x'; it must be a list of strings"),
        (configured(confidence_temperatures=[1.0]), "1 values; block_size is 7"),
        (
            configured(markov_rank=0),
            "confidence_head_with_markov is true, but markov_rank is 0",
        ),
        (configured(markov_rank=8), "markov_head.markov_w1.weight has shape [300, 16]"),
        (configured(num_hidden_layers=4), "lacks layers.3.input_layernorm.weight"),
        (configured(num_hidden_layers=2), "layers.2.input_layernorm.weight, layers.2.mlp"),
        (
            configured(target_layer_ids=[1, 4, 7]),
            "fc.weight has shape [64, 256]; its config implies [64, 192] "
            "(4 taps instead of the 3 that are named)",
        ),
        (without_tensor("norm.weight"), "lacks norm.weight, which its config implies"),
        (with_tensor("extra.weight", 3), "holds extra.weight, which its config does not explain"),
        (with_tensor("norm.weight", 32), "norm.weight has shape [32]; its config implies [64]"),
    ],
)
def test_contradictions_are_named(tmp_path: Path, edit: Edit, message: str, load: Load) -> None:
    folder = copy(tmp_path, "dspark_qwen3", edit)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        load(folder)


def _truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "has no config.json"),
        (lambda f: (f / "config.json").write_text("{"), "cannot be read"),
        (lambda f: (f / "config.json").write_text("[]"), "holds a list, not a JSON object"),
        (lambda f: (f / "model.safetensors").unlink(), "no *.safetensors file"),
        (_truncate, "is truncated"),
        (lambda f: (f / "model.safetensors").write_bytes(b"123"), "is truncated"),
        (
            lambda f: (f / "model.safetensors").write_bytes(b"\2" + b"\0" * 7 + b"{]"),
            "malformed header",
        ),
        (
            lambda f: (f / "model.safetensors").write_bytes(b"\x0a" + b"\0" * 7 + b'{"a":{ } }'),
            "malformed header",
        ),
    ],
)
def test_damage_is_named(
    tmp_path: Path, damage: Callable[[Path], object], message: str, load: Load
) -> None:
    folder = copy(tmp_path, "dspark_qwen3")
    damage(folder)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        load(folder)


def test_a_path_that_is_no_drafter_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no drafter at"):
        inspect_drafter(tmp_path / "nowhere")
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(DrafterError, match=r"weights\.bin: .* or a GGUF file"):
        inspect_drafter(tmp_path / "weights.bin")


# --- what does not fit its target ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 128}, "hidden size of 64; the target's is 128"),
        ({"vocab_size": 301}, "vocabulary of 300; the target's is 301"),
        ({"num_layers": 13}, "target layer count of 12; the target's is 13"),
        ({"tappable": False, "taps_refused": "no layers"}, "does not offer: no layers"),
    ],
)
def test_a_drafter_of_another_target_is_refused(
    changes: dict[str, Any], message: str, load: Load
) -> None:
    with pytest.raises(MisfitError, match=message):
        load(Golden.named("dspark_qwen3").path, **changes)


@pytest.mark.parametrize(
    ("taps", "message"),
    [
        ([1, 4, 9, 7], "do not ascend"),
        ([1, 4, 7, 7], "do not ascend"),
        ([-2, 4, 7, 9], r"taps layers \[-2\]; the target has layers 0 to 11"),
        ([1, 4, 7, 12], r"taps layers \[12\]"),
        ([1, 4, 7, 11], "taps layer 11, the target's last"),
    ],
)
def test_taps_that_no_target_could_give_are_refused(
    tmp_path: Path, taps: list[int], message: str, load: Load
) -> None:
    folder = copy(tmp_path, "dspark_qwen3", configured(target_layer_ids=taps))
    with pytest.raises(MisfitError, match=message):
        load(folder)


def test_borrowing_needs_a_lender() -> None:
    golden = Golden.named("dflash_qwen3")
    target = golden.target()
    target.lender = None
    with pytest.raises(MisfitError, match="no embedding or head of its own"):
        load_drafter(golden.path, target)


def test_a_mask_token_outside_the_vocabulary_is_refused(tmp_path: Path, load: Load) -> None:
    folder = copy(tmp_path, "dspark_qwen3", configured(mask_token_id=300))
    with pytest.raises(MisfitError, match="mask token 300"):
        load(folder)


def test_the_readme_states_the_recognition_table() -> None:
    readme = Path(__file__).parents[1] / "README.md"
    assert compatibility() in readme.read_text(encoding="utf-8")
