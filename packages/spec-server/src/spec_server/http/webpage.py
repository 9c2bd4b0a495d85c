"""The page at `/`: one HTML document that asks for nothing but this server's own data."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Self

SCRIPTS = ("markdown.js", "server.js", "figures.js", "chat.js", "page.js")
"""In the order in which they build on each other."""


@dataclass(frozen=True, slots=True)
class WebPage:
    """The document and what a browser may do with it.

    Attributes:
        text: HTML, with style and script inside.
        headers: a policy under which the document's own script and style run, nothing else does,
            requests go to the page's origin only, and no other page may frame it.
    """

    text: str
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, document: str, style: str, script: str) -> Self:
        """Put style and script into the document's places for them."""
        text = document.replace("/*style*/", style).replace("/*script*/", script)
        return cls(text, {"Content-Security-Policy": _policy(style, script)} | _HEADERS)


@cache
def web_page() -> WebPage:
    """The page, put together from the package's files."""
    folder = files("spec_server.http") / "page"
    read = {name: (folder / name).read_text("utf-8") for name in (*SCRIPTS, *_OTHERS)}
    script = "\n".join(read[name] for name in SCRIPTS)
    return WebPage.of(read["index.html"], read["style.css"], script)


_OTHERS = ("index.html", "style.css")
_HEADERS = {
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def _policy(style: str, script: str) -> str:
    rules = {
        "default-src": "'none'",
        "script-src": _hash(script),
        "style-src": _hash(style),
        "img-src": "data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        # Text cannot become markup, whatever the script does.
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def _hash(text: str) -> str:
    """The source expression that allows exactly this inline text (CSP level 2, section 4.2.5)."""
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
