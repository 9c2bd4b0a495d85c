"""`spec rm`: remove a downloaded model."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

import click

from spec_cli import bundled
from spec_cli.options import json_option, yes_option
from spec_cli.places import Command
from spec_cli.sizes import in_bytes

if TYPE_CHECKING:
    from spec_cli.hub import Cached


@click.command(cls=Command)
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@yes_option("Do not ask.")
@json_option
def rm(names: tuple[str, ...], yes: bool, as_json: bool) -> None:
    """Remove downloaded models.

    NAME is a hub id, as `spec models` shows it; all its versions go. Nothing outside of the hub's
    cache is ever removed.
    """
    from spec_cli.hub import cached_models, remove

    cached = cached_models()
    wanted = [_found(name, cached) for name in dict.fromkeys(names)]
    _ask(wanted, yes)
    freed = {one.repo: remove(one) for one in wanted}
    if as_json:
        rows = [{"repo": repo, "freed_bytes": nbytes} for repo, nbytes in freed.items()]
        click.echo(json.dumps(rows, indent=2))
        return
    for repo, nbytes in freed.items():
        click.echo(f"{repo} removed, {in_bytes(nbytes)} freed")


def _found(name: str, cached: Mapping[str, Cached]) -> Cached:
    """What a name means.

    Raises:
        CacheError: nothing of that name is in the cache.
    """
    from spec_cli.hub import CacheError, cache_folder

    if name in cached:
        return cached[name]
    if name == bundled.NAME:
        raise CacheError(f"{name} is a part of this program, and stays")
    if Path(os.path.expanduser(name)).exists():
        raise CacheError(f"{name} is not in {cache_folder()}; remove it yourself")
    near = get_close_matches(name, cached, n=1)
    meant = f"did you mean {near[0]}?" if near else "`spec models` shows what is downloaded"
    raise CacheError(f"{name} is not in {cache_folder()}; {meant}")


def _ask(wanted: list[Cached], yes: bool) -> None:
    """Ask before anything is removed.

    Raises:
        click.UsageError: there is nobody to ask.
        click.Abort: the answer is no.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise click.UsageError("add --yes where nobody can be asked")
    for one in wanted:
        click.echo(f"{one.repo}, {in_bytes(one.nbytes)}, in {one.folder}", err=True)
    click.confirm("Remove?", abort=True, err=True)
