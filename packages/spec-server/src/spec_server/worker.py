"""The one thread that owns MLX: it loads the models, and drives a batch of rows.

Scheduling: a step is at most one prefill chunk and one decoding round, never both in one forward,
so a long prompt cannot stall answers that are running. Prefills take turns chunk by chunk, so a
short prompt is not stuck behind a long one.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import mlx.core as mx

from spec_core import Batch, Drafter, DraftPolicy, Prefill, SpecError, Target
from spec_server.errors import EngineClosedError, EngineError
from spec_server.job import Job


@dataclass(frozen=True, slots=True)
class Models:
    """What a batch is made of; made, used and dropped on the worker's thread."""

    target: Target
    drafter: Drafter | None
    policy: DraftPolicy


@dataclass(frozen=True, slots=True)
class Limits:
    """How much runs at once.

    Attributes:
        max_batch: rows that are prefilled or decoded at the same time; others wait.
        prefill_chunk: prompt tokens of one forward.
    """

    max_batch: int = 8
    prefill_chunk: int = 512


class Worker:
    """Takes jobs from any thread and runs them on its own.

    Args:
        load: makes the models; called on the worker's thread.
        limits: how much runs at once.
    """

    def __init__(self, load: Callable[[], Models], limits: Limits) -> None:
        self._load = load
        self._limits = limits
        self._inbox: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._ready: Future[None] = Future()
        self._closing = threading.Event()
        self._gate = threading.Lock()
        self._thread = threading.Thread(target=self._main, name="spec-engine", daemon=True)
        self._waiting: deque[Job] = deque()
        self._prefills: deque[tuple[Job, Prefill]] = deque()
        self._decoding: dict[int, Job] = {}

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
            EngineClosedError: the engine is closed.
        """
        with self._gate:
            if self._closing.is_set():
                raise EngineClosedError("the engine is closed; load a new one")
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
            models = self._load()
        except BaseException as error:
            self._ready.set_exception(error)
            return
        self._ready.set_result(None)
        batch = _batch(models)
        try:
            while self._receive():
                try:
                    self._step(batch)
                except Exception as error:  # a fault in one step must not end the engine
                    self._fail_all(error)
                    batch = _batch(models)
        finally:
            self._end()

    def _receive(self) -> bool:
        """Take what arrived; wait if there is nothing to do. False once the engine closes."""
        idle = not (self._waiting or self._prefills or self._decoding)
        while True:
            try:
                job = self._inbox.get(block=idle)
            except queue.Empty:
                return True
            if self._closing.is_set() or job is None:
                if job is not None:
                    self._waiting.append(job)
                return False
            self._waiting.append(job)
            idle = False

    def _step(self, batch: Batch) -> None:
        self._drop_cancelled(batch)
        self._admit(batch)
        self._prefill(batch)
        for outcome in batch.step():
            job = self._decoding[outcome.key]
            if not job.deliver(outcome):
                continue
            del self._decoding[outcome.key]
            if outcome.finish is None:
                batch.leave(outcome.key)

    def _drop_cancelled(self, batch: Batch) -> None:
        for job in [job for job in self._waiting if job.cancelled.is_set()]:
            self._waiting.remove(job)
            job.cancel()
        for entry in [entry for entry in self._prefills if entry[0].cancelled.is_set()]:
            self._prefills.remove(entry)
            entry[0].cancel()
        for key in [key for key, job in self._decoding.items() if job.cancelled.is_set()]:
            batch.leave(key)
            self._decoding.pop(key).cancel()

    def _admit(self, batch: Batch) -> None:
        while self._waiting and self._running < self._limits.max_batch:
            job = self._waiting.popleft()
            try:
                self._prefills.append((job, batch.prefill(job.request)))
            except SpecError as error:
                job.fail(error)

    @property
    def _running(self) -> int:
        return len(self._prefills) + len(self._decoding)

    def _prefill(self, batch: Batch) -> None:
        """One chunk of the prompt whose turn it is."""
        if not self._prefills:
            return
        job, prefill = self._prefills.popleft()
        try:
            outcome = prefill.step(self._limits.prefill_chunk)
        except Exception as error:
            job.fail(_as_engine_error(error))
            return
        if outcome is None:
            self._prefills.append((job, prefill))
        elif not job.deliver(outcome):
            self._decoding[batch.join(prefill)] = job

    def _fail_all(self, error: Exception) -> None:
        failed = _as_engine_error(error)
        for job, _ in self._prefills:
            job.fail(failed)
        for job in self._decoding.values():
            job.fail(failed)
        self._prefills.clear()
        self._decoding.clear()
        mx.clear_cache()

    def _end(self) -> None:
        with self._gate:
            self._closing.set()
        self._fail_all(EngineClosedError("the engine was closed before the answer was complete"))
        while True:
            try:
                job = self._inbox.get(block=False)
            except queue.Empty:
                break
            if job is not None:
                self._waiting.append(job)
        for job in self._waiting:
            job.fail(EngineClosedError("the engine was closed before the request was run"))


def _batch(models: Models) -> Batch:
    return Batch(models.target, models.drafter, models.policy)


def _as_engine_error(error: Exception) -> Exception:
    if isinstance(error, SpecError):
        return error
    wrapped = EngineError(f"the engine failed on this request: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
