"""A server on loopback, on a thread of the test's own process."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPResponse
from typing import Any

from spec_server import Engine
from spec_server.http import EngineSlot, ServerSettings, create_app
from spec_server.http.serve import HttpServer, Listen
from spec_server.http.service import Service

PATIENCE = 60.0


@dataclass(slots=True)
class Live:
    """A running server."""

    http: HttpServer
    thread: threading.Thread
    service: Service
    _opened: list[HTTPConnection] = field(default_factory=list)

    @property
    def open_requests(self) -> int:
        return self.service.open_requests

    @property
    def closing(self) -> bool:
        return self.service.closing

    @property
    def port(self) -> int:
        return int(self.http.address.rpartition(":")[2])

    @property
    def url(self) -> str:
        return f"{self.http.address}/v1"

    def connect(self) -> HTTPConnection:
        return HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)

    def socket(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)

    def post(self, path: str, body: Any) -> HTTPResponse:
        """The response's head; read the rest from it."""
        connection = self.connect()
        headers = {"content-type": "application/json"}
        self._opened.append(connection)
        connection.request("POST", path, json.dumps(body), headers)
        return connection.getresponse()

    def get(self, path: str) -> tuple[int, dict[str, Any]]:
        connection = self.connect()
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def stop(self) -> None:
        self.http.stop()
        self.thread.join(PATIENCE)
        for connection in self._opened:
            connection.close()
        assert not self.thread.is_alive()


@contextmanager
def live(
    engine: Engine | EngineSlot,
    settings: ServerSettings | None = None,
    listen: Listen | None = None,
) -> Iterator[Live]:
    """Serve an engine on a free port; the engine stays the caller's."""
    app = create_app(engine, settings)
    http = HttpServer(app, listen or Listen(port=0, grace_seconds=5.0))
    thread = threading.Thread(target=http.run, daemon=True)
    thread.start()
    server = Live(http, thread, app.state.service)
    try:
        yield server
    finally:
        server.stop()


def eventually(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    pause = threading.Event()
    for _ in range(int(PATIENCE / 0.01)):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError("it did not come about")
