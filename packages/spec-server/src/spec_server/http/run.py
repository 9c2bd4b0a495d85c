"""One request's jobs on the engine, seen from the event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor
from types import TracebackType
from typing import Self

from starlette.types import Receive

from spec_server.engine import Engine
from spec_server.http.body import ClientGoneError
from spec_server.http.bridge import Arrived, Bridge
from spec_server.http.plan import Plan
from spec_server.job import Event, Job, Sink


class Run:
    """Jobs whose events arrive here; leaving the context takes back what has not ended.

    Args:
        receive: the ASGI channel on which a leaving client is announced.
        pool: threads for what would hold up the event loop.
        bridge: brings events to this event loop.
    """

    def __init__(self, receive: Receive, pool: Executor, bridge: Bridge) -> None:
        self._receive = receive
        self._pool = pool
        self._bridge = bridge
        self._queue: asyncio.Queue[Arrived] = asyncio.Queue()
        self._jobs: Sequence[Job] = ()
        self._left = False
        self._watcher: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._watcher = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._left = True
        self.cancel()
        if self._watcher is not None:
            self._watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watcher

    async def start(self, begin: Callable[[], Plan], engine: Engine) -> Plan:
        """Make a plan and queue all that it asks for, or nothing; on another thread, since prompts
        are tokenised and grammars compiled.

        Raises:
            ApiError: what is asked cannot be done.
            SpecError: the engine refuses.
        """
        return await self._bridge.loop.run_in_executor(self._pool, self._start, begin, engine)

    def abort(self, error: BaseException) -> None:
        """End the run with an error; for the event loop's own thread."""
        self._queue.put_nowait(error)

    def cancel(self, index: int | None = None) -> None:
        """Take one job back, or all."""
        for job in self._jobs if index is None else [self._jobs[index]]:
            job.cancelled.set()

    async def events(self, silence: float) -> AsyncIterator[tuple[int, Event] | None]:
        """Events with their job's number until every job has ended; None after a silence.

        Raises:
            ClientGoneError: the client left.
        """
        open_jobs = len(self._jobs)
        while open_jobs:
            item = await self._next(silence)
            if isinstance(item, BaseException):
                raise item
            yield item
            if item is not None:
                event = item[1]
                open_jobs -= isinstance(event, Exception) or event.completion is not None

    async def _next(self, silence: float) -> Arrived | None:
        with contextlib.suppress(asyncio.QueueEmpty):
            return self._queue.get_nowait()
        try:
            async with asyncio.timeout(silence):
                return await self._queue.get()
        except TimeoutError:
            return None

    def _start(self, begin: Callable[[], Plan], engine: Engine) -> Plan:
        plan = begin()
        self._jobs = engine.submit_all([(ask, self._sink(i)) for i, ask in enumerate(plan.asks)])
        if self._left:
            self.cancel()
        return plan

    def _sink(self, index: int) -> Sink:
        return lambda event: self._bridge.put(self._queue, (index, event))

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.cancel()
        self._queue.put_nowait(ClientGoneError())
