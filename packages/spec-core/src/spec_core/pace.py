"""How observed round times compare with the curves: what the machine does, and what a curve has
wrong.

The model: log(observed / expected) of a round of length n is drift + error[n] + noise, with
error[0] = 0. The drift is the whole machine's (another process, a warm processor) and wanders; an
error is the curve's own, the same from round to round and alike for lengths close to each other.
A Kalman filter (R. E. Kalman, "A New Approach to Linear Filtering and Prediction Problems", 1960)
follows both. Which length is best depends on the errors alone.

Matrices are lists: with a handful of lengths that is several times faster than arrays, and this
runs in every round.
"""

from __future__ import annotations

import math

NOISE = 0.12
"""Standard deviations, in the logarithm of time: of one round..."""
_DRIFT, _WANDER = 1.0, 0.03
"""...of the drift at first, and what each round adds..."""
_ERROR, _AGEING = 0.15, 0.004
"""...of an error at first, and what each round adds."""
_ALIKE = 0.85
"""Correlation of the errors of two lengths that follow each other."""
_OUTLIER = 3.0
"""An observation moves the estimate as if it were so many standard deviations off, at most."""
_LARGEST = 3.0
"""The logarithm of the greatest ratio believed."""
_SHARE_OF_DOUBT = 0.5
"""How much less is known of an error than of the drift after what was beyond belief."""


class Pace:
    """Corrections of the curves for lengths 0..longest, by the rounds seen so far."""

    def __init__(self, longest: int) -> None:
        # Number 0 is the drift, the others are the errors of lengths 1..longest.
        every = range(longest + 1)
        self._alike = [[_alike(i, j) for j in every] for i in every]
        self._mean = [0.0 for _ in every]
        self._covariance = [[_ERROR**2 * each for each in row] for row in self._alike]
        self._covariance[0][0] = _DRIFT**2
        self._ageing = [[_AGEING**2 * each for each in row] for row in self._alike]
        self._ageing[0][0] = _WANDER**2

    def observe(self, length: int, ratio: float, *, noise: float = NOISE) -> None:
        """A round of this length took `ratio` times what the curves say, give or take `noise`."""
        seen = (0, length) if length else (0,)  # a plain round shows the drift alone
        both = zip(self._covariance, self._ageing, strict=True)
        covariance = [[a + b for a, b in zip(*rows, strict=True)] for rows in both]
        shared = [sum(row[i] for i in seen) for row in covariance]
        variance = sum(shared[i] for i in seen) + noise**2
        expected = sum(self._mean[i] for i in seen)
        surprise = min(max(math.log(ratio), -_LARGEST), _LARGEST) - expected
        most = _OUTLIER * math.sqrt(variance)
        believed = min(max(surprise, -most), most)
        gain = [each / variance for each in shared]
        self._mean = [m + g * believed for m, g in zip(self._mean, gain, strict=True)]
        self._covariance = [
            [each - g * s for each, s in zip(row, shared, strict=True)]
            for row, g in zip(covariance, gain, strict=True)
        ]
        self._widen(length, abs(surprise - believed))

    @property
    def drift(self) -> float:
        """What plain rounds take lately, as a multiple of what the curves say."""
        return math.exp(self._mean[0])

    def factor(self, length: int) -> float:
        """What a round of this length takes in comparison with a plain one, as a multiple of what
        the curves say of both."""
        return math.exp(self._mean[length]) if length else 1.0

    def doubt(self, length: int) -> float:
        """The standard deviation of the logarithm of `factor`."""
        return math.sqrt(max(0.0, self._covariance[length][length])) if length else 0.0

    def _widen(self, length: int, excess: float) -> None:
        """What lies beyond belief may be the machine's or the curve's: less is known of both."""
        if not excess:
            return
        alike = self._alike[length]  # of the drift: none
        more = (_SHARE_OF_DOUBT * excess) ** 2
        for a, row in zip(alike, self._covariance, strict=True):
            row[:] = [each + more * a * b for each, b in zip(row, alike, strict=True)]
        self._covariance[0][0] += excess**2


def _alike(first: int, second: int) -> float:
    """Correlation of the errors of two lengths; of the drift (0) with anything: none."""
    return _ALIKE ** abs(first - second) if first and second else 0.0
