"""The page in a browser, in front of a real server of the bundled pair."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

QUESTION = "Write a Python function that adds two numbers."
IDLE = "document.getElementById('send').textContent === 'Send'"
READY = "document.getElementById('state-text').textContent === 'Ready'"
LARGEST = 200_000
PICTURED = (
    "Write a Python function that returns the largest of a list.",
    "Write a Python function that reverses a string.",
)


@pytest.fixture
def opened(tab: Any, served: Any) -> Any:
    """The page with an empty conversation, wide and light."""
    tab.resize(1280, 800)
    tab.scheme("light")
    tab.requests.clear()
    tab.console.clear()
    tab.open(f"{served.address}/")
    tab.evaluate("sessionStorage.clear()")
    tab.open(f"{served.address}/?")
    tab.until(READY)
    return tab


def ask(tab: Any, question: str) -> None:
    """As a person would: click, type, click, wait."""
    before = answers(tab)
    tab.click("#question")
    tab.type(question)
    tab.click("#send")
    tab.until(f"document.querySelectorAll('.answer footer').length > {before} && {IDLE}")


def answers(tab: Any) -> int:
    return int(tab.evaluate("document.querySelectorAll('.answer footer').length"))


def bare(text: str) -> str:
    """What of an answer is to be read, without marks and spaces."""
    return re.sub(r"```\w*|[`*\s]", "", text)


def test_a_question_is_answered_as_by_the_api(opened: Any, served: Any) -> None:
    ask(opened, QUESTION)
    answer = served.ask(QUESTION)
    expected = answer["choices"][0]["message"]["content"]
    shown = opened.evaluate("document.querySelector('.answer .markdown').innerText")
    shown = re.sub(r"^(python\s+)?(Copy\s+)?", "", shown)
    assert bare(shown) == bare(expected) != ""
    code = opened.evaluate("document.querySelector('.answer pre').textContent")
    assert code in expected
    kept = opened.evaluate("document.querySelector('.answer footer').innerText")
    assert f"{answer['usage']['completion_tokens']} tokens" in kept
    assert re.search(r"\d tokens/s", kept)


def test_bars_show_what_was_accepted(opened: Any, served: Any) -> None:
    ask(opened, QUESTION)
    seen = served.ask(QUESTION)["x_spec"]
    accepts, positions = seen["round_accepts"], len(seen["accept_by_position"])
    expected = [sum(n > slot for n in accepts) / len(accepts) for slot in range(positions)]
    for place in (".answer footer", "#acceptance"):
        heights = opened.evaluate(
            f"[...document.querySelectorAll('{place} .bar')].map(bar =>"
            " bar.firstChild.getBoundingClientRect().height / bar.getBoundingClientRect().height)"
        )
        assert heights == pytest.approx(expected, abs=0.03)
    assert f"{seen['mean_accept_length']:.1f} tokens a round" in opened.evaluate(
        "document.getElementById('accepted').textContent"
    )


def test_plain_decoding_is_compared_only_when_asked(opened: Any) -> None:
    plain = "document.getElementById('plain').textContent"
    ask(opened, QUESTION)
    assert opened.evaluate(plain) == "not measured"
    opened.click("#compare")
    ask(opened, QUESTION)
    assert re.fullmatch(r"[\d.,]+ tokens/s", opened.evaluate(plain))
    assert opened.evaluate("document.getElementById('same').textContent") == "the same"
    assert "× plain" in opened.evaluate("document.querySelectorAll('.answer footer')[1].innerText")


def test_the_second_question_reuses_the_first(opened: Any) -> None:
    ask(opened, QUESTION)
    ask(opened, "And one that multiplies them?")
    line = opened.evaluate("document.querySelectorAll('.answer footer')[1].innerText")
    assert re.search(r"\d+ of \d+ prompt tokens reused", line)


def test_nothing_is_asked_of_anyone_else(opened: Any, served: Any) -> None:
    ask(opened, QUESTION)
    own = {f"{served.address}/{path}" for path in ("", "?", "v1/models", "metrics")}
    asked = {url for url in opened.requests if not url.startswith("data:")}
    assert asked == own | {f"{served.address}/v1/chat/completions"}
    assert opened.console == []


CONTRAST = """(() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (rgb) => rgb.slice(0, 3).map((v) => v / 255)
    .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (node) => {
    for (; node; node = node.parentElement) {
      const colour = parse(getComputedStyle(node).backgroundColor);
      if (colour.length < 4 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  const low = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let seen = 0;
  while (walker.nextNode()) {
    const parent = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !parent.checkVisibility()) continue;
    if (parent.closest("button:disabled, script, style, option")) continue;
    seen += 1;
    const [a, b] = [light(parse(getComputedStyle(parent).color)), light(ground(parent))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) low.push(`${ratio.toFixed(2)}: ${walker.currentNode.data}`);
  }
  return seen < 20 ? ["too little text"] : low;
})()"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read(opened: Any, scheme: str) -> None:
    """Contrast of at least 4.5 to 1 (WCAG 2.2, success criterion 1.4.3)."""
    opened.scheme(scheme)
    ask(opened, QUESTION)
    assert opened.evaluate(CONTRAST) == []
    ground = opened.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (max(map(int, re.findall(r"\d+", ground))) < 64) == (scheme == "dark")


OVERFLOW = """[...document.querySelectorAll("body *")].filter((e) => e.checkVisibility()
  && !e.closest("pre, .table, .unseen, noscript")
  && (e.getBoundingClientRect().right > innerWidth + 1 || e.getBoundingClientRect().left < -1)
).map((e) => e.tagName + "#" + e.id + "." + e.className)"""

PANEL_SHOWS = "document.getElementById('panel').checkVisibility()"


@pytest.mark.parametrize("width", [1280, 960, 390, 320])
def test_nothing_sticks_out(opened: Any, width: int) -> None:
    opened.resize(width, 800, phone=width < 500)
    ask(opened, QUESTION)
    assert opened.evaluate(OVERFLOW) == []
    if width > 960:
        return
    opened.until(f"!{PANEL_SHOWS}")
    opened.click("#panel-switch")
    opened.until(PANEL_SHOWS)
    assert opened.evaluate(OVERFLOW) == []
    opened.press("Escape")
    opened.until(f"!{PANEL_SHOWS}")


def test_pictures(opened: Any, tmp_path: Path) -> None:
    """Small enough for the documentation; kept in the folder SPEC_PICTURES, if it is set."""
    opened.click("#compare")
    for question in PICTURED:
        ask(opened, question)
    opened.until("document.getElementById('running').textContent === '0'")
    opened.evaluate("document.activeElement.blur()")
    for name, size in (("page-wide", (1280, 800)), ("page-narrow", (390, 844))):
        opened.resize(*size, phone=name == "page-narrow")
        opened.evaluate("new Promise((done) => requestAnimationFrame(() => setTimeout(done, 200)))")
        path = tmp_path / f"{name}.png"
        opened.screenshot(path)
        data = path.read_bytes()
        assert data.startswith(b"\x89PNG")
        assert len(data) < LARGEST
        if "SPEC_PICTURES" in os.environ:
            shutil.copy(path, os.environ["SPEC_PICTURES"])
