"""The server on loopback: clients that leave, silence, load, slowness, the end."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from collections.abc import Iterator
from http.client import HTTPResponse
from typing import Any

import pytest

from spec_server import Engine, EngineError, Limits
from spec_server.http import EngineSlot, ServerSettings
from spec_server.http.app import create_app
from spec_server.http.serve import HttpServer, Listen, serve

from .gated import Gate, gated_engine
from .live import Live, eventually, live

PATH = "/v1/completions"
ENDLESS = {"prompt": [5, 6, 7], "max_tokens": 400, "logit_bias": {"0": -100}}
SHORT = {"prompt": [5, 6, 7], "max_tokens": 3, "logit_bias": {"0": -100}}
LONG = {**ENDLESS, "prompt": [1 + i % 30 for i in range(400)], "max_tokens": 50}


@pytest.fixture
def slow() -> Iterator[tuple[Engine, Gate]]:
    """An engine with two rows whose forwards a test can hold."""
    engine, gate = gated_engine(Limits(max_batch=2, max_queue=1, prefill_chunk=16))
    with engine:
        yield engine, gate
        gate.open()


def hang_up(response: HTTPResponse) -> None:
    """Close a connection at once, as a killed client does."""
    sock = response.fp.raw._sock  # type: ignore[union-attr]
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.shutdown(socket.SHUT_RDWR)
    response.close()


def held(engine: Engine) -> int:
    """Requests that have a row or wait for one."""
    seen = engine.activity
    return seen.running + seen.waiting


def idle(engine: Engine) -> bool:
    return held(engine) == 0


def events(response: HTTPResponse) -> list[Any]:
    """The rest of a stream; the last event must be [DONE]."""
    texts = [e for e in response.read().decode().split("\n\n") if e and not e.startswith(":")]
    assert texts[-1] == "data: [DONE]"
    return [json.loads(text[6:]) for text in texts[:-1]]


# ------------------------------------------------------------------ clients that leave


def test_a_client_that_leaves_a_stream_frees_its_row(slow: tuple[Engine, Gate]) -> None:
    engine, gate = slow
    with live(engine) as server:
        for _ in range(3):
            gate.shut()
            gate.let(3)
            response = server.post(PATH, {**ENDLESS, "stream": True})
            response.readline()
            eventually(lambda: gate.blocked)
            hang_up(response)
            eventually(lambda: not server.open_requests)
            before = gate.passed
            gate.let(2)
            eventually(lambda: idle(engine))
            assert gate.passed - before <= 2
            gate.open()
        assert json.loads(server.post(PATH, SHORT).read())["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("body", [ENDLESS, LONG], ids=["decoding", "prefill"])
def test_a_client_that_leaves_a_whole_answer_frees_its_row(
    slow: tuple[Engine, Gate], body: dict[str, Any]
) -> None:
    engine, gate = slow
    with live(engine) as server:
        gate.shut()
        client = server.socket()
        client.sendall(request(body))
        eventually(lambda: gate.blocked)
        gate.let(2)
        eventually(lambda: gate.blocked)
        client.close()
        eventually(lambda: not server.open_requests)
        before = gate.passed
        gate.let(2)
        eventually(lambda: idle(engine))
        assert gate.passed - before <= 2


def test_a_queued_client_that_leaves_never_starts(slow: tuple[Engine, Gate]) -> None:
    engine, gate = slow
    with live(engine) as server:
        gate.shut()
        running = [server.socket() for _ in range(2)]
        for client in running:
            client.sendall(request(SHORT))
        eventually(lambda: gate.blocked and held(engine) == 2)
        queued = server.socket()
        queued.sendall(request(LONG))
        eventually(lambda: held(engine) == 3)
        queued.close()
        eventually(lambda: server.open_requests == 2)
        gate.open()
        for client in running:
            assert b'"completion_tokens":3' in read_all(client)
        eventually(lambda: idle(engine))
        assert gate.passed < 2 * 3 + 4
        assert engine.activity.prompt_tokens == 6


def request(body: dict[str, Any], close: bool = True) -> bytes:
    raw = json.dumps(body).encode()
    head = (
        f"POST {PATH} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(raw)}\r\n{'Connection: close' if close else 'X-Y: z'}\r\n\r\n"
    )
    return head.encode() + raw


def read_all(client: socket.socket) -> bytes:
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := client.recv(65536):
            data += piece
    client.close()
    return data


# ------------------------------------------------------------------ silence and load


def test_a_silent_stream_is_kept_alive_by_comments(slow: tuple[Engine, Gate]) -> None:
    engine, gate = slow
    with live(engine, ServerSettings(keepalive_seconds=0.02)) as server:
        gate.shut()
        response = server.post(PATH, {**LONG, "stream": True})
        assert response.status == 200
        assert response.readline() == b": still working\n"
        assert response.readline() == b"\n"
        gate.open()
        chunks = events(response)
        assert "".join(c["choices"][0]["text"] for c in chunks)


def test_more_than_the_queue_takes_is_429(slow: tuple[Engine, Gate]) -> None:
    engine, gate = slow
    with live(engine) as server:
        gate.shut()
        open_ones = [server.socket() for _ in range(3)]
        for client in open_ones:
            client.sendall(request(SHORT))
        eventually(lambda: held(engine) == 3)
        for stream in (False, True):
            refused = server.post(PATH, {**SHORT, "stream": stream})
            assert refused.status == 429
            assert refused.headers["Retry-After"]
            error = json.loads(refused.read())["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
        gate.open()
        assert all(b'"completion_tokens":3' in read_all(client) for client in open_ones)


def test_an_error_inside_a_stream_is_an_event(slow: tuple[Engine, Gate]) -> None:
    engine, gate = slow
    with live(engine) as server:
        gate.shut()
        gate.let(2)
        response = server.post(PATH, {**ENDLESS, "stream": True})
        response.readline()
        gate.fail_next("the device is on fire")
        gate.open()
        *_, last = events(response)
        assert "on fire" in last["error"]["message"]
        assert last["error"]["type"] == "server_error"
        assert server.post(PATH, SHORT).status == 200


def test_a_stalled_engine_is_not_ready(slow: tuple[Engine, Gate]) -> None:
    engine, gate = slow
    with live(engine, ServerSettings(stall_seconds=0.05)) as server:
        assert server.get("/readyz")[0] == 200
        gate.shut()
        client = server.socket()
        client.sendall(request(SHORT))
        eventually(lambda: server.get("/readyz")[0] == 503)
        assert server.get("/readyz")[1]["status"] == "stalled"
        gate.open()
        read_all(client)
        eventually(lambda: server.get("/readyz")[0] == 200)


def test_a_dead_engine_is_not_healthy() -> None:
    engine, _ = gated_engine()
    with live(engine) as server:
        engine.close()
        status, facts = server.get("/health")
        assert (status, facts["status"]) == (503, "closed")
        answer = server.post(PATH, SHORT)
        assert answer.status == 503
        assert answer.headers["Retry-After"]


# ------------------------------------------------------------------ slow and many


def test_a_head_that_does_not_arrive_is_not_waited_for(slow: tuple[Engine, Gate]) -> None:
    with live(slow[0], listen=Listen(port=0, header_seconds=0.1)) as server:
        nothing, half = server.socket(), server.socket()
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: 127")
        assert read_all(nothing) == b""
        answer = read_all(half)
        assert answer.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "header_timeout"
        again = server.socket()
        again.sendall(request(SHORT, close=False))
        assert b"200 OK" in again.recv(65536)
        again.sendall(b"POST /v1/comp")
        read_all(again)


def test_a_body_that_does_not_arrive_is_408(slow: tuple[Engine, Gate]) -> None:
    with live(slow[0], ServerSettings(body_seconds=0.1)) as server:
        client = server.socket()
        client.sendall(request(SHORT)[:-5])
        answer = read_all(client)
        assert b"408" in answer.partition(b"\r\n")[0]
        assert b"body_timeout" in answer


def test_connections_are_bounded(slow: tuple[Engine, Gate]) -> None:
    with live(slow[0], listen=Listen(port=0, max_connections=2)) as server:
        held = [server.socket() for _ in range(2)]
        for client in held:
            client.sendall(request(SHORT, close=False))
            assert b"200 OK" in client.recv(65536)
        answer = read_all(server.socket())
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"\r\nRetry-After: 1\r\n" in answer
        assert b"too_many_connections" in answer
        for client in held:
            client.close()
        eventually(lambda: b"200 OK" in _try(server))


def _try(server: Live) -> bytes:
    client = server.socket()
    client.sendall(request(SHORT))
    return read_all(client)


def test_nonsense_behind_a_request_does_not_get_into_its_answer(
    slow: tuple[Engine, Gate],
) -> None:
    engine, gate = slow
    with live(engine) as server:
        gate.shut()
        client = server.socket()
        head, _, body = request({**SHORT, "stream": True}).partition(b"\r\n\r\n")
        client.sendall(head + b"\r\n\r\n" + body)
        assert client.recv(65536).startswith(b"HTTP/1.1 200 ")
        client.sendall(b"\x16\x03\x01 nonsense\r\n\r\n")
        gate.open()
        rest = read_all(client)
        assert b"HTTP/1.1" not in rest
        eventually(lambda: idle(engine))


def test_nonsense_is_refused_and_the_server_lives(slow: tuple[Engine, Gate]) -> None:
    with live(slow[0]) as server:
        client = server.socket()
        client.sendall(b"\x16\x03\x01\x02\x00 nonsense\r\n\r\n")
        answer = read_all(client)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"
        assert b"200 OK" in _try(server)


# ------------------------------------------------------------------ the end


def test_a_shutdown_lets_running_answers_finish(slow: tuple[Engine, Gate]) -> None:
    engine, gate = slow
    with live(engine, listen=Listen(port=0, grace_seconds=30.0)) as server:
        gate.shut()
        response = server.post(PATH, {**SHORT, "stream": True})
        eventually(lambda: gate.blocked)
        server.http.stop()
        eventually(lambda: server.closing)
        gate.open()
        text = "".join(c["choices"][0]["text"] for c in events(response))
        assert len(text) == 3


def test_a_shutdown_ends_what_does_not_finish(slow: tuple[Engine, Gate]) -> None:
    engine, gate = slow
    with live(engine, listen=Listen(port=0, grace_seconds=0.0)) as server:
        gate.shut()
        gate.let(2)
        response = server.post(PATH, {**ENDLESS, "stream": True})
        response.readline()
        server.http.stop()
        *_, last = events(response)
        assert last["error"]["code"] == "shutting_down"
        gate.open()
    eventually(lambda: idle(engine))


def test_a_port_that_is_taken_is_named(slow: tuple[Engine, Gate]) -> None:
    with live(slow[0]) as server, pytest.raises(EngineError, match=f":{server.port} cannot be"):
        HttpServer(create_app(slow[0]), Listen(port=server.port))


def test_what_loading_raises_ends_the_server() -> None:
    def load() -> Engine:
        raise EngineError("no such model")

    with pytest.raises(EngineError, match="no such model"):
        serve(load, listen=Listen(port=0))


def test_a_slot_answers_503_until_it_is_filled(slow: tuple[Engine, Gate]) -> None:
    slot = EngineSlot()
    with live(slot) as server:
        assert server.get("/readyz")[0] == 503
        assert server.post(PATH, SHORT).status == 503
        slot.engine = slow[0]
        assert server.get("/readyz")[0] == 200
        assert server.post(PATH, SHORT).status == 200


def test_listen_out_of_range() -> None:
    for name, value in {
        "port": 70000,
        "max_connections": 0,
        "header_seconds": 0.0,
        "grace_seconds": -1.0,
    }.items():
        with pytest.raises(ValueError, match=name):
            Listen(**{name: value})  # type: ignore[arg-type]
