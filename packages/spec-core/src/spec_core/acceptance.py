"""How often guesses are accepted, slot by slot, learnt from live rounds.

A slot counts as tried only if all before it were accepted, so a fully accepted block says nothing
about the slots beyond it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

_MEMORY, _SHORT_MEMORY = 0.96, 0.8
"""What a slot remembers of its past after each new trial: about twenty-five trials, and five."""
_SURPRISE, _TOLERANCE = 2.0, 0.1
"""The short memory is believed where it differs by so many standard deviations, and by so much."""
_FADING = 0.99
"""The same after a round that did not reach the slot."""
_GUESS_TRIALS = 3.0
"""How many trials the first guess weighs in the shared experience..."""
_SHARED_TRIALS = 20.0
"""...and this in a row's own."""
_FIRST_GUESS = 0.7
"""Acceptance of a slot that nobody has tried yet."""


class Share:
    """How often trials pass, recent ones weighing more: a long memory, which is dropped for a
    short one where that says something clearly different."""

    __slots__ = ("_late_passed", "_late_squares", "_late_tried", "passed", "tried")

    def __init__(self) -> None:
        self.tried = self.passed = 0.0
        self._late_tried = self._late_passed = self._late_squares = 0.0

    def observe(self, passed: float) -> None:
        """A trial that passed (1), did not (0), or would have with this probability."""
        self.fade(_MEMORY)
        self.tried += 1.0
        self.passed += passed
        self._late_tried = self._late_tried * _SHORT_MEMORY + 1.0
        self._late_passed = self._late_passed * _SHORT_MEMORY + passed
        self._late_squares = self._late_squares * _SHORT_MEMORY**2 + 1.0
        share, late = self.passed / self.tried, self._late_passed / self._late_tried
        trials = self._late_tried**2 / self._late_squares  # as many of equal weight
        doubt = math.sqrt(share * (1.0 - share) / trials)
        if abs(late - share) > _SURPRISE * doubt + _TOLERANCE:
            self.tried, self.passed = self._late_tried, self._late_passed

    def fade(self, memory: float) -> None:
        """Weigh less, with the same value."""
        self.tried *= memory
        self.passed *= memory


class Acceptance:
    """Acceptance by slot, given that all earlier slots were accepted."""

    def __init__(self) -> None:
        self._slots: list[Share] = []

    def observe(self, drafted: int, accepted: int, next_rate: float | None = None) -> None:
        """What became of a block; `next_rate` is what the first slot behind it was good for, where
        one was drafted and not verified."""
        trials = [float(slot < accepted) for slot in range(min(drafted, accepted + 1))]
        if next_rate is not None and accepted == drafted:
            trials.append(next_rate)
        while len(self._slots) < len(trials):
            self._slots.append(Share())
        for slot, share in enumerate(self._slots):
            if slot < len(trials):
                share.observe(trials[slot])
            else:
                share.fade(_FADING)

    def rates(self, count: int, prior: Sequence[float] | None = None) -> list[float]:
        """Expected acceptance of the first `count` slots; `prior` fills in for missing trials.

        A slot that was never tried is expected to do as the one before it.
        """
        rates: list[float] = []
        for slot in range(count):
            expected, weight = rates[-1] if rates else _FIRST_GUESS, _GUESS_TRIALS
            if prior is not None:
                expected, weight = prior[slot], _SHARED_TRIALS
            tried = passed = 0.0
            if slot < len(self._slots):
                tried, passed = self._slots[slot].tried, self._slots[slot].passed
            rates.append((passed + weight * expected) / (tried + weight))
        return rates


def expected_tokens(rates: Iterable[float]) -> list[float]:
    """Expected tokens of a round for each draft length 0, 1, ..., len(rates)."""
    tokens, reached = [1.0], 1.0
    for rate in rates:
        reached *= rate
        tokens.append(tokens[-1] + reached)
    return tokens
