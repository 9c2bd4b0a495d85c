"""Who may talk to the server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient

from spec_server import Engine
from spec_server.http import ServerSettings, create_app

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "S"}], "max_tokens": 2}
EVIL = "https://evil.example"

Make = Callable[..., TestClient]


@pytest.fixture
def make(scripted_engine: Engine) -> Iterator[Make]:
    with ExitStack() as stack:

        def client(base: str = "http://127.0.0.1:8000", **settings: object) -> TestClient:
            app = create_app(scripted_engine, ServerSettings(**settings))  # type: ignore[arg-type]
            return stack.enter_context(TestClient(app, base_url=base))

        yield client


def code(response: object) -> tuple[int, str | None]:
    return response.status_code, response.json()["error"]["code"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "base", ["http://127.0.0.1:9", "http://localhost:9", "http://[::1]:9", "http://192.168.1.7"]
)
def test_addresses_and_localhost_are_allowed(make: Make, base: str) -> None:
    assert make(base).post(CHAT, json=BODY).status_code == 200


def test_a_name_that_was_not_allowed_is_refused(make: Make) -> None:
    """DNS rebinding: a page under its own name, which now points to this machine."""
    client = make("http://evil.example:8000")
    for answer in (client.post(CHAT, json=BODY), client.get("/v1/models"), client.get("/metrics")):
        assert code(answer) == (403, "host_not_allowed")
    assert client.get("/health").status_code == 200
    for allowed in (("evil.example",), ("*",)):
        named = make("http://Evil.Example:8000", allowed_hosts=allowed)
        assert named.post(CHAT, json=BODY).status_code == 200


@pytest.mark.parametrize("origin", [EVIL, "null", "http://127.0.0.1:9999", "http://localhost"])
def test_pages_of_other_origins_are_refused(make: Make, origin: str) -> None:
    client = make()
    for answer in (
        client.post(CHAT, json=BODY, headers={"origin": origin}),
        client.get("/v1/models", headers={"origin": origin}),
    ):
        assert code(answer) == (403, "origin_not_allowed")
        assert "access-control-allow-origin" not in answer.headers


def test_the_server_s_own_pages_are_allowed(make: Make) -> None:
    own = {"origin": "http://127.0.0.1:8000"}
    assert make().post(CHAT, json=BODY, headers=own).status_code == 200


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""]
)
def test_what_a_page_can_send_without_a_preflight_is_refused(make: Make, kind: str) -> None:
    answer = make().post(CHAT, content=b'{"messages": []}', headers={"content-type": kind})
    assert code(answer) == (415, "unsupported_media_type")


def test_json_with_a_character_set_is_taken(make: Make) -> None:
    raw = b'{"messages": [{"role": "user", "content": "S"}], "max_tokens": 1}'
    kind = {"content-type": "application/json; charset=utf-8"}
    assert make().post(CHAT, content=raw, headers=kind).status_code == 200


PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


def test_preflights(make: Make) -> None:
    client = make(api_keys=("secret",), cors_origins=("https://good.example",))
    allowed = client.options(CHAT, headers={"origin": "https://good.example", **PREFLIGHT})
    assert allowed.status_code == 204
    assert allowed.headers["access-control-allow-origin"] == "https://good.example"
    assert "POST" in allowed.headers["access-control-allow-methods"]
    assert allowed.headers["access-control-allow-headers"] == "authorization,content-type"
    assert "access-control-allow-credentials" not in allowed.headers
    refused = client.options(CHAT, headers={"origin": EVIL, **PREFLIGHT})
    assert code(refused) == (403, "origin_not_allowed")


def test_listed_origins_can_read_answers_and_errors(make: Make) -> None:
    client = make(api_keys=("secret",), cors_origins=("https://good.example",))
    page = {"origin": "https://good.example"}
    unauthorised = client.post(CHAT, json=BODY, headers=page)
    assert code(unauthorised) == (401, "invalid_api_key")
    key = {"authorization": "Bearer secret"}
    for answer in (
        unauthorised,
        client.post(CHAT, json=BODY, headers=page | key),
        client.post(CHAT, json={**BODY, "n": 0}, headers=page | key),
        client.post("/nowhere", json={}, headers=page | key),
    ):
        assert answer.headers["access-control-allow-origin"] == "https://good.example"
        assert "Origin" in answer.headers["vary"]


def test_keys(make: Make) -> None:
    client = make(api_keys=("first", "second"))
    for headers in (
        {"authorization": "Bearer first"},
        {"authorization": "bearer second"},
        {"x-api-key": "first"},
    ):
        assert client.post(CHAT, json=BODY, headers=headers).status_code == 200
    for headers in (
        {},
        {"authorization": "Bearer third"},
        {"authorization": "Bearer "},
        {"authorization": "Basic first"},
        {"x-api-key": "firs"},
    ):
        answer = client.post(CHAT, json=BODY, headers=headers)
        assert code(answer) == (401, "invalid_api_key")
        assert answer.headers["www-authenticate"] == "Bearer"
    for path in ("/v1/models", "/metrics", "/v1/models/x", "/nowhere"):
        assert client.get(path).status_code == 401
    for path in ("/health", "/readyz", "/"):
        assert client.get(path).status_code == 200
    assert client.head("/").status_code == 200


def test_a_key_makes_any_host_safe(make: Make) -> None:
    client = make("http://box.lan:8000", api_keys=("first",))
    assert client.post(CHAT, json=BODY, headers={"x-api-key": "first"}).status_code == 200


def test_keys_are_not_shown() -> None:
    assert "hush" not in repr(ServerSettings(api_keys=("hush",)))


def test_rules_hold_below_a_prefix(scripted_engine: Engine) -> None:
    inner = create_app(scripted_engine, ServerSettings(api_keys=("key",)))
    outer = Starlette(routes=[Mount("/llm", inner)])
    with TestClient(outer, base_url="http://127.0.0.1") as client:
        assert client.get("/llm/health").status_code == 200
        assert client.get("/llm/v1/models").status_code == 401
        key = {"x-api-key": "key"}
        assert client.get("/llm/v1/models", headers=key).status_code == 200
        answer = client.post(f"/llm{CHAT}", json=BODY, headers=key)
        assert answer.json()["choices"][0]["message"]["content"] == "alpha "
        assert client.get("/v1/models", headers=key).status_code == 404
        assert client.get("/llm/nowhere", headers=key).json()["error"]["code"] == "not_found"


@pytest.mark.parametrize(
    "settings",
    [
        {"api_keys": ("",)},
        {"cors_origins": ("example.org",)},
        {"cors_origins": ("https://example.org/",)},
        {"max_body_bytes": 0},
        {"keepalive_seconds": 0},
        {"default_max_tokens": 0},
    ],
    ids=str,
)
def test_settings_out_of_range(settings: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings)).removesuffix("s")):
        ServerSettings(**settings)  # type: ignore[arg-type]
