"""How many rows of which length fit into memory: asked before a request is admitted."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from spec_core import Drafter, StateImage, Target

_PROBED = 8
_STEP = 256
_SLACK = 1.5
"""Buffers grow by half of what they have."""


@dataclass(frozen=True, slots=True)
class RowCost:
    """What a row takes.

    Attributes:
        per_token: bytes of a position that stays.
        per_recent_token: bytes of a position that only the last `reach` need.
        reach: how many positions of those stay.
        fixed: bytes whatever the length.
    """

    per_token: float = 0.0
    per_recent_token: float = 0.0
    reach: int = 0
    fixed: float = 0.0

    def bytes(self, positions: int) -> float:
        """Of a row with room for so many positions."""
        room = -(-positions // _STEP) * _STEP
        return self.fixed + self.per_token * room + self.per_recent_token * min(room, self.reach)


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """The room for rows, in bytes; None if nothing limits it.

    Rows share rectangular buffers, so each row costs what the longest costs. Buffers grow by half,
    and while one layer's grows, its old copy is there too.
    """

    room: float | None
    cost: RowCost
    layers: int

    def without(self, nbytes: int) -> MemoryBudget:
        """The budget after something else got so many bytes of the room."""
        return self if self.room is None else replace(self, room=max(0.0, self.room - nbytes))

    def need(self, rows: int, longest: int) -> float:
        """Bytes of `rows` rows, the longest of which may reach `longest` positions."""
        return rows * self.cost.bytes(longest) * _SLACK * (1.0 + 1.0 / self.layers)

    def fits(self, rows: int, longest: int) -> bool:
        return self.room is None or self.need(rows, longest) <= self.room

    def share(self, rows: int, longest: int) -> float:
        """How much of the room so many rows take, 0..1."""
        if not self.room or not rows:
            return 0.0
        return min(1.0, self.need(rows, longest) / self.room)

    def longest(self, window: int) -> int:
        """The most positions, up to `window`, that one row can have."""
        if self.fits(1, window):
            return window
        low, high = 0, window
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.fits(1, middle) else (low, middle)
        return low


def measure(target: Target, drafter: Drafter | None, limit: int | None) -> MemoryBudget:
    """Find a row's cost from a few positions of a real one; weights must be evaluated.

    Args:
        target: the target.
        drafter: what drafts for it.
        limit: bytes that the process may use; None: as `default_limit` says.
    """
    state = target.new_state(1)
    tokens = mx.zeros((1, _PROBED), dtype=mx.int32)
    taps = () if drafter is None else drafter.taps
    forward = target.forward(tokens, state, taps=taps, logits="last")
    state.commit([_PROBED])
    mx.eval(*state.pending(), *forward.taps)
    images = [state.image(0)]
    if drafter is not None:
        drafts = drafter.new_state(1)
        drafter.extend(drafts, tokens, forward.taps, [_PROBED])
        images.append(drafts.image(0))
    cost = total([_cost(image) for image in images])
    del state, forward
    limit = default_limit() if limit is None else limit
    room = None if limit is None else max(0.0, limit - mx.get_active_memory())
    return MemoryBudget(room, cost, target.info.num_layers)


def default_limit() -> int | None:
    """Bytes that a process may use here: nine tenths of a GPU's share, four fifths of memory."""
    facts: Mapping[str, object] = mx.device_info()
    recommended = facts.get("max_recommended_working_set_size") or facts.get("memory_size")
    if isinstance(recommended, int) and recommended > 0:
        return recommended * 9 // 10
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * 4 // 5
    except (ValueError, OSError):
        return None


def _cost(image: StateImage) -> RowCost:
    """Of one image of a few positions."""
    held = [p for p in image.per_token.values() if p.array.shape[0]]
    return RowCost(
        per_token=sum(p.array.nbytes / p.array.shape[0] for p in held if p.reach is None),
        per_recent_token=sum(p.array.nbytes / p.array.shape[0] for p in held if p.reach),
        reach=max((p.reach for p in held if p.reach), default=0),
        fixed=sum(array.nbytes for array in image.at_end.values()),
    )


def total(costs: Sequence[RowCost]) -> RowCost:
    """What a row takes in several models together."""
    return RowCost(
        per_token=sum(c.per_token for c in costs),
        per_recent_token=sum(c.per_recent_token for c in costs),
        reach=max(c.reach for c in costs),
        fixed=sum(c.fixed for c in costs),
    )
