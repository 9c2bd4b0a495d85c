"""A compiled grammar on one row: the masks of a block of drafts, and what was committed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

Mask = npt.NDArray[np.bool_]


class Phase(Enum):
    """Where a row stands: thoughts come before what the grammar describes."""

    OPEN = auto()
    """At the beginning: a thought may open, or the grammar begins."""
    THOUGHT = auto()
    """Inside a thought: everything but an end token."""
    AFTER_THOUGHT = auto()
    """The thought has just closed: one token of white space may come first."""
    GRAMMAR = auto()


@dataclass(frozen=True, slots=True)
class Thoughts:
    """The tokens around a thought.

    Attributes:
        start: opens it.
        end: closes it.
        white_space: tokens of white space that may follow it.
    """

    start: int
    end: int
    white_space: frozenset[int]


@dataclass(frozen=True, slots=True)
class _Point:
    """A state of the row: a phase, and a matcher that nobody else advances."""

    phase: Phase
    matcher: LLMatcher


class GrammarConstraint:
    """A `spec_core.Constraint` over an llguidance matcher.

    Looking ahead works on a copy (a few microseconds), so the committed state moves by committed
    tokens only. It never raises: where the matcher gives up (a limit was reached), only an end
    token is allowed, and `failure` says why once that token is committed.

    Args:
        matcher: at the grammar's beginning; this constraint owns it.
        vocab_size: V, the number of columns of the target's logits.
        end_tokens: allowed exactly where the grammar accepts.
        thoughts: tokens around a thought, or None if the answer holds none.
        phase: where the prompt left off.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        vocab_size: int,
        end_tokens: frozenset[int],
        thoughts: Thoughts | None = None,
        phase: Phase = Phase.GRAMMAR,
    ) -> None:
        self._point = _Point(phase, matcher)
        self._vocab_size = vocab_size
        self._end_tokens = end_tokens
        self._ends = np.zeros(vocab_size, dtype=np.bool_)
        self._ends[[t for t in end_tokens if t < vocab_size]] = True
        self._thoughts = thoughts
        self.failure: str | None = None

    @property
    def accepting(self) -> bool:
        """The committed tokens are a complete answer."""
        return self._point.phase is Phase.GRAMMAR and self._point.matcher.is_accepting()

    def masks(self, drafts: Sequence[int]) -> Mask:
        """[len(drafts) + 1, V] allowed tokens; all true behind a draft that is not allowed."""
        allowed = np.ones((len(drafts) + 1, self._vocab_size), dtype=np.bool_)
        point = self._copy(self._point) if drafts else self._point
        for index, draft in enumerate((*drafts, None)):
            allowed[index] = self._mask(point)
            if draft is None or not allowed[index, draft] or draft in self._end_tokens:
                break
            point = self._after(point, draft)
        return allowed

    def advance(self, tokens: Sequence[int]) -> None:
        """Commit emitted tokens."""
        for token in tokens:
            if token in self._end_tokens:
                self._check_end()
                return
            self._point = self._after(self._point, token)

    def _check_end(self) -> None:
        if not self.accepting:
            self.failure = self._point.matcher.get_error() or "the grammar was not complete"

    def _mask(self, point: _Point) -> Mask:
        if point.phase is Phase.THOUGHT:
            return ~self._ends
        allowed = self._grammar_mask(point.matcher)
        if self._thoughts is not None and point.phase is Phase.OPEN:
            allowed[self._thoughts.start] = True
        if self._thoughts is not None and point.phase is Phase.AFTER_THOUGHT:
            allowed[list(self._thoughts.white_space)] = True
        return allowed

    def _grammar_mask(self, matcher: LLMatcher) -> Mask:
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        if matcher.is_error():
            return self._ends.copy()
        mask = np.unpackbits(bits, bitorder="little")[: self._vocab_size].astype(np.bool_)
        return mask if mask.any() else self._ends.copy()

    def _after(self, point: _Point, token: int) -> _Point:
        """The point behind a token; the matcher moves on with it."""
        thoughts = self._thoughts
        if point.phase is Phase.THOUGHT:
            closed = thoughts is not None and token == thoughts.end
            return _Point(Phase.AFTER_THOUGHT if closed else Phase.THOUGHT, point.matcher)
        if thoughts is not None and point.phase is Phase.OPEN and token == thoughts.start:
            return _Point(Phase.THOUGHT, point.matcher)
        white = thoughts is not None and token in thoughts.white_space
        if not (point.phase is Phase.AFTER_THOUGHT and white):
            point.matcher.consume_token(token)
        return _Point(Phase.GRAMMAR, point.matcher)

    @staticmethod
    def _copy(point: _Point) -> _Point:
        return _Point(point.phase, point.matcher.deep_copy())
