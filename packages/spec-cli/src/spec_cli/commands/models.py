"""`spec models`: the targets that have a known drafter."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from spec_cli.options import json_option

if TYPE_CHECKING:
    from spec_drafters.pairs import Pair


@click.command()
@json_option
def models(as_json: bool) -> None:
    """List the targets whose drafters are known, best drafter first.

    Quantised copies of a target (-4bit, -8bit, -bf16) use the same drafters. Any other drafter
    can be named with --drafter.
    """
    from spec_drafters.pairs import known_pairs

    pairs = known_pairs()
    if as_json:
        click.echo(json.dumps([record(pair) for pair in pairs], indent=2))
    else:
        _print_list(pairs)


def record(pair: Pair) -> dict[str, Any]:
    """One row of the table, as --json prints it."""
    return {
        "target": pair.target,
        "repo": pair.repo or None,
        "aliases": list(pair.aliases),
        "drafters": [
            {
                "mode": drafter.mode,
                "source": drafter.source,
                "packaging": drafter.packaging,
                "measured": drafter.measured,
            }
            for drafter in pair.drafters
        ],
        "note": pair.note or None,
    }


def _print_list(pairs: tuple[Pair, ...]) -> None:
    width = max(len(drafter.mode) for pair in pairs for drafter in pair.drafters)
    for pair in pairs:
        click.echo(click.style(pair.target, bold=True) + (f"  ({pair.note})" if pair.note else ""))
        for drafter in pair.drafters:
            star = "*" if drafter.measured else " "
            click.echo(f"  {star} {drafter.mode:{width}}  {drafter.source}")
    click.echo("\n* run with this program; the others are published, and their files are read.")
