"""Draft length from measured curves: each round takes the length with the most expected tokens a
second, and length 0 (parking) where plain decoding wins.

Expected tokens of a round with L guesses are 1 + sum over k <= L of the product of the first k
slots' acceptance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from spec_core.acceptance import Acceptance, expected_tokens
from spec_core.curves import CostCurves
from spec_core.errors import InvalidValueError
from spec_core.pace import NOISE, Pace
from spec_core.probes import Probes
from spec_core.scores import Scores
from spec_core.seams import RowOutcome, RowStatus

_UNCUT_EVERY = 32
"""Every so many rounds a block is verified whole, so that what was cut can prove better."""
_STEEP = 1.5
"""The longest round costs so much more than the shortest, or scores are not looked at: the host
would wait for the draft before it builds the verify."""
_WORTH = 1.03
"""A change has to promise this much..."""
_WORTH_PARKING = 1.06
"""...parking more, since a parked row learns slowly."""
_GIVE_UP = 3.25
"""Plain rounds that drafting has to have lost before it is parked: a few failures in a row, where a
text begins, say little."""
_FIRST_DWELL = 2
"""Rounds before the first change. Later ones wait half as long as the policy is old, up to the
dwell time."""
_SURE, _CHECK_EVERY, _CHECK_ROUNDS = 2.0, 12, 3
"""Where drafting is not better than plain decoding by so many standard deviations of what is known
of its time, plain rounds are looked at: after so many rounds of drafting, so many."""
_MOST_ROWS = 256
"""Rows remembered, beyond those that are there."""
_PROMISING = 0.99
"""Tries are not made more rarely while drafting promises so much of the speed of plain decoding."""
_COMPARE_EVERY = 32
"""Plain rounds of a parked policy of which one is compared with the curves: whatever a policy does
costs the host time in every round."""
_FIRST_NOISE = 0.2
"""Standard deviation, in the logarithm, of the time of the first round that drafts."""
_ALONE = (RowStatus(key=-1, length=0, remaining=1),)
"""A row without a text or company, before there is any."""


class AdaptiveLength:
    """A DraftPolicy that takes the length with the most expected tokens a second.

    Args:
        curves: what rounds cost on this machine, for this target and drafter.
        longest: cap on the length; None = the longest that was measured.
        scores: cut blocks where the drafter's confidence says so and fewer columns cost less.
        dwell: the fewest rounds between two changes of length.
        probe_share: the share of time that probing may cost while parked.

    Raises:
        InvalidValueError: `longest` or `dwell` is below 1, or `probe_share` is not in (0, 1].

    All rows of a round get the same length, since a round costs what its widest row costs; the
    choice weighs every row's own acceptance, and the number of rows.
    """

    def __init__(
        self,
        curves: CostCurves,
        longest: int | None = None,
        *,
        scores: bool = True,
        dwell: int = 16,
        probe_share: float = 0.005,
    ) -> None:
        if longest is not None and longest < 1:
            raise InvalidValueError("longest", longest, "at least 1, or None")
        if dwell < 1:
            raise InvalidValueError("dwell", dwell, "at least 1")
        if not 0.0 < probe_share <= 1.0:
            raise InvalidValueError("probe_share", probe_share, "above 0 and at most 1")
        self._curves = curves
        self._longest = curves.max_length if longest is None else min(longest, curves.max_length)
        self._dwell = dwell
        self._probe_share = probe_share
        self._shared = Acceptance()
        self._rows: dict[int, Acceptance] = {}
        self._statuses: Sequence[RowStatus] = ()
        self._pace = Pace(self._longest)
        self._checks = self._unchecked = 0
        self._check_every = _CHECK_EVERY
        self._drafted = 0
        self._plain_ratio: float | None = None
        self._scores = Scores()
        self._cuts = scores and self._longest > 1 and self._columns_cost()
        self._length = self._opening()
        self._since_change = self._rounds = 0
        self._probes = Probes()
        self._skipping = False
        self._promising = False
        self._lost = 0.0
        self._asked = 0
        self._cut: dict[int, tuple[Sequence[float], int]] = {}

    @property
    def needs_confidence(self) -> bool:
        return self._cuts

    def __str__(self) -> str:
        return "auto: parked" if self.parked else f"auto: {self._length}"

    @property
    def length(self) -> int:
        """The current length; 0 while parked."""
        return self._length

    @property
    def parked(self) -> bool:
        return self._length == 0

    def lengths(self, rows: Sequence[RowStatus]) -> Sequence[int]:
        self._statuses, self._asked = rows, 0
        length = 0 if self._checks else self._length
        if self._probe_due(rows):
            # What is known speaks for plain decoding, or for lengths that teach little.
            length = self._fair_length(rows)
        return [length] * len(rows)

    def truncate(
        self,
        rows: Sequence[RowStatus],
        lengths: Sequence[int],
        confidence: Sequence[Sequence[float]],
    ) -> Sequence[int]:
        """Cut where so many columns are not worth their time, given these scores; all rows alike,
        since a round costs what its widest row costs."""
        if not any(lengths):
            return lengths
        self._asked = max(lengths)
        known = zip(rows, lengths, confidence, strict=True)
        self._cut = {row.key: (scores, length) for row, length, scores in known if length}
        if self.parked or self._rounds % _UNCUT_EVERY == 0:
            return lengths
        width = self._best_width(rows, lengths, confidence)
        return [min(length, width) for length in lengths]

    def _best_width(
        self,
        rows: Sequence[RowStatus],
        lengths: Sequence[int],
        confidence: Sequence[Sequence[float]],
    ) -> int:
        total = [0.0] * (max(lengths) + 1)
        shared = self._shared.rates(self._longest)
        for row, length, scores in zip(rows, lengths, confidence, strict=True):
            rates = self._scores.rates(scores[:length], self._rates_of(row, shared))
            tokens = expected_tokens(rates)
            for width in range(len(total)):
                total[width] += tokens[min(width, length)]
        taken = [self._time(rows, width) + self._cut_time(width) for width in range(len(total))]
        speeds = [tokens / seconds for tokens, seconds in zip(total, taken, strict=True)]
        return max(range(1, len(speeds)), key=speeds.__getitem__)

    def _columns_cost(self) -> bool:
        """Whether a shorter verify saves enough for a look at the scores before it."""
        return self._seconds(_ALONE, self._longest) > _STEEP * self._seconds(_ALONE, 1)

    def observe(self, outcomes: Sequence[RowOutcome], seconds: float | None) -> None:
        if not outcomes:
            return
        rows, drafted = self._statuses, max(outcome.drafted for outcome in outcomes)
        self._meet(rows, bool(drafted))
        for outcome in outcomes:
            if outcome.drafted:
                rate = self._learn_scores(outcome)
                row = self._rows.setdefault(outcome.key, Acceptance())
                row.observe(outcome.drafted, outcome.accepted, rate)
                self._shared.observe(outcome.drafted, outcome.accepted, rate)
        if drafted and not self.parked:
            emitted = sum(outcome.accepted + 1 for outcome in outcomes)
            lost = self._plain_rounds(rows, drafted) - emitted / len(outcomes)
            self._lost = max(0.0, self._lost + lost)
            if self._asked:
                self._scores.gave(emitted, self._time(rows, drafted) + self._cut_time(drafted))
        self._since_change += 1
        self._rounds += 1
        self._forget_absent(rows)
        if self.parked:
            self._probe_ended(outcomes, drafted)
        if len(rows) == len(outcomes):
            self._time_round(rows, drafted, seconds)
        for outcome in outcomes:
            if outcome.finish is not None:
                self._rows.pop(outcome.key, None)
        if drafted and (not self.parked or self._probes.convincing):
            self._reconsider(rows)

    def _meet(self, rows: Sequence[RowStatus], drafted: bool) -> None:
        """Rows are met once: by the try that their first round is, or by passing it over, as the
        one after a try in vain is."""
        new = [row for row in rows if self._unknown(row)]
        if not self.parked or self._promising:
            self._skipping = False
        elif new:
            self._skipping = drafted
        elif not self._skipping:
            return
        for row in new:
            self._rows[row.key] = Acceptance()

    def _time_round(self, rows: Sequence[RowStatus], drafted: int, seconds: float | None) -> None:
        """Correct the curves; while drafting, now and then by plain rounds.

        Plain rounds are compared only among their like: the first one fills the pipeline, the last
        was computed while the one before it was waited for. The first that drafts makes up for what
        a parked drafter was spared: it counts for less. While parked, one round in many is
        compared.
        """
        alike = bool(drafted) == bool(self._drafted)
        held, self._plain_ratio = self._plain_ratio, None
        if held is not None and not drafted:
            self._pace.observe(0, held)
        if seconds is not None:
            ratio = seconds / (self._seconds(rows, drafted) + self._cut_time(drafted))
            if drafted:
                self._pace.observe(drafted, ratio, noise=NOISE if alike else _FIRST_NOISE)
            elif alike and (not self.parked or self._rounds % _COMPARE_EVERY == 0):
                self._plain_ratio = ratio
        self._drafted = drafted
        if not drafted:
            self._checks, self._unchecked = max(0, self._checks - 1), 0
        else:
            self._unchecked += 1

    def _learn_scores(self, outcome: RowOutcome) -> float | None:
        """What a row's scores were worth; the rate of the first slot that was cut, if one was."""
        scores, asked = self._cut.pop(outcome.key, ((), 0))
        if not scores:
            return None
        self._scores.observe(scores, outcome.drafted, outcome.accepted)
        if asked <= outcome.drafted:
            return None
        prior = self._shared.rates(outcome.drafted + 1)[-1]
        return self._scores.rate(outcome.drafted, scores[outcome.drafted], prior)

    def _forget_absent(self, rows: Sequence[RowStatus]) -> None:
        """Let go of rows that left without an end, once there are many."""
        if len(self._rows) > _MOST_ROWS and len(self._rows) > 2 * len(rows):
            present = {row.key for row in rows}
            self._rows = {key: known for key, known in self._rows.items() if key in present}

    # ------------------------------------------------------------------ the choice

    def _opening(self) -> int:
        """Before any experience; the longest where scores cut it."""
        return self._longest if self._cuts else self._fair_length(_ALONE)

    def _fair_length(self, rows: Sequence[RowStatus]) -> int:
        """The best drafting length for text of which nothing is known."""
        tokens = expected_tokens(Acceptance().rates(self._longest))
        times = [self._time(rows, length) for length in range(self._longest + 1)]
        return max(range(1, len(times)), key=lambda length: tokens[length] / times[length])

    def _reconsider(self, rows: Sequence[RowStatus]) -> None:
        speeds = self._speeds(rows)
        if self._cuts and self._scores.speed is not None:
            speeds[-1] = max(speeds[-1], self._scores.speed)
        shortest = 0 if self.parked or self._lost >= _GIVE_UP else 1
        best = max(range(shortest, len(speeds)), key=speeds.__getitem__)
        gain = speeds[best] / speeds[self._length]
        self._check(math.log(speeds[self._length] / speeds[0]))
        patience = min(max(_FIRST_DWELL, self._rounds // 2), self._dwell)
        worth = _WORTH if best else _WORTH_PARKING
        if best != self._length and gain > worth and self._since_change >= patience:
            self._length = best
            self._since_change, self._lost = 0, 0.0
            self._check_every = _CHECK_EVERY
            self._probes = Probes()

    def _check(self, margin: float) -> None:
        """Ask for plain rounds where drafting is not clearly better; ever more rarely."""
        due = self._length > 0 and self._unchecked >= self._check_every
        if due and margin < _SURE * self._pace.doubt(self._length):
            self._checks = _CHECK_ROUNDS
            self._check_every *= 2

    def _speeds(self, rows: Sequence[RowStatus]) -> list[float]:
        """Expected tokens a second of all rows together, for each length."""
        total = [0.0] * (self._longest + 1)
        shared = self._shared.rates(self._longest)
        for row in rows:
            tokens = expected_tokens(self._rates_of(row, shared))
            cap = self._longest if row.max_draft is None else row.max_draft
            for length in range(self._longest + 1):
                total[length] += tokens[min(length, cap)]
        return [emitted / self._time(rows, length) for length, emitted in enumerate(total)]

    def _rates_of(self, row: RowStatus, shared: list[float]) -> list[float]:
        """A row's own acceptance by slot, and what all rows have seen where it has not."""
        known = self._rows.get(row.key)
        return shared if known is None else known.rates(self._longest, shared)

    def _time(self, rows: Sequence[RowStatus], length: int) -> float:
        """Seconds of a round, by the curves and by what was seen."""
        return self._seconds(rows, length) * self._pace.factor(length)

    def _cut_time(self, width: int) -> float:
        """Seconds of drafting what is cut, beyond so many guesses, of the block at hand."""
        return self._curves.cut * max(0, self._asked - width) if width else 0.0

    def _seconds(self, rows: Sequence[RowStatus], length: int) -> float:
        depth = sum(row.length for row in rows) // max(1, len(rows))
        return self._curves.of_lengths(max(1, len(rows)), depth)[length]

    # ------------------------------------------------------------------ probing while parked

    def _probe_due(self, rows: Sequence[RowStatus]) -> bool:
        if not self.parked or not rows:
            return False
        if not self._skipping and any(self._unknown(row) for row in rows):
            return True
        if not self._probes.possible:
            return False
        extra = self._plain_rounds(rows, self._fair_length(rows)) - 1.0
        return self._probes.due(extra / self._probe_share)

    def _unknown(self, row: RowStatus) -> bool:
        """A row that could draft and was in no round that did."""
        return row.key not in self._rows and row.remaining > 1 and row.max_draft != 0

    def _probe_ended(self, outcomes: Sequence[RowOutcome], drafted: int) -> None:
        if not drafted:
            self._probes.rest()
            return
        emitted = sum(outcome.accepted + 1 for outcome in outcomes) / len(outcomes)
        speeds = self._speeds(self._statuses)
        self._promising = max(speeds[1:]) > _PROMISING * speeds[0]
        cost = self._plain_rounds(self._statuses, drafted)
        self._probes.observe(emitted, cost, self._promising)

    def _plain_rounds(self, rows: Sequence[RowStatus], length: int) -> float:
        """What a round costs, in plain rounds."""
        return self._time(rows, length) / self._time(rows, 0)
