"""What a caller asks of a row."""

from __future__ import annotations

from dataclasses import dataclass, field

from spec_core.errors import InvalidValueError
from spec_core.sampling import SamplingParams
from spec_core.seams import Constraint


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to decode.

    Attributes:
        prompt: token ids, at least one.
        sampling: how to sample.
        max_tokens: the budget of emitted tokens, at least 1.
        end_tokens: ids that end the row; the end token itself is emitted.
        max_draft: cap on guesses a round for this row; 0 = plain decoding; None = no cap.
        constraint: a grammar, or None.

    Raises:
        InvalidValueError: the prompt is empty or a number is out of range.
    """

    prompt: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int = 256
    end_tokens: frozenset[int] = frozenset()
    max_draft: int | None = None
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        if not self.prompt:
            raise InvalidValueError("prompt", self.prompt, "at least one token id")
        if self.max_tokens < 1:
            raise InvalidValueError("max_tokens", self.max_tokens, "at least 1")
        if self.max_draft is not None and self.max_draft < 0:
            raise InvalidValueError("max_draft", self.max_draft, "at least 0 (0 = plain decoding)")
