"""The prefix cache over HTTP: what is reported, and who shares."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from spec_core import InvalidValueError
from spec_server import CacheOptions, Engine, Limits, MemoryLimitError
from spec_server.http import ServerSettings, create_app

LONG = "word " * 40 + "S"


@pytest.fixture
def engine(scripted: Path) -> Iterator[Engine]:
    with Engine.load(scripted, mode="lookup", limits=Limits(max_batch=4)) as made:
        yield made


@pytest.fixture
def client(engine: Engine) -> Iterator[TestClient]:
    app = create_app(engine, ServerSettings())
    with TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False) as made:
        yield made


def ask(client: TestClient, headers: dict[str, str] | None = None, **more: Any) -> Any:
    body = {"prompt": LONG, "max_tokens": 3, **more}
    return client.post("/v1/completions", json=body, headers=headers)


def cached(client: TestClient, headers: dict[str, str] | None = None, **more: Any) -> int:
    answer = ask(client, headers, **more).json()
    seen: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert answer["x_spec"]["cached_tokens"] == seen
    return seen


def test_reuse_is_on_by_default_and_reported(client: TestClient) -> None:
    first, second = ask(client).json(), ask(client).json()
    length = first["usage"]["prompt_tokens"]
    assert first["x_spec"]["cache_stopped"] == "unseen"
    assert (first["x_spec"]["cached_tokens"], first["x_spec"]["cache_stopped_at"]) == (0, 0)
    assert second["x_spec"]["cached_tokens"] == length - 1
    assert second["x_spec"]["cache_stopped"] == "end"
    assert second["x_spec"]["cache_stopped_at"] == length - 1
    assert first["choices"][0]["text"] == second["choices"][0]["text"]

    edited = ask(client, prompt=LONG.replace("word word S", "word wood S")).json()
    assert edited["x_spec"]["cache_stopped"] == "diverged"
    assert 16 <= edited["x_spec"]["cached_tokens"] == edited["x_spec"]["cache_stopped_at"]
    assert edited["x_spec"]["cached_tokens"] < length - 1


def test_tenants_share_nothing_and_the_header_goes_before_the_body(client: TestClient) -> None:
    assert cached(client) == 0
    assert cached(client, {"X-Cache-Salt": "a"}) == 0
    assert cached(client, {"x-cache-salt": "a"}) > 0
    assert cached(client, cache_salt="a") > 0
    assert cached(client, cache_salt="b") == 0
    assert cached(client, {"X-Cache-Salt": "c"}, cache_salt="b") == 0
    assert cached(client) > 0
    chat = {"messages": [{"role": "user", "content": LONG}], "max_tokens": 3, "cache_salt": "a"}
    seen = [
        client.post("/v1/chat/completions", json=chat, headers=headers).json()["x_spec"]
        for headers in ({}, {}, {"X-Cache-Salt": "d"})
    ]
    assert [one["cached_tokens"] > 0 for one in seen] == [False, True, False]


def test_a_salt_that_cannot_be_kept_is_refused(client: TestClient) -> None:
    for headers, more, param in (
        ({"X-Cache-Salt": ""}, {}, "X-Cache-Salt"),
        ({"X-Cache-Salt": "x" * 257}, {}, "X-Cache-Salt"),
        ({}, {"cache_salt": ""}, "cache_salt"),
        ({}, {"cache_salt": 7}, "cache_salt"),
    ):
        response = ask(client, headers, **more)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param


def test_metrics_of_what_is_kept(client: TestClient) -> None:
    ask(client)
    ask(client)
    values = {
        line.split()[0]: float(line.split()[1])
        for line in client.get("/metrics").text.splitlines()
        if line.startswith("spec_prefix_cache")
    }
    assert values["spec_prefix_cache_queries_total"] == 2
    assert values["spec_prefix_cache_hits_total"] == 1
    assert 0 < values["spec_prefix_cache_ram_bytes"] < values["spec_prefix_cache_ram_limit_bytes"]
    assert values["spec_prefix_cache_stored_entries_total"] > 0
    assert values["spec_prefix_cache_disk_bytes"] == 0


def test_without_a_cache(scripted: Path) -> None:
    with (
        Engine.load(scripted, mode="lookup", prefix_cache=None) as engine,
        TestClient(create_app(engine), base_url="http://127.0.0.1") as client,
    ):
        assert [cached(client) for _ in range(2)] == [0, 0]
        assert ask(client).json()["x_spec"]["cache_stopped"] == "off"
        assert "spec_prefix_cache_ram_bytes" not in client.get("/metrics").text


@pytest.mark.parametrize("prefix_cache", [None, CacheOptions()])
def test_a_limit_that_leaves_nothing_is_refused_at_once(
    scripted: Path, prefix_cache: CacheOptions | None
) -> None:
    limits = Limits(memory_bytes=1 << 20)
    with pytest.raises(MemoryLimitError, match=r"leaves 0 MiB for requests.*raise that limit"):
        Engine.load(scripted, mode="lookup", prefix_cache=prefix_cache, limits=limits)


def test_what_it_may_take_is_taken_off_the_limit(scripted: Path) -> None:
    limits = Limits(memory_bytes=1 << 30)
    with Engine.load(scripted, mode="lookup", prefix_cache=None, limits=limits) as engine:
        memory = engine._worker.memory
        assert memory is not None
        assert memory.room is not None
        room = memory.room
    with Engine.load(scripted, mode="lookup", limits=limits) as engine:
        assert engine.cache is not None
        ram, memory = engine.cache.stats().ram_limit, engine._worker.memory
        assert memory is not None
        assert memory.room is not None
        assert ram == pytest.approx(room / 8, rel=0.1)
        assert memory.room + ram == pytest.approx(room, rel=0.1)
    with pytest.raises(InvalidValueError, match="memory limit leaves"):
        Engine.load(scripted, mode="lookup", prefix_cache=CacheOptions(1 << 30), limits=limits)
