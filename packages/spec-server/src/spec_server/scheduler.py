"""What each step of the engine computes. Owned by the engine's thread.

Each request has tokens that ought to be computed and tokens that are; a step is at most one
prefill chunk and one decoding round, never both in one forward. The chunk's size follows from a
time budget, so a long prompt cannot stall answers that are running; prefills take turns chunk by
chunk, so a short prompt is not stuck behind a long one.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from concurrent.futures import wait
from dataclasses import dataclass
from itertools import islice

import mlx.core as mx

from spec_cache import PrefixReuse, Thread
from spec_core import Batch, Drafter, DraftPolicy, Prefill, RowOutcome, SpecError, Target
from spec_server.activity import Activity
from spec_server.errors import EngineError
from spec_server.job import Job
from spec_server.limits import Limits
from spec_server.memory import MemoryBudget

_log = logging.getLogger("spec_server")

_NO_ROOM = "the answer ended early: the memory limit has no room for more of it"
_LEAST_CHUNK = 16
_RESERVED = 1024
_CACHED_SHARE = 8
_CLEANED_EVERY = 64


@dataclass(frozen=True, slots=True)
class Models:
    """What a batch is made of; made, used and dropped on the engine's thread."""

    target: Target
    drafter: Drafter | None
    policy: DraftPolicy


@dataclass(slots=True)
class Entry:
    """A request that has a row.

    Attributes:
        reserved: positions that the row may have before more room must be found.
        thread: its dealings with the prefix cache.
        answer: what it has emitted, where the cache wants to know.
    """

    job: Job
    prefill: Prefill
    reserved: int
    thread: Thread | None
    answer: list[int]

    @property
    def positions(self) -> int:
        return len(self.job.request.prompt) + self.prefill.row.emitted


class Scheduler:
    """Moves requests from the queue through their prefill into the batch, and out of it.

    Args:
        models: what a batch is made of.
        limits: how much runs at once.
        memory: how many rows fit.
        activity: told what happens.
        reuse: the prefix cache, or None.
    """

    def __init__(
        self,
        models: Models,
        limits: Limits,
        memory: MemoryBudget,
        activity: Activity,
        reuse: PrefixReuse | None = None,
    ) -> None:
        self._models = models
        self._limits = limits
        self._memory = memory
        self._activity = activity
        self._reuse = reuse
        self._batch = self._new_batch()
        self._waiting: deque[Job] = deque()
        self._prefills: deque[Entry] = deque()
        self._decoding: dict[int, Entry] = {}
        self._token_seconds = 0.0
        self._steps = 0

    @property
    def idle(self) -> bool:
        """Nothing is to be computed, and the batch holds no memory of rows that have ended."""
        return not (self._waiting or self._prefills or self._decoding or self._batch.busy)

    def add(self, job: Job) -> None:
        """Queue a request."""
        self._waiting.append(job)

    def step(self) -> None:
        """Admit, compute one prefill chunk and one decoding round, and hand out the results."""
        self._drop_cancelled()
        self._load_ahead()
        self._admit()
        self._prefill()
        self._decode()
        self._clean()

    def report(self, arriving: int = 0) -> None:
        """Tell where things stand; `arriving` requests are not queued here yet."""
        entries = [*self._prefills, *self._decoding.values()]
        longest = max((entry.reserved for entry in entries), default=0)
        self._activity.stepped(
            running=len(entries),
            waiting=len(self._waiting) + arriving,
            memory_share=self._memory.share(len(entries), longest),
        )

    def fail_all(self, error: Exception) -> None:
        """End every request that has a row, and begin anew."""
        failed = _as_engine_error(error)
        for entry in [*self._prefills, *self._decoding.values()]:
            _release(entry)
            entry.job.fail(failed)
        self._prefills.clear()
        self._decoding.clear()
        self._batch = self._new_batch()
        mx.clear_cache()
        self.report()

    def fail_waiting(self, error: Exception) -> None:
        """End every request that waits."""
        for job in self._waiting:
            job.fail(error)
        self._waiting.clear()

    # ------------------------------------------------------------------ in and out

    def _new_batch(self) -> Batch:
        return Batch(self._models.target, self._models.drafter, self._models.policy)

    def _drop_cancelled(self) -> None:
        for job in [job for job in self._waiting if job.cancelled.is_set()]:
            self._waiting.remove(job)
            job.end("cancelled")
        for entry in [entry for entry in self._prefills if entry.job.cancelled.is_set()]:
            self._prefills.remove(entry)
            _release(entry)
            entry.job.end("cancelled")
        for key in [k for k, entry in self._decoding.items() if entry.job.cancelled.is_set()]:
            self._batch.leave(key)
            self._decoding.pop(key).job.end("cancelled")

    def _load_ahead(self) -> None:
        """Have prefixes of the requests that come next loaded from disk, in the background."""
        if self._reuse is None:
            return
        for job in islice(self._waiting, self._limits.max_batch):
            if job.loading is None:
                with contextlib.suppress(SpecError):  # admission meets it again, and reports it
                    job.loading = self._reuse.prefetch(job.request, job.cache_salt)

    def _admit(self) -> None:
        """Give rows to waiting requests, oldest first, as far as rows and memory go."""
        put_off: list[Job] = []
        while self._waiting and self._running + 1 <= self._limits.max_batch:
            job = self._waiting.popleft()
            reserved = self._reservation(job)
            if self._running and not self._fits(1, reserved):
                put_off.append(job)
                break
            try:
                started = self._start(job)
            except Exception as error:
                job.fail(_as_engine_error(error))
                continue
            if started is None:
                put_off.append(job)
                continue
            prefill, thread = started
            job.admitted(None if thread is None else thread.reuse)
            self._prefills.append(Entry(job, prefill, reserved, thread, []))
        self._waiting.extendleft(reversed(put_off))

    def _start(self, job: Job) -> tuple[Prefill, Thread | None] | None:
        if self._reuse is None:
            return self._batch.prefill(job.request), None
        if not self._loaded(job):
            return None
        started = self._reuse.admit(self._batch, job.request, job.cache_salt)
        if started is not None:
            self._activity.looked_up(len(job.request.prompt), started[1].reuse.length)
        return started

    def _loaded(self, job: Job) -> bool:
        """Whether a request's prefix is in memory; waits for it where nothing else runs."""
        loading = job.loading
        if loading is None or loading.done():
            return True
        if self._running:
            return False
        if not loading.cancel():
            wait([loading])
        return True

    @property
    def _running(self) -> int:
        return len(self._prefills) + len(self._decoding)

    # ------------------------------------------------------------------ memory

    def _reservation(self, job: Job) -> int:
        """Positions that a request is given room for at first."""
        return len(job.request.prompt) + min(job.request.max_tokens, _RESERVED)

    def _fits(self, more: int, longest: int) -> bool:
        entries = [*self._prefills, *self._decoding.values()]
        return self._memory.fits(
            len(entries) + more, max([longest, *(entry.reserved for entry in entries)])
        )

    def _has_room(self, entry: Entry) -> bool:
        """Whether a row may have one more round; finds more room where it needs it."""
        block = 1 + (0 if self._models.drafter is None else self._models.drafter.max_block)
        if entry.positions + block <= entry.reserved:
            return True
        if not entry.prefill.row.remaining:
            return True
        wanted = entry.reserved + min(_RESERVED, entry.prefill.row.remaining + block)
        if self._running == 1 or self._fits(0, wanted):
            entry.reserved = wanted
            return True
        return False

    def _clean(self) -> None:
        """Give freed buffers back before they take a noticeable share of the limit."""
        self._steps += 1
        if self._memory.room is None or (self._steps % _CLEANED_EVERY and not self.idle):
            return
        if mx.get_cache_memory() > self._memory.room / _CACHED_SHARE:
            mx.clear_cache()

    # ------------------------------------------------------------------ prefill

    def _prefill(self) -> None:
        """One chunk of the prompt whose turn it is."""
        if not self._prefills:
            return
        entry = self._prefills.popleft()
        try:
            outcome = self._chunk(entry)
        except Exception as error:
            _release(entry)
            entry.job.fail(_as_engine_error(error))
            return
        if outcome is None:
            self._keep(entry)
            self._prefills.append(entry)
            return
        self._activity.prompt_done(len(entry.job.request.prompt))
        self._activity.observe([outcome])
        entry.answer.extend(outcome.tokens)
        ended = entry.job.deliver(outcome)
        self._keep(entry)
        if not ended:  # listed before it joins: if that fails, all have failed, this one too
            self._decoding[entry.prefill.row.key] = entry
            self._batch.join(entry.prefill)

    def _chunk(self, entry: Entry) -> RowOutcome | None:
        prefill, tokens = entry.prefill, self._chunk_size()
        if self._reuse is not None and entry.thread is not None:
            tokens = self._reuse.chunk(entry.thread, prefill.position, tokens)
        tokens = min(tokens, prefill.remaining)
        began = time.perf_counter()
        outcome = prefill.step(tokens)
        if tokens >= _LEAST_CHUNK or not self._token_seconds:
            self._token_seconds = (time.perf_counter() - began) / tokens
        return outcome

    def _keep(self, entry: Entry) -> None:
        """Store what a chunk added; the answer does not depend on it."""
        if self._reuse is None or entry.thread is None:
            return
        try:
            self._reuse.after_chunk(entry.thread, entry.prefill)
        except Exception as error:
            entry.thread.release()
            _log.warning("a prompt was not kept for reuse: %s", error)

    def _chunk_size(self) -> int:
        """Prompt tokens of the next chunk: as many as the time budget allows, if others wait."""
        most = self._limits.prefill_chunk
        if not (self._decoding or self._prefills) or not self._token_seconds:
            return most
        affordable = int(self._limits.step_seconds / self._token_seconds)
        return min(most, max(_LEAST_CHUNK, affordable - affordable % _LEAST_CHUNK))

    # ------------------------------------------------------------------ decoding

    def _decode(self) -> None:
        for key, entry in list(self._decoding.items()):
            if not self._has_room(entry):
                self._batch.leave(key)
                self._decoding.pop(key).job.end("length", _NO_ROOM)
        outcomes = self._batch.step()
        self._activity.observe(outcomes)
        ended = [outcome for outcome in outcomes if self._deliver(outcome)]
        for outcome in ended:
            self._store_turn(self._decoding.pop(outcome.key), outcome)
        for outcome in ended:
            if outcome.finish is None:
                self._batch.leave(outcome.key)

    def _store_turn(self, entry: Entry, outcome: RowOutcome) -> None:
        """Keep a finished row. (One that a stop string ended may be a token ahead of its text.)"""
        if self._reuse is None or entry.thread is None or outcome.finish is None:
            return
        try:
            self._reuse.end_of_turn(entry.thread, entry.answer, self._batch, outcome.key)
        except SpecError as error:
            _log.warning("a finished answer was not kept for reuse: %s", error)

    def _deliver(self, outcome: RowOutcome) -> bool:
        entry = self._decoding[outcome.key]
        if entry.thread is not None:
            entry.answer.extend(outcome.tokens)
        return entry.job.deliver(outcome)


def _release(entry: Entry) -> None:
    if entry.thread is not None:
        entry.thread.release()


def _as_engine_error(error: Exception) -> Exception:
    if isinstance(error, SpecError):
        return error
    wrapped = EngineError(f"the engine failed on this request: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
