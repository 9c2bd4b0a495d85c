"""How far to copy where the text repeats itself, from measured curves.

A longer match is better evidence, so acceptance is learnt by match length: one rate for each
doubling, the same for all slots of a copy. Each copy takes the length with the most expected
tokens a second, or none where plain decoding wins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from spec_core.curves import CostCurves
from spec_core.policy import FixedLength
from spec_core.seams import DraftPolicy, RowOutcome, RowStatus

_WHOLE_COPIES = 0.35
"""The share of copies that is accepted whole, at any match length, before any experience."""
_PRIOR_TRIALS = 6.0
_MEMORY = 0.98
"""What a rate remembers of its past after each slot."""
_STEP = 0.1
"""How far (in the logarithm) a round moves the corrections of the curves: for all rounds alike
(learnt from plain ones), and for copies alone."""
_PROBE_EVERY, _PROBE_AT_LEAST = 8, 128
"""Refused copies between two trials: from .. to, by what a trial costs."""


@dataclass(slots=True)
class _Rate:
    """Acceptance of one slot of the copies in one class of match lengths."""

    prior: float
    tried: float = 0.0
    passed: float = 0.0
    refused: int = 0

    @property
    def value(self) -> float:
        return (self.passed + _PRIOR_TRIALS * self.prior) / (self.tried + _PRIOR_TRIALS)

    def observe(self, drafted: int, accepted: int) -> None:
        for slot in range(min(drafted, accepted + 1)):
            self.tried = self.tried * _MEMORY + 1.0
            self.passed = self.passed * _MEMORY + (slot < accepted)


class CopyLength:
    """Chooses how far to copy, match by match.

    Args:
        curves: what rounds cost whose guesses cost nothing.
        probe_share: the share of time that trials may cost where copies do not pay.
    """

    def __init__(self, curves: CostCurves, *, probe_share: float = 0.01) -> None:
        self._curves = curves
        self._probe_share = probe_share
        self._rates: dict[int, _Rate] = {}
        self._drift = self._own = 0.0

    def choose(self, row: RowStatus, rows: int) -> int:
        """Tokens to copy in a row with a match, among `rows` that share the round."""
        cap = row.copies if row.max_draft is None else min(row.copies, row.max_draft)
        longest = min(cap, row.remaining - 1, self._curves.max_length)
        if longest < 1:
            return 0
        costs = self._curves.of_lengths(rows, row.length)
        rate = self._rate(row.copies)
        slower = math.exp(self._own)
        best, best_speed, tokens, reached = 0, 0.0, float(rows), 1.0
        for length in range(1, longest + 1):
            reached *= rate.value
            tokens += reached
            speed = tokens / (costs[length] * slower)
            if speed > best_speed:
                best, best_speed = length, speed
        if best_speed > rows / costs[0]:
            return best
        extra = (costs[best] * slower - costs[0]) / costs[0]
        interval = min(max(_PROBE_EVERY, extra / self._probe_share), _PROBE_AT_LEAST)
        return best if rate.refused >= interval else 0

    def learn(self, match: int, drafted: int, accepted: int) -> None:
        """What became of a match: so many tokens of it were verified (0: refused) and accepted."""
        rate = self._rate(match)
        rate.refused = 0 if drafted else rate.refused + 1
        rate.observe(drafted, accepted)

    def time(self, rows: int, depth: int, drafted: int, seconds: float) -> None:
        """How long a round took that drafted nothing but copies, or nothing: corrects the curves.

        A machine that is slower for a while is slower at plain rounds too; only what copies take
        in comparison counts.
        """
        expected = self._curves.of_lengths(rows, depth)[min(drafted, self._curves.max_length)]
        ratio = math.log(min(max(seconds / expected, 0.2), 5.0))
        if drafted:
            self._own += _STEP * (ratio - self._drift - self._own)
        else:
            self._drift += _STEP * (ratio - self._drift)

    def _rate(self, match: int) -> _Rate:
        level = match.bit_length()
        if level not in self._rates:
            self._rates[level] = _Rate(_WHOLE_COPIES ** (1.0 / (1.5 * 2 ** (level - 1))))
        return self._rates[level]


class WithCopies:
    """A DraftPolicy for a Copier: matches by their own rule, everything else by another policy.

    Args:
        copies: how far to copy.
        drafts: how far to draft in rows without a match, and to cut a match that does not pay;
            None where there is nothing but copies.
    """

    def __init__(self, copies: CopyLength, drafts: DraftPolicy | None = None) -> None:
        self._copies = copies
        self._drafts: DraftPolicy = drafts or FixedLength(0)
        self._name = "auto" if drafts is None else ""
        self._rows: Sequence[RowStatus] = ()

    def __str__(self) -> str:
        return self._name or str(self._drafts)

    @property
    def needs_confidence(self) -> bool:
        return self._drafts.needs_confidence

    def lengths(self, rows: Sequence[RowStatus]) -> Sequence[int]:
        self._rows = rows
        drafts = self._drafts.lengths(rows)
        return [
            (self._copies.choose(row, len(rows)) or length) if row.copies else length
            for row, length in zip(rows, drafts, strict=True)
        ]

    def truncate(
        self,
        rows: Sequence[RowStatus],
        lengths: Sequence[int],
        confidence: Sequence[Sequence[float]],
    ) -> Sequence[int]:
        """Cut what was drafted; a copy has no scores, and may be longer than any draft."""
        drafted = [index for index, row in enumerate(rows) if not row.copies]
        if not drafted:
            return lengths
        shorter = self._drafts.truncate(
            [rows[index] for index in drafted],
            [lengths[index] for index in drafted],
            [confidence[index] for index in drafted],
        )
        cut = dict(zip(drafted, shorter, strict=True))
        return [cut.get(index, length) for index, length in enumerate(lengths)]

    def observe(self, outcomes: Sequence[RowOutcome], seconds: float | None) -> None:
        matches = {row.key: row.copies for row in self._rows if row.copies}
        others: list[RowOutcome] = []
        for outcome in outcomes:
            match = matches.get(outcome.key, 0)
            if match:
                self._copies.learn(match, outcome.drafted, outcome.accepted)
            if not (match and outcome.drafted):
                others.append(outcome)
        drafted = max((outcome.drafted for outcome in outcomes), default=0)
        copied_or_plain = not any(outcome.drafted for outcome in others)
        if seconds is not None and outcomes and copied_or_plain:
            depth = sum(row.length for row in self._rows) // max(1, len(self._rows))
            self._copies.time(len(outcomes), depth, drafted, seconds)
        self._drafts.observe(others, seconds)
