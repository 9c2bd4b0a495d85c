"""Many short requests from several clients against `spec serve`: are all answers as if alone?

    python benchmarks/serve_load.py --requests 2000 --clients 16 --out result.json

Every distinct request is asked once, alone; then clients pick from them at random, pause now and
then, take half of the answers as streams, and hang up on some: in a stream, or while they wait. An
answer that differs from the one given alone, a request without an answer, or a status other than
200 and 429 counts against the server. (429 is tried again, as SDKs do.) The server's memory is
read along the way, and at the end how many rounds of a long answer pass before a short request
that arrives in their midst has its first token.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from statistics import median
from typing import Any

WORDS = (
    "Hello",
    "What is the weather in Paris?",
    "Write a Python function that adds two numbers.",
    "What is 12 + 30?",
    "Tell me about the sea.",
    "Name three colours.",
    "How do I boil an egg?",
    "Say something kind.",
)
SAMPLERS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0, "frequency_penalty": 0.6},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 1, "seed": 2, "top_p": 0.9},
    {"temperature": 1, "top_k": 1},
    {"temperature": 0, "stop": ["the", "."]},
    {"temperature": 0, "response_format": {"type": "json_object"}},
    {"temperature": 1, "seed": 5, "logit_bias": {"300": 2}},
)
BUDGETS = (1, 2, 5, 9, 16, 24, 40)
LEAVE = 0.15
"""How many requests are hung up on."""
PAUSES = (0.0, 0.0, 0.0, 0.02, 0.1)
"""Seconds that a client may wait before its next request."""
ENDLESS = {"logit_bias": {"0": -100, "2": -100}}
"""Bans the bundled pair's end tokens."""


@dataclass(slots=True)
class Report:
    """What happened, over all clients."""

    statuses: Counter[int] = field(default_factory=Counter)
    completed: int = 0
    left: int = 0
    wrong: list[dict[str, Any]] = field(default_factory=list)
    tokens: int = 0
    first_token_seconds: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Client:
    """One connection after the other to a server."""

    host: str
    port: int

    def ask(self, body: Mapping[str, Any], leave_after: int | None = None) -> tuple[int, Any]:
        """Status (0: it was not waited for) and answer (None: likewise).

        Args:
            body: the request.
            leave_after: hang up after so many lines of a stream, or so many hundredths of a
                second where the answer comes as a whole.
        """
        connection = HTTPConnection(self.host, self.port, timeout=1800)
        try:
            raw = json.dumps(body)
            connection.request(
                "POST", "/v1/chat/completions", raw, {"content-type": "application/json"}
            )
            if leave_after is not None and not body.get("stream"):
                time.sleep(leave_after / 100)
                return 0, None
            response = connection.getresponse()
            if leave_after is not None and response.status == 200:
                for _ in range(leave_after):
                    response.readline()
                return response.status, None
            content = response.read()
            if response.status != 200:
                return response.status, json.loads(content)
            if body.get("stream"):
                return 200, _assembled(content.decode())
            answer = json.loads(content)
            return 200, _told(answer["choices"][0], answer["usage"], answer["x_spec"])
        finally:
            connection.close()


def _told(choice: Any, usage: Any, seen: Any) -> dict[str, Any]:
    return {
        "text": choice["message"]["content"] or "",
        "finish": choice["finish_reason"],
        "tokens": usage["completion_tokens"],
        "ttft": seen["ttft_seconds"],
    }


def _assembled(raw: str) -> dict[str, Any]:
    events = [event for event in raw.split("\n\n") if event.startswith("data: ")]
    assert events[-1] == "data: [DONE]", raw[-200:]
    chunks = [json.loads(event[6:]) for event in events[:-1]]
    text = "".join(c["choices"][0]["delta"]["content"] for c in chunks if c["choices"])
    last = chunks[-2]
    return {
        "text": text,
        "finish": last["choices"][0]["finish_reason"],
        "tokens": chunks[-1]["usage"]["completion_tokens"],
        "ttft": last["x_spec"]["ttft_seconds"],
    }


def distinct(count: int, seed: int) -> list[dict[str, Any]]:
    """Requests that differ in prompt, sampler or budget."""
    rng = random.Random(seed)
    made: dict[str, dict[str, Any]] = {}
    while len(made) < count:
        body = {
            "messages": [{"role": "user", "content": rng.choice(WORDS)}],
            "max_tokens": rng.choice(BUDGETS),
            "enable_thinking": False,
            **rng.choice(SAMPLERS),
        }
        made[json.dumps(body, sort_keys=True)] = body
    return list(made.values())


def drive(
    host: str, port: int, requests: int, clients: int, *, kinds: int = 160, seed: int = 0
) -> Report:
    """Ask everything alone, then `requests` of it at random from `clients` threads at once."""
    bodies = distinct(kinds, seed)
    alone = [Client(host, port).ask(body) for body in bodies]
    failed = [answer for status, answer in alone if status != 200]
    if failed:
        raise SystemExit(f"a request fails even alone: {failed[0]}")
    report, lock = Report(), threading.Lock()
    numbers = iter(range(requests))

    def work(own: int) -> None:
        client = Client(host, port)
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            rng = random.Random(seed * 1_000_003 + number)
            _one(client, rng, bodies, alone, report, lock)

    threads = [threading.Thread(target=work, args=(own,)) for own in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return report


def _one(
    client: Client,
    rng: random.Random,
    bodies: Sequence[Mapping[str, Any]],
    alone: Sequence[tuple[int, Any]],
    report: Report,
    lock: threading.Lock,
) -> None:
    """One request, and its answer compared."""
    index = rng.randrange(len(bodies))
    stream, leaves = rng.random() < 0.5, rng.random() < LEAVE
    time.sleep(rng.choice(PAUSES))
    body = dict(bodies[index])
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    while True:
        status, answer = client.ask(body, rng.randint(0, 6) if leaves else None)
        if status:
            with lock:
                report.statuses[status] += 1
        if status != 429:
            break
        time.sleep(0.05)
    expected = alone[index][1]
    with lock:
        if answer is None:
            report.left += 1
            return
        same = status == 200 and all(answer[k] == expected[k] for k in ("text", "finish", "tokens"))
        if not same:
            report.wrong.append({"body": body, "status": status, "got": answer, "alone": expected})
            return
        report.completed += 1
        report.tokens += answer["tokens"]
        report.first_token_seconds.append(answer["ttft"])


@contextmanager
def served(arguments: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """`spec serve` in a process of its own: host, port and process id."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "spec_cli", "serve", "--port", str(port)]
    command += ["--max-draft", "full", *arguments]
    process = subprocess.Popen([*command, "--log-level", "warning"])
    try:
        while _health(port) != 200:
            if process.poll() is not None:
                raise SystemExit("the server did not start")
            time.sleep(0.1)
        yield "127.0.0.1", port, process.pid
    finally:
        process.terminate()
        process.wait(60)


def _health(port: int) -> int:
    connection = HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status
    except OSError:
        return 0
    finally:
        connection.close()


def resident(process: int) -> int:
    """Bytes of memory that a process holds (Linux; 0 elsewhere)."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return 0
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    return int(found[1]) * 1024 if found else 0


def active(host: str, port: int) -> int:
    """Requests that the server holds."""
    connection = HTTPConnection(host, port, timeout=30)
    connection.request("GET", "/health")
    facts = json.loads(connection.getresponse().read())
    connection.close()
    return int(facts["running"] + facts["waiting"])


class Watch:
    """Reads a process's memory every second, in the background."""

    def __init__(self, process: int) -> None:
        self._process = process
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self.sizes: list[int] = []

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _read(self) -> None:
        while not self._ended.wait(1.0):
            self.sizes.append(resident(self._process))


def rounds_before_the_first_token(port: int, repeats: int) -> list[int]:
    """How many chunks of a 400-token answer come between a short request and its first text.

    A chunk of the long answer is a round. The one that runs when the request arrives counts.
    """
    return [_rounds_before(port, number) for number in range(repeats)]


def _rounds_before(port: int, number: int) -> int:
    """One long answer, and one short request in its midst."""
    times: list[float] = []
    begun = threading.Event()

    def long() -> None:
        for _ in _texts(port, f"Tell me about the sea, part {number}.", 400):
            times.append(time.perf_counter())
            if len(times) == 10:
                begun.set()

    thread = threading.Thread(target=long)
    thread.start()
    begun.wait(120)
    time.sleep(0.01 * (number % 5))
    sent = time.perf_counter()
    texts = _texts(port, f"Hello number {number}", 8)
    next(texts)
    seen = time.perf_counter()
    for _ in texts:
        pass
    thread.join()
    assert seen < times[-1], "the long answer ended before the short one began"
    return sum(sent < at <= seen for at in times)


def _texts(port: int, prompt: str, tokens: int) -> Iterator[str]:
    """The texts of a stream, as they come."""
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "temperature": 0,
        "enable_thinking": False,
        "stream": True,
        **ENDLESS,
    }
    connection = HTTPConnection("127.0.0.1", port, timeout=1800)
    connection.request(
        "POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"}
    )
    for line in iter(connection.getresponse().readline, b""):
        if line.startswith(b"data: {"):
            text = json.loads(line[6:])["choices"][0]["delta"]["content"]
            if text:
                yield text
    connection.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--kinds", type=int, default=160, help="distinct requests")
    parser.add_argument("--mode", default="dspark")
    parser.add_argument("--serve", default="", help="more options of spec serve")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    arguments = ["--dtype", "float32", "--cpu-blas", "bundled", "--mode", options.mode]
    with served([*arguments, *options.serve.split()]) as (host, port, process):
        began = time.perf_counter()
        with Watch(process) as watch:
            report = drive(host, port, options.requests, options.clients, kinds=options.kinds)
        seconds = time.perf_counter() - began
        while active(host, port):
            time.sleep(0.05)
        rounds = rounds_before_the_first_token(port, 8)
    result = _summary(options, report, watch.sizes, seconds) | {
        "rounds_before_the_first_token": {"median": median(rounds), "most": max(rounds)}
    }
    print(json.dumps(result, indent=2))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=2) + "\n")
    sys.exit(bool(result["wrong"] or result["lost"]))


def _summary(
    options: argparse.Namespace, report: Report, memory: Sequence[int], seconds: float
) -> dict[str, Any]:
    from harness import stamp

    ttft = sorted(report.first_token_seconds)
    answered = report.completed + report.left + len(report.wrong)
    return {
        **stamp(),
        "mode": options.mode,
        "clients": options.clients,
        "requests": options.requests,
        "completed": report.completed,
        "hung_up": report.left,
        "wrong": len(report.wrong),
        "lost": options.requests - answered,
        "examples": report.wrong[:3],
        "statuses": dict(report.statuses),
        "tokens": report.tokens,
        "seconds": round(seconds, 1),
        "ttft_ms": {"median": round(median(ttft) * 1e3, 1), "p95": _p95(ttft)} if ttft else {},
        "resident_mib": _tenths([n >> 20 for n in memory]),
    }


def _tenths(values: Sequence[int]) -> list[int]:
    """The median of each tenth of a run."""
    size = max(len(values) // 10, 1)
    return [int(median(values[i : i + size])) for i in range(0, size * 10, size) if values[i:]]


def _p95(values: Sequence[float]) -> float:
    return round(values[int(len(values) * 0.95)] * 1e3, 1)


if __name__ == "__main__":
    main()
