"""One request on its way through the engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from spec_cache import Reuse
from spec_core import DraftPolicy, Request, RowOutcome, Statistics, TokenLogprob
from spec_server.errors import GrammarError
from spec_server.grammar import GrammarConstraint
from spec_server.results import AnswerStatistics, Chunk, Completion, FinishReason
from spec_server.text import AnswerText, Segment

Event = Chunk | Exception
"""What a sink is given: chunks, the last one with the completion, or what went wrong."""

Sink = Callable[[Event], None]
"""Called on the engine's thread; must return at once and not raise."""


@dataclass(frozen=True, slots=True)
class Labels:
    """How the engine's answers are drafted, for their statistics.

    Attributes:
        policy: how far it drafts, its text says where it stands; None where nothing drafts.
    """

    mode: str
    drafter: str | None = None
    fallbacks: tuple[str, ...] = ()
    policy: DraftPolicy | None = field(default=None, compare=False)


@dataclass(slots=True)
class Job:
    """A request, its answer so far, and where to send it. Owned by the engine's thread.

    Attributes:
        cache_salt: its tenant's, for the prefix cache.
        loading: done once the prefix that is kept on disk is in memory; None before it was asked
            for.
        cancelled: set by any thread; honoured before the next forward.
    """

    request: Request
    text: AnswerText
    sink: Sink
    labels: Labels
    cache_salt: str = field(default="", repr=False)
    loading: Future[bool] | None = None
    submitted: float = field(default_factory=time.perf_counter)
    cancelled: threading.Event = field(default_factory=threading.Event)
    _queue_seconds: float = 0.0
    _reuse: Reuse = field(default_factory=Reuse)
    _notes: list[str] = field(default_factory=list)
    _statistics: Statistics = field(default_factory=Statistics)
    _content: list[str] = field(default_factory=list)
    _reasoning: list[str] = field(default_factory=list)
    _ids: list[int] = field(default_factory=list)
    _logprobs: list[TokenLogprob] = field(default_factory=list)
    _first_at: float | None = None

    def admitted(self, reuse: Reuse | None) -> None:
        """The request has a row, and perhaps a restored prefix."""
        self._queue_seconds = time.perf_counter() - self.submitted
        self._reuse = reuse or self._reuse

    def deliver(self, outcome: RowOutcome) -> bool:
        """Send what a round did to this request on; true if that was the end of it."""
        if self._first_at is None:
            self._first_at = time.perf_counter()
        self._statistics.add(outcome)
        if self._broke_grammar():
            return True
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

    def end(self, reason: FinishReason, note: str | None = None) -> None:
        """End the answer with what there is of it; a note is added to its fallbacks."""
        if note is not None:
            self._notes.append(note)
        self._end(self.text.finish(complete=False), (), None, reason)

    def fail(self, error: Exception) -> None:
        """End the request with an error."""
        self.sink(error)

    def _broke_grammar(self) -> bool:
        """Fail the request if its grammar gave up, so that what it says does not hold."""
        constraint = self.request.constraint
        if not isinstance(constraint, GrammarConstraint) or constraint.failure is None:
            return False
        self.fail(GrammarError(f"the answer's grammar could not be kept: {constraint.failure}"))
        return True

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
            queue_seconds=self._queue_seconds,
            cached_tokens=self._reuse.length,
            cache_stopped_at=self._reuse.stopped_at,
            cache_stopped=self._reuse.stopped,
            fallbacks=(*self.labels.fallbacks, *self._notes),
            max_draft=_max_draft(self.labels, self.request),
        )


def _max_draft(labels: Labels, request: Request) -> str:
    """The policy's text, and the request's own cap."""
    if labels.policy is None:
        return "0"
    cap = "" if request.max_draft is None else f", at most {request.max_draft}"
    return f"{labels.policy}{cap}"


def _joined(first: Segment, rest: Segment) -> Segment:
    return Segment(
        first.content + rest.content, first.reasoning + rest.reasoning, first.used, rest.stop
    )


def _rate(tokens: int, whole: float, decoding: float) -> float:
    if tokens > 1:
        return (tokens - 1) / max(decoding, 1e-9)
    return tokens / max(whole, 1e-9)
