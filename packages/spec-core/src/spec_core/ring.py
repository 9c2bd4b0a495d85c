"""Keys and values of a sliding window: rings with slack.

A ring has `capacity` = window + slack slots a row, and position p lives in slot p mod capacity.
A forward of at most slack + 1 columns overwrites only what no query of it, and none after any
commit, still sees; so a commit is metadata, after the ring has wrapped as before. A longer
forward that would overwrite more is attended to from a gathered copy and written when it is
committed; the cost is that of its own columns and one window.

Sums over keys are taken in the order of the slots, and that order is a function of the positions
alone: newer laps of the ring first. The gathered copy keeps it, so that logits do not depend on
how a text was cut into forwards wherever arithmetic does not depend on shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from spec_core._buffers import room, same_kind, scatter
from spec_core.errors import InvalidValueError, SeamError
from spec_core.kv import Plane, RowClock

SLACK = 32
"""The least slack of a ring: one more than the longest forward that is written at once."""

_ALIGNMENT = 64
_NOWHERE = -(2**30)

Positions = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Gather:
    """The keys that a forward of many columns attends to, out of its columns and the ring.

    Attributes:
        index: [B or 1, S] into the forward's T columns, followed by the ring's slots.
        positions: [B or 1, S] the position of each; negative: nothing, never attended to.
        old: whether any of them is in the ring.
    """

    index: mx.array
    positions: mx.array
    old: bool


class Ring:
    """One window over the rows of a clock; shared by all layers that have this window.

    Args:
        clock: the rows' lengths.
        window: position p sees positions p - window + 1 .. p.
        slack: exactly so many slots more than the window; None: at least `SLACK`.

    Raises:
        InvalidValueError: `window` or `slack` is too small.
    """

    __slots__ = ("_at", "_gathers", "_masks", "capacity", "clock", "window")

    def __init__(self, clock: RowClock, window: int, slack: int | None = None) -> None:
        if window < 1:
            raise InvalidValueError("window", window, "at least 1")
        if slack is not None and slack < 1:
            raise InvalidValueError("slack", slack, "at least 1")
        self.clock = clock
        self.window = window
        self.capacity = _aligned(window + SLACK) if slack is None else window + slack
        self._at: list[int] = []
        self._masks: dict[tuple[int, int, bool], mx.array | str | None] = {}
        self._gathers: dict[int, Gather] = {}

    def at_once(self, columns: int) -> bool:
        """Whether a forward of so many columns is written into the ring before its commit."""
        fits = self.clock.longest + columns <= self.capacity
        return fits or columns <= self.capacity - self.window + 1

    def width(self, columns: int) -> int:
        """How many slots hold something after a forward that is written at once."""
        return min(self.capacity, self.clock.reads(columns))

    def gather(self, columns: int) -> Gather:
        """What a forward that is not written at once attends to; worked out once a forward."""
        self._forget()
        if columns not in self._gathers:
            self._gathers[columns] = self._gather(columns)
        return self._gathers[columns]

    def mask(
        self, columns: int, window: int | None = None, as_array: bool = False
    ) -> mx.array | str | None:
        """Who sees which slot, as `spec_core.kv.causal_mask`; worked out once a forward.

        Args:
            columns: T of the forward.
            window: one that is narrower than the ring's.
            as_array: never "causal".
        """
        self._forget()
        narrow = self.window if window is None else min(window, self.window)
        key = (columns, narrow, as_array)
        if key not in self._masks:
            self._masks[key] = self._mask(columns, narrow, as_array)
        return self._masks[key]

    def _mask(self, columns: int, window: int, as_array: bool) -> mx.array | str | None:
        clock = self.clock
        end = clock.longest + columns
        bare = end <= window and self.width(columns) == end
        if clock.uniform and bare and not (as_array and columns > 1):
            return None if columns == 1 else "causal"
        slots = self._held(columns) if self.at_once(columns) else self.gather(columns).positions
        query = clock.positions(columns)[: slots.shape[0], None, :, None]
        held = slots[:, None, None]
        return (held <= query) & (held > query - window)

    def _held(self, columns: int) -> mx.array:
        """[B or 1, S] the position in each slot once so many columns are written."""
        slots = np.arange(self.width(columns), dtype=np.int32)
        newest = np.array([n + columns - 1 for n in self._lengths()], dtype=np.int32)[:, None]
        held = newest - (newest - slots) % self.capacity
        return mx.array(np.where(held < 0, _NOWHERE, held))

    def _gather(self, columns: int) -> Gather:
        lengths = self._lengths()
        rows = [_laps(n, columns, self.window, self.capacity) for n in lengths]
        most = max(len(row) for row in rows)
        held = np.stack([np.pad(r, (0, most - len(r)), constant_values=_NOWHERE) for r in rows])
        starts = np.array(lengths, dtype=np.int32)[:, None]
        new = held >= starts
        old = (held >= 0) & ~new
        index = np.where(new, held - starts, np.where(old, columns + held % self.capacity, 0))
        return Gather(mx.array(index), mx.array(held), bool(old.any()))

    def _lengths(self) -> list[int]:
        """Of each row; of one, if all agree."""
        return self.clock.lengths[:1] if self.clock.uniform else self.clock.lengths

    def _forget(self) -> None:
        if self._at != self.clock.lengths:
            self._at = list(self.clock.lengths)
            self._masks, self._gathers = {}, {}


def _laps(length: int, columns: int, window: int, capacity: int) -> Positions:
    """The positions that a forward attends to, newer laps of the ring first, each at its own
    place within blocks of the alignment; gaps hold _NOWHERE."""
    first, end = max(0, length - window + 1), length + columns
    laps = []
    for lap in range((end - 1) // capacity, first // capacity - 1, -1):
        start = lap * capacity
        low = max(0, first - start) // _ALIGNMENT * _ALIGNMENT
        high = min(capacity, _aligned(end - start))
        laps.append(np.arange(start + low, start + high, dtype=np.int32))
    held = np.concatenate(laps)
    return np.where((held >= first) & (held < end), held, np.int32(_NOWHERE))


def _aligned(slots: int) -> int:
    return -(-slots // _ALIGNMENT) * _ALIGNMENT


class RingRows:
    """Keys and values of B rows in one sliding layer. Verbs as those of `spec_core.kv.KVRows`,
    and `commit`.

    Args:
        ring: the window, shared with the state's other layers that have it.
    """

    __slots__ = ("_held", "_oldest", "_planes", "ring")

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self._planes = {name: _RingPlane(ring.capacity) for name in ("keys", "values")}
        # The oldest position of each row that nothing was written over.
        self._oldest = [0] * ring.clock.rows
        self._held: tuple[mx.array, mx.array] | None = None

    def append(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Take in [B, heads, T, dim] columns at each row's length; returns what they attend to
        under `Ring.mask`, [B, heads, S, dim] each."""
        columns, planes = keys.shape[2], self._planes
        if self.ring.at_once(columns):
            self._overwrite([columns] * len(self._oldest))
            return planes["keys"].put(keys, self.ring), planes["values"].put(values, self.ring)
        gather = self.ring.gather(columns)
        self._held = (keys, values)
        return planes["keys"].beside(keys, gather), planes["values"].beside(values, gather)

    def commit(self, keep: Sequence[int]) -> None:
        """Keep the first keep[b] provisional columns; call it before the clock's own `commit`.
        Metadata only, unless the forward was too long to be written at once."""
        if self._held is None:
            return
        held, self._held = self._held, None
        if any(keep):
            for plane, new in zip(self._planes.values(), held, strict=True):
                plane.settle(new, self.ring.clock, keep)
            self._overwrite([max(count, 1) for count in keep])

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order; call it before the clock's own `select`."""
        used = self._used(self.ring.clock.lengths)
        for plane in self._planes.values():
            plane.select(rows, used)
        self._oldest = [self._oldest[row] for row in rows]

    def join(self, other: RingRows) -> None:
        """Write the rows of `other` behind ours; call it before the clock's own `join`.

        Raises SeamError where the kinds differ.
        """
        mine, theirs = self.ring, other.ring
        if (mine.window, mine.capacity) != (theirs.window, theirs.capacity):
            raise SeamError(
                f"rows with a window of {theirs.window} in {theirs.capacity} slots cannot join "
                f"rows with a window of {mine.window} in {mine.capacity}"
            )
        have, joining = self._used(mine.clock.lengths), self._used(theirs.clock.lengths)
        for name, plane in self._planes.items():
            plane.join(other._planes[name], have, joining)
        self._oldest = self._oldest + other._oldest

    def image(self, row: int, start: int = 0) -> dict[str, mx.array]:
        """Owned copies of the positions from `start` on that the ring still has, at least the
        newest window - 1 of them, [n, heads, dim] by plane; lazy: evaluate them before anything
        else runs. Empty where nothing was ever written."""
        stop = self.ring.clock.lengths[row]
        first = min(stop, max(start, self._oldest[row]))
        written = {n: p for n, p in self._planes.items() if p.array is not None}
        return {name: plane.image(row, first, stop) for name, plane in written.items()}

    def restore(self, row: int, image: Mapping[str, mx.array], length: int) -> None:
        """Write the newest positions before `length` into a row; the state then sets the clock.

        Raises SeamError where names, shapes or types differ from what is stored, or where fewer
        than window - 1 positions are given.
        """
        if image and set(image) != set(self._planes):
            raise SeamError(f"image has planes {sorted(image)}; expected {sorted(self._planes)}")
        given = min((values.shape[0] for values in image.values()), default=0)
        if given < min(length, self.ring.window - 1):
            raise SeamError(
                f"a window of {self.ring.window} resumes at {length} only from the "
                f"{min(length, self.ring.window - 1)} positions before; the image has {given}"
            )
        count = min(given, self.ring.capacity, length)
        for name, values in image.items():
            self._planes[name].fill(row, values[values.shape[0] - count :], length, self.ring)
        self._oldest[row] = length - count

    def pending(self) -> list[mx.array]:
        """The live buffers, for evaluation only: evaluate and forget, never keep."""
        live = [plane.array for plane in self._planes.values() if plane.array is not None]
        return live if self._held is None else [*live, *self._held]

    def _overwrite(self, written: Sequence[int]) -> None:
        """So many columns of each row go into the ring, over the oldest positions."""
        ends = [n + count for n, count in zip(self.ring.clock.lengths, written, strict=True)]
        self._oldest = [
            max(old, end - self.ring.capacity) for old, end in zip(self._oldest, ends, strict=True)
        ]

    def _used(self, lengths: Sequence[int]) -> list[int]:
        """How many slots of each row hold something that is needed."""
        return [min(length, self.ring.capacity) for length in lengths]


class _RingPlane(Plane):
    """A plane of so many slots a row; position p lives in slot p mod capacity."""

    __slots__ = ("capacity",)

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.capacity = capacity

    def put(self, new: mx.array, ring: Ring) -> mx.array:
        """Write [B, heads, T, dim] at each row's length; gives the slots in use."""
        rows, _, columns, _ = new.shape
        clock, width = ring.clock, ring.width(columns)
        buffer = room(self.array, new, rows, width, self.capacity)
        if clock.uniform:
            buffer = _write(buffer, slice(0, rows), new, clock.longest, self.capacity)
        else:
            buffer = scatter(buffer, new, clock.positions(columns) % self.capacity)
        self.array = buffer
        return buffer[:rows, :, :width]

    def beside(self, new: mx.array, gather: Gather) -> mx.array:
        """[B, heads, S, dim] out of [B, heads, T, dim] columns and the ring."""
        known = new
        if gather.old:
            assert self.array is not None, "rows with positions have a buffer"
            known = mx.concatenate([new, self.array[: new.shape[0]]], axis=2)
        if gather.index.shape[0] == 1:
            return mx.take(known, gather.index[0], axis=2)
        return mx.take_along_axis(known, gather.index[:, None, :, None], axis=2)

    def settle(self, new: mx.array, clock: RowClock, keep: Sequence[int]) -> None:
        """Write the first keep[b] columns of each row, or the newest of them that fit."""
        rows, most = new.shape[0], max(keep)
        count = min(most, self.capacity)
        end = max(n + max(k, 1) for n, k in zip(clock.lengths, keep, strict=True))
        buffer = room(self.array, new, rows, min(end, self.capacity), self.capacity)
        if clock.uniform and len(set(keep)) == 1:
            newest = new[:, :, most - count : most]
            start = clock.longest + most - count
            self.array = _write(buffer, slice(0, rows), newest, start, self.capacity)
            return
        # Rows that keep fewer repeat their first column, in the slot where it belongs anyway.
        back = np.array(keep, dtype=np.int32)[:, None] - count + np.arange(count, dtype=np.int32)
        columns = mx.array(np.maximum(back, 0))
        slots = (mx.array(clock.lengths, dtype=mx.int32)[:, None] + columns) % self.capacity
        chosen = mx.take_along_axis(new, columns[:, None, :, None], axis=2)
        self.array = scatter(buffer, chosen, slots)

    def image(self, row: int, start: int, stop: int) -> mx.array:
        assert self.array is not None, "a plane that was never written has no image"
        slots = mx.arange(start, stop, dtype=mx.int32) % self.capacity
        return mx.contiguous(mx.take(self.array[row], slots, axis=1).transpose(1, 0, 2))

    def fill(self, row: int, values: mx.array, stop: int, ring: Ring) -> None:
        """Write [n, heads, dim] as the positions before `stop` of a row."""
        new = values.transpose(1, 0, 2)[None]
        same_kind(self.array, new)
        width = min(max(stop, ring.clock.longest), self.capacity)
        buffer = room(self.array, new, ring.clock.rows, width, self.capacity)
        start = stop - values.shape[0]
        self.array = _write(buffer, slice(row, row + 1), new, start, self.capacity)


def _write(buffer: mx.array, rows: slice, new: mx.array, start: int, capacity: int) -> mx.array:
    """Write [B, heads, T, dim] columns as positions start..start + T - 1, T <= capacity."""
    first = start % capacity
    fits = min(new.shape[2], capacity - first)
    if fits:
        buffer[rows, :, first : first + fits] = new[:, :, :fits]
    if new.shape[2] > fits:
        buffer[rows, :, : new.shape[2] - fits] = new[:, :, fits:]
    return buffer
