"""What happened: observed from outcomes, never printed here."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from spec_core.seams import RowOutcome


@dataclass(slots=True)
class Statistics:
    """Counts over the outcomes of one sequence, or of several.

    Attributes:
        rounds: target forwards after the prefill that emitted something for the sequence.
        drafted: guesses that were verified.
        accepted: guesses that were accepted, before the cut at an end token or the budget.
        emitted: tokens emitted, the prompt's own first token included.
        round_accepts: accepted guesses of each round, before the cut.
        by_source: emitted tokens by where they came from: a drafter's name, or "target" for the
            target's own.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    round_accepts: list[int] = field(default_factory=list)
    by_source: Counter[str] = field(default_factory=Counter)
    _reached: list[int] = field(default_factory=list)
    _passed: list[int] = field(default_factory=list)

    def add(self, outcome: RowOutcome) -> None:
        self.emitted += len(outcome.tokens)
        if outcome.prefill:
            self.by_source["target"] += len(outcome.tokens)
            return
        self.rounds += 1
        self.drafted += outcome.drafted
        self.accepted += outcome.accepted
        self.round_accepts.append(outcome.accepted)
        guessed = min(outcome.accepted, len(outcome.tokens))
        if guessed:
            self.by_source[outcome.source] += guessed
        if len(outcome.tokens) > guessed:
            self.by_source["target"] += len(outcome.tokens) - guessed
        self._count_positions(outcome)

    def _count_positions(self, outcome: RowOutcome) -> None:
        while len(self._reached) < outcome.drafted:
            self._reached.append(0)
            self._passed.append(0)
        for slot in range(min(outcome.accepted + 1, outcome.drafted)):
            self._reached[slot] += 1
            self._passed[slot] += slot < outcome.accepted

    @property
    def mean_accept_length(self) -> float:
        """Mean accepted guesses a round plus one, the target's own token; 1.0 with no round."""
        return 1.0 + (self.accepted / self.rounds if self.rounds else 0.0)

    @property
    def accept_by_position(self) -> list[float]:
        """For each draft slot, the share accepted of those whose earlier slots all were."""
        return [
            passed / reached if reached else 0.0
            for passed, reached in zip(self._passed, self._reached, strict=True)
        ]
