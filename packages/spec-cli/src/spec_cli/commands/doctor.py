"""`spec doctor`: what is wrong, and what to do about it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from spec_cli.options import (
    checkpoint,
    drafting_options,
    json_option,
    loading_options,
    log_level_option,
)
from spec_cli.places import Command

if TYPE_CHECKING:
    from spec_cli.doctor.finding import Finding

_MARKS = {"ok": ("ok", "green"), "note": ("note", "yellow"), "problem": ("PROBLEM", "red")}
_INDENT = 9
_WITHOUT_MODEL = ("cpu_blas", "config", "as_json", "log_level")
"""Options that matter where no model is named."""


@click.command(cls=Command)
@click.option(
    "--model",
    metavar="FOLDER|ID",
    callback=checkpoint,
    help="Look at this model, too; spec-tiny is the bundled one.",
)
@click.option(
    "--context",
    type=click.IntRange(2),
    metavar="N",
    help="With --model: positions that have to fit in memory. [default: the model's most]",
)
@drafting_options
@loading_options
@click.option(
    "--config",
    envvar="SPEC_CONFIG",
    type=click.Path(dir_okay=False),
    help="TOML file of `spec serve` to look at, too.",
)
@json_option
@log_level_option("warning")
@click.pass_context
def doctor(context: click.Context, /, **options: Any) -> None:
    """Look for what is wrong, and say what to do about it.

    Looks at Python, MLX, memory, disk, packages and settings; with --model also at that model:
    its files, its family, its drafter, and whether all of it fits in memory. Nothing is loaded
    and nothing is downloaded.

    The exit code is 0 if everything works, notes included, and 1 if there is a problem.
    """
    from spec_cli.commands.serve import serve

    _refuse_without_model(context)
    found = []
    for finding in _looks(options, serve):
        found.append(finding)
        if not options["as_json"]:
            _print(finding)
    problems = sum(finding.status == "problem" for finding in found)
    if options["as_json"]:
        click.echo(json.dumps(record(found), indent=2))
    else:
        click.echo(_verdict(found))
    context.exit(1 if problems else 0)


def _refuse_without_model(context: click.Context) -> None:
    """Refuse options that only matter for a model where none is named."""
    if context.params["model"] is not None:
        return
    for name in context.params:
        typed = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if typed and name not in _WITHOUT_MODEL:
            raise click.UsageError(f"--{name.replace('_', '-')} needs --model")


def _looks(options: Mapping[str, Any], served: click.Command) -> Iterator[Finding]:
    from spec_cli.doctor.machine import machine
    from spec_cli.doctor.packages import packages
    from spec_cli.doctor.settings import settings

    yield from machine(options["cpu_blas"])
    yield from packages()
    yield from settings(served, options["config"])
    if options["model"] is not None:
        yield from _model(options)


def _model(options: Mapping[str, Any]) -> Iterator[Finding]:
    """The model's findings; none can be had where MLX cannot be imported."""
    from spec_cli.doctor.machine import mlx_error

    if mlx_error() is not None:
        return
    from spec_cli.doctor.model import Asked, model
    from spec_cli.loading import load_options

    yield from model(Asked(load_options(options), options["context"]))


def record(found: Iterable[Finding]) -> dict[str, Any]:
    """The object that --json prints."""
    listed = list(found)
    return {
        "ok": all(finding.status != "problem" for finding in listed),
        "findings": [asdict(finding) for finding in listed],
    }


def _print(finding: Finding) -> None:
    word, colour = _MARKS[finding.status]
    mark = click.style(f"{word:{_INDENT - 1}}", fg=colour, bold=finding.status != "ok")
    click.echo(f"{mark} {click.style(finding.name, bold=True)}: {finding.seen}")
    if finding.advice:
        click.echo(f"{' ' * _INDENT}-> {finding.advice}")


def _verdict(found: Iterable[Finding]) -> str:
    counts = {status: sum(f.status == status for f in found) for status in ("problem", "note")}
    shown = [
        f"{count} {name}{'' if count == 1 else 's'}" for name, count in counts.items() if count
    ]
    return f"\n{' and '.join(shown)}." if shown else "\nNothing is wrong."
