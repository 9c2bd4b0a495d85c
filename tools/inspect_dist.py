"""Look into a package's built sdist and wheel: `python inspect_dist.py DIST spec-core ...`.

Run by the sessions `wheel` and `release`, in the repository's folder. Prints a sentence for each
thing that is wrong, and ends with 1 if there is any.
"""

from __future__ import annotations

import sys
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from packaging.metadata import Metadata
from packaging.requirements import Requirement

CACHES = {"__pycache__", ".pytest_cache", ".hypothesis", ".mypy_cache", ".ruff_cache"}
WEIGHTS = {".safetensors", ".gguf", ".npz", ".bin", ".pt", ".pth"}
HOLDS_WEIGHTS = {"spec-cli": "spec_cli/models/"}
"""Where a wheel may hold weights: the bundled pair."""
LARGEST = 100 * 2**20
"""What PyPI takes unless asked."""

Files = Mapping[str, bytes]


def problems(root: Path, dist: Path, package: str) -> list[str]:
    """Everything that is wrong with the files built for a package."""
    name, folder = package.replace("-", "_"), root / "packages" / package
    wheel, sdist = _only(dist, f"{name}-*.whl"), _only(dist, f"{name}-*.tar.gz")
    version = wheel.name.split("-")[1]
    info = f"{name}-{version}.dist-info"
    inside, source = _zip(wheel), _tar(sdist)
    return [
        *(f"{path.name} is too large for PyPI" for path in (wheel, sdist) if _large(path)),
        *_wheel(package, folder, inside, info),
        *_sdist(folder, source, f"{name}-{version}"),
        *_metadata(package, folder, inside.get(f"{info}/METADATA", b""), version),
    ]


def _wheel(package: str, folder: Path, inside: Files, info: str) -> Iterator[str]:
    wanted = _tree(folder / "src", folder / "src")
    code = {path: data for path, data in inside.items() if not path.startswith(f"{info}/")}
    yield from _differences("wheel", code, wanted)
    if inside.get(f"{info}/licenses/LICENSE") != (folder / "LICENSE").read_bytes():
        yield "wheel: the licence is missing or another"
    if f"{package.replace('-', '_')}/py.typed" not in code:
        yield "wheel: py.typed is missing"
    allowed = HOLDS_WEIGHTS.get(package)
    for path in code:
        if Path(path).suffix in WEIGHTS and (allowed is None or not path.startswith(allowed)):
            yield f"wheel: {path} is a file of weights"
        if {"tests", "test"} & set(Path(path).parts):
            yield f"wheel: {path} belongs to the tests"


def _sdist(folder: Path, source: Files, top: str) -> Iterator[str]:
    wanted = _tree(folder, folder / "src", folder / "tests")
    for name in ("pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE"):
        wanted[name] = (folder / name).read_bytes()
    outside = [path for path in source if not path.startswith(f"{top}/")]
    yield from (f"sdist: {path} lies outside of {top}" for path in outside)
    held = {path.removeprefix(f"{top}/"): data for path, data in source.items()}
    held.pop("PKG-INFO", None)
    # The build tool normalises pyproject.toml and keeps ours beside it.
    held["pyproject.toml"] = held.pop("pyproject.toml.orig", held.get("pyproject.toml", b""))
    yield from _differences("sdist", held, wanted)


def _differences(what: str, held: Files, wanted: Files) -> Iterator[str]:
    yield from (f"{what}: {path} is missing" for path in wanted if path not in held)
    yield from (f"{what}: {path} does not belong there" for path in held if path not in wanted)
    both = [path for path in held if path in wanted]
    yield from (
        f"{what}: {path} is not the file here" for path in both if held[path] != wanted[path]
    )


def _metadata(package: str, folder: Path, text: bytes, version: str) -> Iterator[str]:
    try:
        found = Metadata.from_email(text, validate=True)
    except ExceptionGroup as errors:
        yield from (f"metadata: {error}" for error in errors.exceptions)
        return
    facts = {
        "name": (found.name, package),
        "version": (str(found.version), version),
        "licence": (found.license_expression, "Apache-2.0"),
        "licence file": (found.license_files, ["LICENSE"]),
        "type of the description": (found.description_content_type, "text/markdown"),
        "lowest Python": (str(found.requires_python), ">=3.11"),
    }
    yield from (f"metadata: {k} is {v[0]}, not {v[1]}" for k, v in facts.items() if v[0] != v[1])
    if (found.description or "").strip() != (folder / "README.md").read_text("utf-8").strip():
        yield "metadata: the description is not README.md"
    for requirement in found.requires_dist or ():
        yield from _requirement(requirement)


def _requirement(requirement: Requirement) -> Iterator[str]:
    if requirement.url is not None:
        yield f"metadata: {requirement} names a place; an index refuses that"
    if not requirement.specifier:
        yield f"metadata: {requirement} takes any version"


def _tree(top: Path, *folders: Path) -> dict[str, bytes]:
    """Files below these folders by their path from `top`, but for what Python and tools leave."""
    paths = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    kept = [path for path in paths if not CACHES & set(path.parts)]
    return {path.relative_to(top).as_posix(): path.read_bytes() for path in kept}


def _zip(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist() if name[-1] != "/"}


def _tar(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as archive:
        members = [member for member in archive.getmembers() if not member.isdir()]
        files = {member.name: archive.extractfile(member) for member in members}
        return {name: file.read() if file else b"" for name, file in files.items()}


def _only(dist: Path, pattern: str) -> Path:
    found = list(dist.glob(pattern))
    if len(found) != 1:
        raise SystemExit(f"expected one {pattern} in {dist}, found {[p.name for p in found]}")
    return found[0]


def _large(path: Path) -> bool:
    return path.stat().st_size > LARGEST


if __name__ == "__main__":
    root, dist = Path.cwd(), Path(sys.argv[1])
    found = [f"{name}: {one}" for name in sys.argv[2:] for one in problems(root, dist, name)]
    for sentence in found:
        print(sentence)
    sys.exit(bool(found))
