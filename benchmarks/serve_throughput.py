"""What HTTP costs: tokens a second over `spec serve` against the Engine's own, same requests.

    python benchmarks/serve_throughput.py --mode dspark --out result.json

Trials of both take turns, each with the same requests, so many at a time; rates are medians, the
share is the engine's time for all turns against the other's. The Engine runs in this process while
the server rests, and the other way round. The first turn does not count, nor one in which other
programs took a noticeable part of the machine (on Linux); that one is tried again. Time to first
token is what a streaming client sees, from sending to the first text, alone and in company.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from statistics import median
from typing import Any

from harness import stamp
from serve_load import served

from spec_cli import bundled
from spec_server import CacheOptions, Engine, Limits

PROMPTS = (
    "Write a Python function that adds two numbers.",
    "Write a Python function that reverses a string.",
    "Write a Python class for a bank account.",
    "Write a Python function that checks whether a number is prime.",
    "Tell me about the sea.",
    "What is 12 + 30?",
    "How do I boil an egg?",
    "Say something kind to a friend.",
)


def through_engine(engine: Engine, prompt: str, tokens: int) -> int:
    """Tokens of one answer."""
    return engine.generate(prompt, max_tokens=tokens).completion_tokens


def through_http(port: int, prompt: str, tokens: int, stream: bool) -> int:
    """The same over HTTP."""
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": tokens,
            "temperature": 0, "stream": stream}  # fmt: skip
    if stream:
        body["stream_options"] = {"include_usage": True}
    raw = _post(port, body).decode()
    last = raw.strip().split("\n\n")[-2][6:] if stream else raw
    return int(json.loads(last)["usage"]["completion_tokens"])


def _post(port: int, body: dict[str, Any]) -> bytes:
    connection = HTTPConnection("127.0.0.1", port, timeout=300)
    try:
        connection.request(
            "POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"}
        )
        return connection.getresponse().read()
    finally:
        connection.close()


def trial(ask: Callable[[str], int], rows: int, rounds: int) -> float:
    """Tokens a second of `rows` askers at a time."""
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(rows * rounds)]
    began = time.perf_counter()
    with ThreadPoolExecutor(rows) as pool:
        tokens = sum(pool.map(ask, prompts))
    return tokens / (time.perf_counter() - began)


OTHERS_AT_MOST = 0.08
"""Cores that other programs may keep busy during a turn that counts."""


class Others:
    """How much of the machine other programs take, on Linux; 0 elsewhere.

    Args:
        processes: those that belong to the measurement.
    """

    def __init__(self, *processes: int) -> None:
        self._processes = processes
        self._at, self._busy = time.perf_counter(), self._seconds()

    def cores(self) -> float:
        """Cores that were busy with other programs since this was made."""
        passed = time.perf_counter() - self._at
        return max(0.0, self._seconds() - self._busy) / passed

    def _seconds(self) -> float:
        """Processor seconds of all programs but ours, so far."""
        try:
            whole = [int(n) for n in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
            ours = [Path(f"/proc/{n}/stat").read_text().rpartition(")")[2] for n in self._processes]
        except OSError:
            return 0.0
        # user, nice, system, (idle, iowait), irq, softirq, steal: all but the idle ones are busy.
        busy = sum(whole[:3]) + sum(whole[5:8])
        used = sum(int(n) for line in ours for n in line.split()[11:13])
        return (busy - used) / os.sysconf("SC_CLK_TCK")


def first_text(port: int, prompt: str) -> float:
    """Seconds from sending a streaming request to its first text."""
    connection = HTTPConnection("127.0.0.1", port, timeout=300)
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 4, "stream": True,
            "enable_thinking": False}  # fmt: skip
    began = time.perf_counter()
    connection.request(
        "POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"}
    )
    response = connection.getresponse()
    seen = 0.0
    for line in iter(response.readline, b""):
        if not seen and line.startswith(b"data: {"):
            choice = json.loads(line[6:])["choices"][0]
            if choice["delta"]["content"]:
                seen = time.perf_counter() - began
    connection.close()
    return seen


def company(port: int, rows: int, stop: threading.Event) -> Iterator[threading.Thread]:
    """Clients that keep so many rows busy."""

    def work(own: int) -> None:
        while not stop.is_set():
            through_http(port, PROMPTS[own % len(PROMPTS)], 64, True)

    for own in range(rows):
        thread = threading.Thread(target=work, args=(own,))
        thread.start()
        yield thread


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2, help="requests a row and trial")
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=280.0, help="for all trials, at most")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--mode", default="dspark")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--model", default=str(bundled.TARGET))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    arguments = ["--model", options.model, "--mode", options.mode, "--max-batch", str(options.rows)]
    # The command may bring a BLAS of its own; both sides must multiply with the same one.
    arguments += ["--cpu-blas", "bundled", "--dtype", options.dtype]
    limits, cache = Limits(max_batch=options.rows), CacheOptions()
    rates: dict[str, list[float]] = {"engine": [], "http": [], "http_streamed": []}
    with (
        served(arguments) as (_, port, process),
        Engine.load(
            options.model,
            mode=options.mode,
            dtype=options.dtype,
            limits=limits,
            prefix_cache=cache,
        ) as engine,
    ):
        asks: dict[str, Callable[[str], int]] = {
            "engine": lambda prompt: through_engine(engine, prompt, options.tokens),
            "http": lambda prompt: through_http(port, prompt, options.tokens, False),
            "http_streamed": lambda prompt: through_http(port, prompt, options.tokens, True),
        }
        for ask in asks.values():
            trial(ask, options.rows, 1)
        processes, tried = (os.getpid(), process), 0
        ends = time.perf_counter() + options.seconds
        while len(rates["engine"]) < options.trials and time.perf_counter() < ends:
            others, turn = Others(*processes), {}
            for name in _turn(list(asks), tried):
                turn[name] = trial(asks[name], options.rows, options.rounds)
            tried, cores = tried + 1, others.cores()
            print(f"{turn}, others took {cores:.2f} cores", file=sys.stderr)
            if cores <= OTHERS_AT_MOST and tried > 1:
                for name, rate in turn.items():
                    rates[name].append(rate)
        ttft = _first_texts(port, options.rows)
    if not rates["engine"]:
        raise SystemExit("other programs kept the machine busy; nothing was measured")
    result = _summary(options, rates, ttft) | {"turns_tried": tried}
    print(json.dumps(result, indent=2))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=2) + "\n")


def _turn(names: Sequence[str], number: int) -> list[str]:
    """Another order each time."""
    shift = number % len(names)
    return [*names[shift:], *names[:shift]]


def _first_texts(port: int, rows: int) -> dict[str, float]:
    alone = [first_text(port, f"{i}: {PROMPTS[i % 8]}") for i in range(16)]
    stop = threading.Event()
    threads = list(company(port, rows - 1, stop))
    together = [first_text(port, f"{i}. {PROMPTS[i % 8]}") for i in range(16)]
    stop.set()
    for thread in threads:
        thread.join()
    return {"alone": median(alone) * 1e3, "among_others": median(together) * 1e3}


def share(engine: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    """The engine's time for the same requests against another's, and its standard error.

    Every trial has the same requests, so the time of all turns is the sum of 1 / rate; the error is
    the jackknife's, which leaves out one turn after the other.
    """
    own, others = [1 / rate for rate in engine], [1 / rate for rate in other]
    whole, turns = sum(own) / sum(others), len(own)
    if turns < 2:
        return whole, math.nan
    without = [
        (sum(own) - mine) / (sum(others) - theirs) for mine, theirs in zip(own, others, strict=True)
    ]
    return whole, math.sqrt((turns - 1) / turns * sum((one - whole) ** 2 for one in without))


def _summary(
    options: argparse.Namespace, rates: dict[str, list[float]], ttft: dict[str, float]
) -> dict[str, Any]:
    middle = {name: median(values) for name, values in rates.items()}
    shares = {name: share(rates["engine"], rates[name]) for name in ("http", "http_streamed")}
    return {
        **stamp(),
        "model": Path(options.model).name,
        "mode": options.mode,
        "dtype": options.dtype,
        "rows": options.rows,
        "tokens_per_second": {name: round(value, 1) for name, value in middle.items()},
        "share_of_engine": {name: round(value, 3) for name, (value, _) in shares.items()},
        "standard_error": {name: round(error, 3) for name, (_, error) in shares.items()},
        "ttft_ms": {name: round(value, 1) for name, value in ttft.items()},
        "trials": {name: [round(v, 1) for v in values] for name, values in rates.items()},
    }


if __name__ == "__main__":
    main()
