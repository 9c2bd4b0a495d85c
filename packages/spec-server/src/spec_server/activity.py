"""What the engine is doing and has done, readable from any thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from spec_core import RowOutcome


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Counters since the engine was loaded, and gauges of this moment.

    Attributes:
        running: requests that are prefilled or decoded.
        waiting: requests that wait for a row.
        progress_seconds: since the engine's thread last finished a step, or was idle.
        drafts: rounds in which a request's guesses were verified, one count a request.
        draft_tokens: guesses that were verified.
        accepted_tokens: guesses that were accepted, before the cut at an answer's end.
        accepted_by_position: the same, by draft slot.
        prompt_tokens: of requests whose prompt is done, reused ones included.
        generation_tokens: emitted tokens.
        cache_queries: prompts that were looked up in the prefix cache.
        cache_hits: of those, prompts that reused something.
        cache_query_tokens: tokens of the prompts that were looked up.
        cache_hit_tokens: tokens that were reused.
        memory_share: how much of the memory limit's room for rows is reserved, 0..1.
    """

    running: int = 0
    waiting: int = 0
    progress_seconds: float = 0.0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_by_position: tuple[int, ...] = ()
    prompt_tokens: int = 0
    generation_tokens: int = 0
    cache_queries: int = 0
    cache_hits: int = 0
    cache_query_tokens: int = 0
    cache_hit_tokens: int = 0
    memory_share: float = 0.0


@dataclass(slots=True)
class _Totals:
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    by_position: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    generation_tokens: int = 0


class Activity:
    """Written by the engine's thread (and, for requests that arrive, by any); read by any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals = _Totals()
        self._gauges = Snapshot()
        self._moved = time.monotonic()
        self._idle = True

    def observe(self, outcomes: Iterable[RowOutcome]) -> None:
        """Count what a round did."""
        with self._lock:
            for outcome in outcomes:
                self._count(self._totals, outcome)

    def prompt_done(self, tokens: int) -> None:
        with self._lock:
            self._totals.prompt_tokens += tokens

    def looked_up(self, tokens: int, reused: int) -> None:
        """Count a look into the prefix cache."""
        with self._lock:
            seen = self._gauges
            self._gauges = replace(
                seen,
                cache_queries=seen.cache_queries + 1,
                cache_hits=seen.cache_hits + (reused > 0),
                cache_query_tokens=seen.cache_query_tokens + tokens,
                cache_hit_tokens=seen.cache_hit_tokens + reused,
            )

    def stepped(self, *, running: int, waiting: int, memory_share: float) -> None:
        """The engine's thread finished a step, or goes idle."""
        with self._lock:
            self._moved, self._idle = time.monotonic(), not running and not waiting
            self._gauges = replace(
                self._gauges, running=running, waiting=waiting, memory_share=memory_share
            )

    def arrived(self, count: int) -> None:
        """Requests were queued; an idle engine has work from now on."""
        with self._lock:
            if self._idle:
                self._moved, self._idle = time.monotonic(), False
            self._gauges = replace(self._gauges, waiting=self._gauges.waiting + count)

    def snapshot(self) -> Snapshot:
        with self._lock:
            seen = self._totals
            return replace(
                self._gauges,
                progress_seconds=0.0 if self._idle else time.monotonic() - self._moved,
                drafts=seen.drafts,
                draft_tokens=seen.draft_tokens,
                accepted_tokens=seen.accepted_tokens,
                accepted_by_position=tuple(seen.by_position),
                prompt_tokens=seen.prompt_tokens,
                generation_tokens=seen.generation_tokens,
            )

    @staticmethod
    def _count(totals: _Totals, outcome: RowOutcome) -> None:
        totals.generation_tokens += len(outcome.tokens)
        if not outcome.drafted:
            return
        totals.drafts += 1
        totals.draft_tokens += outcome.drafted
        totals.accepted_tokens += outcome.accepted
        while len(totals.by_position) < outcome.drafted:
            totals.by_position.append(0)
        for slot in range(outcome.accepted):
            totals.by_position[slot] += 1
