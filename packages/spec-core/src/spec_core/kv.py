"""Key/value storage for rows of different length: left-aligned buffers, one offset a row.

A commit is metadata; nothing is rolled or copied. Slots at or beyond a row's length hold
finite numbers of the past and are never attended to. Every write happens in place as long as
nothing else refers to the buffer, so nobody keeps a view of one over a round.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from spec_core.errors import SeamError

_STEP = 256


class RowClock:
    """The lengths of B rows, shared by all layers of one state.

    Attributes:
        lengths: committed positions of each row.
        provisional: columns of the forward that is not committed yet (0: none).
        valid: how many of those are real, for each row.
    """

    __slots__ = ("lengths", "provisional", "valid")

    def __init__(self, rows: int, start: int = 0) -> None:
        self.lengths = [start] * rows
        self.provisional = 0
        self.valid: list[int] = [0] * rows

    @property
    def rows(self) -> int:
        return len(self.lengths)

    @property
    def uniform(self) -> bool:
        return len(set(self.lengths)) <= 1

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

    def commit(self, keep: Sequence[int]) -> None:
        """Keep the first keep[b] provisional columns of row b. Raises SeamError if out of range."""
        if len(keep) != self.rows or any(
            not 0 <= k <= v for k, v in zip(keep, self.valid, strict=True)
        ):
            raise SeamError(
                f"commit({list(keep)}) does not fit {self.valid} valid provisional columns"
            )
        self.lengths = [n + k for n, k in zip(self.lengths, keep, strict=True)]
        self.provisional, self.valid = 0, [0] * self.rows

    def offset(self) -> int | mx.array:
        """Where the next column goes: one int if all rows agree, else [B] int32."""
        return self.lengths[0] if self.uniform else mx.array(self.lengths, dtype=mx.int32)

    def positions(self, columns: int) -> mx.array:
        """[B, columns] absolute positions of the provisional columns."""
        return mx.array(self.lengths, dtype=mx.int32)[:, None] + mx.arange(columns, dtype=mx.int32)

    def settled(self) -> None:
        """Raise SeamError if a forward is provisional."""
        if self.provisional:
            raise SeamError("rows cannot move while a forward is provisional; commit it first")


class KVRows:
    """Keys and values of B rows in one layer, [B, heads, S, dim] each.

    Args:
        clock: the lengths, shared with the state's other layers.
    """

    __slots__ = ("clock", "keys", "values")

    def __init__(self, clock: RowClock) -> None:
        self.clock = clock
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

    def append(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write [B, heads, T, dim] columns at each row's length; returns both buffers up to the
        longest row's end, [B, heads, max(lengths) + T, dim]. Lengths stay; see RowClock."""
        columns = keys.shape[2]
        end = max(self.clock.lengths) + columns
        self.keys = _write(_room(self.keys, keys, self.clock.rows, end), keys, self.clock)
        self.values = _write(_room(self.values, values, self.clock.rows, end), values, self.clock)
        rows = self.clock.rows
        return self.keys[:rows, :, :end], self.values[:rows, :, :end]


def _room(buffer: mx.array | None, new: mx.array, rows: int, end: int) -> mx.array:
    """The buffer, grown geometrically where rows or positions do not fit."""
    if buffer is not None and buffer.shape[0] >= rows and buffer.shape[2] >= end:
        return buffer
    have_rows, have = (0, 0) if buffer is None else (buffer.shape[0], buffer.shape[2])
    capacity = have if have >= end else max(-(-end // _STEP) * _STEP, have + have // 2)
    shape = (max(rows, have_rows), new.shape[1], capacity, new.shape[3])
    grown = mx.zeros(shape, dtype=new.dtype)
    if buffer is not None:
        grown[:have_rows, :, :have] = buffer
    return grown


def _write(buffer: mx.array, new: mx.array, clock: RowClock) -> mx.array:
    rows, _, columns, _ = new.shape
    if clock.uniform:
        at = clock.lengths[0]
        buffer[:rows, :, at : at + columns] = new
        return buffer
    for row, at in enumerate(clock.lengths):
        buffer[row : row + 1, :, at : at + columns] = new[row : row + 1]
    return buffer


def causal_mask(clock: RowClock, columns: int, end: int) -> mx.array | str | None:
    """Who sees whom: column t of row b sees positions 0..lengths[b]+t.

    Returns None (a single column, all rows alike), "causal" (all rows alike) or a boolean
    [B, 1, columns, end] mask.
    """
    if clock.uniform:
        return None if columns == 1 else "causal"
    seen = clock.positions(columns)[:, None, :, None]
    return mx.arange(end, dtype=mx.int32) <= seen
