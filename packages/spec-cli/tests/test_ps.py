"""`spec ps`: what a server says of itself."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from .command import Spec

KEY = "a-key"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """A server's address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "spec_cli", "serve", "--port", "0", "--no-prefix-cache"],
        env=os.environ | {"SPEC_API_KEY": KEY},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    address = ""
    for line in process.stderr:
        found = re.search(r"http://[\d.]+:\d+", line)
        if found:
            address = found[0]
            break
    rest = threading.Thread(target=process.stderr.read)
    rest.start()
    yield address
    process.send_signal(signal.SIGINT)
    process.wait(30)
    rest.join()
    process.stderr.close()


def test_a_running_server_is_described(spec: Spec, server: str) -> None:
    options = ("--url", f"{server}/v1", "--api-key", KEY)
    fresh = spec("ps", *options)
    assert fresh.code == 0, fresh.err
    assert "nothing was drafted yet" in fresh.out
    seen = answered(server)
    record = json.loads(spec("ps", "--json", *options).out)
    for _ in range(100):  # the round that ended the answer may still be counted
        if record["running"]:
            record = json.loads(spec("ps", "--json", *options).out)
    assert (record["status"], record["model"], record["mode"]) == ("ready", "spec-tiny", "dspark")
    assert (record["running"], record["waiting"], record["cache"]) == (0, 0, None)
    assert record["generation_tokens"] == seen["completion_tokens"]
    assert record["mean_accept_length"] == pytest.approx(seen["mean_accept_length"])
    assert len(record["accept_by_position"]) == 7
    assert f"{record['mean_accept_length']:.2f} tokens a round" in spec("ps", *options).out


def answered(server: str) -> dict[str, Any]:
    """Have it answer once; its own figures."""
    body = {
        "messages": [{"role": "user", "content": "Write a Python function that adds two numbers."}]
    }
    request = urllib.request.Request(
        f"{server}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"},
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        answer = json.loads(reply.read())
    seen: dict[str, Any] = answer["x_spec"]
    return seen | answer["usage"]


def test_a_server_with_a_key_wants_it(spec: Spec, server: str) -> None:
    ran = spec("ps", "--url", server)
    assert ran.code == 1
    assert "SPEC_API_KEY" in ran.err


def test_no_server_is_one_sentence(spec: Spec) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        ran = spec("ps", "--url", f"http://127.0.0.1:{taken.getsockname()[1]}")
    assert (ran.code, ran.out) == (1, "")
    assert "no server answers" in ran.err
    assert "spec serve" in ran.err


@pytest.mark.parametrize("url", ["nonsense", "http://", "localhost:8000", "http://host:port", ""])
def test_what_is_no_url_is_called_so(spec: Spec, url: str) -> None:
    ran = spec("ps", "--url", url)
    assert (ran.code, ran.out) == (2, "")
    assert f"{url!r} is no URL; write it as http://host:port" in ran.err


@pytest.mark.parametrize("body", [b"hello", b"[]", b'{"status": "ok"}'])
def test_another_kind_of_server_is_told_apart(spec: Spec, body: bytes) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as other:
        threading.Thread(target=other.serve_forever, args=(0.02,), daemon=True).start()
        ran = spec("ps", "--url", f"http://127.0.0.1:{other.server_port}")
        other.shutdown()
    assert ran.code == 1
    assert "is no `spec serve`" in ran.err
