"""Forwards of a few columns, traced once for each shape and then replayed.

mlx-lm's Python builds some twenty operations a layer, and on CUDA a forward of one or a few columns
waits for it: 3 to 4 ms for 36 layers. From a trace (spec_core.traces) it takes 1 ms.

What a model does with a cache is traced over ordinary layers and a clock of traced lengths: it is
the path that batches of rows of different length take. Attention reads as far as rows go by
spec_core.flash_decode; where that does not serve, a mask hides the rest of the buffer.

The weights are constants of a trace, as are the modules: with the next new state traces of other
ones are no longer used. MLX also fuses neighbouring elementwise operations (mx.compile cannot be
told not to). Each of them still rounds to its own type, so that logits of Qwen3 were the same,
bit for bit; a device that contracts a product and a sum into one operation may differ in the last
bit, as kernels for other shapes do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeGuard

import mlx.core as mx
from mlx.nn.layers.base import Module

from spec_core.flash_decode import MOST_COLUMNS
from spec_core.seams import Forward
from spec_core.traces import MOST_TRACES, TracedClock, Traces
from spec_targets.layers import Frame, FullLayer, LayerCache

TRACED_ROWS = (8, 16)
"""Rows times columns that forwards of several columns are filled up to, so that traces are few. For
CUDA's kernels for a few rows they cost nothing."""
MOST_SLOTS_AHEAD = 4096
"""Slots of a buffer up to which single columns are traced. Plain rounds are launched ahead: where
the device is behind, MLX copies a buffer that is still being read, and from a trace the host is so
fast that a device with much to read would always be behind."""

Taps = tuple[mx.array, ...]

Call = Callable[[mx.array, list[FullLayer], Frame, Sequence[int]], tuple[mx.array, Taps]]
"""The model over layer caches of one open frame: (tokens, caches, frame, taps) -> logits, taps."""

_Buffers = list[list[mx.array]]
"""Keys and values of each layer."""

_Written = tuple[mx.array, Taps, _Buffers]
"""Logits [B, T, V], taps, the same buffers written."""

_Traced = Callable[[mx.array, mx.array, _Buffers], _Written]
"""Of tokens [B, T], starts [B] and buffers."""


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
        self._traces: Traces[[mx.array, mx.array, _Buffers], _Written] = Traces(most)

    @property
    def traces(self) -> int:
        """How many there are."""
        return len(self._traces)

    def renew(self) -> None:
        """Use no trace from before if the model holds other weights or modules since."""
        if _unchanged(self._modules, self._held):
            return
        self._modules = self._model.modules()  # type: ignore[no-untyped-call]
        self._held = [dict(module) for module in self._modules]
        self._changes += 1
        self._traces.clear()  # they hold the old ones

    def serve(self, layers: Sequence[LayerCache], columns: int) -> TypeGuard[list[FullLayer]]:
        """Whether `run` forwards so many columns over these layers: few, over full attention in
        the model's own type that has been written to."""
        return 1 <= columns <= MOST_COLUMNS and all(
            type(layer) is FullLayer
            and layer.written
            and (columns > 1 or layer.slots <= MOST_SLOTS_AHEAD)
            for layer in layers
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
        shapes = tuple(buffer.shape for pair in buffers for buffer in pair)
        key = (self._changes, tokens.shape, tokens.dtype, tuple(taps), shapes)
        traced = self._traced(tuple(taps))
        logits, recorded, written = self._traces.replay(key, traced, tokens, starts, buffers)
        for layer, pair in zip(layers, written, strict=True):
            layer.take(pair)
        return Forward(logits=logits, taps=recorded)

    def _traced(self, taps: tuple[int, ...]) -> _Traced:
        """What is recorded."""

        def forward(tokens: mx.array, starts: mx.array, buffers: _Buffers) -> _Written:
            capacity = min(buffer.shape[2] for pair in buffers for buffer in pair)
            frame = Frame(TracedClock(starts, tokens.shape[1], capacity))
            frame.open()
            layers = [_layer_over(pair, frame) for pair in buffers]
            with _forgetful(self._modules):
                logits, recorded = self._call(tokens, layers, frame, taps)
            return logits, recorded, [list(layer.pending()) for layer in layers]

        return forward


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
