"""Attention of each row over its own positions only.

Rows of a batch share one rectangle of keys, and mlx-lm's models attend to all of it in one call.
On CUDA a few columns attend by spec_core.flash_decode instead; elsewhere, where most of the
rectangle is padding (16,000 positions beside three rows of 500), the call is made once for each
row. The models' code stays as it is: for the length of a forward an attention module's call runs
with another function in place of mlx-lm's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from spec_core import flash_decode
from spec_targets.layers import FullLayer, StoringLayer
from spec_targets.swap import Swap

_NAME = "scaled_dot_product_attention"


class RowByRow:
    """The swaps under which a model's full attention runs row by row."""

    def __init__(self, model: Module) -> None:
        modules: Iterable[Module] = model.modules()  # type: ignore[no-untyped-call]
        self._modules = [module for module in modules if _attends(type(module))]
        self._made: dict[type, type] = {}

    def swaps(self) -> list[Swap]:
        return [(module, self) for module in self._modules]

    def of(self, cls: type) -> type:
        """The subclass of an attention class whose call attends row by row."""
        if cls not in self._made:
            self._made[cls] = _rebound(cls)
        return self._made[cls]


def _attends(cls: type) -> bool:
    call = cls.__call__
    return isinstance(call, FunctionType) and _NAME in call.__code__.co_names


def _rebound(cls: type) -> type:
    own = cls.__call__
    assert isinstance(own, FunctionType)
    names = {**own.__globals__, _NAME: _row_by_row(own.__globals__[_NAME])}
    call = FunctionType(own.__code__, names, own.__name__, own.__defaults__, own.__closure__)
    call.__kwdefaults__ = own.__kwdefaults__
    return type(cls.__name__, (cls,), {"__call__": call, "__module__": cls.__module__})


def _row_by_row(own: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def attend(
        queries: mx.array,
        keys: Any,
        values: Any,
        cache: Any,
        scale: float,
        mask: Any,
        **rest: Any,
    ) -> mx.array:
        frame = cache.own_positions(mask) if isinstance(cache, FullLayer) else None
        ends = None if frame is None or rest.get("sinks") is not None else frame.ends
        if ends is not None and _is_served(queries, keys, values):
            if not isinstance(cache, StoringLayer):
                return flash_decode.attend(queries, keys, values, ends, scale)
            if cache.holds(keys, values):
                return cache.attend(queries, scale)
        if frame is None or frame.row_ends is None:
            return own(queries, keys, values, cache=cache, scale=scale, mask=mask, **rest)
        causal = None if queries.shape[2] == 1 else "causal"
        return mx.concatenate(
            [
                own(
                    queries[row : row + 1],
                    _upto(keys, row, end),
                    _upto(values, row, end),
                    cache=cache,
                    scale=scale,
                    mask=causal,
                    **rest,
                )
                for row, end in enumerate(frame.row_ends)
            ]
        )

    return attend


def _is_served(queries: mx.array, keys: Any, values: Any) -> bool:
    """Quantised keys are not."""
    return isinstance(keys, mx.array) and flash_decode.serves(queries, keys, values)


def _upto(stored: Any, row: int, end: int) -> Any:
    """One row's first positions of [B, heads, S, dim], or of the parts that quantising gives."""
    if isinstance(stored, mx.array):
        return stored[row : row + 1, :, :end]
    return tuple(part[row : row + 1, :, :end] for part in stored)
