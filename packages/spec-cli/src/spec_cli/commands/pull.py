"""`spec pull`: a model from the hub, with its drafter."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from spec_cli import bundled
from spec_cli.options import json_option, log_level_option, yes_option
from spec_cli.places import Command
from spec_cli.sizes import counted, in_bytes

if TYPE_CHECKING:
    from spec_cli.pulling import Arrived, Plan

ASK_ABOVE = 2**30
"""Bytes; a larger download is asked about."""


@dataclass(frozen=True, slots=True)
class Pulled:
    """A repository that is there now.

    Attributes:
        plan: what it holds.
        folder: where it is.
    """

    plan: Plan
    folder: Path


@click.command(cls=Command)
@click.argument("name")
@click.option(
    "--drafter/--no-drafter",
    default=True,
    show_default=True,
    help="Fetch the drafter that is known for the model, too.",
)
@yes_option("Do not ask, however large the download.")
@json_option
@log_level_option("error")
def pull(name: str, **options: Any) -> None:
    """Download a model with its drafter.

    NAME is a hub id (owner/name), or the name of a target that `spec models` lists. It goes into
    the hub's cache, where other programs find it, too. Downloads of more than 1 GiB are asked
    about. Files that are complete are not fetched again, so that the same command goes on after
    an interruption.
    """
    from spec_cli.pulling import check_room, drafter_of, plan, source_of

    as_json = options["as_json"]
    if bundled.target(name) == str(bundled.TARGET):
        _say(f"{name} comes with this program, and so do its drafters; nothing is to be fetched")
        _report([], as_json)
        return
    source = source_of(name)
    plans = [plan(source)]
    matched = drafter_of(source.repo) if options["drafter"] and not source.drafter else None
    if matched is not None:
        plans.append(plan(source_of(matched)))
    for one in plans:
        _say(_line(one))
    check_room(plans)
    _ask(plans, options["yes"])
    _report([_fetched(one) for one in plans], as_json)


def _say(text: str) -> None:
    click.echo(text, err=True)


def _line(wanted: Plan) -> str:
    there = wanted.nbytes - wanted.missing_bytes
    have = f", {in_bytes(there)} of them there already" if there else ""
    return f"{wanted.repo}: {in_bytes(wanted.nbytes)} in {counted(len(wanted.parts), 'file')}{have}"


def _ask(plans: Sequence[Plan], yes: bool) -> None:
    """Ask about a large download.

    Raises:
        click.UsageError: there is nobody to ask.
        click.Abort: the answer is no.
    """
    missing = sum(one.missing_bytes for one in plans)
    if yes or missing <= ASK_ABOVE:
        return
    if not sys.stdin.isatty():
        raise click.UsageError(
            f"{in_bytes(missing)} are to be fetched; add --yes where nobody can be asked"
        )
    click.confirm(f"Fetch {in_bytes(missing)}?", abort=True, err=True)


def _fetched(wanted: Plan) -> Pulled:
    from spec_cli.pulling import fetch

    try:
        with _progress(wanted) as arrived:
            return Pulled(wanted, fetch(wanted, arrived))
    except KeyboardInterrupt:
        _say("Files that are complete stay; the same command goes on with the others.")
        raise


@contextmanager
def _progress(wanted: Plan) -> Iterator[Arrived]:
    """A bar with rate and remaining time, on a terminal's stderr."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    console = Console(stderr=True)
    if not console.is_terminal or not wanted.missing:
        yield lambda _: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(wanted.repo, total=wanted.missing_bytes)
        yield lambda count: progress.update(task, completed=min(count, wanted.missing_bytes))


def _report(done: Sequence[Pulled], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps([record(one) for one in done], indent=2))
        return
    for one in done:
        click.echo(str(one.folder))
    if done:
        _say(f"run: spec chat --model {done[0].plan.repo}" if not _only_drafter(done) else "done")


def _only_drafter(done: Sequence[Pulled]) -> bool:
    from spec_cli.pulling import source_of

    return source_of(done[0].plan.repo).drafter


def record(one: Pulled) -> dict[str, Any]:
    """One repository, as --json prints it."""
    return {
        "repo": one.plan.repo,
        "folder": str(one.folder),
        "bytes": one.plan.nbytes,
        "fetched_bytes": one.plan.missing_bytes,
        "files": len(one.plan.parts),
    }
