"""Whether this device can multiply with the quantised weights of a model.

Not every backend of MLX has kernels for every number of bits, and what it has changes between
releases. So each kind that a model holds is tried on a matrix of its own before anything runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from spec_targets.errors import UnsupportedTargetError

_OUTPUTS = 32
_GROUPS = 4
_ROWS = (1, 16)  # a decoding step and a block take different kernels
_TOLERANCE = 0.2  # the CPU sums in the weights' own type, which costs several hundredths


@dataclass(frozen=True, slots=True)
class Quantisation:
    """How weights are packed, as `mx.quantize` takes it, and the type they are multiplied in."""

    bits: int
    group_size: int
    mode: str = "affine"
    dtype: mx.Dtype = mx.bfloat16

    def __str__(self) -> str:
        name = "" if self.mode == "affine" else f" ({self.mode})"
        return f"{self.bits}-bit weights in groups of {self.group_size}{name}"


def quantisations(model: Module) -> list[Quantisation]:
    """The kinds of quantised weights that a model holds."""
    modules: Iterable[Module] = model.modules()  # type: ignore[no-untyped-call]
    packed = (module for module in modules if "scales" in module and hasattr(module, "bits"))
    return sorted({_kind(module) for module in packed}, key=str)


def check_quantised(model: Module) -> None:
    """Try each kind on the active device.

    Raises UnsupportedTargetError, with the reason, if one cannot be multiplied with or gives
    something else than the same weights unpacked.
    """
    for kind in quantisations(model):
        try:
            off = _distance(kind)
        except Exception as error:  # the backend's own: which one depends on what is missing
            reason = " ".join(str(error).split())[:300]
        else:
            if off <= _TOLERANCE:
                continue
            reason = f"the product is off by {off:.2g} of its size"
        raise UnsupportedTargetError(
            f"{kind} do not work on {mx.default_device()} with the installed MLX: {reason}; "
            "use a checkpoint with another quantisation"
        )


def _kind(module: Any) -> Quantisation:
    dtype = module.scales.dtype
    return Quantisation(
        bits=module.bits,
        group_size=module.group_size,
        mode=getattr(module, "mode", "affine"),
        dtype=dtype if mx.issubdtype(dtype, mx.floating) else mx.bfloat16,
    )


def _distance(kind: Quantisation) -> float:
    """Root mean square error of products with packed weights, relative to the products' own."""
    how: dict[str, Any] = {
        "group_size": kind.group_size,
        "bits": kind.bits,
        "mode": kind.mode,
    }
    inputs = _GROUPS * kind.group_size
    packed, scales, *biases = mx.quantize(_waves(_OUTPUTS, inputs).astype(kind.dtype), **how)
    how["biases"] = biases[0] if biases else None
    unpacked = mx.dequantize(packed, scales, **how).astype(mx.float32)
    worst = 0.0
    for rows in _ROWS:
        x = _waves(rows, inputs).astype(kind.dtype)
        expected = x.astype(mx.float32) @ unpacked.T
        got = mx.quantized_matmul(x, packed, scales, transpose=True, **how)
        off = mx.sqrt(((got - expected) ** 2).mean() / (expected**2).mean())
        worst = max(worst, float(off))
    return worst


def _waves(rows: int, columns: int) -> mx.array:
    """[rows, columns] numbers of both signs, different in every row and group."""
    at = mx.arange(rows * columns, dtype=mx.float32).reshape(rows, columns)
    return mx.sin(at * 0.7) + 0.3 * mx.cos(at * 0.013)
