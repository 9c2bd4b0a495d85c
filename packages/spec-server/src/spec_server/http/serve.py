"""Runs the app with uvicorn: one process, bounded connections, a shutdown that lets answers end.

Needs the extra `http` (uvicorn).
"""

from __future__ import annotations

import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import uvicorn
from starlette.applications import Starlette

from spec_core.errors import InvalidValueError
from spec_server.engine import Engine
from spec_server.errors import EngineError
from spec_server.http.app import create_app
from spec_server.http.protocol import bounded
from spec_server.http.service import EngineSlot, Service
from spec_server.http.settings import ServerSettings

_log = logging.getLogger("spec_server")


@dataclass(frozen=True, slots=True)
class Listen:
    """Where and how connections are taken.

    Attributes:
        host: the address to bind; by default only this machine reaches it.
        port: 0 takes a free one.
        max_connections: connections at a time; more are answered 503.
        header_seconds: how long a request's head may take to arrive.
        grace_seconds: how long a shutdown waits for answers that are on their way.

    Raises:
        InvalidValueError: a value is out of range.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    max_connections: int = 512
    header_seconds: float = 15.0
    grace_seconds: float = 15.0

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65536:
            raise InvalidValueError("port", self.port, "from 0 to 65535")
        if self.max_connections < 1:
            raise InvalidValueError("max_connections", self.max_connections, "at least 1")
        if not self.header_seconds > 0:
            raise InvalidValueError("header_seconds", self.header_seconds, "more than 0 seconds")
        if self.grace_seconds < 0:
            raise InvalidValueError("grace_seconds", self.grace_seconds, "at least 0 seconds")


def serve(
    load: Callable[[], Engine],
    settings: ServerSettings | None = None,
    listen: Listen | None = None,
    *,
    ready: Callable[[Engine, str], None] | None = None,
) -> bool:
    """Serve until a signal ends it. Answers 503 while the engine is being loaded.

    Returns whether it was still being loaded at the end. That cannot be called off, and a process
    that ends in the ordinary way meanwhile is aborted by MLX: leave it by `os._exit`, or wait.

    Args:
        load: makes the engine, on a thread of its own; it is closed at the end.
        settings: how the HTTP surface behaves.
        listen: where and how connections are taken.
        ready: told the engine and the address once requests are answered.

    Raises:
        EngineError: the address cannot be bound.
        SpecError: what loading raised.
    """
    slot, failed = EngineSlot(), list[BaseException]()
    server = HttpServer(create_app(slot, settings), listen)

    def loading() -> None:
        try:
            slot.engine = load()
        except BaseException as error:
            failed.append(error)
            server.stop()
        else:
            if ready is not None:
                ready(slot.engine, server.address)

    loader = threading.Thread(target=loading, name="spec-loading", daemon=True)
    loader.start()
    try:
        server.run()
    finally:
        still_loading = loader.is_alive()
        if slot.engine is not None:
            slot.engine.close()
    if failed:
        raise failed[0]
    return still_loading


class HttpServer:
    """An app of `create_app` on a socket of its own.

    Args:
        app: the app.
        listen: where and how connections are taken.

    Raises:
        EngineError: the address cannot be bound.
    """

    def __init__(self, app: Starlette, listen: Listen | None = None) -> None:
        listen = listen or Listen()
        self._socket = _bind(listen)
        self._server = _Server(_config(app, listen), app.state.service, listen.grace_seconds)
        self.address = _address(self._socket)

    def run(self) -> None:
        """Serve until `stop`, or on the main thread a signal, ends it."""
        self._server.run(sockets=[self._socket])

    def stop(self) -> None:
        """End serving: let running answers finish within the grace time. Safe from any thread."""
        self._server.should_exit = True


def _bind(listen: Listen) -> socket.socket:
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    try:
        return socket.create_server((listen.host, listen.port), family=family, backlog=512)
    except OSError as error:
        raise EngineError(
            f"{listen.host}:{listen.port} cannot be listened on: {error.strerror or error}; "
            "choose another --port or --host"
        ) from error


def _address(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _config(app: object, listen: Listen) -> uvicorn.Config:
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        http=bounded(listen.max_connections, listen.header_seconds),
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=3,
    )


class _Server(uvicorn.Server):
    """Ends answers in an orderly way before the connections are closed."""

    def __init__(self, config: uvicorn.Config, service: Service, grace_seconds: float) -> None:
        super().__init__(config)
        self._service = service
        self._grace_seconds = grace_seconds

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._service.open_requests:
            _log.info(
                "waiting %g s for answers to end (%d); another signal ends them now",
                self._grace_seconds,
                self._service.open_requests,
            )
        await self._service.drain(self._grace_seconds, lambda: self.force_exit)
        self.force_exit = False  # the answers that were ended are told so first
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """A signal ends the server, and nothing else: the engine is closed afterwards."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        signals = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self.handle_exit) for number in signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
