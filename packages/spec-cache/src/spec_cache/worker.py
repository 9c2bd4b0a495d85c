"""The background thread: it writes files, loads ahead, and never computes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, KeysView, Sequence
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

_BATCH = 8
"""Keys a turn: a job waits for that many files at most."""


class Worker:
    """One thread with two queues: jobs, which go first, and keys to be written.

    Args:
        write: takes keys, in the order in which they were queued, and handles its own errors.
    """

    def __init__(self, write: Callable[[Sequence[bytes]], None]) -> None:
        self._write = write
        self._jobs: deque[Callable[[], None]] = deque()
        self._keys: dict[bytes, None] = {}
        self._busy = False
        self._closing = False
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="spec-cache", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> KeysView[bytes]:
        """Keys that are not written yet."""
        return self._keys.keys()

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Run a job soon. Its error, if any, goes to the future."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(job())
            except BaseException as error:
                future.set_exception(error)

        with self._wake:
            if self._closing:
                future.cancel()
                return future
            self._jobs.append(run)
            self._wake.notify_all()
        return future

    def write_later(self, keys: Iterable[bytes]) -> None:
        """Queue keys; those that are waiting already keep their place."""
        with self._wake:
            for key in keys:
                self._keys.setdefault(key)
            self._wake.notify_all()

    def flush(self) -> None:
        """Wait until both queues are empty and nothing runs."""
        with self._wake:
            self._wake.wait_for(lambda: not (self._jobs or self._keys or self._busy))

    def close(self, flush: bool) -> None:
        """End the thread, after what is queued or at once."""
        with self._wake:
            self._closing = True
            if not flush:
                self._keys.clear()
            self._wake.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._wake:
                self._busy = False
                self._wake.notify_all()
                self._wake.wait_for(lambda: self._jobs or self._keys or self._closing)
                if not (self._jobs or self._keys):
                    return
                self._busy = True
                job = self._jobs.popleft() if self._jobs else None
                batch = (
                    [] if job else [self._pop_key() for _ in range(min(_BATCH, len(self._keys)))]
                )
            if job:
                job()
            else:
                self._write(batch)

    def _pop_key(self) -> bytes:
        key = next(iter(self._keys))
        del self._keys[key]
        return key
