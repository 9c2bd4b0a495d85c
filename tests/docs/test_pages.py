"""The pages that users read: their Python runs, their links lead somewhere, their words hold."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    page
    for pattern in ("*.md", "docs/**/*.md", "packages/*/*.md", "benchmarks/**/*.md")
    for page in ROOT.glob(pattern)
)
NOT_RUN = "<!-- not run"


class Block(NamedTuple):
    page: Path
    line: int
    code: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def python_blocks(page: Path) -> list[Block]:
    """The fenced Python of a page, but for what stands right below a `<!-- not run: why -->`."""
    text = page.read_text(encoding="utf-8")
    blocks = []
    for match in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        before = text[: match.start()].rstrip().rsplit("\n", 1)[-1]
        if not before.startswith(NOT_RUN):
            blocks.append(Block(page, text.count("\n", 0, match.start()) + 2, match[1]))
    return blocks


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


BLOCKS = [block for page in PAGES for block in python_blocks(page)]


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_python_of_a_page_runs(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    # Blank lines keep a traceback's line numbers those of the page.
    code = compile("\n" * (block.line - 1) + block.code, str(block.page), "exec")
    exec(code, {"__name__": "__page__"})


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
    local = [link for link in links if "://" not in link and not link.startswith("mailto:")]
    assert [link for link in local if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("package", sorted((ROOT / "packages").iterdir()), ids=named)
def test_readme_of_a_package_has_an_example_that_runs(package: Path) -> None:
    readme = package / "README.md"
    assert python_blocks(readme) or "```console" in readme.read_text(encoding="utf-8")
