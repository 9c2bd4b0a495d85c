"""Key/value storage for rows of different length: left-aligned buffers, one length a row.

A commit is metadata; nothing is rolled or copied. Slots at or beyond a row's length hold
finite numbers of the past and are never attended to. Every write happens in place as long as
nothing else refers to the buffer, so nobody keeps a view of one over a round. Where kernels write
that MLX does not know of (`RowClock.storing`), what reads or writes a buffer here waits for them.

The buffers grow geometrically, in rows and in positions, and shrink when half of them is free
after rows have left. Verbs that move rows (`select`, `join`, `restore`) leave the clock alone:
the state that owns the clock calls them on all its layers, then moves the clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

import mlx.core as mx

from spec_core._buffers import fits, lengthened, room, same_kind, scatter, shrunk
from spec_core.device import on_cuda
from spec_core.errors import InvalidValueError, SeamError

_STEP = 256
"""Where attention reads lengths in steps: the smallest step."""

Quantized = tuple[mx.array, mx.array, mx.array]
"""Packed integers, scales and biases, as `mx.quantize` gives them."""


class RowClock:
    """The lengths of B rows, shared by all layers of one state.

    Attributes:
        lengths: committed positions of each row.
        provisional: columns of the forward that is not committed yet (0: none).
        valid: how many of those are real, for each row.
        stepped: attention reads lengths in steps only, see `reads`.
        storing: is there when the last kernel has ended that stores columns unknown to MLX, see
            spec_core.flash_decode.store_and_attend; None: there is none. Such kernels write only
            at or beyond a row's length.
    """

    __slots__ = ("_positions", "lengths", "provisional", "stepped", "storing", "valid")

    def __init__(self, rows: int, start: int = 0) -> None:
        self.lengths = [start] * rows
        self.provisional = 0
        self.valid: list[int] = [0] * rows
        self.stepped = on_cuda()
        self.storing: mx.array | None = None
        self._positions: tuple[list[int], int, mx.array] | None = None

    @property
    def rows(self) -> int:
        return len(self.lengths)

    @property
    def uniform(self) -> bool:
        return len(set(self.lengths)) <= 1

    @property
    def longest(self) -> int:
        return max(self.lengths, default=0)

    def reads(self, columns: int) -> int:
        """Slots that a forward of `columns` columns attends to, from the first on.

        MLX's CUDA attention over several queries makes a plan for each new number of keys (40 ms
        on an H200), so there the number goes up in steps of an eighth or so, and a mask hides the
        slots behind the rows. A single query needs no plan.
        """
        end = self.longest + columns
        if columns == 1 or not self.stepped:
            return end
        step = max(_STEP, (1 << end.bit_length()) >> 4)
        return -(-end // step) * step

    def begin(self, columns: int, valid: Sequence[int] | None = None) -> None:
        """Open a provisional forward of `columns` columns. Raises SeamError if one is open."""
        if self.provisional:
            raise SeamError(
                f"a forward of {self.provisional} columns is still provisional; commit it first"
            )
        real = [columns] * self.rows if valid is None else list(valid)
        if len(real) != self.rows or any(not 0 <= v <= columns for v in real):
            raise SeamError(f"valid is {real}; it must be {self.rows} values in 0..{columns}")
        self.provisional, self.valid = columns, real

    def check(self, keep: Sequence[int]) -> None:
        """Raise SeamError unless `commit(keep)` fits the provisional forward."""
        if len(keep) != self.rows or any(
            not 0 <= k <= v for k, v in zip(keep, self.valid, strict=True)
        ):
            raise SeamError(
                f"commit({list(keep)}) does not fit {self.valid} valid provisional columns"
            )

    def commit(self, keep: Sequence[int]) -> None:
        """Keep the first keep[b] provisional columns of row b. Raises SeamError if out of range."""
        self.check(keep)
        self.advance(keep)

    def advance(self, keep: Sequence[int]) -> None:
        """`commit` of what `check` has accepted."""
        self.lengths = [n + k for n, k in zip(self.lengths, keep, strict=True)]
        self.provisional, self.valid = 0, [0] * self.rows

    def offset(self) -> int | mx.array:
        """Where the next column goes: one int if all rows agree, else [B] int32."""
        return self.lengths[0] if self.uniform else mx.array(self.lengths, dtype=mx.int32)

    def positions(self, columns: int) -> mx.array:
        """[B, columns] absolute positions of the provisional columns; built once a forward."""
        known = self._positions
        if known is not None and known[0] == self.lengths and known[1] == columns:
            return known[2]
        starts = mx.array(self.lengths, dtype=mx.int32)
        made = starts[:, None] + mx.arange(columns, dtype=mx.int32)
        self._positions = (list(self.lengths), columns, made)
        return made

    def ends(self, columns: int) -> mx.array:
        """[B] int32, where each row ends once it has the provisional columns."""
        return mx.array([length + columns for length in self.lengths], dtype=mx.int32)

    def wait_for_stores(self) -> None:
        """Wait for what is being stored: MLX's own operations may read and write it then."""
        if self.storing is not None:
            mx.eval(self.storing)
            self.storing = None

    def settled(self) -> None:
        """Raise SeamError if a forward is provisional."""
        if self.provisional:
            raise SeamError("rows cannot move while a forward is provisional; commit it first")

    def check_rows(self, rows: Sequence[int]) -> None:
        """Raise SeamError unless `select(rows)` names distinct rows between forwards."""
        self.settled()
        if len(set(rows)) != len(rows) or any(not 0 <= r < self.rows for r in rows):
            raise SeamError(f"select({list(rows)}) does not name distinct rows of {self.rows}")

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order. Raises SeamError as `check_rows`."""
        self.check_rows(rows)
        self.lengths = [self.lengths[row] for row in rows]
        self.valid = [0] * len(rows)

    def join(self, other: RowClock) -> None:
        """Append the rows of `other`."""
        self.settled()
        other.settled()
        self.lengths = self.lengths + other.lengths
        self.valid = [0] * self.rows


class Plane:
    """One array of B rows and S positions, [R, heads, S, dim], with R >= B and room to grow.

    Args:
        limit: S never grows beyond it.
    """

    __slots__ = ("array", "limit")

    def __init__(self, limit: int | None = None) -> None:
        self.array: mx.array | None = None
        self.limit = limit

    def fits(self, rows: int, end: int) -> bool:
        """There is no buffer, or rows and positions fit it."""
        return self.array is None or fits(self.array, rows, end)

    def make_room(self, rows: int, end: int) -> None:
        """Grow, if there is a buffer, until rows and positions fit."""
        if self.array is not None:
            self.array = room(self.array, self.array, rows, end)

    def write(self, new: mx.array, clock: RowClock) -> mx.array:
        """Write [B, heads, T, dim] at each row's length; gives [B, heads, reads(T), dim]."""
        rows, _, columns, _ = new.shape
        end, reads = clock.longest + columns, clock.reads(columns)
        buffer = room(self.array, new, rows, reads)
        if clock.uniform:
            buffer[:rows, :, end - columns : end] = new
        else:
            buffer = scatter(buffer, new, clock.positions(columns))
        self.array = buffer
        return buffer[:rows, :, :reads]

    def select(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Rows whose slot changes are lifted out as evaluated copies, then set down."""
        if self.array is None:
            return
        kept = [lengths[row] for row in rows]
        moves = [(slot, row) for slot, row in enumerate(rows) if slot != row]
        lifted = [mx.contiguous(self.array[row, :, : lengths[row]]) for _, row in moves]
        mx.eval(lifted)
        self.array = shrunk(self.array, len(rows), max(kept, default=0))
        if self.array is not None:
            for (slot, row), copy in zip(moves, lifted, strict=True):
                self.array[slot, :, : lengths[row]] = copy

    def join(self, other: Plane, lengths: Sequence[int], joining: Sequence[int]) -> None:
        """Write the rows of `other` behind the first len(lengths) rows."""
        if self.array is None and not lengths:
            self.array = other.array
            return
        first, total = len(lengths), len(lengths) + len(joining)
        like = self.array if other.array is None else other.array
        if like is None:
            return
        same_kind(self.array, like)
        buffer = room(self.array, like, total, max([*lengths, *joining]), self.limit)
        for row, length in enumerate(joining):
            if other.array is not None:
                buffer[first + row, :, :length] = other.array[row, :, :length]
        self.array = buffer

    def image(self, row: int, start: int, stop: int) -> mx.array:
        """An owned copy, [stop - start, heads, dim]; evaluate it before anything else runs."""
        assert self.array is not None, "a plane that was never written has no image"
        return mx.contiguous(self.array[row, :, start:stop].transpose(1, 0, 2))

    def restore(self, row: int, values: mx.array, rows: int, longest: int) -> None:
        """Write [n, heads, dim] into the first n positions of a row."""
        new = values.transpose(1, 0, 2)[None]
        same_kind(self.array, new)
        length = values.shape[0]
        if self.array is None and rows == 1:
            self.array = lengthened(new, max(longest, length))
            return
        buffer = room(self.array, new, rows, max(longest, length))
        buffer[row, :, :length] = new[0]
        self.array = buffer


_Stored = TypeVar("_Stored")


class RowStore(Generic[_Stored]):
    """The verbs of storage with rows, over named planes. See KVRows and QuantizedKVRows.

    Args:
        clock: the lengths, shared with the state's other layers.
        names: one for each plane, as they appear in images.
    """

    __slots__ = ("_planes", "clock")

    def __init__(self, clock: RowClock, names: Sequence[str]) -> None:
        self.clock = clock
        self._planes = {name: Plane() for name in names}

    def append(self, keys: mx.array, values: mx.array) -> tuple[_Stored, _Stored]:
        """Write [B, heads, T, dim] columns at each row's length; returns both buffers up to the
        longest row's end, [B, heads, clock.reads(T), dim]. Lengths stay; see RowClock."""
        raise NotImplementedError

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order; call it before the clock's own `select`."""
        self.clock.wait_for_stores()
        for plane in self._planes.values():
            plane.select(rows, self.clock.lengths)

    def join(self, other: RowStore[_Stored]) -> None:
        """Write the rows of `other` behind ours; call it before the clock's own `join`.

        Raises SeamError where the kinds differ.
        """
        if list(other._planes) != list(self._planes):
            raise SeamError(
                f"rows with planes {list(other._planes)} cannot join rows with planes "
                f"{list(self._planes)}; both states must store keys and values alike"
            )
        self.clock.wait_for_stores()
        other.clock.wait_for_stores()
        for name, plane in self._planes.items():
            plane.join(other._planes[name], self.clock.lengths, other.clock.lengths)

    def image(self, row: int, start: int = 0) -> dict[str, mx.array]:
        """Owned copies of a row's positions from `start` on, [n, heads, dim] by plane; lazy:
        evaluate them before anything else runs. Empty where nothing was ever written."""
        self.clock.wait_for_stores()
        stop = self.clock.lengths[row]
        written = {n: p for n, p in self._planes.items() if p.array is not None}
        return {name: plane.image(row, start, stop) for name, plane in written.items()}

    def restore(self, row: int, image: Mapping[str, mx.array]) -> None:
        """Write an image of start 0 into a row; the state then sets the clock.

        Raises SeamError where names, shapes or types differ from what is stored.
        """
        if image and set(image) != set(self._planes):
            raise SeamError(f"image has planes {sorted(image)}; expected {sorted(self._planes)}")
        self.clock.wait_for_stores()
        for name, values in image.items():
            self._planes[name].restore(row, values, self.clock.rows, self.clock.longest)

    def pending(self) -> list[mx.array]:
        """The live buffers, to evaluate, or to write and give back by `take`; never keep one."""
        return [plane.array for plane in self._planes.values() if plane.array is not None]

    @property
    def written(self) -> bool:
        """Whether every plane has a buffer."""
        return all(plane.array is not None for plane in self._planes.values())

    def make_room(self, columns: int) -> None:
        """Grow what buffers there are as `append` of so many columns would, so that somebody else
        can write them."""
        rows, end = self.clock.rows, self.clock.reads(columns)
        if all(plane.fits(rows, end) for plane in self._planes.values()):
            return
        self.clock.wait_for_stores()
        for plane in self._planes.values():
            plane.make_room(rows, end)

    def take(self, buffers: Sequence[mx.array]) -> None:
        """Store these buffers, one for each plane in the order of `pending`."""
        for plane, buffer in zip(self._planes.values(), buffers, strict=True):
            plane.array = buffer


class KVRows(RowStore[mx.array]):
    """Keys and values of B rows in one layer, [B, heads, S, dim] each."""

    __slots__ = ()

    def __init__(self, clock: RowClock) -> None:
        super().__init__(clock, ("keys", "values"))

    def append(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        planes, clock = self._planes, self.clock
        clock.wait_for_stores()
        return planes["keys"].write(keys, clock), planes["values"].write(values, clock)


class QuantizedKVRows(RowStore[Quantized]):
    """KVRows in 4 or 8 bits a number; each column is quantised once, when it is written.

    Args:
        clock: the lengths, shared with the state's other layers.
        bits: 4 or 8.
        group_size: how many numbers share a scale: 32, 64 or 128; it must divide the head size.

    Raises:
        InvalidValueError: `bits` or `group_size` is something else.
    """

    __slots__ = ("bits", "group_size")

    def __init__(self, clock: RowClock, bits: int = 8, group_size: int = 64) -> None:
        if bits not in (4, 8):
            raise InvalidValueError("kv_bits", bits, "4 or 8")
        if group_size not in (32, 64, 128):
            raise InvalidValueError("group_size", group_size, "32, 64 or 128")
        parts = ("packed", "scales", "biases")
        super().__init__(clock, [f"{what}.{part}" for what in ("keys", "values") for part in parts])
        self.bits = bits
        self.group_size = group_size

    def append(self, keys: mx.array, values: mx.array) -> tuple[Quantized, Quantized]:
        return self._append("keys", keys), self._append("values", values)

    def _append(self, what: str, new: mx.array) -> Quantized:
        packed, scales, biases = mx.quantize(new, group_size=self.group_size, bits=self.bits)
        write = self._planes
        return (
            write[f"{what}.packed"].write(packed, self.clock),
            write[f"{what}.scales"].write(scales, self.clock),
            write[f"{what}.biases"].write(biases, self.clock),
        )


def causal_mask(
    clock: RowClock, columns: int, end: int, window: int | None = None
) -> mx.array | str | None:
    """Who sees whom: column t of row b sees positions 0..lengths[b]+t, of them the newest
    `window` if there is one.

    Args:
        clock: the rows' lengths.
        columns: T of the forward.
        end: slots attended to, as `clock.reads(columns)`.
        window: None for full attention.

    Returns None (a single column, all rows alike), "causal" (all rows alike, and no slot lies
    behind them) or a boolean [B, 1, columns, end] mask.
    """
    if window is not None and clock.longest + columns <= window:
        window = None
    if clock.uniform and window is None and end == clock.longest + columns:
        return None if columns == 1 else "causal"
    return boolean_mask(clock, columns, end, window)


def boolean_mask(clock: RowClock, columns: int, end: int, window: int | None = None) -> mx.array:
    """`causal_mask`, always as a boolean array [B, 1, columns, end]."""
    last = clock.positions(columns)[:, None, :, None]
    slots = mx.arange(end, dtype=mx.int32)
    seen = slots <= last
    return seen if window is None else seen & (slots > last - window)
