"""`spec cache`: what a folder of kept prefixes holds, and how to empty it."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from spec_cli.options import json_option
from spec_cli.places import Command
from spec_cli.sizes import counted, in_bytes

if TYPE_CHECKING:
    from spec_cache import StoredNamespace

_SHOWN = 12

folder_argument = click.argument(
    "folder",
    envvar="SPEC_PREFIX_CACHE_DIR",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
)


@click.group()
def cache() -> None:
    """Look at, or empty, a folder given to --prefix-cache-dir.

    FOLDER may be left out where SPEC_PREFIX_CACHE_DIR names it. Servers that use the folder may
    go on meanwhile.
    """


@cache.command(cls=Command)
@folder_argument
@json_option
def ls(folder: Path, as_json: bool) -> None:
    """List the models, drafters and tenants whose prefixes are there, last used first."""
    from spec_cache import list_directory

    stored = list_directory(folder)
    if as_json:
        click.echo(json.dumps([asdict(one) for one in stored], indent=2))
        return
    for one in stored:
        click.echo(_line(one))


@cache.command(cls=Command)
@folder_argument
@json_option
def stats(folder: Path, as_json: bool) -> None:
    """Sum up what is there."""
    from spec_cache import list_directory

    stored = list_directory(folder)
    seen: dict[str, Any] = {
        "namespaces": len(stored),
        "files": sum(one.files for one in stored),
        "bytes": sum(one.nbytes for one in stored),
        "tokens": sum(one.tokens for one in stored),
        "last_used": max((one.last_used for one in stored), default=None),
    }
    if as_json:
        click.echo(json.dumps(seen))
        return
    click.echo(
        f"{counted(seen['tokens'], 'token')} in {counted(seen['files'], 'file')} "
        f"({in_bytes(seen['bytes'])}), of {counted(seen['namespaces'], 'namespace')}"
    )


@cache.command(cls=Command)
@folder_argument
@click.option(
    "--namespace", metavar="ID", help="Only this one: the beginning of its id as `ls` shows it."
)
@json_option
def clear(folder: Path, namespace: str | None, as_json: bool) -> None:
    """Remove what is there. Files that are not the cache's stay."""
    from spec_cache import clear_directory

    root = None if namespace is None else _root(folder, namespace)
    freed = clear_directory(folder, root)
    click.echo(json.dumps({"freed_bytes": freed}) if as_json else f"{in_bytes(freed)} freed")


def _root(folder: Path, beginning: str) -> str:
    """The one namespace whose id begins like this."""
    from spec_cache import list_directory

    roots = [one.root for one in list_directory(folder)]
    found = [root for root in roots if beginning and root.startswith(beginning.lower())]
    if len(found) != 1:
        raise click.UsageError(
            f"{len(found)} of the {len(roots)} namespaces in {folder} have an id that begins with "
            f"{beginning!r}; `spec cache ls` shows them"
        )
    return found[0]


def _line(one: StoredNamespace) -> str:
    kept = [_named(one.target), _named(one.drafter), one.quantisation]
    if one.kv_bits is not None:
        kept.append(f"KV of {one.kv_bits} bits")
    if one.salted:
        kept.append("a tenant's")
    used = time.strftime("%Y-%m-%d %H:%M", time.localtime(one.last_used))
    tokens, files = counted(one.tokens, "token"), counted(one.files, "file")
    return (
        f"{one.root[:_SHOWN]}  {used}  {in_bytes(one.nbytes):>9}  {tokens:>15}  "
        f"{files:>12}  {', '.join(part for part in kept if part) or 'unreadable'}"
    )


def _named(identity: str) -> str:
    """A target's name, or a mode, without the digest behind it."""
    return identity.partition(" ")[0]
