"""Conversion: another layout of the same drafter."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from spec_core.errors import InvalidValueError
from spec_core.seams import Drafter
from spec_drafters.convert import convert
from spec_drafters.errors import CheckpointError, PackagingError
from spec_drafters.load import SlotConvention, inspect_drafter, load_drafter
from spec_drafters.spec import BlockSpec

from .checkpoints import Edit, both, configured, copy
from .helpers import GOLDEN, Golden, Greedy
from .test_features import YARN, biased, dflash2
from .test_gguf import SOURCE, as_dflash
from .test_speculators import layered, llama, reduce, speculators

GGUF = "gguf_dspark_log_snr"


def drafts(path: Path, golden: Golden) -> mx.array:
    """The logits of a greedy proposal behind a fixed text."""
    drafter: Drafter = load_drafter(path, golden.target())  # type: ignore[arg-type]
    state, chooser = drafter.new_state(1), Greedy()
    hidden = golden.target().info.hidden_size
    taps = [
        mx.random.normal((1, 9, hidden), key=mx.random.key(i)) for i, _ in enumerate(drafter.taps)
    ]
    tokens = mx.arange(9, dtype=mx.int32)[None]
    drafter.extend(state, tokens, taps, [9])
    drafter.propose(state, mx.array([5], dtype=mx.int32), drafter.max_block, chooser)
    return chooser.logits


def check(source: Path, golden: Golden, tmp_path: Path, layout: str, **options: Any) -> Path:
    """Converted, it is the same drafter in this layout. Gives its folder."""
    dest = tmp_path / "out" / "drafter"
    converted = convert(source, dest, **options)
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["drafter"]
    assert converted.layout == layout
    assert converted.spec == inspect_drafter(dest)
    one, other = drafts(source, golden), drafts(dest, golden)
    assert one.dtype == other.dtype
    assert mx.array_equal(one, other)
    return dest


def architectures(folder: Path) -> list[str]:
    return json.loads((folder / "config.json").read_text())["architectures"]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("name", "layout", "architecture"),
    [
        ("dspark_qwen3", "DeepSpec", "Qwen3DSparkModel"),
        ("dspark_qwen3_rnn", "DeepSpec", "Qwen3DSparkModel"),
        ("deepspec_dflash_qwen3", "DeepSpec", "Qwen3DSparkModel"),
        ("dspark_gemma4", "DeepSpec", "Gemma4DSparkModel"),
        ("dspark_gemma4_separate_v", "DeepSpec", "Gemma4DSparkModel"),
        ("eagle3_qwen3", "DeepSpec", "Qwen3Eagle3Model"),
        ("eagle3_gemma4", "DeepSpec", "Gemma4Eagle3Model"),
        ("dflash_qwen3", "z-lab", "DFlashDraftModel"),
        ("dflash_gemma4", "z-lab", "DFlashDraftModel"),
    ],
)
def test_goldens(tmp_path: Path, name: str, layout: str, architecture: str) -> None:
    dest = check(GOLDEN / name, Golden.named(name), tmp_path, layout)
    assert architectures(dest) == [architecture]
    config = json.loads((dest / "config.json").read_text())
    assert ("block_size" in config) == ("eagle3" not in name)


SCHEMA: dict[str, tuple[str, Edit, str, str]] = {
    "dspark": ("dspark_qwen3", speculators("dspark", 7), "DeepSpec", "Qwen3DSparkModel"),
    "silent anchor": ("dspark_qwen3", speculators("dspark", 6), "z-lab", "DSparkDraftModel"),
    "rnn": ("dspark_qwen3_rnn", speculators("dspark", 6), "z-lab", "DSparkDraftModel"),
    "dflash": (
        "dflash_qwen3",
        speculators("dflash", 15, block_size=16),
        "z-lab",
        "DFlashDraftModel",
    ),
    "window": (
        "dspark_qwen3",
        both(
            speculators("dspark", 7),
            layered(layer_types=["sliding_attention"] * 2 + ["full_attention"], sliding_window=9),
        ),
        "z-lab",
        "DSparkDraftModel",
    ),
    "YaRN": (
        "dspark_qwen3",
        both(speculators("dspark", 7), layered(rope_parameters={"rope_theta": 1e6, **YARN})),
        "z-lab",
        "DSparkDraftModel",
    ),
    "eagle3": (
        "eagle3_qwen3",
        speculators("eagle3", 7, norm_before_residual=False),
        "DeepSpec",
        "Qwen3Eagle3Model",
    ),
    "eagle3 llama": (
        "eagle3_qwen3",
        both(speculators("eagle3", 3), llama),
        "own",
        "eagle3DraftModel",
    ),
    "eagle3 reduced": (
        "eagle3_qwen3",
        both(speculators("eagle3", 3), reduce(mx.arange(3, 240, 4, dtype=mx.int32))),
        "own",
        "eagle3DraftModel",
    ),
}


@pytest.mark.parametrize("case", SCHEMA)
def test_speculators(tmp_path: Path, case: str) -> None:
    name, edit, layout, architecture = SCHEMA[case]
    (tmp_path / "in").mkdir()
    source = copy(tmp_path / "in", name, edit)
    dest = check(source, Golden.named(name), tmp_path, layout)
    assert architectures(dest) == [architecture]


@pytest.mark.parametrize(
    ("edit", "architecture"),
    [
        (dflash2(), "DFlash2DraftModel"),
        (biased, "DFlashDraftModel"),
        (configured(rope_scaling=YARN, is_neox_style=False), "DFlashDraftModel"),
        (configured(is_causal=True), "DFlashDraftModel"),
    ],
)
def test_zlabs(tmp_path: Path, edit: Edit, architecture: str) -> None:
    (tmp_path / "in").mkdir()
    source = copy(tmp_path / "in", "dflash_qwen3", edit)
    dest = check(source, Golden.named("dflash_qwen3"), tmp_path, "z-lab")
    assert architectures(dest) == [architecture]


@pytest.mark.parametrize(
    ("name", "layout"),
    [(GGUF, "DeepSpec"), ("dflash_gemma4", "z-lab"), ("dspark_qwen3", "DeepSpec")],
)
def test_gguf(tmp_path: Path, name: str, layout: str) -> None:
    source = SOURCE if name == GGUF else as_dflash(tmp_path / "x.gguf", name)
    check(source, Golden.named(name), tmp_path, layout)


# --- slot conventions, taps ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("convention", "layout", "slot"), [("anchor", "DeepSpec", 0), ("shifted", "z-lab", 1)]
)
def test_a_slot_convention_is_written_down(
    tmp_path: Path, convention: SlotConvention, layout: str, slot: int
) -> None:
    converted = convert(GOLDEN / "dspark_qwen3", tmp_path / "drafter", slot_convention=convention)
    assert converted.layout == layout
    spec = inspect_drafter(tmp_path / "drafter")
    assert isinstance(spec, BlockSpec)
    assert spec.first_slot == slot
    with pytest.raises(InvalidValueError, match="has no slots"):
        convert(GOLDEN / "eagle3_qwen3", tmp_path / "other", slot_convention=convention)


def test_moved_taps_are_written_down(tmp_path: Path) -> None:
    converted = convert(GOLDEN / "dspark_qwen3", tmp_path / "drafter", tap_shift=-1)
    before = inspect_drafter(GOLDEN / "dspark_qwen3").taps
    assert converted.spec.taps == tuple(tap - 1 for tap in before or ())


def test_what_a_file_does_not_say_stays_unsaid(tmp_path: Path) -> None:
    convert(GOLDEN / "hybrid_dflash_markov", tmp_path / "drafter")
    before = inspect_drafter(GOLDEN / "hybrid_dflash_markov")
    assert isinstance(before, BlockSpec)
    assert before.first_slot is None
    assert inspect_drafter(tmp_path / "drafter") == before


def test_taps_of_the_targets_depth_are_written_down(tmp_path: Path) -> None:
    def three(config: dict[str, Any], tensors: dict[str, mx.array]) -> None:
        tensors["fc.weight"] = tensors["fc.weight"][:, : 3 * 48]

    (tmp_path / "in").mkdir()
    edit = speculators(
        "eagle3", 7, eagle_aux_hidden_state_layer_ids=None, norm_before_residual=False
    )
    source = copy(tmp_path / "in", "eagle3_qwen3", both(edit, three))
    with pytest.raises(CheckpointError, match="name the target's layer count"):
        convert(source, tmp_path / "drafter")
    converted = convert(source, tmp_path / "drafter", target_layers=12)
    assert converted.spec.taps == (1, 5, 8)
    before = replace(inspect_drafter(source), taps=(1, 5, 8))
    assert replace(converted.spec, packaging=before.packaging) == before


def test_changes_that_have_no_form_are_refused(tmp_path: Path) -> None:
    """Gemma layers behind a silent anchor: DeepSpec cannot say the one, z-lab not the other."""
    with pytest.raises(PackagingError, match="has no form that could be written"):
        convert(GOLDEN / "dspark_gemma4", tmp_path / "drafter", slot_convention="shifted")
    assert list(tmp_path.iterdir()) == []


# --- all or nothing -----------------------------------------------------------------------------


def test_a_failed_conversion_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(mx, "save_safetensors", full)
    with pytest.raises(CheckpointError, match="no space left"):
        convert(SOURCE, tmp_path / "drafter")
    assert list(tmp_path.iterdir()) == []


def test_conversion_overwrites_nothing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is there already"):
        convert(SOURCE, tmp_path)
