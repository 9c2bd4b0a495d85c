"""Rows that cannot share a forward: each has a state of its own, run one after the other.

Some model code is wrong for rows of different length (it gives a mask or an offset the wrong
axis). The load-time proof finds that; such a model still serves batches, without their speed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from spec_core.errors import SeamError
from spec_core.seams import Forward, RowState, StateImage
from spec_targets.state import LayeredState

RowForward = Callable[[int, LayeredState, Sequence[int] | None], Forward]
"""(row, its state, its `valid`) -> its forward."""


class SoloRows:
    """A TargetState of one-row states. See spec_core.seams.TargetState.

    Args:
        make: gives a state of one row.
        rows: how many, all of length 0.
    """

    def __init__(self, make: Callable[[], LayeredState], rows: int) -> None:
        self.states = [make() for _ in range(rows)]

    @property
    def rows(self) -> int:
        return len(self.states)

    @property
    def lengths(self) -> Sequence[int]:
        return tuple(state.lengths[0] for state in self.states)

    def run(self, forward: RowForward, valid: Sequence[int] | None) -> Forward:
        """One forward a row, put together; if one raises, none has happened."""
        if valid is not None and len(valid) != self.rows:
            raise SeamError(f"valid is {list(valid)}; it must be {self.rows} values")
        done: list[Forward] = []
        try:
            for row, state in enumerate(self.states):
                done.append(forward(row, state, None if valid is None else [valid[row]]))
        except BaseException:
            for state in self.states[: len(done)]:
                state.commit([0])
            raise
        return _stacked(done)

    def commit(self, keep: Sequence[int]) -> None:
        if len(keep) != self.rows:
            raise SeamError(f"commit({list(keep)}) does not fit {self.rows} rows")
        for state, count in zip(self.states, keep, strict=True):
            state.check([count])
        for state, count in zip(self.states, keep, strict=True):
            state.commit([count])

    def select(self, rows: Sequence[int]) -> None:
        self._settled()
        if len(set(rows)) != len(rows) or any(not 0 <= r < self.rows for r in rows):
            raise SeamError(f"select({list(rows)}) does not name distinct rows of {self.rows}")
        self.states = [self.states[row] for row in rows]

    def join(self, other: RowState) -> None:
        if not isinstance(other, SoloRows):
            raise SeamError(f"{type(other).__name__} cannot join rows of a target without batches")
        self._settled()
        other._settled()
        self.states = self.states + other.states

    def image(self, row: int, start: int = 0) -> StateImage:
        return self.states[row].image(0, start)

    def restore(self, row: int, image: StateImage) -> None:
        self.states[row].restore(0, image)

    def pending(self) -> Sequence[mx.array]:
        return [array for state in self.states for array in state.pending()]

    def _settled(self) -> None:
        for state in self.states:
            state.settled()


def _stacked(rows: Sequence[Forward]) -> Forward:
    logits = [row.logits for row in rows if row.logits is not None]
    taps = zip(*(row.taps for row in rows), strict=True)
    return Forward(
        logits=mx.concatenate(logits) if logits else None,
        taps=tuple(mx.concatenate(list(each)) for each in taps),
    )
