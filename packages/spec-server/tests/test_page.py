"""The page at `/`: how it is served, and what it can never ask for."""

from __future__ import annotations

import base64
import hashlib
import logging
import re

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient

from spec_server import Engine
from spec_server.http import EngineSlot, ServerSettings, create_app
from spec_server.http.webpage import web_page

BASE = "http://127.0.0.1:8000"
TEXT = web_page().text
SCRIPT = TEXT.partition('<script type="module">')[2].partition("</script>")[0]
STYLE = TEXT.partition("<style>")[2].partition("</style>")[0]


def client(settings: ServerSettings | None = None, base: str = BASE) -> TestClient:
    """The page needs no engine."""
    return TestClient(create_app(EngineSlot(), settings), base_url=base)


def policy(headers: object) -> dict[str, str]:
    rules = headers["content-security-policy"].split("; ")  # type: ignore[index]
    return dict(rule.split(" ", 1) for rule in rules)


def test_a_browser_gets_html_that_only_runs_its_own_script() -> None:
    response = client().get("/")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.text == TEXT
    found = policy(response.headers)
    for name, part in (("script-src", SCRIPT), ("style-src", STYLE)):
        digest = base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()
        assert found[name] == f"'sha256-{digest}'"
    assert found["default-src"] == found["frame-ancestors"] == found["form-action"] == "'none'"
    assert found["base-uri"] == "'none'"
    assert found["connect-src"] == "'self'"
    assert found["require-trusted-types-for"] == "'script'"
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"


def test_style_and_script_are_whole() -> None:
    """Nothing inside them ends them early, and no place is left open."""
    assert SCRIPT.rstrip().endswith("new Page().start();")
    assert STYLE.count("{") == STYLE.count("}") > 50
    assert TEXT.count("<script") == TEXT.count("</script") == 1
    assert TEXT.count("<style") == TEXT.count("</style") == 1
    assert "/*script*/" not in TEXT
    assert "/*style*/" not in TEXT


def test_no_address_of_another_server() -> None:
    """Only the namespace of the icon's SVG looks like one; nothing is loaded by it."""
    found = re.findall(r"(?:https?:|wss?:)?//[\w.-]+\.\w+[\w./-]*", TEXT)
    assert found == ["http://www.w3.org/2000/svg"]
    assert not re.search(r"@import|url\(", STYLE)


def test_addresses_are_relative_and_nothing_but_the_icon_is_loaded_by_the_document() -> None:
    markup = TEXT.replace(SCRIPT, "").replace(STYLE, "")
    loaded = re.findall(r'\b(?:href|src|action|srcset|poster|data)="([^"]{0,5})', markup)
    assert loaded == ["data:"]
    asked = re.findall(r'\.ask\("([^"]+)"', SCRIPT)
    assert sorted(asked) == ["metrics", "v1/chat/completions", "v1/models"]
    assert SCRIPT.count("fetch(") == 1


def test_text_never_becomes_markup() -> None:
    """Second to the policy's trusted types, which Chromium enforces."""
    forbidden = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|DOMParser"
    )
    assert not re.search(forbidden, SCRIPT)
    assert not re.search(r'\son\w+="', TEXT.replace(SCRIPT, ""))


def test_head_tells_the_same_without_a_body() -> None:
    for settings in (ServerSettings(), ServerSettings(page=False), ServerSettings(api_keys=("k",))):
        response = client(settings).head("/")
        assert response.status_code == 200
        assert response.content == b""


def test_below_a_prefix() -> None:
    outer = Starlette(routes=[Mount("/llm", create_app(EngineSlot()))])
    with TestClient(outer, base_url=BASE) as browser:
        assert browser.get("/llm/").text == TEXT
        assert browser.get("/llm").text == TEXT
        assert browser.head("/llm/").status_code == 200


def test_the_page_needs_no_key_but_what_it_shows_does() -> None:
    browser = client(ServerSettings(api_keys=("secret",)))
    assert browser.get("/").text == TEXT
    for path in ("/metrics", "/v1/models"):
        assert browser.get(path).status_code == 401
    assert browser.get("/metrics", headers={"authorization": "Bearer secret"}).status_code == 200
    assert browser.post("/", json={}).status_code == 401


def test_it_is_kept_from_foreign_names_and_origins() -> None:
    refused = client(base="http://evil.example").get("/")
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "host_not_allowed")
    refused = client().get("/", headers={"origin": "https://evil.example"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "origin_not_allowed")


def test_switched_off() -> None:
    response = client(ServerSettings(page=False)).get("/")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain")
    assert "v1/chat/completions" in response.text
    keyed = client(ServerSettings(page=False, api_keys=("secret",)))
    assert keyed.get("/").status_code == 401


def test_looks_at_the_figures_do_not_fill_the_log(
    scripted_engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """The page looks every few seconds, and so do dashboards and balancers."""
    browser = TestClient(create_app(scripted_engine), base_url=BASE)
    with caplog.at_level(logging.DEBUG, logger="spec_server.access"):
        for path in ("/metrics", "/health", "/readyz", "/v1/models"):
            assert browser.get(path).status_code == 200
        assert client().get("/readyz").status_code == 503
    levels = [r.levelname for r in caplog.records if r.name == "spec_server.access"]
    assert levels == ["DEBUG", "DEBUG", "DEBUG", "INFO", "INFO"]
