"""Ten things that go wrong in practice, each over a real server in every mode."""

from __future__ import annotations

import json
import random
import resource
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from spec_server import Limits

from .checkpoints import END, build_drafter
from .conftest import Serve, shared

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ENDLESS = {"logit_bias": {str(END): -100}}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def user(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **more}


def post(server: Any, path: str, body: dict[str, Any], status: int = 200) -> Any:
    response = server.post(path, body)
    raw = response.read()
    assert response.status == status, raw
    return json.loads(raw)


def stream(server: Any, path: str, body: dict[str, Any]) -> list[Any]:
    """A stream's events; it ends with [DONE]."""
    raw = server.post(path, {**body, "stream": True}).read().decode()
    texts = [event for event in raw.split("\n\n") if event and not event.startswith(":")]
    assert texts[-1] == "data: [DONE]"
    return [json.loads(text[6:]) for text in texts[:-1]]


def written(server: Any, body: dict[str, Any]) -> tuple[list[str], str]:
    """The tokens of a completion, and why it ended."""
    choice = post(server, TEXT, {"logprobs": 0, "temperature": 0, **body})["choices"][0]
    return choice["logprobs"]["tokens"], choice["finish_reason"]


def content(server: Any, body: dict[str, Any]) -> str:
    text: str = post(server, CHAT, {"temperature": 0, **body})["choices"][0]["message"]["content"]
    return text


# ------------------------------------------------------------------ 1: lossless


def prompts(count: int) -> list[list[int]]:
    """Random bytes, and periodic ones, as token ids."""
    rng = random.Random(5)
    made = [[rng.randrange(256) for _ in range(rng.randint(1, 60))] for _ in range(count)]
    return made + [[60 + i % n for i in range(24)] for n in (1, 2, 3, 5, 7)][: max(1, count // 4)]


def check_lossless(serve: Serve, kind: str, mode: str, count: int, caps: list[int | None]) -> None:
    plain, server = serve(kind, "baseline"), serve(kind, mode)
    for prompt in prompts(count):
        body = {"prompt": prompt, "max_tokens": 64, **ENDLESS}
        expected = written(plain, body)
        for cap in caps:
            more = {} if cap is None else {"max_draft": cap}
            answer = post(server, TEXT, {**body, **more, "logprobs": 0, "temperature": 0})
            choice, seen = answer["choices"][0], answer["x_spec"]
            assert (choice["logprobs"]["tokens"], choice["finish_reason"]) == expected
            assert seen["mode"] == mode
            assert all(n <= (cap if cap is not None else 32) for n in seen["round_accepts"])
            emitted = sum(seen["round_accepts"]) + seen["rounds"] + 1
            assert 0 <= emitted - 64 <= 32


drafting = pytest.mark.parametrize("mode", ["lookup", "dspark", "dflash"])
every_kind = pytest.mark.parametrize("kind", ["dense", "window", "hybrid"])
dense_at_least = pytest.mark.parametrize(
    "kind",
    ["dense", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("window", "hybrid"))],
)
"""The other two belong to the slow tests."""


@drafting
@every_kind
def test_1_lossless_on_three_cache_kinds(serve: Serve, kind: str, mode: str) -> None:
    check_lossless(serve, kind, mode, 2, [2, None])


@pytest.mark.slow
@drafting
@every_kind
def test_1_lossless_at_every_draft_length(serve: Serve, kind: str, mode: str) -> None:
    check_lossless(serve, kind, mode, 20, [1, 2, 4, 7, 16, None])


@pytest.mark.slow
@drafting
@every_kind
def test_1_lossless_with_lengths_that_the_engine_chooses(
    serve: Serve, kind: str, mode: str
) -> None:
    plain, server = serve(kind, "baseline"), serve(kind, mode, max_draft="auto")
    for prompt in prompts(6):
        body = {"prompt": prompt, "max_tokens": 64, **ENDLESS}
        assert written(server, body) == written(plain, body)


# ------------------------------------------------------------------ 2: penalties


@drafting
@dense_at_least
def test_2_penalties_under_speculation(serve: Serve, kind: str, mode: str) -> None:
    plain, server = serve(kind, "baseline"), serve(kind, mode)
    variants: list[dict[str, float]] = [
        {},
        {"frequency_penalty": 0.8},
        {"presence_penalty": 0.8},
        {"frequency_penalty": 0.8, "presence_penalty": 0.8},
        {"repetition_penalty": 1.3},
    ]
    texts = []
    for more in variants:
        body = {"prompt": "abcabcabcabc", "max_tokens": 48, **ENDLESS, **more}
        texts.append(written(server, body))
        assert texts[-1] == written(plain, body)
    assert all(text != texts[0] for text in texts[1:])


# ------------------------------------------------------------------ 3: tool calls


def test_3_a_streamed_tool_call_is_the_whole_one(serve: Serve, mode: str) -> None:
    server = serve("scripted", mode)
    body = user("T", tools=[WEATHER])
    choice = post(server, CHAT, body)["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    chunks = [c["choices"][0] for c in stream(server, CHAT, body)]
    calls = [d for c in chunks for d in c["delta"].get("tool_calls", ())]
    assert {d["index"] for d in calls} == {0}
    assert len({d["id"] for d in calls if "id" in d}) == 1
    streamed = "".join(d["function"].get("arguments", "") for d in calls)
    for arguments in (call["function"]["arguments"], streamed):
        assert json.loads(arguments) == {"city": "Paris"}
    assert call["function"]["name"] == calls[0]["function"]["name"] == "get_weather"
    assert choice["finish_reason"] == chunks[-1]["finish_reason"] == "tool_calls"
    assert not choice["message"]["content"]
    assert all(c["delta"]["content"] == "" for c in chunks)


# ------------------------------------------------------------------ 4: stop strings


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (["beta gamma"], "alpha "),
        (["pha"], "al"),
        (["eta"], "alpha b"),
        (["delta2"], "alpha beta gamma "),
        (["ga", "beta"], "alpha "),
    ],
)
def test_4_stop_across_and_inside_tokens(
    serve: Serve, mode: str, stop: list[str], expected: str
) -> None:
    server = serve("scripted", mode)
    body = user("S", stop=stop)
    choice = post(server, CHAT, body)["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (expected, "stop")
    pieces = [c["choices"][0]["delta"]["content"] for c in stream(server, CHAT, body)]
    for end in range(len(pieces) + 1):
        assert expected.startswith("".join(pieces[:end]))
    assert "".join(pieces) == expected


def test_4_characters_over_several_tokens(serve: Serve, mode: str) -> None:
    server = serve("scripted", mode)
    pieces = [c["choices"][0]["delta"]["content"] for c in stream(server, CHAT, user("U"))]
    assert "".join(pieces) == content(server, user("U")) == "hi 😀漢!"
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


# ------------------------------------------------------------------ 5: usage


@every_kind
def test_5_the_usage_chunk(serve: Serve, kind: str, mode: str) -> None:
    server = serve(kind, mode)
    body = user("count", max_tokens=20, **ENDLESS)
    chunks = stream(server, CHAT, {**body, "stream_options": {"include_usage": True}})
    (last,) = [c for c in chunks if c["usage"] is not None]
    assert last is chunks[-1]
    assert (last["choices"], last["object"]) == ([], "chat.completion.chunk")
    usage, whole = last["usage"], post(server, CHAT, body)["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert usage[name] == whole[name]
    without = stream(server, CHAT, body)
    assert all("usage" not in c and len(c["choices"]) == 1 for c in without)


# ------------------------------------------------------------------ 6: clients that leave


def leave(server: Any, number: int) -> None:
    """Send a request and hang up: in a stream, in a prefill, while waiting for a whole answer."""
    long = [1 + i % 90 for i in range(1500)] if number % 2 else [5, 6, 7]
    body = {"prompt": [number, *long], "max_tokens": 400, **ENDLESS, "stream": number % 4 < 2}
    raw = json.dumps(body).encode()
    head = (
        f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(raw)}\r\n\r\n"
    )
    with server.socket() as client:
        client.sendall(head.encode() + raw)
        if number % 4 == 0:
            seen = b""
            while seen.count(b"data: ") < 3:
                seen += client.recv(4096)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def active(server: Any) -> int:
    facts = server.get("/health")[1]
    return int(facts["running"] + facts["waiting"])


@dense_at_least
def test_6_clients_that_leave(serve: Serve, kind: str, mode: str) -> None:
    server = serve(kind, mode)
    body = {"prompt": "still there?", "max_tokens": 12, **ENDLESS}
    expected = written(serve(kind, "baseline"), body)
    for number in range(8 if kind == "dense" else 4):
        leave(server, number)
        shared("live").eventually(lambda: active(server) == 0)
        assert written(server, body) == expected


@pytest.mark.slow
def test_6_memory_stays_flat(serve: Serve, mode: str) -> None:
    server = serve("dense", mode)

    def resident() -> int:
        pages = Path("/proc/self/statm").read_text().split()[1]
        return int(pages) * resource.getpagesize()

    sizes = []
    for number in range(60):
        leave(server, number % 20)
        shared("live").eventually(lambda: active(server) == 0)
        sizes.append(resident())
    assert sizes[-1] - sizes[20] < 48 * 2**20


# ------------------------------------------------------------------ 7: context


@dense_at_least
def test_7_context_overflow(serve: Serve, kind: str, mode: str) -> None:
    server = serve(kind, mode, Limits(max_batch=4, context_window=256))
    for body in ({"prompt": "x" * 400, "max_tokens": 9}, {"prompt": "x" * 256}):
        for streamed in (False, True):
            error = post(server, TEXT, {**body, "stream": streamed}, 400)["error"]
            assert error["code"] == "context_length_exceeded"
            for number in ("256", str(len(body["prompt"]))):  # type: ignore[arg-type]
                assert number in error["message"]
    body = {"prompt": "x" * 250, "max_tokens": 100, **ENDLESS}
    tokens, reason = written(server, body)
    assert (len(tokens), reason) == (6, "length")
    plain = serve(kind, "baseline", Limits(max_batch=4, context_window=256))
    assert (tokens, reason) == written(plain, body)


# ------------------------------------------------------------------ 8: reuse


@every_kind
def test_8_the_second_identical_request_hits(serve: Serve, kind: str, mode: str) -> None:
    server, fresh = serve(kind, mode), serve(kind, "baseline")
    rng = random.Random(f"{kind} {mode}")
    system = "".join(rng.choice("abcdefgh ") for _ in range(300))
    turns = [{"role": "system", "content": system}, {"role": "user", "content": "one"}]
    body = {"messages": turns, "max_tokens": 16, "temperature": 0, **ENDLESS}
    before = hits(server)
    first, second = post(server, CHAT, body), post(server, CHAT, body)
    assert hits(server) == before + 1
    assert first["choices"][0]["message"] == second["choices"][0]["message"]
    usage = second["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert cached >= 0.9 * usage["prompt_tokens"]
    assert second["x_spec"]["round_accepts"] == first["x_spec"]["round_accepts"]
    reply = first["choices"][0]["message"]["content"]
    turns += [{"role": "assistant", "content": reply}, {"role": "user", "content": "two"}]
    assert content(server, body) == content(fresh, body)


def hits(server: Any) -> float:
    connection = server.connect()
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    (line,) = [li for li in text.splitlines() if li.startswith("spec_prefix_cache_hits_total ")]
    return float(line.split()[1])


# ------------------------------------------------------------------ 9: batches


@dense_at_least
def test_9_each_row_its_own_sampler(serve: Serve, kind: str, mode: str) -> None:
    server = serve(kind, mode)
    common = {"prompt": "each its own", "max_tokens": 24, "logprobs": 0, **ENDLESS}
    rows: list[dict[str, Any]] = [
        {**common, "temperature": 0},
        {**common, "temperature": 1, "seed": 1},
        {**common, "temperature": 1, "seed": 2},
        {**common, "temperature": 1, "top_k": 1},
    ]

    def ask(body: dict[str, Any]) -> list[str]:
        tokens: list[str] = post(server, TEXT, body)["choices"][0]["logprobs"]["tokens"]
        return tokens

    alone = [ask(row) for row in rows]
    assert alone[0] == alone[3]
    assert len({tuple(tokens) for tokens in alone}) == 3
    plain = serve(kind, "baseline")
    assert alone == [post(plain, TEXT, row)["choices"][0]["logprobs"]["tokens"] for row in rows]
    rng = random.Random(1)
    with ThreadPoolExecutor(4) as pool:
        for _ in range(8 if kind == "dense" else 3):
            order = rng.sample(range(4), 4)
            together = list(pool.map(ask, [rows[i] for i in order]))
            assert together == [alone[i] for i in order]


# ------------------------------------------------------------------ 10: wrong checkpoints


def spec(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "spec_cli", "serve", "--port", "0", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_10_wrong_drafters_are_named(folders: Callable[[str], Path], tmp_path: Path) -> None:
    target = folders("dense")
    wide = build_drafter(tmp_path / "wide", target, "dspark", hidden_size=96)
    words = build_drafter(tmp_path / "words", target, "dspark", vocab_size=300)
    empty = build_drafter(tmp_path / "empty", target, "dspark")
    (empty / "model.safetensors").unlink()
    for arguments, mentions in (
        (["--drafter", str(wide)], ["hidden", "96", "64"]),
        (["--drafter", str(words)], ["300", "258"]),
        (["--drafter", str(empty)], [str(empty)]),
    ):
        ended = spec("--model", str(target), *arguments)
        assert ended.returncode == 1
        (line,) = [li for li in ended.stderr.splitlines() if li.startswith("spec: ")]
        assert "Traceback" not in ended.stderr
        for mention in mentions:
            assert mention in line
    ended = spec("--model", str(folders("dense:dspark")))
    assert ended.returncode == 1
    assert "--drafter" in ended.stderr
    assert "Traceback" not in ended.stderr
