"""Options from a TOML file and from the environment, below the command line's own."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

Decorated = TypeVar("Decorated", bound=Callable[..., Any])

PREFIX = "SPEC"
"""Environment variables are called SPEC_ and the option's name, for instance SPEC_MAX_BATCH."""

_SOURCES = {
    ParameterSource.COMMANDLINE: "command line",
    ParameterSource.ENVIRONMENT: "environment",
    ParameterSource.DEFAULT_MAP: "file",
}


def config_option(*private: str) -> Callable[[Decorated], Decorated]:
    """`--config FILE`: what the command line and the environment leave open.

    Args:
        private: options that a file cannot set.
    """

    def load(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
        if value is not None:
            context.default_map = read_options(context.command, Path(value), private)
        return value

    return click.option(
        "--config",
        envvar=f"{PREFIX}_CONFIG",
        type=click.Path(exists=True, dir_okay=False),
        is_eager=True,
        callback=load,
        help="TOML file with options, named as here without the dashes in front.",
    )


def read_options(command: click.Command, path: Path, private: tuple[str, ...]) -> dict[str, Any]:
    """A file's options for a command.

    Args:
        command: what they are options of.
        path: the file.
        private: options that a file cannot set.

    Raises:
        click.UsageError: it is no TOML, or names something that is no option.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise click.UsageError(f"{path} cannot be read as TOML: {error}") from error
    known = {p.name for p in command.params if p.name and p.name not in (*private, "config")}
    for name, value in content.items():
        if name.replace("-", "_") not in known:
            shown = ", ".join(sorted(n.replace("_", "-") for n in known))
            raise click.UsageError(f"{path} has {name!r}, which is no option; there are {shown}")
        if isinstance(value, dict):
            raise click.UsageError(f"{path} has a table {name!r}; options are plain values")
    return {name.replace("-", "_"): value for name, value in content.items()}


def with_environment(command: click.Command, *private: str) -> click.Command:
    """Let every option be set by an environment variable too."""
    for parameter in command.params:
        if isinstance(parameter, click.Option) and parameter.name not in (*private, "config"):
            assert parameter.name is not None
            parameter.envvar = f"{PREFIX}_{parameter.name.upper()}"
    return command


def printed(context: click.Context, secret: tuple[str, ...], private: tuple[str, ...]) -> str:
    """The options in force as TOML that `--config` reads, with where each comes from."""
    lines = []
    for parameter in context.command.params:
        name = str(parameter.name)
        if name in (*private, "config"):
            continue
        source = _SOURCES.get(context.get_parameter_source(name), "default")  # type: ignore[arg-type]
        value = _toml(context.params[name], name in secret)
        key = name.replace("_", "-")
        lines.append(f"{key} = {value}  # {source}" if value else f"# {key} is not set")
    return "\n".join(lines)


def _toml(value: Any, secret: bool) -> str:
    if value is None or value == ():
        return ""
    if secret:
        return '"..."' if isinstance(value, str) else "[" + ", ".join('"..."' for _ in value) + "]"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_toml(entry, False) for entry in value) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    return json.dumps(str(value), ensure_ascii=False)
