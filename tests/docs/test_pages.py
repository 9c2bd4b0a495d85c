"""The pages that users read: what they show runs, and their links lead somewhere."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from .blocks import BLOCKS, PAGES, ROOT, SERVED, Block, blocks, commands, in_language, named, shown

LANGUAGES = {"python", "console", "toml", "json", "yaml", "javascript", "text", ""}
LONGEST_SECONDS = 600
"""A block that runs for so long waits for something; most take two seconds."""
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)[^)]*\)")


def test_every_block_is_run_read_or_says_why_not() -> None:
    unknown = [b for b in BLOCKS if b.language not in LANGUAGES]
    assert [f"{block}: {block.language}" for block in unknown] == []
    assert [str(block) for block in in_language("javascript")] == []
    indented = re.compile(r"^ +```(python|console)", re.MULTILINE)
    assert [named(page) for page in PAGES if indented.search(page.read_text("utf-8"))] == []
    remarks = [b for b in BLOCKS if b.remark and b.runs and not b.needs_server]
    assert [f"{block}: {block.remark}" for block in remarks] == []


@pytest.mark.parametrize("block", in_language("python"), ids=str)
def test_python_of_a_page_runs(
    block: Block, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(ROOT)
    # Blank lines keep a traceback's line numbers those of the page.
    source = "\n" * (block.line - 1) + _addressed(block, request)
    exec(compile(source, str(block.page), "exec"), {"__name__": "__page__"})


@pytest.mark.parametrize("block", in_language("console"), ids=str)
def test_commands_of_a_page_run_and_print_what_it_shows(
    block: Block,
    surroundings: dict[str, str],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    code = _addressed(block, request)
    # The page's reader has to install uv; who runs this has done so.
    script = "\n".join(typed.removeprefix("pip install uv && ") for typed in commands(code))
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=ROOT,
        env=surroundings | {"HOME": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=LONGEST_SECONDS,
    )
    assert done.returncode == 0, done.stdout
    printed = {_figureless(line) for line in done.stdout.splitlines()}
    missing = [line for line in shown(code) if _figureless(line) not in printed]
    assert missing == [], done.stdout


def _addressed(block: Block, request: pytest.FixtureRequest) -> str:
    """The code, with a running server's address where it needs one."""
    if not block.needs_server:
        return block.code
    address: str = request.getfixturevalue("server")
    return block.code.replace(SERVED, address)


def _figureless(line: str) -> str:
    """A line of output without its figures and its width, which differ from run to run."""
    return " ".join(re.sub(r"\d+(\.\d+)?", "0", line).split())


@pytest.mark.parametrize("block", in_language("toml", "json", "yaml"), ids=str)
def test_configuration_of_a_page_can_be_read(block: Block) -> None:
    read = {"toml": tomllib.loads, "json": json.loads, "yaml": yaml.safe_load}
    assert read[block.language](block.code)


def test_readmes_of_packages_link_to_nothing_beside_them() -> None:
    """A package index shows the README alone."""
    readmes = ROOT.glob("packages/*/README.md")
    links = [
        (named(page), to) for page in readmes for *_, to in LINK.findall(page.read_text("utf-8"))
    ]
    assert [link for link in links if not link[1].startswith(("https://", "#"))] == []


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    broken = []
    for _, _, link in LINK.findall(page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        if "://" in link or link.startswith("mailto:"):
            continue
        there = page.parent / path if path else page
        if not there.exists() or (anchor and anchor not in _anchors(there)):
            broken.append(link)
    assert broken == []


def _anchors(page: Path) -> set[str]:
    """The anchors that headings have on GitHub."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_pictures_of_a_page_have_words_for_who_cannot_see_them(page: Path) -> None:
    pictures = [words for mark, words, _ in LINK.findall(page.read_text(encoding="utf-8")) if mark]
    assert [words for words in pictures if len(words.split()) < 3] == []


@pytest.mark.parametrize("picture", sorted((ROOT / "docs" / "images").glob("*.svg")), ids=named)
def test_drawings_are_light_stand_alone_and_know_the_dark(picture: Path) -> None:
    text = picture.read_text(encoding="utf-8")
    parts = {part.tag.partition("}")[2]: part for part in ElementTree.fromstring(text).iter()}
    assert parts["title"].text
    assert "prefers-color-scheme: dark" in (parts["style"].text or "")
    assert not {"script", "image", "foreignObject", "a"} & parts.keys()
    assert len(text) < 20_000


def test_the_index_leads_to_every_page() -> None:
    index = ROOT / "docs" / "README.md"
    links = {link for _, _, link in LINK.findall(index.read_text(encoding="utf-8"))}
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert pages - links == set()


@pytest.mark.parametrize("package", sorted((ROOT / "packages").iterdir()), ids=named)
def test_readme_of_a_package_has_an_example_that_runs(package: Path) -> None:
    examples = [b for b in blocks(package / "README.md") if b.language in ("python", "console")]
    assert [block for block in examples if block.runs]
