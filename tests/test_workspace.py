"""What the six packages promise alike: licence, changelog, ranges of siblings, backends."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PACKAGES = {
    folder.name: tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
    for folder in sorted((ROOT / "packages").iterdir())
    if (folder / "pyproject.toml").is_file()
}
BACKENDS = ("cpu", "cuda12", "cuda13")
LIGHT = ("mlx_lm", "transformers", "starlette", "torch")

each_package = pytest.mark.parametrize("name", PACKAGES)


def project(name: str) -> dict[str, Any]:
    table: dict[str, Any] = PACKAGES[name]["project"]
    return table


def requirements(name: str) -> list[Requirement]:
    """All that a package asks for, extras included."""
    table = project(name)
    groups = (table["dependencies"], *table["optional-dependencies"].values())
    return [Requirement(text) for group in groups for text in group]


def test_all_six_packages_are_here() -> None:
    layers = ["cache", "cli", "core", "drafters", "server", "targets"]
    assert list(PACKAGES) == [f"spec-{layer}" for layer in layers]


def next_breaking(version: Version) -> Version:
    """The first version after this one that may break something: 0.2 after 0.1.5, 3 after 2.4."""
    return Version(str(version.major + 1) if version.major else f"0.{version.minor + 1}")


@each_package
def test_ranges_of_siblings_follow_the_policy(name: str) -> None:
    """`>=LOW,<NEXT`: NEXT breaks what is here, LOW does not lie above it, extras say the same."""
    ranges: dict[str, set[str]] = {}
    for requirement in (r for r in requirements(name) if r.name in PACKAGES):
        here = Version(project(requirement.name)["version"])
        bounds = {s.operator: Version(s.version) for s in requirement.specifier}
        assert set(bounds) == {">=", "<"}, str(requirement)
        assert bounds["<"] == next_breaking(here), f"{requirement}: {here} is here"
        assert bounds[">="] <= here, f"{requirement}: {here} is here"
        ranges.setdefault(requirement.name, set()).add(str(requirement.specifier))
    assert {sibling: said for sibling, said in ranges.items() if len(said) > 1} == {}


@each_package
def test_every_dependency_states_a_lowest_version(name: str) -> None:
    assert [str(r) for r in requirements(name) if ">=" not in str(r.specifier)] == []


@each_package
def test_a_package_passes_each_backend_on(name: str) -> None:
    base = "mlx" if name == "spec-core" else "spec-core"
    extras = project(name)["optional-dependencies"]
    asked = {backend: Requirement(extras[backend][0]) for backend in BACKENDS}
    assert {b: (r.name, r.extras) for b, r in asked.items()} == {b: (base, {b}) for b in BACKENDS}


@each_package
def test_a_package_carries_the_licence_of_the_project(name: str) -> None:
    licence = (ROOT / "packages" / name / "LICENSE").read_bytes()
    assert licence == (ROOT / "LICENSE").read_bytes()


@each_package
def test_the_changelog_is_open_and_has_the_newest_version_first(name: str) -> None:
    text = (ROOT / "packages" / name / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## \[(.+?)\]", text, re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert len(headings) == 1 or headings[1] == project(name)["version"]


@each_package
def test_a_package_is_marked_as_typed(name: str) -> None:
    assert (ROOT / "packages" / name / "src" / name.replace("-", "_") / "py.typed").is_file()


@pytest.mark.parametrize("module", ["spec_core", "spec_drafters"])
def test_the_lower_layers_import_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print(*(m for m in {LIGHT} if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
