"""The fenced blocks of the pages, and what the line above a block says about it.

`<!-- not run: why -->` keeps a block from being run; `<!-- with a server -->` runs it beside
`spec serve` and puts that server's address in place of the one on the page.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    page
    for pattern in ("*.md", "docs/**/*.md", "packages/*/*.md", "benchmarks/**/*.md")
    for page in ROOT.glob(pattern)
)
SERVED = "127.0.0.1:8000"
"""The address on the pages."""

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NOT_RUN = re.compile(r"<!-- not run: \w.+ -->")


class Block(NamedTuple):
    """A fenced block; `remark` is the comment right above it."""

    page: Path
    line: int
    language: str
    code: str
    remark: str

    def __str__(self) -> str:
        return f"{named(self.page)}:{self.line}"

    @property
    def runs(self) -> bool:
        return _NOT_RUN.fullmatch(self.remark) is None

    @property
    def needs_server(self) -> bool:
        return self.remark == "<!-- with a server -->"


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, fence.start()) + 2, fence[1], fence[2], _above(text, fence))
        for fence in _FENCE.finditer(text)
    ]


def _above(text: str, fence: re.Match[str]) -> str:
    line = text[: fence.start()].rstrip("\n").rsplit("\n", 1)[-1]
    return line if line.startswith("<!--") else ""


def commands(code: str) -> list[str]:
    """What is typed in a console block: after `$ `, and as long as lines end with a backslash."""
    return re.findall(r"^\$ ((?:.*\\\n)*.*)", code, re.MULTILINE)


def shown(code: str) -> list[str]:
    """What a console block shows as output, line by line."""
    rest = re.sub(r"^\$ (?:.*\\\n)*.*\n", "", code, flags=re.MULTILINE)
    return [line for line in rest.splitlines() if line.strip() and line.strip() != "..."]


BLOCKS = [block for page in PAGES for block in blocks(page)]


def in_language(*languages: str) -> list[Block]:
    """The blocks that are run, in these languages."""
    return [block for block in BLOCKS if block.runs and block.language in languages]
