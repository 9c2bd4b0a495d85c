"""From a path to a drafter that fits a target."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Literal, get_args

import mlx.core as mx

from spec_core.errors import InvalidValueError
from spec_core.seams import Drafter, EmbeddingLender, Target
from spec_drafters.block import BlockDrafter
from spec_drafters.checkpoint import Checkpoint
from spec_drafters.eagle import EagleDrafter
from spec_drafters.errors import CheckpointError
from spec_drafters.fit import fit
from spec_drafters.linear import Precision, Weights
from spec_drafters.probe import right_slots
from spec_drafters.recognize import open_checkpoint, packaging_of, read_as, recognize
from spec_drafters.spec import BlockSpec, DrafterSpec, EagleSpec

SlotConvention = Literal["auto", "anchor", "shifted"]

_DTYPES = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}
_QUANTISED = ("Q8_0", "Q4_0", "Q4_1")


def inspect_drafter(path: str | Path) -> DrafterSpec:
    """What lies at a path, from its config and tensor headers alone.

    Raises:
        DrafterError: as `load_drafter`, the target's part aside.
    """
    return recognize(open_checkpoint(Path(path)))


def load_drafter(
    path: str | Path,
    target: Target,
    *,
    bits: int | None = None,
    dtype: str | mx.Dtype | None = None,
    slot_convention: SlotConvention = "auto",
    tap_shift: int = 0,
) -> Drafter:
    """Load a drafter for a target. Everything is checked before weights are read.

    Args:
        path: a local folder or file.
        target: what it drafts for; lends embedding and head where the drafter has none.
        bits: 4 or 8 to quantise the drafter's matrices, None to keep them dense.
        dtype: of weights and activations: "float32", "bfloat16" or "float16"; the file's own
            if None.
        slot_convention: which slot of a block predicts the token after the anchor: the anchor's
            own ("anchor"), the one after it ("shifted"), or as the file says ("auto"); a file
            that does not say is tried both ways on the target, which takes a few seconds.
        tap_shift: added to the number of every tapped layer, for a file that counts otherwise.

    Raises:
        PackagingError: the packaging is unknown or not supported.
        CheckpointError: files are missing, damaged or contradictory.
        MisfitError: the drafter does not fit the target.
        InvalidValueError: `bits`, `dtype`, `slot_convention` or `tap_shift` is out of range.
    """
    if bits not in (None, 4, 8):
        raise InvalidValueError("drafter bits", bits, "4, 8 or None")
    wanted = None if dtype is None else _dtype(dtype)
    checkpoint = open_checkpoint(Path(path))
    packaging, lender = packaging_of(checkpoint), target.lender
    spec = read_otherwise(read_as(packaging, checkpoint), slot_convention, tap_shift)
    spec = fit(spec, target.info, lends=lender is not None)
    precision = Precision(wanted or _own_dtype(checkpoint, spec), bits)
    weights = Weights(checkpoint.read(spec.tensors()), precision)
    drafter = (packaging.build or build)(spec, weights, lender)
    if isinstance(drafter, BlockDrafter) and drafter.spec.first_slot is None:
        return right_slots(target, drafter)
    return drafter


def read_otherwise(
    spec: DrafterSpec, slot_convention: SlotConvention, tap_shift: int
) -> DrafterSpec:
    """The spec under another slot convention, with its taps moved.

    Raises:
        InvalidValueError: the convention is unknown, the drafter has no slots, or no taps that
            could move.
    """
    if slot_convention not in get_args(SlotConvention):
        raise InvalidValueError("slot_convention", slot_convention, "auto, anchor or shifted")
    if tap_shift and not spec.taps:
        raise InvalidValueError("tap_shift", tap_shift, "0: the file names no taps")
    if tap_shift:
        spec = replace(spec, taps=tuple(tap + tap_shift for tap in spec.taps or ()))
    if slot_convention == "auto":
        return spec
    if not isinstance(spec, BlockSpec):
        raise InvalidValueError(
            "slot_convention", slot_convention, f"auto: a drafter of mode {spec.mode} has no slots"
        )
    return replace(spec, first_slot=0 if slot_convention == "anchor" else 1)


def build(
    spec: DrafterSpec, weights: Weights, lender: EmbeddingLender | None
) -> BlockDrafter | EagleDrafter:
    """The drafter of a spec that was fitted to its target."""
    if isinstance(spec, BlockSpec):
        return BlockDrafter(spec, weights, lender)
    assert isinstance(spec, EagleSpec)
    return EagleDrafter(spec, weights, lender)


def _dtype(name: str | mx.Dtype) -> mx.Dtype:
    for dtype in _DTYPES.values():
        if name in (dtype, str(dtype).removeprefix("mlx.core.")):
            return dtype
    raise InvalidValueError("drafter dtype", name, "float32, bfloat16 or float16")


def _own_dtype(checkpoint: Checkpoint, spec: DrafterSpec) -> mx.Dtype:
    """What most of the file is in: the type of its largest tensor."""
    largest = max(spec.tensors(), key=lambda name: prod(checkpoint.tensors[name].shape))
    kind = checkpoint.tensors[largest].dtype
    if kind in _QUANTISED:
        return mx.bfloat16
    if kind not in _DTYPES:
        raise CheckpointError(f"{checkpoint.path.name}: {largest} is {kind}, not a float type")
    return _DTYPES[kind]
