"""A target's memory of B rows: one clock, and a cache for each layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from spec_core.errors import SeamError
from spec_core.kv import RowClock
from spec_core.seams import PerToken, RowState, StateImage
from spec_targets.layers import Frame, LayerCache, LayerImage


class LayeredState:
    """A TargetState composed of layer caches. See spec_core.seams.TargetState.

    Args:
        rows: how many, all of length 0.
        make_layers: gives the layer caches in the order of mlx-lm's own.
    """

    def __init__(self, rows: int, make_layers: Callable[[Frame], list[LayerCache]]) -> None:
        self._clock = RowClock(rows)
        self._frame = Frame(self._clock)
        self.layers: list[LayerCache] = make_layers(self._frame)

    @property
    def rows(self) -> int:
        return self._clock.rows

    @property
    def clock(self) -> RowClock:
        """The lengths of the rows, shared by all layers."""
        return self._clock

    @property
    def lengths(self) -> Sequence[int]:
        return tuple(self._clock.lengths)

    @property
    def valid(self) -> Sequence[int]:
        """How many columns of each row are real in the provisional forward."""
        return self._clock.valid

    def begin(self, columns: int, valid: Sequence[int] | None) -> None:
        """Open a provisional forward. Raises SeamError if one is open or `valid` does not fit."""
        self._clock.begin(columns, valid)
        self._frame.open()
        for layer in self.layers:
            layer.begin(columns)

    def part_rows(self, columns: int, waste: float | None) -> bool:
        """Let the rows of the open forward attend alone, if that is worth it; see LayerOptions."""
        return self._frame.part_rows(columns, waste)

    def check(self, keep: Sequence[int]) -> None:
        """Raise SeamError unless `commit(keep)` fits the provisional forward."""
        self._clock.check(keep)

    def settled(self) -> None:
        """Raise SeamError if a forward is provisional."""
        self._clock.settled()

    def commit(self, keep: Sequence[int]) -> None:
        self.check(keep)
        for layer in self.layers:
            layer.commit(keep)
        self._clock.advance(keep)

    def select(self, rows: Sequence[int]) -> None:
        self._clock.check_rows(rows)
        if list(rows) == list(range(self.rows)):
            return
        for layer in self.layers:
            layer.select(rows)
        self._clock.select(rows)
        mx.eval(self.pending())

    def join(self, other: RowState) -> None:
        if not isinstance(other, LayeredState) or _kinds(other) != _kinds(self):
            raise SeamError(
                f"{type(other).__name__} cannot join a state with layers {_kinds(self)}; "
                "both must come from the same target"
            )
        self._clock.settled()
        other._clock.settled()
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            mine.join(theirs)
        self._clock.join(other._clock)
        mx.eval(self.pending())

    def image(self, row: int, start: int = 0) -> StateImage:
        self._clock.settled()
        length = self._clock.lengths[row]
        if not 0 <= start <= length:
            raise SeamError(f"image from {start} of a row of length {length}")
        per_token: dict[str, PerToken] = {}
        at_end: dict[str, mx.array] = {}
        for index, layer in enumerate(self.layers):
            part = layer.image(row, start)
            per_token.update({f"{index}.{name}": each for name, each in part.per_token.items()})
            at_end.update({f"{index}.{name}": each for name, each in part.at_end.items()})
        mx.eval([each.array for each in per_token.values()], list(at_end.values()))
        return StateImage(start=start, length=length, per_token=per_token, at_end=at_end)

    def restore(self, row: int, image: StateImage) -> None:
        self._clock.settled()
        if self._clock.lengths[row]:
            raise SeamError(f"row {row} has {self._clock.lengths[row]} positions; restore needs 0")
        parts = _parts(image, len(self.layers))
        for layer, part in zip(self.layers, parts, strict=True):
            layer.restore(row, part, image.start, image.length)
        self._clock.lengths[row] = image.length
        mx.eval(self.pending())

    def pending(self) -> Sequence[mx.array]:
        storing = self._clock.storing
        first = [] if storing is None else [storing]
        return first + [array for layer in self.layers for array in layer.pending()]


def _kinds(state: LayeredState) -> list[str]:
    return [type(layer).__name__ for layer in state.layers]


def _parts(image: StateImage, layers: int) -> list[LayerImage]:
    """The image layer by layer. Raises SeamError if it names a layer that is not there."""
    return [
        LayerImage(per_token=per_token, at_end=at_end)
        for per_token, at_end in zip(
            _by_layer(image.per_token, layers), _by_layer(image.at_end, layers), strict=True
        )
    ]


def _by_layer(arrays: Any, layers: int) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{} for _ in range(layers)]
    for name, each in arrays.items():
        index, _, own = name.partition(".")
        if not (index.isdigit() and int(index) < layers and own):
            raise SeamError(f"image holds {name!r}; this target has {layers} layer caches")
        parts[int(index)][own] = each
    return parts
