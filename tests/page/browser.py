"""A headless Chromium, driven over the DevTools protocol through a pipe: no package is needed."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PATIENCE = 120.0
FLAGS = [
    "--headless",
    "--remote-debugging-pipe",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
# Chromium reads commands from descriptor 3 and writes events to descriptor 4.
LAUNCH = """
import os, sys
reads, writes = int(sys.argv[1]), int(sys.argv[2])
spare = os.dup2(writes, 63)
os.dup2(reads, 3)
os.dup2(spare, 4)
os.execvp(sys.argv[3], sys.argv[3:])
"""


def chromium() -> str | None:
    """The browser's program, if there is one."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    return next((found for name in names if (found := shutil.which(name))), None)


LAID_OUT = """async (width) => {
  const frame = () => new Promise(requestAnimationFrame);
  while (innerWidth !== width) await frame();
  await frame();
}"""
"""Waits until the page has this width and has been told so: media queries report their changes
before a frame's callbacks run."""

AT_REST = """async (selector) => {
  const element = document.querySelector(selector);
  element.scrollIntoView({ block: "nearest" });
  for (let before = null; ; ) {
    await new Promise(requestAnimationFrame);
    const { x, y, width, height } = element.getBoundingClientRect();
    const middle = [x + width / 2, y + height / 2];
    const still = String(middle) === String(before);
    if (still && element.contains(document.elementFromPoint(...middle))) return middle;
    before = middle;
  }
}"""
"""Waits until an element is in the same place in two frames, and on top there."""


@dataclass(slots=True)
class Tab:
    """One page of the browser.

    Attributes:
        requests: addresses of everything that the page asked for.
        console: what it wrote, errors and refusals of the browser included.
    """

    _commands: int
    _events: int
    _session: str = ""
    _number: int = 0
    _rest: bytes = b""
    requests: list[str] = field(default_factory=list)
    console: list[str] = field(default_factory=list)

    def attach(self) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        made = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = made["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            event = self._read(deadline)
            if event.get("id") == self._number:
                assert "error" not in event, f"{method}: {event['error']}"
                result: dict[str, Any] = event["result"]
                return result
            self._note(event)
        raise AssertionError(f"{method}: the browser did not answer")

    def _read(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._events], [], [], deadline - time.monotonic())
            assert ready, "the browser is silent"
            data = os.read(self._events, 1 << 20)
            assert data, "the browser ended"
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        event: dict[str, Any] = json.loads(line)
        return event

    def _note(self, event: dict[str, Any]) -> None:
        method, given = event.get("method"), event.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(given["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.console.append(json.dumps(given["exceptionDetails"]))
        elif method == "Log.entryAdded":
            self.console.append(given["entry"]["text"])
        elif method == "Runtime.consoleAPICalled":
            self.console.append(json.dumps(given["args"]))

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        seen = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in seen, seen["exceptionDetails"]
        return seen["result"].get("value")

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def until(self, condition: str) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            if self.evaluate(f"Boolean({condition})"):
                return
            time.sleep(0.05)
        raise AssertionError(f"it did not come about: {condition}\n{self.console}")

    def click(self, selector: str) -> None:
        """Click the middle of an element, as a mouse does, once it is at rest and nothing covers
        it."""
        place = self.evaluate(f"({AT_REST})({json.dumps(selector)})")
        for kind in ("mousePressed", "mouseReleased"):
            self.call(
                "Input.dispatchMouseEvent",
                type=kind,
                x=place[0],
                y=place[1],
                button="left",
                clickCount=1,
            )

    def type(self, text: str) -> None:
        """Type into what has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, modifiers: int = 0) -> None:
        codes = {"Enter": 13, "Tab": 9, "Escape": 27}
        event = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
        text = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", modifiers=modifiers, **event, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", modifiers=modifiers, **event)

    def resize(self, width: int, height: int, *, phone: bool = False) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=phone,
        )
        self.evaluate(f"({LAID_OUT})({width})")

    def scheme(self, name: str) -> None:
        """Prefer light or dark."""
        feature = {"name": "prefers-color-scheme", "value": name}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def screenshot(self, path: Path) -> None:
        made = self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(made["data"]))


@contextmanager
def tab(program: str, profile: Path) -> Iterator[Tab]:
    """A browser with an empty profile and one tab; it ends with the context."""
    commands, to_browser = os.pipe()
    from_browser, events = os.pipe()
    launcher = [sys.executable, "-c", LAUNCH, str(commands), str(events)]
    process = subprocess.Popen(
        [*launcher, program, *FLAGS, f"--user-data-dir={profile}"],
        pass_fds=(commands, events),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(commands)
    os.close(events)
    try:
        made = Tab(to_browser, from_browser)
        made.attach()
        yield made
    finally:
        process.kill()
        process.wait()
        os.close(to_browser)
        os.close(from_browser)
