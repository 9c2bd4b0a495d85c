"""What a round costs on one machine: measured points, and what lies between them."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from spec_core.errors import InvalidValueError


@dataclass(frozen=True, slots=True)
class RoundCost:
    """One measured point.

    Attributes:
        rows: sequences that shared the round.
        length: guesses a row; 0 = a pipelined plain step.
        depth: committed positions of each row.
        seconds: wall time of the round.

    Raises:
        InvalidValueError: there are no rows, the length or depth is negative, or the time is not
            positive and finite.
    """

    rows: int
    length: int
    depth: int
    seconds: float

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise InvalidValueError("rows of a round", self.rows, "at least 1")
        if self.length < 0:
            raise InvalidValueError("length of a round", self.length, "0 or more")
        if self.depth < 0:
            raise InvalidValueError("depth of a round", self.depth, "0 or more")
        if not 0.0 < self.seconds < math.inf:
            raise InvalidValueError("seconds of a round", self.seconds, "positive and finite")


_DEPTH_STEP = 256


class CostCurves:
    """Seconds of a round by rows, draft length and depth.

    Between measured points the cost is linear, beyond the last one it continues with the last
    slope (never downwards). Curves need not be monotone: a wider block can be cheaper.

    Args:
        points: at least lengths 0 and 1 for one row at one depth. The smallest depth is the
            base; points at other depths (one row) give the slope by depth.
        cut: what a guess costs that is drafted and then cut, before its block is verified: a round
            that asks for 7 and verifies 3 takes four times that more than one that asks for 3.

    Raises:
        InvalidValueError: the points do not suffice, two are of the same round, or `cut` is
            negative or not finite.
    """

    def __init__(self, points: Iterable[RoundCost], cut: float = 0.0) -> None:
        self.points = tuple(points)
        self.cut = cut
        if not 0.0 <= cut < math.inf:
            raise InvalidValueError("cost of a guess that is cut", cut, "0 or more, and finite")
        rounds = [(p.rows, p.length, p.depth) for p in self.points]
        twice = next((one for one in rounds if rounds.count(one) > 1), None)
        if twice is not None:
            raise InvalidValueError("round (rows, length, depth)", twice, "measured once")
        base = min((p.depth for p in self.points), default=0)
        self._base_depth = base
        self._curves: dict[int, list[tuple[float, float]]] = {}
        for p in self.points:
            if p.depth == base:
                self._curves.setdefault(p.rows, []).append((p.length, p.seconds))
        for curve in self._curves.values():
            curve.sort()
        single = [length for length, _ in self._curves.get(1, [])]
        if 0 not in single or len(single) < 2:
            raise InvalidValueError(
                "round costs", sorted(single), "measured for one row at length 0 and one more"
            )
        self._slopes = self._depth_slopes()
        self._lengths: dict[tuple[int, int], tuple[float, ...]] = {}

    @property
    def max_length(self) -> int:
        """The longest draft that was measured for one row."""
        return int(self._curves[1][-1][0])

    def seconds(self, rows: int, length: int, depth: int) -> float:
        """Expected wall time of a round."""
        measured = sorted(self._curves)
        by_rows = [(float(n), _between(self._curves[n], length)) for n in measured]
        flat = _between(by_rows, rows)
        deeper = max(0, depth - self._base_depth) * _between(self._slopes, length)
        return flat + rows * deeper

    def of_lengths(self, rows: int, depth: int) -> tuple[float, ...]:
        """Expected seconds for each length 0..max_length, about so deep: worked out once for every
        few hundred positions."""
        key = (rows, depth // _DEPTH_STEP)
        if key not in self._lengths:
            at = key[1] * _DEPTH_STEP
            every = range(self.max_length + 1)
            self._lengths[key] = tuple(self.seconds(rows, length, at) for length in every)
        return self._lengths[key]

    def _depth_slopes(self) -> list[tuple[float, float]]:
        """(length, seconds a position) of one row, by the deepest point of each length."""
        slopes: dict[float, float] = {}
        for p in sorted(self.points, key=lambda point: point.depth):
            if p.rows == 1 and p.depth != self._base_depth:
                more = max(0.0, p.seconds - _between(self._curves[1], p.length))
                slopes[float(p.length)] = more / (p.depth - self._base_depth)
        return sorted(slopes.items()) or [(0.0, 0.0)]


def _between(curve: Sequence[tuple[float, float]], at: float) -> float:
    """Linear interpolation; the first value before the first point, the last slope after it."""
    index = bisect_left(curve, (at, float("-inf")))
    if index == 0:
        return curve[0][1]
    if index == len(curve):
        if len(curve) == 1:
            return curve[0][1]
        index -= 1
        (x0, y0), (x1, y1) = curve[index - 1], curve[index]
        return y1 + max(0.0, y1 - y0) / (x1 - x0) * (at - x1)
    (x0, y0), (x1, y1) = curve[index - 1], curve[index]
    return y0 + (y1 - y0) * (at - x0) / (x1 - x0)
