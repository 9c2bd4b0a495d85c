"""How weights are stored: as the device walks them fastest."""

from __future__ import annotations

from collections.abc import Iterable

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear

from spec_core import blas
from spec_targets.anatomy import dissect


def lay_out(model: Module) -> None:
    """Store float32 matrices column by column where they are multiplied faster so.

    One matrix at a time, so that a load needs the memory of one more. An embedding is among them
    where it serves as the head too.
    """
    if not blas.prefers_columns():
        return
    modules: Iterable[Module] = model.modules()  # type: ignore[no-untyped-call]
    head = _embedding_as_head(model)
    for module in modules:
        if isinstance(module, Linear) or module is head:
            _by_columns(module)


def _by_columns(module: Module) -> None:
    weight = module["weight"]
    if weight.dtype == mx.float32 and weight.ndim == 2:
        transposed = mx.contiguous(weight.T)
        mx.eval(transposed)
        module["weight"] = transposed.T


def _embedding_as_head(model: Module) -> Module | None:
    if getattr(model, "layers", None) is None:
        return None
    parts = dissect(model)
    tied = parts.head is None and type(parts.embedding) is Embedding
    return parts.embedding if tied else None
