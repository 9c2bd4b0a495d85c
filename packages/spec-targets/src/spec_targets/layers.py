"""Layer caches: what an mlx-lm model sees as one layer's cache, and what a state does with it.

Towards the model a layer cache looks like mlx-lm's own object of that kind (`offset`,
`update_and_fetch`, `make_mask`, ...). Towards the state it is a `LayerCache`. The lengths of the
rows are in one RowClock that all layers share; a `Frame` holds what a forward works out once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol, Self

import mlx.core as mx

from spec_core.device import on_cuda, runs_beside_host
from spec_core.errors import SeamError
from spec_core.flash_decode import MOST_COLUMNS, Columns, store_and_attend
from spec_core.kv import KVRows, QuantizedKVRows, RowClock, boolean_mask, causal_mask
from spec_core.ring import Ring
from spec_core.seams import PerToken
from spec_targets.errors import UnsupportedTargetError

Mask = mx.array | str | None


@dataclass(frozen=True, slots=True)
class LayerOptions:
    """How a layer stores what it remembers.

    Attributes:
        kv_bits: None for the model's own type, or 4 or 8. Windows are small and bounded: only
            layers with full attention are quantised.
        group_size: how many quantised numbers share a scale.
        slack: of the rings of sliding layers, see spec_core.ring; None: what serves best.
        waste: where rows of different length would read more padding than so many positions
            together, each attends alone (infinite: never); None: what serves best.
    """

    kv_bits: int | None = None
    group_size: int = 64
    slack: int | None = None
    waste: float | None = None


@dataclass(frozen=True, slots=True)
class LayerImage:
    """One layer's part of a StateImage; names are the layer's own."""

    per_token: Mapping[str, PerToken] = field(default_factory=lambda: MappingProxyType({}))
    at_end: Mapping[str, mx.array] = field(default_factory=lambda: MappingProxyType({}))


class LayerCache(Protocol):
    """What a state asks of a layer. The clock moves after the layers have done their part."""

    def begin(self, columns: int) -> None:
        """A forward of `columns` provisional columns opens."""

    def commit(self, keep: Sequence[int]) -> None:
        """Keep the first keep[b] provisional columns of row b. The clock still has the old
        lengths. Lazy."""

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows in this order; the clock still counts the old ones."""

    def join(self, other: Self) -> None:
        """Append the rows of `other`; the clock still counts ours only."""

    def image(self, row: int, start: int) -> LayerImage:
        """Owned copies, lazy: the state evaluates all layers at once."""

    def restore(self, row: int, image: LayerImage, start: int, length: int) -> None:
        """Write an image into a row; the clock still has length 0 for it."""

    def pending(self) -> Sequence[mx.array]:
        """The live buffers."""


class Frame:
    """What all layers of one forward share: where it starts, and its masks.

    Attributes:
        clock: the rows' lengths.
        offset: where the first column goes: an int if all rows agree, else [B].
        row_ends: where each row's keys end in a forward whose rows attend alone; None: together.
        ends: the same on the device, [B], where few columns attend by spec_core.flash_decode.
    """

    __slots__ = ("_masks", "_rings", "clock", "ends", "offset", "row_ends")

    def __init__(self, clock: RowClock) -> None:
        self.clock = clock
        self.offset: int | mx.array = 0
        self.row_ends: Sequence[int] | None = None
        self.ends: mx.array | None = None
        self._masks: dict[tuple[int, bool, int | None], Mask] = {}
        self._rings: dict[tuple[int, int | None], Ring] = {}

    def open(self) -> None:
        """A forward begins."""
        self.offset = self.clock.offset()
        self.row_ends = self.ends = None
        self._masks = {}

    def mask(self, columns: int, as_array: bool, window: int | None) -> Mask:
        """The mask over left-aligned rows, as spec_core.kv.causal_mask; built once a forward."""
        key = (columns, as_array, window)
        if key not in self._masks:
            end = self.clock.reads(columns)
            make = boolean_mask if as_array and columns > 1 else causal_mask
            self._masks[key] = make(self.clock, columns, end, window)
        return self._masks[key]

    def part_rows(self, columns: int, waste: float | None) -> bool:
        """Let the rows of this forward attend each over its own positions, if that is worth it;
        see LayerOptions. Says whether it is."""
        ends = [length + columns for length in self.clock.lengths]
        few = columns <= MOST_COLUMNS and (columns > 1 or not self.clock.uniform)
        if few and waste != math.inf and on_cuda():
            self.ends = self.clock.ends(columns)
        wasted = max(ends) * len(ends) - sum(ends)
        if wasted:
            allowed = _tolerable_waste(max(ends), columns) if waste is None else waste
            self.row_ends = ends if wasted > allowed else None
        return self.row_ends is not None or self.ends is not None

    def has_made(self, mask: Mask) -> bool:
        """Whether a mask is one of ours over all left-aligned rows, without a window."""
        return any(mask is made for (_, _, window), made in self._masks.items() if window is None)

    def ring(self, window: int, slack: int | None = None) -> Ring:
        """The ring that all layers with this window share."""
        key = (window, slack)
        if key not in self._rings:
            self._rings[key] = Ring(self.clock, window, slack)
        return self._rings[key]


_MUCH = 1024
"""Padding that costs a CPU more than separate calls, and keys from which CUDA's do."""


def _tolerable_waste(longest: int, columns: int) -> float:
    """Positions of padding that rows may read.

    CUDA has no fused attention for a single query with a mask, and of several with one it does not
    read faster what is shorter. Metal skips what a mask hides.
    """
    if not runs_beside_host():
        return _MUCH
    return 0 if on_cuda() and columns == 1 and longest >= _MUCH else math.inf


class FullLayer:
    """Full attention: looks like mlx-lm's KVCache, stores in KVRows.

    Args:
        frame: shared by the layers of a state.
        buffers: keys and values to store in, in a trace.
    """

    __slots__ = ("_frame", "_rows")

    def __init__(self, frame: Frame, buffers: Sequence[mx.array] = ()) -> None:
        self._frame = frame
        self._rows: KVRows | QuantizedKVRows = KVRows(frame.clock)
        if buffers:
            self.take(buffers)

    # Towards the model.

    @property
    def offset(self) -> int | mx.array:
        return self._frame.offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        return self._rows.append(keys, values)

    def make_mask(
        self, columns: int, return_array: bool = False, window_size: int | None = None
    ) -> Mask:
        return self._frame.mask(columns, return_array, window_size)

    def own_positions(self, mask: Mask) -> Frame | None:
        """The frame, if rows attend each over its own positions under this mask."""
        return self._frame if self._frame.has_made(mask) else None

    # Towards the state.

    def begin(self, columns: int) -> None:
        pass

    def commit(self, keep: Sequence[int]) -> None:
        pass

    def select(self, rows: Sequence[int]) -> None:
        self._rows.select(rows)

    def join(self, other: FullLayer) -> None:
        self._rows.join(other._rows)  # type: ignore[arg-type]

    def image(self, row: int, start: int) -> LayerImage:
        arrays = self._rows.image(row, start)
        return LayerImage(per_token={name: PerToken(array) for name, array in arrays.items()})

    def restore(self, row: int, image: LayerImage, start: int, length: int) -> None:
        if start or any(each.array.shape[0] != length for each in image.per_token.values()):
            raise SeamError(
                f"full attention resumes at {length} only from positions 0..{length - 1}; "
                f"the image starts at {start}"
            )
        self._rows.restore(row, {name: each.array for name, each in image.per_token.items()})

    def pending(self) -> Sequence[mx.array]:
        return self._rows.pending()

    # Towards spec_targets.compiled; see spec_core.kv.RowStore.

    @property
    def waiting(self) -> bool:
        """Columns came that were not stored."""
        return False

    @property
    def written(self) -> bool:
        return self._rows.written

    def make_room(self, columns: int) -> None:
        self._rows.make_room(columns)

    def take(self, buffers: Sequence[mx.array]) -> None:
        self._rows.take(buffers)


class StoringLayer(FullLayer):
    """Full attention whose newest columns the kernel stores that attends, in a trace on CUDA.

    Args:
        frame: its clock says what the first kernel comes after.
        buffers: keys and values, with room for the newest columns.
    """

    __slots__ = ("_newest",)

    def __init__(self, frame: Frame, buffers: Sequence[mx.array]) -> None:
        super().__init__(frame, buffers)
        self._newest: Columns | None = None

    @property
    def waiting(self) -> bool:
        return self._newest is not None

    def holds(self, keys: mx.array, values: mx.array) -> bool:
        """Whether these are the columns that came, and nothing that was made of them."""
        newest = self._newest
        return newest is not None and keys is newest.keys and values is newest.values

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        """Gives the newest columns alone: `attend` is what reads the others."""
        if self.waiting:
            raise SeamError("columns came twice in one forward")
        self._newest = Columns(keys, values)
        return keys, values

    def attend(self, queries: mx.array, scale: float) -> mx.array:
        """Attention [B, H, T, D] of the newest columns, each row's over its own positions."""
        clock, ends, newest = self._frame.clock, self._frame.ends, self._newest
        assert newest is not None
        assert ends is not None
        assert clock.storing is not None
        stored = Columns(*self.pending())
        out, clock.storing, stored = store_and_attend(
            queries, stored, newest, ends, scale, clock.storing
        )
        self.take((stored.keys, stored.values))
        self._newest = None
        return out


class QuantizedFullLayer(FullLayer):
    """Full attention over quantised keys and values; mlx-lm recognises it by `bits`."""

    __slots__ = ("bits", "group_size")

    def __init__(self, frame: Frame, bits: int, group_size: int) -> None:
        self._frame = frame
        self._rows = QuantizedKVRows(frame.clock, bits, group_size)
        self.bits = bits
        self.group_size = group_size


def group_size_for(head_sizes: Sequence[int]) -> int:
    """The largest of 64 and 32 that divides all head sizes, as quantised storage needs.

    Raises UnsupportedTargetError if neither does.
    """
    for size in (64, 32):
        if all(head % size == 0 for head in head_sizes):
            return size
    raise UnsupportedTargetError(
        f"keys and values with heads of size {sorted(set(head_sizes))} cannot be quantised: the "
        "size must be a multiple of 32; leave them as they are"
    )


def full_layer(like: object, frame: Frame, options: LayerOptions) -> LayerCache:
    """A layer cache in place of mlx-lm's KVCache."""
    if options.kv_bits is None:
        return FullLayer(frame)
    return QuantizedFullLayer(frame, options.kv_bits, options.group_size)


LayerMaker = Callable[[Any, Frame, LayerOptions], LayerCache]
"""(mlx-lm's own cache object, frame, options) -> ours in its place."""
