"""A server with the real page and made-up data, below any prefix."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from spec_server.http.webpage import web_page

CARD = {
    "id": "made-up",
    "max_model_len": 4096,
    "x_spec": {
        "mode": "dflash",
        "drafter": "some/made-up-dflash",
        "fallbacks": [],
        "dtype": "float32",
        "default_sampling": {"temperature": 0.5},
    },
}
METRICS = """# HELP spec_decode_num_drafts_total Rounds
spec_decode_num_drafts_total 10.0
spec_decode_num_accepted_tokens_total 12.0
spec_decode_num_accepted_tokens_per_pos_total{position="0"} 8.0
spec_decode_num_accepted_tokens_per_pos_total{position="1"} 4.0
spec_generation_tokens_total 22.0
spec_num_requests_running 2.0
spec_num_requests_waiting 3.0
spec_prefix_cache_queries_total 4.0
spec_prefix_cache_hits_total 1.0
spec_prefix_cache_query_tokens_total 200.0
spec_prefix_cache_hit_tokens_total 50.0
"""
SEEN = {
    "round_accepts": [2, 1, 0, 1],
    "accept_by_position": [0.75, 0.33],
    "mean_accept_length": 2.0,
    "tokens_per_second": 50.0,
    "ttft_seconds": 0.1,
    "drafted": 8,
    "max_draft": "full",
    "fallbacks": [],
}
USAGE = {
    "prompt_tokens": 10,
    "completion_tokens": 8,
    "prompt_tokens_details": {"cached_tokens": 4},
}


def events(*deltas: dict[str, Any], rate: float = 50.0, finish: str = "stop") -> list[Any]:
    """The chunks of an answer."""
    chunks = [{"choices": [{"delta": delta, "finish_reason": None}]} for delta in deltas]
    end = {
        "choices": [{"delta": {"content": ""}, "finish_reason": finish}],
        "x_spec": SEEN | {"tokens_per_second": rate},
    }
    return [*chunks, end, {"choices": [], "usage": USAGE}, "[DONE]"]


def content(text: str, **more: Any) -> list[Any]:
    """An answer in two chunks."""
    half = len(text) // 2
    return events({"content": text[:half]}, {"content": text[half:]}, **more)


@dataclass(slots=True)
class Refused:
    """An answer that is an error."""

    status: int
    message: str
    code: str


class Hang:
    """In place of a chunk: say nothing more until the client leaves."""


@dataclass(slots=True)
class Canned:
    """What is answered, and what was asked.

    Attributes:
        replies: to chat requests in turn; the last one stays.
        bodies: chat requests.
        key: demanded of data routes, if not empty.
        left: the client closed a hanging answer.
    """

    port: int = 0
    replies: list[Any] = field(default_factory=lambda: [content("Hello.")])
    bodies: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    key: str = ""
    prefix: str = ""
    left: threading.Event = field(default_factory=threading.Event)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}{self.prefix}"


@contextmanager
def serving() -> Iterator[Canned]:
    canned = Canned()

    class Handler(_Handler):
        state = canned

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    canned.port = http.server_address[1]
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield canned
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    state: Canned

    def log_message(self, format: str, *values: object) -> None:
        pass

    def do_GET(self) -> None:
        self.state.paths.append(self.path)
        path = self.path.partition("?")[0].removeprefix(self.state.prefix)
        if path in ("", "/"):
            self._send(200, web_page().text, "text/html; charset=utf-8", **web_page().headers)
        elif self._allowed():
            given = {"/metrics": METRICS, "/v1/models": json.dumps({"data": [CARD]})}.get(path)
            self._send(200 if given else 404, given or "", "text/plain")

    def do_POST(self) -> None:
        self.state.paths.append(self.path)
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if not self._allowed():
            return
        self.state.bodies.append(body)
        replies = self.state.replies
        reply = replies.pop(0) if len(replies) > 1 else replies[0]
        if isinstance(reply, Refused):
            self._refuse(reply)
        else:
            self._stream(reply)

    def _allowed(self) -> bool:
        if not self.state.key or self.headers["authorization"] == f"Bearer {self.state.key}":
            return True
        self._refuse(Refused(401, "the API key is missing or wrong", "invalid_api_key"))
        return False

    def _refuse(self, refused: Refused) -> None:
        error = {"message": refused.message, "code": refused.code}
        self._send(refused.status, json.dumps({"error": error}), "application/json")

    def _send(self, status: int, text: str, kind: str, **headers: str) -> None:
        self.send_response(status)
        data = text.encode()
        for name, value in {"Content-Type": kind, "Content-Length": len(data), **headers}.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, chunks: list[Any]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for chunk in chunks:
            if isinstance(chunk, Hang):
                self.connection.recv(1)
                self.state.left.set()
                return
            text = chunk if isinstance(chunk, str) else json.dumps(chunk)
            # In pieces, to cut events and characters in two.
            data = f"data: {text}\n\n".encode()
            for piece in (data[:9], data[9:]):
                self.wfile.write(piece)
                self.wfile.flush()
