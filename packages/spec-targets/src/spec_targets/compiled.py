"""Forwards of a few columns, traced once for each shape and then replayed.

mlx-lm's Python builds some twenty operations a layer, and on CUDA a forward of one or a few columns
waits for it: 3 to 4 ms for 36 layers. From a trace (spec_core.traces) it takes 1 ms.

What a model does with a cache is traced over a clock of traced lengths: it is the path that
batches of rows of different length take. Attention reads as far as rows go, and stores the newest
columns on the way, by spec_core.flash_decode; where that does not serve, ordinary layers store them
and a mask hides the rest of the buffer.

The weights are constants of a trace, as are the modules: with the next new state traces of other
ones are no longer used. MLX also fuses neighbouring elementwise operations (mx.compile cannot be
told not to). Each of them still rounds to its own type, so that logits of Qwen3 were the same,
bit for bit; a device that contracts a product and a sum into one operation may differ in the last
bit, as kernels for other shapes do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TypeGuard

import mlx.core as mx
from mlx.nn.layers.base import Module

from spec_core import flash_decode
from spec_core.flash_decode import MOST_COLUMNS
from spec_core.kv import RowClock
from spec_core.seams import Forward
from spec_core.traces import MOST_TRACES, Buffers, TracedClock, Traces, shapes_of
from spec_targets.layers import Frame, FullLayer, LayerCache, StoringLayer

WIDTHS, WIDTHS_OF_ROWS = (8, 16), (4, 8, 16)
"""Columns that forwards of several are filled up to, of one row and of more, so that traces are
few. CUDA's kernels for a few rows take as long for eight as for two."""
Taps = tuple[mx.array, ...]

Call = Callable[[mx.array, Sequence[FullLayer], Frame, Sequence[int]], tuple[mx.array, Taps]]
"""The model over layer caches of one open frame: (tokens, caches, frame, taps) -> logits, taps."""

_Written = tuple[mx.array, Taps, Buffers, mx.array]
"""Logits [B, T, V], taps, the same buffers written, and [1] what is there when they are."""

_Traced = Callable[[mx.array, mx.array, mx.array, Buffers], _Written]
"""Of tokens [B, T], starts [B], what was there when the buffers were last written, and buffers."""


class CompiledForwards:
    """Runs a model's forwards from traces; knows nothing of what was proven.

    Args:
        model: whose forwards they are.
        call: runs it, as often as there is something to trace.
        stores: what attends may also store. Then single columns are served, too: plain rounds are
            launched ahead, and MLX would copy buffers that are still being read.
        most: traces that are kept; the one that was not used for longest goes first.
    """

    def __init__(
        self, model: Module, call: Call, *, stores: bool = True, most: int = MOST_TRACES
    ) -> None:
        self._model = model
        self._holdings = _Holdings(model)
        self._changes = 0
        self._call = call
        self._may_store = stores
        self._widens = not any("Switch" in type(module).__name__ for module in _modules(model))
        self._traces: Traces[[mx.array, mx.array, mx.array, Buffers], _Written] = Traces(most)

    @property
    def traces(self) -> int:
        """How many there are."""
        return len(self._traces)

    def renew(self) -> None:
        """Use no trace from before if the model holds other weights or modules since. (What is
        written into an array is not seen: assign another one.)"""
        if self._holdings.changed() is None:
            return
        self._holdings = _Holdings(self._model)
        self._changes += 1
        self._traces.clear()  # they hold the old ones

    def serve(self, layers: Sequence[LayerCache], columns: int) -> TypeGuard[list[FullLayer]]:
        """Whether `run` forwards so many columns over these layers: few, over full attention in
        the model's own type that has been written to; single ones only where what attends
        stores."""
        few = 1 <= columns <= MOST_COLUMNS
        if not few or not all(type(layer) is FullLayer and layer.written for layer in layers):
            return False
        return columns > 1 or self._stores(layers)

    def _stores(self, layers: Sequence[LayerCache]) -> bool:
        return self._may_store and flash_decode.fits(*layers[0].pending())

    def width(self, rows: int, columns: int) -> int:
        """Columns to fill such a forward up to. What experts read grows with every column."""
        widths = (WIDTHS if rows == 1 else WIDTHS_OF_ROWS) if self._widens and columns > 1 else ()
        return next((width for width in widths if width >= columns), columns)

    def run(
        self,
        tokens: mx.array,
        layers: list[FullLayer],
        clock: RowClock,
        taps: Sequence[int],
    ) -> Forward:
        """The open forward of rows of this clock, over layers that are served. If it raises,
        nothing was written."""
        for layer in layers:
            layer.make_room(tokens.shape[1])
        starts = mx.array(clock.lengths, dtype=mx.int32)
        after = _nothing() if clock.storing is None else clock.storing
        stores = self._stores(layers)
        # Neither list outlives this call: MLX writes in place only what nobody else refers to.
        buffers = [list(layer.pending()) for layer in layers]
        key = (self._changes, tokens.shape, tuple(taps), shapes_of(buffers))
        traced = self._traced(tuple(taps), stores)
        logits, recorded, written, done = self._traces.replay(
            key, traced, tokens, starts, after, buffers
        )
        for layer, pair in zip(layers, written, strict=True):
            layer.take(pair)
        clock.storing = done if stores else None
        return Forward(logits=logits, taps=recorded)

    def _traced(self, taps: tuple[int, ...], stores: bool) -> _Traced:
        """What is recorded; `stores`: what attends stores, not ordinary layers."""
        kind = StoringLayer if stores else FullLayer

        def forward(
            tokens: mx.array, starts: mx.array, after: mx.array, buffers: Buffers
        ) -> _Written:
            clock = TracedClock.over(starts, tokens.shape[1], buffers)
            clock.storing = after if stores else None
            frame = Frame(clock)
            frame.open()
            layers = [kind(frame, pair) for pair in buffers]
            with _forgetful(self._model):
                logits, recorded = self._call(tokens, layers, frame, taps)
            if any(layer.waiting for layer in layers):
                raise ValueError("a layer attends in a way of its own, and nothing was stored")
            done = after if clock.storing is None else clock.storing.flatten()[:1]
            return logits, recorded, [list(layer.pending()) for layer in layers], done

        return forward


@contextmanager
def _forgetful(model: Module) -> Iterator[None]:
    """Raise ValueError if modules keep something of a call, and give them back what they had: an
    array of a trace is no number, and what a trace found in a module is the same for ever."""
    before = _Holdings(model)
    changed: str | None = None
    try:
        yield
    finally:
        changed = before.changed()
        before.give_back()
    if changed is not None:
        raise ValueError(f"{changed} keeps what it was called with, and cannot be traced")


class _Holdings:
    """What a model's modules hold, at one moment: their items, and those of their lists."""

    def __init__(self, model: Module) -> None:
        self._modules = _modules(model)
        self._items = [dict(module) for module in self._modules]
        lists = [each for items in self._items for each in items.values() if type(each) is list]
        self._lists = [(each, list(each)) for each in lists]

    def changed(self) -> str | None:
        """The class of a module that holds other things since, or None."""
        for module, items in zip(self._modules, self._items, strict=True):
            if not _same(list(module), list(items)) or not _same(module.values(), items.values()):
                return type(module).__name__
        if all(_same(each, held) for each, held in self._lists):
            return None
        return "a module with a list"

    def give_back(self) -> None:
        """Let the modules hold what they held."""
        for module, items in zip(self._modules, self._items, strict=True):
            if not _same(module.values(), items.values()):
                dict.clear(module)
                dict.update(module, items)
        for each, held in self._lists:
            each[:] = held


def _same(some: Collection[object], others: Collection[object]) -> bool:
    """Whether two collections have the very same members."""
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))


def _modules(model: Module) -> list[Module]:
    modules: list[Module] = model.modules()  # type: ignore[no-untyped-call]
    return modules


@cache
def _nothing() -> mx.array:
    """What is there at once, [1]."""
    return mx.array([0.0])  # not lazy: it serves every thread
