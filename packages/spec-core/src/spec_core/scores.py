"""What a drafter's confidence is worth."""

from __future__ import annotations

from collections.abc import Sequence

from spec_core.acceptance import Share

_SCORE_TRIALS = 5.0
"""How many trials the rate with any score weighs."""
_LATELY = 0.95
"""What the speed of blocks remembers of its past after each."""


class Scores:
    """What a drafter's confidence is worth, by slot: the acceptance seen at such scores.

    A slot's score and its acceptance both presume that all slots before it were accepted. Only
    the order of scores is believed, and that once there is experience with such scores.

    Attributes:
        speed: tokens a second that blocks cut by scores have given lately; None before the first
            one. What they promise would flatter them: each cut is the best of several estimates.
    """

    def __init__(self) -> None:
        self._shares: dict[tuple[int, int], Share] = {}
        self._tokens = self._seconds = 0.0

    @property
    def speed(self) -> float | None:
        return self._tokens / self._seconds if self._seconds else None

    def gave(self, tokens: float, seconds: float) -> None:
        """What a block gave after its cut, and the time that such a round takes."""
        self._tokens = _LATELY * self._tokens + tokens
        self._seconds = _LATELY * self._seconds + seconds

    def rate(self, slot: int, score: float, prior: float) -> float:
        """Expected acceptance of a slot with this score; `prior` is that with any score."""
        share = self._shares.get(_score_class(slot, score))
        tried, passed = (0.0, 0.0) if share is None else (share.tried, share.passed)
        return (passed + _SCORE_TRIALS * prior) / (tried + _SCORE_TRIALS)

    def rates(self, scores: Sequence[float], priors: Sequence[float]) -> list[float]:
        """Expected acceptance of a block's slots; priors may be more."""
        known = zip(scores, priors, strict=False)
        return [self.rate(slot, score, prior) for slot, (score, prior) in enumerate(known)]

    def observe(self, scores: Sequence[float], drafted: int, accepted: int) -> None:
        for slot in range(min(drafted, accepted + 1)):
            key = _score_class(slot, scores[slot])
            self._shares.setdefault(key, Share()).observe(float(slot < accepted))


def _score_class(slot: int, score: float) -> tuple[int, int]:
    """Slots one by one, then in pairs and fours; scores in fifths."""
    return min(slot, 2) if slot < 4 else slot.bit_length(), min(int(5.0 * score), 4)
