"""Forwards of a few columns, traced once for each shape and then replayed.

mlx-lm's Python builds some twenty operations a layer, and on CUDA a verify of a few columns waits
for it: 3 to 4 ms for 36 layers. `mx.compile` records the operations of one such call and builds
the next from the record, in C++ (0.9 ms).

The record has no lengths in it. Where the rows start is an input, and so are the buffers of keys
and values, whole: only a buffer that grew, other rows, columns or taps have a record of their own.
What a model does with a cache is recorded from ordinary layers over a clock of traced lengths: it
is the path that batches of rows of different length take. Attention reads as far as rows go by
spec_core.flash_decode; where that does not serve, a mask hides the rest of the buffer.

The weights are constants of a record, as are the modules: with the next new state records of other
ones are no longer used. MLX also fuses neighbouring elementwise operations (mx.compile cannot be
told not to). Each of them still rounds to its own type, so that logits of Qwen3 were the same,
bit for bit; a device that contracts a product and a sum into one operation may differ in the last
bit, as kernels for other shapes do.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeGuard

import mlx.core as mx
from mlx.nn.layers.base import Module

from spec_core.flash_decode import MOST_COLUMNS
from spec_core.kv import RowClock
from spec_core.seams import Forward
from spec_targets.layers import Frame, FullLayer, LayerCache

MOST_TRACES = 64
"""Traces that are kept. One takes a few megabytes of the host, and to make it twice as long as a
forward without one; a server meets a shape for every width, number of rows and size of buffers."""

Taps = tuple[mx.array, ...]

Call = Callable[[mx.array, list[FullLayer], Frame, Sequence[int]], tuple[mx.array, Taps]]
"""The model over layer caches of one open frame: (tokens, caches, frame, taps) -> logits, taps."""

_Buffers = list[list[mx.array]]
"""Keys and values of each layer."""

_Trace = Callable[[mx.array, mx.array, _Buffers], tuple[mx.array, Taps, _Buffers]]
"""(tokens [B, T], starts [B], buffers) -> logits [B, T, V], taps, the same buffers written."""


class CompiledForwards:
    """Runs a model's forwards from traces; knows nothing of what was proven.

    Args:
        model: whose forwards they are.
        call: runs it, as often as there is something to trace.
        most: traces that are kept; the one that was not used for longest goes first.
    """

    def __init__(self, model: Module, call: Call, most: int = MOST_TRACES) -> None:
        self._model = model
        self._modules: list[Module] = model.modules()  # type: ignore[no-untyped-call]
        self._held = [dict(module) for module in self._modules]
        self._changes = 0
        self._call = call
        self._most = most
        self._kept = _Kept()

    @property
    def traces(self) -> int:
        """How many there are."""
        return len(self._kept.traces)

    def renew(self) -> None:
        """Use no trace from before if the model holds other weights or modules since."""
        if _unchanged(self._modules, self._held):
            return
        self._modules = self._model.modules()  # type: ignore[no-untyped-call]
        self._held = [dict(module) for module in self._modules]
        self._changes += 1
        self._kept.traces.clear()  # they hold the old ones

    def serve(self, layers: Sequence[LayerCache], columns: int) -> TypeGuard[list[FullLayer]]:
        """Whether `run` forwards so many columns over these layers: few, over full attention in
        the model's own type that has been written to."""
        return 1 < columns <= MOST_COLUMNS and all(
            type(layer) is FullLayer and layer.written for layer in layers
        )

    def run(
        self,
        tokens: mx.array,
        layers: list[FullLayer],
        lengths: Sequence[int],
        taps: Sequence[int],
    ) -> Forward:
        """The open forward of rows of these lengths, over layers that are served. If it raises,
        nothing was written."""
        for layer in layers:
            layer.make_room(tokens.shape[1])
        starts = mx.array(list(lengths), dtype=mx.int32)
        # Neither list outlives this call: MLX writes in place only what nobody else refers to.
        buffers = [list(layer.pending()) for layer in layers]
        logits, recorded, written = self._replay(tokens, starts, buffers, tuple(taps))
        for layer, pair in zip(layers, written, strict=True):
            layer.take(pair)
        return Forward(logits=logits, taps=recorded)

    def _replay(
        self, tokens: mx.array, starts: mx.array, buffers: _Buffers, taps: tuple[int, ...]
    ) -> tuple[mx.array, Taps, _Buffers]:
        shapes = tuple(buffer.shape for pair in buffers for buffer in pair)
        key = (self._changes, tokens.shape, tokens.dtype, taps, shapes)
        kept = self._kept.traces
        trace = kept.get(key) or self._trace(taps)
        forward = trace(tokens, starts, buffers)
        kept[key] = trace  # not before: one that raised is half a trace
        kept.move_to_end(key)
        if len(kept) > self._most:
            kept.popitem(last=False)
        return forward

    def _trace(self, taps: tuple[int, ...]) -> _Trace:
        """A function that is recorded when it is first called."""

        def forward(
            tokens: mx.array, starts: mx.array, buffers: _Buffers
        ) -> tuple[mx.array, Taps, _Buffers]:
            capacity = min(buffer.shape[2] for pair in buffers for buffer in pair)
            frame = Frame(TracedClock(starts, tokens.shape[1], capacity))
            frame.open()
            layers = [_layer_over(pair, frame) for pair in buffers]
            with _forgetful(self._modules):
                logits, recorded = self._call(tokens, layers, frame, taps)
            return logits, recorded, [list(layer.pending()) for layer in layers]

        compiled: _Trace = mx.compile(forward)
        return compiled


class _Kept(threading.local):
    """Traces by what they are for; each thread has its own. MLX keeps a compiled function's graphs
    by thread and address, and forgets them in one thread only: in another one they would then be
    taken for those of the next function at that address."""

    def __init__(self) -> None:
        self.traces: OrderedDict[tuple[Any, ...], _Trace] = OrderedDict()


@contextmanager
def _forgetful(modules: Sequence[Module]) -> Iterator[None]:
    """Raise ValueError if modules keep something of a call, and give them back what they had: an
    array of a trace is no number, and what a trace found in a module is the same for ever."""
    before = [dict(module) for module in modules]
    changed: list[str] = []
    try:
        yield
    finally:
        for module, held in zip(modules, before, strict=True):
            if not _unchanged([module], [held]):
                changed.append(type(module).__name__)
                dict.clear(module)
                dict.update(module, held)
    if changed:
        raise ValueError(f"{changed[0]} keeps what it was called with, and cannot be traced")


def _unchanged(modules: Sequence[Module], before: Sequence[Mapping[str, Any]]) -> bool:
    """Whether modules hold the very things that they held."""
    return all(
        module.keys() == held.keys() and all(module[name] is each for name, each in held.items())
        for module, held in zip(modules, before, strict=True)
    )


def _layer_over(buffers: Sequence[mx.array], frame: Frame) -> FullLayer:
    layer = FullLayer(frame)
    layer.take(buffers)
    return layer


class TracedClock(RowClock):
    """A clock of an open forward whose lengths only the device knows: to the host no two rows are
    known to be alike, and they may fill the buffers.

    Args:
        starts: [B] int32, the lengths.
        columns: of the forward.
        capacity: slots of the buffers.
    """

    __slots__ = ("_at", "_capacity", "_starts")

    def __init__(self, starts: mx.array, columns: int, capacity: int) -> None:
        super().__init__(starts.shape[0])
        self.begin(columns)
        self._starts = starts
        self._capacity = capacity
        self._at = starts[:, None] + mx.arange(columns, dtype=mx.int32)

    @property
    def uniform(self) -> bool:
        return False

    @property
    def longest(self) -> int:
        """The most that it can be."""
        return self._capacity - self.provisional

    def reads(self, columns: int) -> int:
        return self._capacity

    def offset(self) -> mx.array:
        return self._starts

    def positions(self, columns: int) -> mx.array:
        return self._at

    def ends(self, columns: int) -> mx.array:
        return self._starts + columns
