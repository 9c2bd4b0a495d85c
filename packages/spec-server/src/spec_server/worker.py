"""The one thread that owns MLX: it loads the models, and steps a scheduler."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import mlx.core as mx

from spec_cache import Namespace, PrefixCache, PrefixReuse
from spec_server.activity import Activity
from spec_server.errors import EngineBusyError, EngineClosedError
from spec_server.job import Job
from spec_server.limits import Limits
from spec_server.memory import MemoryBudget, measure
from spec_server.scheduler import Models, Scheduler

__all__ = ["Limits", "Models", "Worker"]

_STORED_AT_ONCE = 256 << 20
"""The most bytes of a prompt's state that are stored together."""


class Worker:
    """Takes jobs from any thread and runs them on its own.

    Args:
        load: makes the models; called on the worker's thread.
        limits: how much runs at once.
        cache: opens the prefix cache, given how many rows fit without it, and names this engine's
            rows; called on the worker's thread once the models are loaded. None: there is none.

    Attributes:
        activity: what it is doing and has done.
        memory: how many rows fit; known once `start` has returned.
    """

    def __init__(
        self,
        load: Callable[[], Models],
        limits: Limits,
        cache: Callable[[MemoryBudget], tuple[PrefixCache, Namespace]] | None = None,
    ) -> None:
        self._load = load
        self._limits = limits
        self._cache = cache
        self.activity = Activity()
        self.memory: MemoryBudget | None = None
        self._inbox: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._ready: Future[None] = Future()
        self._closing = threading.Event()
        self._gate = threading.Lock()
        self._thread = threading.Thread(target=self._main, name="spec-engine", daemon=True)

    def start(self) -> None:
        """Start the thread and wait until the models are loaded.

        Raises:
            SpecError, or whatever loading raised.
        """
        self._thread.start()
        try:
            self._ready.result()
        except BaseException:
            self.close(wait=self._ready.done())
            raise

    def submit(self, job: Job) -> None:
        """Queue a job.

        Raises:
            EngineBusyError: as many requests wait as may.
            EngineClosedError: the engine is closed.
        """
        self.submit_all([job])

    def submit_all(self, jobs: Sequence[Job]) -> None:
        """Queue all of these jobs, or none; errors as in `submit`."""
        most = self._limits.max_batch + self._limits.max_queue
        with self._gate:
            if self._closing.is_set():
                raise EngineClosedError("the engine is closed; load a new one")
            held = self.activity.snapshot()
            if held.running + held.waiting + len(jobs) > most:
                raise EngineBusyError(held.running, held.waiting)
            self.activity.arrived(len(jobs))
            for job in jobs:
                self._inbox.put(job)

    def close(self, *, wait: bool = True) -> None:
        """End the thread after its current step; jobs that still run fail. Idempotent."""
        with self._gate:
            self._closing.set()
            self._inbox.put(None)
        if wait and self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._closing.is_set()

    def _main(self) -> None:
        """The thread. Streams that are left to its own end race with the end of the process."""
        try:
            self._run()
        finally:
            mx.clear_streams()

    def _run(self) -> None:
        try:
            scheduler = self._prepare()
        except BaseException as error:
            self._ready.set_exception(error)
            return
        self._ready.set_result(None)
        try:
            while self._receive(scheduler):
                try:
                    scheduler.step()
                except Exception as error:  # a fault in one step must not end the engine
                    scheduler.fail_all(error)
                with self._gate:  # what arrives is counted and queued in one go
                    scheduler.report(self._inbox.qsize())
        finally:
            self._end(scheduler)

    def _prepare(self) -> Scheduler:
        models = self._load()
        self.memory = measure(models.target, models.drafter, self._limits.memory_bytes)
        reuse = None
        if self._cache is not None:
            kept, namespace = self._cache(self.memory)
            self.memory = self.memory.without(kept.stats().ram_limit)
            reuse, copies = _reuse(kept, namespace, self.memory, self._limits)
            self.memory = self.memory.without(copies)
        return Scheduler(models, self._limits, self.memory, self.activity, reuse)

    def _receive(self, scheduler: Scheduler) -> bool:
        """Take what arrived; wait if there is nothing to do. False once the engine closes."""
        idle = scheduler.idle
        while True:
            try:
                job = self._inbox.get(block=idle)
            except queue.Empty:
                return True
            if job is not None:
                scheduler.add(job)
            if self._closing.is_set() or job is None:
                return False
            idle = False

    def _end(self, scheduler: Scheduler) -> None:
        with self._gate:
            self._closing.set()
        scheduler.fail_all(
            EngineClosedError("the engine was closed before the answer was complete")
        )
        while True:
            try:
                job = self._inbox.get(block=False)
            except queue.Empty:
                break
            if job is not None:
                scheduler.add(job)
        scheduler.fail_waiting(
            EngineClosedError("the engine was closed before the request was run")
        )


def _reuse(
    kept: PrefixCache, namespace: Namespace, memory: MemoryBudget, limits: Limits
) -> tuple[PrefixReuse, int]:
    """The prefix cache beside the batch, and the bytes of the copies it makes on the way."""
    cost = memory.cost
    forgets = 0 < cost.reach < max(kept.block, limits.prefill_chunk)
    exact = cost.fixed > 0 or forgets
    if cost.fixed or cost.reach:
        return PrefixReuse(kept, namespace, exact=exact), 0
    most = min(_STORED_AT_ONCE, kept.stats().ram_limit // 4)
    if memory.room is not None:
        most = min(most, int(memory.room) // 8)
    at_once = int(most / max(1.0, cost.per_token))
    return PrefixReuse(kept, namespace, exact=exact, at_once=at_once), 2 * most
