"""uvicorn's HTTP/1.1 connection, with a bound on how many there are and how slow they may be."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from spec_server.http.errors import ApiError
from spec_server.http.sse import to_json


def bounded(max_connections: int, header_seconds: float) -> type[asyncio.Protocol]:
    """A protocol class for uvicorn.

    Args:
        max_connections: more are answered 503 and closed.
        header_seconds: a request's head must arrive within this time.
    """

    class Bounded(_Bounded):
        most = max_connections
        seconds = header_seconds

    return Bounded


class _Bounded(H11Protocol):
    most: int
    seconds: float
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.most:
            transport.write(_refusal(self.most))
            transport.close()
            return
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_here()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self._await_head()
        else:
            self._head_is_here()

    def _await_head(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self.seconds, self.transport.close)

    def _head_is_here(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _refusal(most: int) -> bytes:
    error = ApiError(
        503,
        f"there are {most} connections already; try again in a moment, or raise --max-connections",
        type="server_error",
        code="too_many_connections",
    )
    body = to_json(error.envelope)
    head = (
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
