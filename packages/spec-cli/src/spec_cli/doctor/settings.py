"""Settings that are in force: SPEC_* and HF_* in the environment, and a TOML file."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import click

from spec_cli.config_file import PREFIX, read_options
from spec_cli.doctor.finding import Finding

_SECTION = "settings"
_SHARED = (
    "SPEC_API_KEY",
    "SPEC_CONFIG",
    "SPEC_CPU_BLAS",
    "SPEC_CURVES_DIR",
    "SPEC_LOG_LEVEL",
    "SPEC_MAX_DRAFT",
    "SPEC_PREFIX_CACHE_DIR",
    "SPEC_TRACEBACK",
    "SPEC_URL",
)
"""Variables that other commands than `spec serve` read."""
_SECRET = ("SPEC_API_KEY", "HF_TOKEN")
_HUB = ("HF_HOME", "HF_HUB_CACHE", "HF_ENDPOINT", "HF_HUB_OFFLINE", "HF_TOKEN")


def settings(
    served: click.Command, config: str | None, environment: Mapping[str, str] | None = None
) -> Iterator[Finding]:
    """The settings' findings.

    Args:
        served: `spec serve`, whose options the environment and a file can set.
        config: the file; None: what SPEC_CONFIG names.
        environment: the process's own by default.
    """
    seen = os.environ if environment is None else environment
    variables = _variables(seen)
    known = _known(served)
    for name in (*variables, *(name for name in _HUB if name in seen)):
        yield _variable(name, seen[name], known)
    file = config or seen.get("SPEC_CONFIG")
    if file is not None:
        yield _file(served, Path(file))
    if not variables and file is None:
        yield Finding(_SECTION, "settings", "ok", "no SPEC_* variable is set; defaults apply")


def unread(served: click.Command) -> list[str]:
    """A sentence for each SPEC_* variable of the process that no command reads."""
    known = _known(served)
    names = (name for name in _variables(os.environ) if name not in known)
    return [f"{name} is set, but {_unread(name, known)}" for name in names]


def _variables(seen: Mapping[str, str]) -> list[str]:
    return sorted(name for name in seen if name.startswith(f"{PREFIX}_"))


def _known(served: click.Command) -> set[str]:
    return {*_SHARED, *(f"{PREFIX}_{p.name}".upper() for p in served.params)}


def _variable(name: str, value: str, known: set[str]) -> Finding:
    shown = "(set; its value is not shown)" if name in _SECRET else value
    if name in _SHARED or name in _HUB:
        return Finding(_SECTION, name, "ok", shown)
    if name in known:
        return Finding(_SECTION, name, "ok", f"{shown} (for spec serve alone)")
    return Finding(_SECTION, name, "note", shown, _unread(name, known))


def _unread(name: str, known: set[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"no command reads it{f'; did you mean {near[0]}?' if near else ''}"


def _file(served: click.Command, path: Path) -> Finding:
    try:
        options = read_options(served, path, ("print_config",))
    except click.UsageError as error:
        return Finding(_SECTION, str(path), "problem", error.message, "mend or unset it")
    names = ", ".join(sorted(name.replace("_", "-") for name in options)) or "nothing"
    return Finding(_SECTION, str(path), "ok", f"sets {names}")
