"""Answers on their way: for threads, and for event loops."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from types import TracebackType
from typing import Self

from spec_server.job import Event, Job
from spec_server.results import Chunk, Completion


class Answer(Iterator[Chunk]):
    """An answer on its way. Iterate for chunks; the last one holds the completion.

    Leaving early (`close`, or the end of a `with` block) takes the request back and frees its
    row; `cancel` does so too, but lets the iteration end with the completion so far.
    """

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._listener: Callable[[], None] | None = None
        self._lock = threading.Lock()
        self._job: Job | None = None
        self._last: Completion | Exception | None = None
        self._ended = threading.Event()

    def __next__(self) -> Chunk:
        if self._last is not None:
            raise StopIteration
        event = self._events.get()
        if isinstance(event, Exception):
            self._last = event
            raise event
        self._last = event.completion
        return event

    def result(self) -> Completion:
        """Wait for the end; chunks that were not read by then are skipped.

        Raises:
            SpecError: what the iteration raised, or would have.
        """
        if self._last is None:
            self._ended.wait()  # to be woken once, not for every chunk, leaves the engine the CPU
        for _ in self:
            pass
        assert self._last is not None
        if isinstance(self._last, Exception):
            raise self._last
        return self._last

    def cancel(self) -> None:
        """Take the request back. Safe from any thread; does nothing after the end."""
        if self._job is not None:
            self._job.cancelled.set()

    close = cancel

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()

    def put(self, event: Event) -> None:
        """The sink: called on the engine's thread."""
        with self._lock:
            self._events.put(event)
            if isinstance(event, Exception) or event.completion is not None:
                self._ended.set()
            if self._listener is not None:
                self._listener()

    def started(self, job: Job) -> Self:
        """Know the job that feeds this answer."""
        self._job = job
        return self

    @property
    def ready(self) -> bool:
        """Whether the next chunk is there, so that `next` would not wait."""
        return self._last is not None or not self._events.empty()

    def listen(self, listener: Callable[[], None]) -> None:
        """Have a function called, on the engine's thread, after each event."""
        with self._lock:
            self._listener = listener


class AsyncAnswer(AsyncIterator[Chunk]):
    """An answer for an event loop. Iterate for chunks; the last one holds the completion.

    The request is made on a thread of the loop's executor when it is first awaited. Leaving early
    (the end of an `async with` block, or a cancelled task) takes it back.

    Args:
        begin: makes the request.
    """

    def __init__(self, begin: Callable[[], Answer]) -> None:
        self._begin = begin
        self._answer: Answer | None = None
        self._arrived = asyncio.Event()

    async def __anext__(self) -> Chunk:
        answer = await self._begun()
        try:
            while True:
                self._arrived.clear()
                if answer.ready:
                    break
                await self._arrived.wait()
        except asyncio.CancelledError:
            answer.cancel()
            raise
        try:
            return next(answer)
        except StopIteration:
            raise StopAsyncIteration from None

    async def result(self) -> Completion:
        """Wait for the end.

        Raises:
            SpecError: what the iteration raised, or would have.
        """
        async for _ in self:
            pass
        assert self._answer is not None
        return self._answer.result()

    async def aclose(self) -> None:
        """Take the request back."""
        if self._answer is not None:
            self._answer.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def _begun(self) -> Answer:
        if self._answer is not None:
            return self._answer
        loop = asyncio.get_running_loop()
        starting = loop.run_in_executor(None, self._begin)
        try:
            self._answer = await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(_cancel)
            raise

        def arrived() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._arrived.set)

        self._answer.listen(arrived)
        return self._answer


def _cancel(starting: asyncio.Future[Answer]) -> None:
    """Take back a request that was made after nobody wanted it any more."""
    if not starting.cancelled() and starting.exception() is None:
        starting.result().cancel()
