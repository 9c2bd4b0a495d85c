"""What the page does with answers, refusals, keys and settings, in front of a made-up server."""

from __future__ import annotations

import json
from typing import Any

import pytest

from .conftest import canned

IDLE = "document.getElementById('send').textContent === 'Send'"
READY = "document.getElementById('state-text').textContent === 'Ready'"
REFUSAL = "document.querySelector('.answer .refusal')?.textContent"


@pytest.fixture
def opened(tab: Any, server: Any) -> Any:
    """The page of the made-up server; each has a port, and so an origin, of its own."""
    tab.resize(1280, 800)
    tab.requests.clear()
    tab.console.clear()
    tab.open(f"{server.address}/")
    tab.until(READY)
    return tab


def begin(tab: Any, question: str) -> None:
    tab.click("#question")
    tab.type(question)
    tab.press("Enter")


def ask(tab: Any, question: str) -> None:
    before = shown(tab)
    begin(tab, question)
    tab.until(f"document.querySelectorAll('.answer').length > {before} && {IDLE}")


def shown(tab: Any) -> int:
    return int(tab.evaluate("document.querySelectorAll('.answer').length"))


def fill(tab: Any, name: str, value: str) -> None:
    tab.evaluate(
        f"(() => {{ const field = document.getElementById('{name}'); field.value = {value!r};"
        " field.dispatchEvent(new Event('input', { bubbles: true })); })()"
    )


def text(tab: Any, selector: str) -> str:
    return str(tab.evaluate(f"document.querySelector({json.dumps(selector)}).innerText"))


# ------------------------------------------------------------------ answers


def test_a_thought_is_folded(opened: Any, server: Any) -> None:
    thought = {"reasoning_content": "hm, 2 + 2", "reasoning": "hm, 2 + 2", "content": ""}
    server.replies = [canned.events(thought, {"content": "It is 4."})]
    ask(opened, "2 + 2?")
    assert not opened.evaluate("document.querySelector('.answer details').open")
    assert text(opened, ".answer .markdown") == "It is 4."
    opened.click(".answer summary")
    assert text(opened, ".thought-text") == "hm, 2 + 2"


HOSTILE = (
    "<img src=x onerror=alert(1)> <script>alert(2)</script>\n\n"
    "[a](javascript:alert(3)) [b](data:text/html,x) [c](/metrics) ![d](http://127.0.0.1:9/d.png)\n\n"
    "`<b>` **<i>x</i>** http://127.0.0.1:9/e&quot;onclick=x\n\n"
    "```html\n<iframe src=//x></iframe>\n```"
)


def test_what_a_model_writes_never_becomes_markup(opened: Any, server: Any) -> None:
    server.replies = [canned.content(HOSTILE)]
    ask(opened, "<img src=x>")
    tags = opened.evaluate(
        "[...new Set([...document.querySelectorAll('.markdown *')].map((e) => e.tagName))].sort()"
    )
    assert tags == ["A", "BUTTON", "CODE", "FIGCAPTION", "FIGURE", "P", "PRE", "SPAN", "STRONG"]
    links = opened.evaluate("[...document.querySelectorAll('.markdown a')].map((a) => a.href)")
    assert links == ["http://127.0.0.1:9/d.png", "http://127.0.0.1:9/e&quot;onclick=x"]
    assert "<script>alert(2)</script>" in text(opened, ".markdown")
    assert "[a](javascript:alert(3)) [b](data:text/html,x) [c](/metrics)" in text(
        opened, ".markdown"
    )
    assert text(opened, ".question p") == "<img src=x>"
    assert {url for url in opened.requests if "127.0.0.1:9/" in url} == set()
    assert opened.console == []


def test_the_policy_stops_what_the_script_would_not(opened: Any) -> None:
    """Neither markup from text, nor a script, nor an image of another server."""
    for attempt in (
        "document.body.innerHTML = '<b>x</b>'",
        "document.createElement('script').text = 'window.hit = 1'",
    ):
        failed = opened.evaluate(
            f"(() => {{ try {{ {attempt}; }} catch (error) {{ return error.name; }} }})()"
        )
        assert failed == "TypeError"
    opened.evaluate(
        "document.body.append(Object.assign(new Image(), {src: 'http://127.0.0.1:9/'}))"
    )
    refused = opened.evaluate("fetch('http://127.0.0.1:9/').catch((error) => error.name)")
    assert refused == "TypeError"
    assert any("Content Security Policy" in line for line in opened.console)


def test_figures(opened: Any, server: Any) -> None:
    """Counters since the start, then the answer's own."""
    assert text(opened, "#running") == "2"
    assert text(opened, "#waiting") == "3"
    assert text(opened, "#cache") == "1 of 4 prompts"
    assert text(opened, "#reused") == "25%"
    assert text(opened, "#acceptance").split() == ["80%", "1", "40%", "2"]
    assert text(opened, "#accepted") == "2.2 tokens a round"
    ask(opened, "Hello?")
    assert text(opened, "#speed") == "50"
    assert text(opened, "#plain") == "not measured"
    assert text(opened, "#acceptance").split() == ["75%", "1", "25%", "2"]
    assert "4 of 10 prompt tokens reused" in text(opened, ".answer footer")


def test_the_comparison_asks_the_same_without_drafts(opened: Any, server: Any) -> None:
    server.replies = [canned.content("Hello."), canned.content("Hello.", rate=20.0)]
    opened.click("#compare")
    ask(opened, "Hello?")
    drafted, plain = server.bodies
    assert plain.pop("max_draft") == 0
    assert "max_draft" not in drafted
    assert drafted == plain
    assert isinstance(drafted["seed"], int)
    assert text(opened, "#plain") == "20 tokens/s"
    assert text(opened, "#ratio").startswith("2.5× as fast")
    assert text(opened, "#same") == "the same"


def test_a_comparison_that_fails_measures_nothing(opened: Any, server: Any) -> None:
    full = canned.Refused(429, "256 requests wait already", "queue_full")
    server.replies = [canned.content("Hello."), full]
    opened.click("#compare")
    ask(opened, "Hello?")
    assert text(opened, "#plain") == "not measured"
    assert "plain" not in text(opened, ".answer footer")


def test_an_answer_without_figures_is_an_answer(opened: Any, server: Any) -> None:
    """A proxy may leave out what it does not know."""
    *chunks, end, _usage, done = canned.content("Hello.")
    server.replies = [[*chunks, {"choices": end["choices"]}, done]]
    ask(opened, "Hello?")
    assert text(opened, ".answer .markdown") == "Hello."
    assert opened.evaluate(REFUSAL) is None
    assert text(opened, "#speed") == "–"


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    "refused",
    [
        canned.Refused(429, "256 requests wait already; try again in a moment", "queue_full"),
        canned.Refused(400, "the prompt has 5000 tokens, 4096 fit", "context_length_exceeded"),
        canned.Refused(503, "the model is still being loaded", "loading"),
        canned.Refused(403, "pages of this origin may not use this server", "origin_not_allowed"),
    ],
    ids=lambda refused: refused.code,
)
def test_a_refusal_is_shown_and_can_be_tried_again(opened: Any, server: Any, refused: Any) -> None:
    server.replies = [refused, canned.content("Now.")]
    ask(opened, "Hello?")
    assert opened.evaluate(REFUSAL) == refused.message
    opened.click(".answer .below button")
    opened.until(f"document.querySelector('.answer .markdown').innerText === 'Now.' && {IDLE}")
    assert shown(opened) == 1
    assert server.bodies[0] == server.bodies[1]


def test_an_error_inside_the_stream_keeps_what_there_is(opened: Any, server: Any) -> None:
    error = {"error": {"message": "the server was shut down", "code": "shutting_down"}}
    server.replies = [[*canned.content("Half an")[:2], error, "[DONE]"]]
    ask(opened, "Hello?")
    assert opened.evaluate(REFUSAL) == "the server was shut down"
    assert text(opened, ".answer .markdown") == "Half an"


def test_a_stream_that_breaks_off_is_no_answer(opened: Any, server: Any) -> None:
    server.replies = [canned.content("Half an")[:2]]
    ask(opened, "Hello?")
    assert "before the answer was complete" in opened.evaluate(REFUSAL)


def test_a_question_that_failed_is_not_sent_along(opened: Any, server: Any) -> None:
    server.replies = [canned.Refused(429, "full", "queue_full"), canned.content("Yes.")]
    ask(opened, "First?")
    ask(opened, "Second?")
    ask(opened, "Third?")
    sent = [(m["role"], m["content"]) for m in server.bodies[2]["messages"]]
    assert sent == [("user", "Second?"), ("assistant", "Yes."), ("user", "Third?")]


def test_stop_leaves_the_server_and_keeps_the_text(opened: Any, server: Any) -> None:
    server.replies = [[*canned.content("Some words")[:2], canned.Hang()], canned.content("Yes.")]
    begin(opened, "Go on?")
    opened.until("document.querySelector('.answer .markdown').innerText === 'Some words'")
    opened.click("#send")
    opened.until(IDLE)
    assert server.left.wait(30)
    assert text(opened, ".answer footer") == "stopped"
    assert opened.evaluate(REFUSAL) is None
    ask(opened, "And?")
    assert server.bodies[1]["messages"][1] == {"role": "assistant", "content": "Some words"}


# ------------------------------------------------------------------ keys, places, settings


def test_a_key_is_asked_for_and_kept_in_the_tab_only(tab: Any, server: Any) -> None:
    server.key = "s3cret"
    tab.open(f"{server.address}/")
    tab.until("document.getElementById('key-dialog').open")
    for key, then in (("wrong", "not accepted"), ("a b", "no spaces")):
        tab.evaluate("document.getElementById('key').focus()")
        tab.type(key)
        tab.press("Enter")
        tab.until(f"document.getElementById('key-message').textContent.includes('{then}')")
        tab.evaluate("document.getElementById('key').value = ''")
    tab.evaluate("document.getElementById('key').focus()")
    tab.type("s3cret")
    tab.press("Enter")
    tab.until(READY)
    ask(tab, "Hello?")
    assert text(tab, ".answer .markdown") == "Hello."
    tab.open(f"{server.address}/?again")
    tab.until(READY)
    assert not tab.evaluate("document.getElementById('key-dialog').open")
    assert tab.evaluate("localStorage.length === 0 && document.cookie === ''")
    tab.click("#key-switch")
    tab.until("document.getElementById('key-dialog').open")
    assert not tab.evaluate("Object.values(sessionStorage).some((v) => v.includes('s3cret'))")


@pytest.mark.parametrize("slash", ["", "/"])
def test_below_a_prefix(tab: Any, server: Any, slash: str) -> None:
    server.prefix = "/some/where"
    tab.open(f"{server.address}{slash}")
    tab.until(READY)
    ask(tab, "Hello?")
    assert text(tab, ".answer .markdown") == "Hello."
    assert all(path.startswith("/some/where") for path in server.paths)


def test_settings_are_sent_and_kept(opened: Any, server: Any) -> None:
    ask(opened, "Hello?")
    assert set(server.bodies[0]) == {"messages", "stream", "stream_options"}
    settings = {"system": "Be brief.", "temperature": "0.7", "max-tokens": "9", "seed": "5"}
    for name, value in settings.items():
        fill(opened, name, value)
    fill(opened, "thinking", "off")
    opened.click("#new")
    opened.open(f"{server.address}/")
    opened.until(READY)
    ask(opened, "Hello?")
    body = server.bodies[1]
    assert (body["temperature"], body["max_tokens"], body["seed"]) == (0.7, 9, 5)
    assert body["enable_thinking"] is False
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert len(body["messages"]) == 2


@pytest.mark.parametrize(("name", "value"), [("temperature", "3"), ("max-tokens", "1.5")])
def test_wrong_settings_are_not_sent(opened: Any, server: Any, name: str, value: str) -> None:
    fill(opened, name, value)
    begin(opened, "Hello?")
    assert opened.evaluate("document.activeElement.id") == name
    assert server.bodies == []
    assert opened.evaluate("document.getElementById('question').value") == "Hello?"


def test_the_conversation_outlives_a_reload_and_ends_with_a_new_chat(
    opened: Any, server: Any
) -> None:
    server.replies = [canned.content("A **bold** word.")]
    ask(opened, "Hello?")
    opened.open(f"{server.address}/")
    opened.until(READY)
    assert text(opened, ".answer .markdown strong") == "bold"
    assert len(opened.evaluate("[...document.querySelectorAll('.answer .bar')].map(() => 1)")) == 2
    opened.click("#new")
    assert shown(opened) == 0
    opened.open(f"{server.address}/")
    opened.until(READY)
    assert shown(opened) == 0


def test_by_keyboard_alone(opened: Any, server: Any) -> None:
    """The question has the focus; every control is reached by Tab; Shift+Enter begins a line."""
    assert opened.evaluate("document.activeElement.id") == "question"
    opened.type("one")
    opened.press("Enter", modifiers=8)
    opened.type("two")
    opened.press("Enter")
    opened.until(f"document.querySelectorAll('.answer footer').length === 1 && {IDLE}")
    assert server.bodies[0]["messages"][0]["content"] == "one\ntwo"
    reached = set()
    for _ in range(24):
        opened.press("Tab")
        reached.add(opened.evaluate("document.activeElement.id || document.activeElement.tagName"))
    controls = {"new", "log", "question", "compare", "system", "temperature", "max-tokens"}
    assert controls | {"thinking", "seed"} <= reached


def test_a_panel_that_is_open_does_not_lock_a_wider_screen(opened: Any, server: Any) -> None:
    opened.resize(390, 844, phone=True)
    opened.until("document.getElementById('panel-switch').offsetParent !== null")
    opened.click("#panel-switch")
    opened.until("document.getElementById('chat').inert")
    opened.resize(1280, 800)
    opened.until("!document.getElementById('chat').inert")
    ask(opened, "Hello?")
    assert text(opened, ".answer .markdown") == "Hello."
