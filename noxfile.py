"""Every check of the workspace: `uv run nox` runs all but the slow ones, `nox -l` lists them.

A workspace cannot stop one package from importing what only its neighbour declares, so each
package is tested in an environment made for it alone, and once more from its built wheel.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import nox

ROOT = Path(__file__).parent
PACKAGES = ["spec-core", "spec-drafters", "spec-targets", "spec-cache", "spec-server", "spec-cli"]
SUPPORTED = ["3.11", "3.12", "3.13", "3.14"]
FLOOR = SUPPORTED[0]
# The MLX backend that tests run on; macOS has Metal in `mlx` itself and takes nothing from it.
BACKEND = os.environ.get("SPEC_BACKEND", "cpu")

nox.needs_version = ">=2026.2"
nox.options.default_venv_backend = "uv"
nox.options.reuse_venv = "yes"
nox.options.error_on_missing_interpreters = True
# MLX's CPU backend computes on one core, so two sessions fill the two that CI has.
nox.options.parallel = 2
nox.options.allow_parallel = True
nox.options.sessions = [
    "lint",
    "types",
    "wheel",
    "e2e",
    "tests",
    "lowest",
    "docs",
    "bench",
    "vlm",
]

os.environ["HF_HUB_OFFLINE"] = "1"
# With another BLAS than the wheel's, sums depend on the number of rows, and near-ties may differ.
os.environ["SPEC_CPU_BLAS"] = "bundled"
# With UV_FROZEN, uv would ignore `--resolution lowest-direct` without a word.
for name in ("UV_FROZEN", "UV_PROJECT_ENVIRONMENT", "PYTHONPATH"):
    os.environ.pop(name, None)


def present(version: str) -> bool:
    """Whether this Python runs here (a version manager's stub may exist without running)."""
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        return True
    interpreter = shutil.which(f"python{version}")
    return (
        interpreter is not None
        and subprocess.run([interpreter, "-c", ""], capture_output=True).returncode == 0
    )


PYTHONS = [version for version in SUPPORTED if present(version)]
each_package = nox.parametrize("package", [nox.param(name, id=name) for name in PACKAGES])


def sync(session: nox.Session, *arguments: str) -> None:
    """Make the session's environment exactly what the lock says for these arguments."""
    session.run_install(
        "uv",
        "sync",
        "--quiet",
        "--locked",
        "--exact",
        "--no-default-groups",
        *arguments,
        env={"UV_PROJECT_ENVIRONMENT": session.virtualenv.location},
        external=True,
    )


def sync_package(session: nox.Session, package: str, *arguments: str) -> None:
    """Only this package, its declared dependencies, one backend and its own test group."""
    sync(session, "--package", package, "--extra", BACKEND, "--group", "test", *arguments)


def sync_workspace(session: nox.Session, *arguments: str) -> None:
    """All packages together, as a user of the workspace has them."""
    sync(session, "--group", BACKEND, *arguments)


def tool(session: nox.Session, *command: str, group: str = "lint") -> None:
    """Run a command of a group from an environment of its own."""
    home = ROOT / ".nox" / ("tools" if group == "lint" else f"tools-{group}")
    session.run(
        "uv",
        "run",
        "--quiet",
        "--locked",
        f"--only-group={group}",
        *command,
        env={"UV_PROJECT_ENVIRONMENT": str(home)},
        external=True,
    )


def pytest(session: nox.Session, *arguments: str) -> None:
    """Run pytest; no test at all is a failure, as it is for pytest."""
    session.run("python", "-m", "pytest", *arguments, *session.posargs)


@nox.session(python=FLOOR)
def lint(session: nox.Session) -> None:
    """Style, spelling, layers and the lock."""
    session.run("uv", "lock", "--check", "--quiet", external=True)
    tool(session, "ruff", "check")
    tool(session, "ruff", "format", "--check")
    tool(session, "codespell")
    sources = [str(ROOT / "packages" / name / "src") for name in PACKAGES]
    session.env["PYTHONPATH"] = os.pathsep.join(sources)
    tool(session, "lint-imports")


@nox.session(python=FLOOR)
@each_package
def types(session: nox.Session, package: str) -> None:
    """mypy --strict, seeing only what the package declares."""
    sync_package(session, package)
    interpreter = str(Path(session.bin) / "python")
    cache = f"--cache-dir=.mypy_cache/{package}"
    tool(session, "mypy", cache, "--python-executable", interpreter, f"packages/{package}/src")


@nox.session(python=PYTHONS)
@each_package
def tests(session: nox.Session, package: str) -> None:
    """The package's tests, in an environment that holds only what it declares."""
    sync_package(session, package)
    session.run("uv", "pip", "check", "--quiet", external=True)
    pytest(session, f"packages/{package}/tests")


@nox.session(python=FLOOR, reuse_venv=False)
@each_package
def lowest(session: nox.Session, package: str) -> None:
    """The same tests with the lowest direct dependencies that the package admits."""
    session.install(
        "--quiet",
        "--resolution=lowest-direct",
        f"--group=packages/{package}/pyproject.toml:test",
        "--editable",
        f"packages/{package}[{BACKEND}]",
    )
    session.run("uv", "pip", "check", "--quiet", external=True)
    pytest(session, f"packages/{package}/tests")


@nox.session(python=FLOOR)
def wheel(session: nox.Session) -> None:
    """Build every sdist and wheel and look inside; install each wheel alone, import all of it, run
    its commands."""
    dist = build_all(session)
    tool(session, "python", "tools/inspect_dist.py", str(dist), *PACKAGES)
    for name in PACKAGES:
        try_wheel(session, name, wheel_of(dist, name), dist / "siblings.txt")


def build_all(session: nox.Session) -> Path:
    """A folder with every sdist and wheel, and constraints that pin the packages to them."""
    dist = Path(session.create_tmp()).resolve() / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    session.run(
        *("uv", "build", "--quiet", "--all-packages", "--no-sources", "--out-dir", str(dist)),
        external=True,
    )
    # An index may know the same names for something else.
    pins = [f"{name} @ {wheel_of(dist, name).as_uri()}\n" for name in PACKAGES]
    (dist / "siblings.txt").write_text("".join(pins))
    return dist


def wheel_of(dist: Path, package: str) -> Path:
    """A package's wheel in a folder, which also holds its sdist."""
    name = package.replace("-", "_")
    only(dist.glob(f"{name}-*.tar.gz"))
    return only(dist.glob(f"{name}-*.whl"))


def only(paths: Iterable[Path]) -> Path:
    """The single path of a glob."""
    found = list(paths)
    if len(found) != 1:
        raise FileNotFoundError(f"expected one file, found {found}")
    return found[0]


def try_wheel(session: nox.Session, name: str, path: Path, siblings: Path) -> None:
    """Install one wheel into an empty environment and run tools/try_wheel.py there."""
    home = Path(session.create_tmp()).resolve()
    environment = home / name
    session.run(
        *("uv", "venv", "--quiet", "--clear", "--python", FLOOR, str(environment)),
        external=True,
    )
    python = str(environment / "bin" / "python")
    session.run(
        *("uv", "pip", "install", "--quiet", "--python", python, "--no-sources"),
        *("--constraints", str(siblings), f"{name}[{BACKEND}] @ {path.as_uri()}"),
        external=True,
    )
    session.run("uv", "pip", "check", "--quiet", "--python", python, external=True)
    script = str(ROOT / "tools" / "try_wheel.py")
    with session.chdir(home):
        session.run(python, "-I", "-W", "error", script, name, external=True)


@nox.session(python=FLOOR)
def docs(session: nox.Session) -> None:
    """The code blocks of the READMEs and of docs/ run, and their links lead somewhere."""
    sync_workspace(session, "--group", "e2e")
    pytest(session, "tests/docs")


@nox.session(python=FLOOR)
def e2e(session: nox.Session) -> None:
    """All packages together, from the outside."""
    sync_workspace(session, "--group", "e2e")
    pytest(session, "tests", "--ignore=tests/docs", "--ignore=tests/page")


@nox.session(python=FLOOR)
def page(session: nox.Session) -> None:
    """The page at `/` in a headless Chromium (not part of a plain `nox`: it wants a quiet machine).

    `SPEC_PICTURES=docs/images nox -s page` takes the documentation's pictures anew.
    """
    sync_workspace(session, "--group", "e2e")
    pytest(session, "tests/page")


@nox.session(python=FLOOR, allow_parallel=False)
def bench(session: nox.Session) -> None:
    """A short `spec benchmark` of the bundled pair; it must find every mode lossless."""
    sync_workspace(session)
    command = ["spec", "benchmark", "--trials=1", "--max-prompts=1", "--max-tokens=48", "--json"]
    report = json.loads(session.run(*command, silent=True, stderr=None) or "{}")
    for run in report["runs"]:
        session.log(f"{run['mode']}: {run['tokens_per_second']:.1f} tokens/s, {run['speedup']}x")
    if not report["runs"] or not all(run["identical"] for run in report["runs"]):
        session.error("a mode of the bundled pair differs from plain decoding")


@nox.session(python=FLOOR)
def vlm(session: nox.Session) -> None:
    """The extra `vlm` of spec-targets."""
    sync_package(session, "spec-targets", "--extra", "vlm")
    session.run("uv", "pip", "check", "--quiet", external=True)
    pytest(session, "packages/spec-targets/tests", "-m", "vlm")


@nox.session(python=FLOOR)
def slow(session: nox.Session) -> None:
    """The tests that take minutes (not part of a plain `nox`)."""
    sync_workspace(session, "--group", "e2e")
    pytest(session, "-m", "slow", "packages", "tests")


@nox.session(python=FLOOR)
def release(session: nox.Session) -> None:
    """`nox -s release -- spec-core`: may it be released? Then builds, inspects and tries it."""
    packages = session.posargs or session.error("name the packages to release")
    if unknown := set(packages) - set(PACKAGES):
        session.error(f"{', '.join(unknown)}: no such package; there are {', '.join(PACKAGES)}")
    tool(session, "python", "tools/check_release.py", *packages)
    built = build_all(session)
    tool(session, "python", "tools/inspect_dist.py", str(built), *packages)
    for package in packages:
        files = sorted(built.glob(f"{package.replace('-', '_')}-*"))
        tool(session, "twine", "check", "--strict", *map(str, files), group="release")
        try_wheel(session, package, wheel_of(built, package), built / "siblings.txt")
        for file in files:
            (ROOT / "dist").mkdir(exist_ok=True)
            session.log(f"ready: {shutil.copy2(file, ROOT / 'dist')}")
