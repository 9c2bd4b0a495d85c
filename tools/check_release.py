"""What must hold before a package is released: `python check_release.py spec-core`.

Run by the session `release`, in the repository's folder. Prints a sentence for each thing that is
wrong, and ends with 1 if there is any.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

HEADING = re.compile(r"^## \[([^\]]+)\](.*)$", re.MULTILINE)
DATE = re.compile(r" - \d{4}-\d\d-\d\d")


def problems(root: Path, package: str) -> list[str]:
    """Everything that speaks against releasing a package from this work tree."""
    project = tomllib.loads((root / "packages" / package / "pyproject.toml").read_text())["project"]
    changelog = (root / "packages" / package / "CHANGELOG.md").read_text(encoding="utf-8")
    return [
        *_tree(root, package, project["version"]),
        *_changelog(changelog, project["version"]),
        *_siblings(root, project),
    ]


def _tree(root: Path, package: str, version: str) -> Iterator[str]:
    changed = _git(root, "status", "--porcelain")
    if changed:
        yield f"the work tree has changes, so the tag is not what would be built: {changed}"
    tag, found = f"{package}-v{version}", _git(root, "tag", "--points-at", "HEAD")
    if tag not in found:
        yield f"HEAD has no tag {tag}; it has {', '.join(found) or 'none'}"


def _changelog(text: str, version: str) -> Iterator[str]:
    headings = list(HEADING.finditer(text))
    if len(headings) < 2 or headings[0][1] != "Unreleased":
        wanted = f"## [{version}] - YYYY-MM-DD"
        yield f"the changelog must have '## [Unreleased]' and below it '{wanted}'"
        return
    unreleased, newest = headings[:2]
    if text[unreleased.end() : newest.start()].strip():
        yield "the changelog has lines left under Unreleased; move them to the version"
    if newest[1] != version:
        yield f"the changelog's newest section is {newest[1]}, the version {version}"
    if not DATE.fullmatch(newest[2]):
        yield f"the changelog's section {newest[1]} has no date: ## [{newest[1]}] - YYYY-MM-DD"
    end = headings[2].start() if len(headings) > 2 else len(text)
    if not re.search(r"^- \S", text[newest.end() : end], re.MULTILINE):
        yield f"the changelog's section {newest[1]} has no lines"


def _siblings(root: Path, project: dict[str, Any]) -> Iterator[str]:
    for requirement in map(Requirement, project["dependencies"]):
        if not (root / "packages" / requirement.name).is_dir():
            continue
        start = f"{requirement.name}-v"
        tags = _git(root, "tag", "--list", f"{start}*")
        released = [Version(tag.removeprefix(start)) for tag in tags]
        if not any(requirement.specifier.contains(version) for version in released):
            shown = ", ".join(map(str, released)) or "none"
            yield f"no released version of {requirement} is there (released: {shown})"


def _git(root: Path, *arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


if __name__ == "__main__":
    found = [f"{name}: {one}" for name in sys.argv[1:] for one in problems(Path.cwd(), name)]
    for sentence in found:
        print(sentence)
    sys.exit(bool(found))
