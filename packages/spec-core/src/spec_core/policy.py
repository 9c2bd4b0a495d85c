"""How far to draft: the fixed length, and the cut by confidence.

(Which drafter guesses is not a policy: `spec_drafters.Combined` lets a lookup hit replace the
drafter, row by row.)
"""

from __future__ import annotations

from collections.abc import Sequence

from spec_core.errors import InvalidValueError
from spec_core.seams import RowOutcome, RowStatus

WHOLE_BLOCK = 2**31 - 1
"""More than any drafter proposes: the round caps it at the drafter's own block."""


class FixedLength:
    """Always ask for `length` guesses (None: the drafter's whole block).

    Raises:
        InvalidValueError: `length` is negative.
    """

    needs_confidence = False

    def __init__(self, length: int | None = None) -> None:
        if length is not None and length < 0:
            raise InvalidValueError("max_draft", length, "at least 0 (0 = plain decoding)")
        self._length = WHOLE_BLOCK if length is None else length

    def __str__(self) -> str:
        return "full" if self._length == WHOLE_BLOCK else str(self._length)

    def lengths(self, rows: Sequence[RowStatus]) -> Sequence[int]:
        return [self._length] * len(rows)

    def truncate(
        self,
        rows: Sequence[RowStatus],
        lengths: Sequence[int],
        confidence: Sequence[Sequence[float]],
    ) -> Sequence[int]:
        return lengths

    def observe(self, outcomes: Sequence[RowOutcome], seconds: float | None) -> None:
        """A fixed length learns nothing."""


class ConfidenceThreshold(FixedLength):
    """Cut a proposal before the first slot whose confidence is below `threshold`.

    A slot's confidence depends only on what stands before it, so the cut is lossless. Costs one
    short read a round.

    Raises:
        InvalidValueError: `threshold` is not in (0, 1].
    """

    needs_confidence = True

    def __init__(self, threshold: float, length: int | None = None) -> None:
        super().__init__(length)
        if not 0.0 < threshold <= 1.0:
            raise InvalidValueError("confidence_threshold", threshold, "more than 0 and at most 1")
        self._threshold = threshold

    def __str__(self) -> str:
        return f"{super().__str__()}, confidence {self._threshold:g}"

    def truncate(
        self,
        rows: Sequence[RowStatus],
        lengths: Sequence[int],
        confidence: Sequence[Sequence[float]],
    ) -> Sequence[int]:
        return [self._cut(n, scores) for n, scores in zip(lengths, confidence, strict=True)]

    def _cut(self, length: int, scores: Sequence[float]) -> int:
        low = (slot for slot in range(length) if scores[slot] < self._threshold)
        return next(low, length)
