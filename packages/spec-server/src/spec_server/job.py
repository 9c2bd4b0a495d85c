"""One request on its way through the engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from spec_core import Request, RowOutcome, Statistics, TokenLogprob
from spec_server.results import AnswerStatistics, Chunk, Completion, FinishReason
from spec_server.text import AnswerText, Segment

Event = Chunk | Exception
"""What a sink is given: chunks, the last one with the completion, or what went wrong."""

Sink = Callable[[Event], None]
"""Called on the engine's thread; must return at once and not raise."""


@dataclass(frozen=True, slots=True)
class Labels:
    """How the engine's answers are drafted, for their statistics."""

    mode: str
    drafter: str | None = None
    fallbacks: tuple[str, ...] = ()


@dataclass(slots=True)
class Job:
    """A request, its answer so far, and where to send it. Owned by the engine's thread.

    Attributes:
        cancelled: set by any thread; honoured before the next forward.
    """

    request: Request
    text: AnswerText
    sink: Sink
    labels: Labels
    submitted: float = field(default_factory=time.perf_counter)
    cancelled: threading.Event = field(default_factory=threading.Event)
    _statistics: Statistics = field(default_factory=Statistics)
    _content: list[str] = field(default_factory=list)
    _reasoning: list[str] = field(default_factory=list)
    _ids: list[int] = field(default_factory=list)
    _logprobs: list[TokenLogprob] = field(default_factory=list)
    _first_at: float | None = None

    def deliver(self, outcome: RowOutcome) -> bool:
        """Send what a round did to this request on; true if that was the end of it."""
        if self._first_at is None:
            self._first_at = time.perf_counter()
        self._statistics.add(outcome)
        shown = outcome.tokens
        if outcome.finish == "stop" and shown[-1] in self.request.end_tokens:
            shown = shown[:-1]
        segment = self.text.feed(shown)
        count = len(outcome.tokens) if segment.stop is None else segment.used
        logprobs = None if outcome.logprobs is None else outcome.logprobs[:count]
        if segment.stop is not None:
            return self._end(segment, outcome.tokens[:count], logprobs, "stop")
        if outcome.finish is not None:
            rest = self.text.finish(complete=outcome.finish == "stop")
            reason: FinishReason = "stop" if rest.stop is not None else outcome.finish
            return self._end(_joined(segment, rest), outcome.tokens, logprobs, reason)
        self._send(segment, outcome.tokens, logprobs)
        return False

    def cancel(self) -> None:
        """End the answer with what there is of it."""
        self._end(self.text.finish(complete=False), (), None, "cancelled")

    def fail(self, error: Exception) -> None:
        """End the request with an error."""
        self.sink(error)

    def _end(
        self,
        segment: Segment,
        tokens: Sequence[int],
        logprobs: Sequence[TokenLogprob] | None,
        reason: FinishReason,
    ) -> bool:
        self._send(segment, tokens, logprobs, reason)
        return True

    def _send(
        self,
        segment: Segment,
        tokens: Sequence[int],
        logprobs: Sequence[TokenLogprob] | None,
        reason: FinishReason | None = None,
    ) -> None:
        self._content.append(segment.content)
        self._reasoning.append(segment.reasoning)
        self._ids.extend(tokens)
        self._logprobs.extend(logprobs or ())
        chunk = Chunk(
            text=segment.content,
            reasoning=segment.reasoning,
            token_ids=tuple(tokens),
            logprobs=None if logprobs is None else tuple(logprobs),
            completion=None if reason is None else self._completion(reason, segment.stop),
        )
        self.sink(chunk)

    def _completion(self, reason: FinishReason, stop: str | None) -> Completion:
        asked = self.request.sampling.logprobs is not None
        return Completion(
            text="".join(self._content),
            reasoning="".join(self._reasoning),
            token_ids=tuple(self._ids),
            prompt_tokens=len(self.request.prompt),
            finish_reason=reason,
            stop=stop,
            logprobs=tuple(self._logprobs) if asked else None,
            statistics=self._summary(),
        )

    def _summary(self) -> AnswerStatistics:
        now, seen = time.perf_counter(), self._statistics
        first = now if self._first_at is None else self._first_at
        return AnswerStatistics(
            mode=self.labels.mode,
            drafter=self.labels.drafter,
            rounds=seen.rounds,
            drafted=seen.drafted,
            accepted=seen.accepted,
            mean_accept_length=seen.mean_accept_length,
            round_accepts=tuple(seen.round_accepts),
            accept_by_position=tuple(seen.accept_by_position),
            tokens_per_second=_rate(len(self._ids), now - self.submitted, now - first),
            ttft_seconds=first - self.submitted,
            seconds=now - self.submitted,
            fallbacks=self.labels.fallbacks,
        )


def _joined(first: Segment, rest: Segment) -> Segment:
    return Segment(
        first.content + rest.content, first.reasoning + rest.reasoning, first.used, rest.stop
    )


def _rate(tokens: int, whole: float, decoding: float) -> float:
    if tokens > 1:
        return (tokens - 1) / max(decoding, 1e-9)
    return tokens / max(whole, 1e-9)
