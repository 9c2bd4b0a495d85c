"""What the routes share: the engine, the settings, the metrics, the requests in progress."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from starlette.types import Receive

from spec_cache import CacheStats
from spec_server.activity import Snapshot
from spec_server.engine import Engine
from spec_server.http.bridge import Bridge
from spec_server.http.errors import ApiError, closing, loading
from spec_server.http.metrics import Metrics
from spec_server.http.run import Run
from spec_server.http.settings import ServerSettings

_THREADS = 32


@dataclass(slots=True)
class EngineSlot:
    """Holds the engine once it is loaded, so that a server can answer before."""

    engine: Engine | None = None


@dataclass(slots=True)
class Service:
    """One app's state.

    Attributes:
        slot: where the engine is, or will be.
        settings: how the HTTP surface behaves.
        metrics: counted here and in the engine.
        started: when the app was made, in seconds of Unix time.
        closing: no new requests are taken.
        pool: threads that tokenise prompts and compile grammars.
    """

    slot: EngineSlot
    settings: ServerSettings
    metrics: Metrics = field(init=False)
    started: float = field(default_factory=time.time)
    closing: bool = False
    pool: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(_THREADS, thread_name_prefix="spec-http")
    )
    _runs: set[Run] = field(default_factory=set)
    _bridge: Bridge | None = None

    def __post_init__(self) -> None:
        self.metrics = Metrics(self._activity, self._cache)

    def engine(self) -> Engine:
        """The engine.

        Raises:
            ApiError: it is not loaded yet, or the server shuts down.
        """
        if self.closing:
            raise closing()
        if self.slot.engine is None:
            raise loading()
        return self.slot.engine

    def trouble(self) -> str | None:
        """Why the server cannot answer now, or None if it can."""
        engine = self.slot.engine
        if self.closing:
            return "closing"
        if engine is None:
            return "loading"
        if not engine.alive:
            return "closed"
        if engine.activity.progress_seconds > self.settings.stall_seconds:
            return "stalled"
        return None

    @asynccontextmanager
    async def run(self, receive: Receive) -> AsyncIterator[Run]:
        """A run that a shutdown knows of."""
        async with Run(receive, self.pool, self._to_this_loop()) as run:
            self._runs.add(run)
            try:
                yield run
            finally:
                self._runs.discard(run)

    def _to_this_loop(self) -> Bridge:
        """One bridge for all requests of an event loop."""
        loop = asyncio.get_running_loop()
        if self._bridge is None or self._bridge.loop is not loop:
            self._bridge = Bridge(loop)
        return self._bridge

    @property
    def open_requests(self) -> int:
        """Requests in progress."""
        return len(self._runs)

    async def drain(self, seconds: float, hurry: Callable[[], bool] = lambda: False) -> None:
        """Take no new requests, let those in progress finish for so long, or until `hurry`, then
        end them."""
        self.closing = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._runs and not hurry():
                    await asyncio.sleep(0.02)
        for run in self._runs:
            run.abort(_cut_off())

    def _activity(self) -> Snapshot | None:
        return None if self.slot.engine is None else self.slot.engine.activity

    def _cache(self) -> CacheStats | None:
        cache = None if self.slot.engine is None else self.slot.engine.cache
        return None if cache is None else cache.stats()


def _cut_off() -> ApiError:
    return ApiError(
        503,
        "the server was shut down before the answer was complete",
        type="server_error",
        code="shutting_down",
        headers={"Retry-After": "5"},
    )
