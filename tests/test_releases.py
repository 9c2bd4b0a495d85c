"""What the session `release` refuses: tools/check_release.py and tools/inspect_dist.py."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[1] / "tools"
GOOD = "# Changelog\n\n## [Unreleased]\n\n## [0.2.0] - 2026-01-31\n\n- Something.\n"
METADATA = """\
Metadata-Version: 2.4
Name: spec-a
Version: 0.2.0
Requires-Python: >=3.11
License-Expression: Apache-2.0
License-File: LICENSE
Requires-Dist: {requirement}
Description-Content-Type: text/markdown

# spec-a
"""


def run(tool: str, folder: Path, *arguments: str) -> list[str]:
    """The sentences that a tool prints; it must end with 1 exactly if there are any."""
    command = [sys.executable, str(TOOLS / tool), *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    sentences = done.stdout.splitlines()
    assert done.returncode == bool(sentences)
    return sentences


def git(folder: Path, *arguments: str) -> None:
    author = ("-c", "user.name=a", "-c", "user.email=a@b.example", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *author, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A repository with the packages spec-a, which needs spec-b, and spec-b; nothing committed."""
    for name, needs in (("spec-a", '"spec-b>=0.1,<0.2"'), ("spec-b", "")):
        folder = tmp_path / "packages" / name
        code = folder / "src" / name.replace("-", "_")
        code.mkdir(parents=True)
        (folder / "tests").mkdir()
        project = f'[project]\nname = "{name}"\nversion = "0.2.0"\ndependencies = [{needs}]\n'
        (folder / "pyproject.toml").write_text(project)
        (folder / "CHANGELOG.md").write_text(GOOD)
        (folder / "README.md").write_text(f"# {name}\n")
        (folder / "LICENSE").write_text("Apache")
        (code / "py.typed").touch()
        (code / "__init__.py").write_text('"""It."""\n')
        (folder / "tests" / "test_it.py").touch()
    git(tmp_path, "init")
    return tmp_path / "packages" / "spec-a"


def check(package: Path, *tags: str) -> list[str]:
    """What is said about a release of what is there now, under these tags."""
    root = package.parents[1]
    git(root, "add", ".")
    git(root, "commit", "-m", "all")
    for tag in tags:
        git(root, "tag", tag)
    return run("check_release.py", root, "spec-a")


def test_what_is_tagged_and_described_may_be_released(package: Path) -> None:
    assert check(package, "spec-a-v0.2.0", "spec-b-v0.1.5") == []


@pytest.mark.parametrize(
    ("tags", "mentions"),
    [
        (["spec-b-v0.1.0"], "no tag spec-a-v0.2.0; it has spec-b-v0.1.0"),
        (["spec-a-v0.2.0"], "no released version of spec-b<0.2,>=0.1 is there (released: none)"),
        (["spec-a-v0.2.0", "spec-b-v0.2.0"], "(released: 0.2.0)"),
    ],
)
def test_a_missing_tag_is_named(package: Path, tags: list[str], mentions: str) -> None:
    (sentence,) = check(package, *tags)
    assert mentions in sentence


@pytest.mark.parametrize(
    ("old", "new", "mentions"),
    [
        ("## [Unreleased]\n", "", "must have '## [Unreleased]'"),
        ("## [Unreleased]\n", "## [Unreleased]\n\n- Later.\n", "left under Unreleased"),
        ("[0.2.0]", "[0.1.9]", "newest section is 0.1.9, the version 0.2.0"),
        (" - 2026-01-31", "", "has no date"),
        ("- Something.\n", "", "has no lines"),
    ],
)
def test_a_wrong_changelog_is_named(package: Path, old: str, new: str, mentions: str) -> None:
    (package / "CHANGELOG.md").write_text(GOOD.replace(old, new))
    (sentence,) = check(package, "spec-a-v0.2.0", "spec-b-v0.1.0")
    assert mentions in sentence


def test_a_changed_work_tree_is_named(package: Path) -> None:
    assert check(package, "spec-a-v0.2.0", "spec-b-v0.1.0") == []
    (package / "src" / "spec_a" / "more.py").touch()
    (sentence,) = run("check_release.py", package.parents[1], "spec-a")
    assert "more.py" in sentence


def built(
    package: Path, extra: dict[str, str | None], requirement: str = "spec-b>=0.1,<0.2"
) -> Path:
    """Files as a build makes them, the wheel with `extra` on top; None takes a file away."""
    dist = package.parents[1] / "dist"
    dist.mkdir()
    info = "spec_a-0.2.0.dist-info"
    inside: dict[str, str | None] = {
        "spec_a/__init__.py": '"""It."""\n',
        "spec_a/py.typed": "",
        f"{info}/METADATA": METADATA.format(requirement=requirement),
        f"{info}/licenses/LICENSE": "Apache",
    } | extra
    with zipfile.ZipFile(dist / "spec_a-0.2.0-py3-none-any.whl", "w") as wheel:
        for name, text in inside.items():
            if text is not None:
                wheel.writestr(name, text)
    with tarfile.open(dist / "spec_a-0.2.0.tar.gz", "w:gz") as sdist:
        for path in (p for p in package.rglob("*") if p.is_file()):
            sdist.add(path, f"spec_a-0.2.0/{path.relative_to(package)}")
        sdist.addfile(tarfile.TarInfo("spec_a-0.2.0/PKG-INFO"), io.BytesIO())
    return dist


def inspect(package: Path, dist: Path) -> list[str]:
    return run("inspect_dist.py", package.parents[1], str(dist), "spec-a")


def test_files_as_a_build_makes_them_pass(package: Path) -> None:
    assert inspect(package, built(package, {})) == []


@pytest.mark.parametrize(
    ("extra", "mentions"),
    [
        ({"spec_a/tests/test_it.py": "x"}, "belongs to the tests"),
        ({"spec_a/model.safetensors": "x"}, "is a file of weights"),
        ({"other/__init__.py": "x"}, "other/__init__.py does not belong there"),
        ({"spec_a/__init__.py": "x"}, "spec_a/__init__.py is not the file here"),
        ({"spec_a/py.typed": None}, "py.typed is missing"),
        ({"spec_a-0.2.0.dist-info/licenses/LICENSE": "MIT"}, "the licence is missing or another"),
    ],
)
def test_what_is_wrong_in_a_wheel_is_named(
    package: Path, extra: dict[str, str | None], mentions: str
) -> None:
    found = inspect(package, built(package, extra))
    assert [sentence for sentence in found if mentions in sentence]


@pytest.mark.parametrize(
    ("requirement", "mentions"),
    [("spec-b", "takes any version"), ("spec-b @ file:///tmp/b.whl", "names a place")],
)
def test_a_requirement_that_no_index_can_serve_is_named(
    package: Path, requirement: str, mentions: str
) -> None:
    found = inspect(package, built(package, {}, requirement))
    assert [sentence for sentence in found if mentions in sentence]


def test_what_is_missing_in_an_sdist_is_named(package: Path) -> None:
    dist = built(package, {})
    (package / "src" / "spec_a" / "late.py").touch()
    missing = [sentence for sentence in inspect(package, dist) if "sdist" in sentence]
    assert missing == ["spec-a: sdist: src/spec_a/late.py is missing"]
