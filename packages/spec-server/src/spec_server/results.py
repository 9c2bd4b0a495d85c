"""What an engine gives back: chunks while an answer grows, and the completion at its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from spec_core import TokenLogprob

FinishReason = Literal["stop", "length", "cancelled"]
"""An end token or a stop string; the budget or the context; the caller took the request back."""


@dataclass(frozen=True, slots=True)
class AnswerStatistics:
    """How an answer came about.

    Attributes:
        mode: what drafted: "dspark", "dflash", "eagle3", "lookup", or "baseline" for nothing.
        drafter: the drafter's folder or id; None where there is no model.
        rounds: target forwards after the prefill.
        drafted: guesses that were verified.
        accepted: guesses that were accepted, before the cut at the answer's end.
        mean_accept_length: mean accepted guesses a round plus one, the target's own token.
        round_accepts: accepted guesses of each round, before the cut.
        accept_by_position: for each draft slot, the share accepted of those whose earlier
            slots all were.
        tokens_per_second: decoding speed after the first token (of the whole request, if there
            was only one).
        ttft_seconds: from submission to the first token.
        seconds: from submission to the end.
        queue_seconds: from submission to a row.
        cached_tokens: prompt tokens that the prefix cache restored.
        cache_stopped_at: the first position of the prompt that was never stored.
        cache_stopped: why reuse ended, in a word ("off" without a cache).
        fallbacks: what was asked for and is not done, one sentence each.
        max_draft: how far it drafts: "full", a number, "auto: 7" (the length at the end), or
            "auto: parked" where plain decoding is faster; "0" where nothing drafts.
    """

    mode: str
    drafter: str | None
    rounds: int
    drafted: int
    accepted: int
    mean_accept_length: float
    round_accepts: tuple[int, ...]
    accept_by_position: tuple[float, ...]
    tokens_per_second: float
    ttft_seconds: float
    seconds: float
    queue_seconds: float = 0.0
    cached_tokens: int = 0
    cache_stopped_at: int = 0
    cache_stopped: str = "off"
    fallbacks: tuple[str, ...] = ()
    max_draft: str = "0"


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished answer.

    Attributes:
        text: what is meant for the reader; ends right before a stop string.
        reasoning: the model's thought, without its markers; "" if there was none.
        token_ids: every token of the answer, an end token included; with a stop string, up to
            the token that completed it.
        prompt_tokens: the prompt's length.
        finish_reason: why it ended.
        stop: the stop string that ended it, or None.
        logprobs: one entry a token, where asked for.
        statistics: how it came about.
    """

    text: str
    reasoning: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    finish_reason: FinishReason
    stop: str | None
    logprobs: tuple[TokenLogprob, ...] | None
    statistics: AnswerStatistics

    @property
    def completion_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one round added to an answer. Texts join to the completion's, ids likewise.

    Attributes:
        text: more text for the reader; "" while it is held back.
        reasoning: more of the thought.
        token_ids: the tokens of this chunk.
        logprobs: one entry a token, where asked for.
        completion: the whole answer, in the last chunk only.
    """

    text: str
    reasoning: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    completion: Completion | None = None
