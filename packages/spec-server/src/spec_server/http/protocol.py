"""uvicorn's HTTP/1.1 connection, with a bound on how many there are and how slow they may be."""

from __future__ import annotations

import asyncio
from http import HTTPStatus

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from spec_server.http.errors import ApiError
from spec_server.http.sse import to_json


def bounded(max_connections: int, header_seconds: float) -> type[asyncio.Protocol]:
    """A protocol class for uvicorn.

    Args:
        max_connections: more are answered 503 and closed.
        header_seconds: a request's head must arrive within this time; half of one is answered 408.
    """

    class Bounded(_Bounded):
        most = max_connections
        seconds = header_seconds

    return Bounded


class _Bounded(H11Protocol):
    most: int
    seconds: float
    _timer: asyncio.TimerHandle | None = None
    _begun = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.most:
            self._refuse(_too_many(self.most))
            return
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_here()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self._begun = True
            self._await_head()
        else:
            self._head_is_here()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP gets an envelope too, unless an answer is on its way already: that
        one breaks off."""
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is not None and cycle.response_started and not cycle.response_complete:
            self.transport.close()
        else:
            self._refuse(ApiError(400, f"this is not HTTP/1.1: {msg}", code="invalid_http"))

    def _await_head(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self.seconds, self._give_up)

    def _head_is_here(self) -> None:
        self._begun = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        """Nothing came, or not all of a head: only the latter waits for an answer."""
        if self._begun:
            self._refuse(_too_slow(self.seconds))
        else:
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        self.transport.write(_response(error))
        self.transport.close()


def _too_many(most: int) -> ApiError:
    return ApiError(
        503,
        f"there are {most} connections already; try again in a moment, or raise --max-connections",
        type="server_error",
        code="too_many_connections",
        headers={"Retry-After": "1"},
    )


def _too_slow(seconds: float) -> ApiError:
    return ApiError(
        408,
        f"the request's head took more than {seconds:g} s to arrive (--header-seconds)",
        code="header_timeout",
    )


def _response(error: ApiError) -> bytes:
    body = to_json(error.envelope)
    headers = {
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        **error.headers,
        "Connection": "close",
    }
    lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body
