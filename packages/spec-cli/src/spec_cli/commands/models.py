"""`spec models`: the targets that have a known drafter, and what is on this machine."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from spec_cli import bundled
from spec_cli.options import json_option
from spec_cli.places import Command
from spec_cli.sizes import in_bytes

if TYPE_CHECKING:
    from spec_cli.hub import Cached
    from spec_drafters.pairs import KnownDrafter, Pair

_PARAMETERS = re.compile(r"(\d+(?:\.\d+)?)([BM])(?![a-z])", re.IGNORECASE)
_BYTES = {"16 bits": 2.0, "4 bits": 0.5625}
"""Of a parameter; 4 bits with their groups' scales and biases."""
_SHARE = 0.8
"""Of what may be used, for weights; the rest is for requests."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What is here.

    Attributes:
        cached: repositories in the hub's cache.
        usable: bytes that a process may use; None if that is not known.
    """

    cached: Mapping[str, Cached]
    usable: int | None

    def fits(self, nbytes: float) -> bool | None:
        """Whether weights of this size fit; None if that is not known."""
        return None if self.usable is None else nbytes <= _SHARE * self.usable

    def copies(self, pair: Pair) -> list[Cached]:
        """Downloaded copies of a target, in whatever quantisation."""
        from spec_drafters.pairs import find_pair

        if pair.target == bundled.NAME:
            return [_bundled()]
        return [one for repo, one in self.cached.items() if find_pair(repo) == pair]

    def drafter(self, drafter: KnownDrafter) -> Cached | None:
        """A drafter's downloaded repository."""
        return self.cached.get(_repo(drafter))

    def others(self, pairs: Iterable[Pair]) -> list[Cached]:
        """Downloaded repositories that no pair names."""
        known = {one.repo for pair in pairs for one in self.copies(pair)}
        known |= {_repo(drafter) for pair in pairs for drafter in pair.drafters}
        return [one for repo, one in self.cached.items() if repo not in known]


@click.command(cls=Command)
@json_option
def models(as_json: bool) -> None:
    """List known pairs, and what is downloaded.

    A pair is a target and the drafters that were made for it, best first. Quantised copies of a
    target (-4bit, -8bit, -bf16) use the same drafters; any other drafter can be named with
    --drafter. Whether a model fits in memory is judged by its name or its files;
    `spec doctor --model` looks more closely.
    """
    from spec_drafters.pairs import known_pairs

    pairs, machine = known_pairs(), this_machine()
    if as_json:
        rows = [record(pair, machine) for pair in pairs]
        rows += [_other(one, machine) for one in machine.others(pairs)]
        click.echo(json.dumps(rows, indent=2))
    else:
        _print_list(pairs, machine)


def this_machine() -> Machine:
    """What is here now."""
    from spec_cli.doctor.machine import memory_facts, mlx_error
    from spec_cli.hub import cached_models

    usable = None if mlx_error() is not None else memory_facts().usable
    return Machine(cached_models(), usable)


def _bundled() -> Cached:
    from spec_cli.hub import Cached

    files = [file for file in bundled.TARGET.iterdir() if file.is_file()]
    return Cached(bundled.NAME, sum(file.stat().st_size for file in files), bundled.TARGET)


def _repo(drafter: KnownDrafter) -> str:
    """The repository that a drafter, or its file, is in."""
    from spec_drafters.resolve import GGUF

    return "/".join(drafter.source.removeprefix(GGUF).split("/")[:2])


def parameters(name: str) -> float | None:
    """How many parameters a model has by its name ("Qwen3-4B"); None if that does not say."""
    found = _PARAMETERS.search(name)
    return None if found is None else float(found[1]) * {"B": 1e9, "M": 1e6}[found[2].upper()]


def record(pair: Pair, machine: Machine) -> dict[str, Any]:
    """One row of the table, as --json prints it."""
    return {
        "target": pair.target,
        "repo": pair.repo or None,
        "aliases": list(pair.aliases),
        "fits": _fits(pair, machine),
        "downloaded": [_copy(one, machine) for one in machine.copies(pair)],
        "drafters": [_drafter(drafter, machine) for drafter in pair.drafters],
        "note": pair.note or None,
    }


def _fits(pair: Pair, machine: Machine) -> dict[str, bool | None] | None:
    count = parameters(pair.target)
    if count is None:
        return None
    return {kind: machine.fits(count * size) for kind, size in _BYTES.items()}


def _copy(one: Cached, machine: Machine) -> dict[str, Any]:
    return {
        "repo": one.repo,
        "bytes": one.nbytes,
        "folder": str(one.folder),
        "fits": machine.fits(one.nbytes),
    }


def _drafter(drafter: KnownDrafter, machine: Machine) -> dict[str, Any]:
    cached = machine.drafter(drafter)
    return {
        "mode": drafter.mode,
        "source": drafter.source,
        "packaging": drafter.packaging,
        "measured": drafter.measured,
        "downloaded_bytes": None if cached is None else cached.nbytes,
    }


def _other(one: Cached, machine: Machine) -> dict[str, Any]:
    """A downloaded repository that no pair names."""
    return {
        "target": one.repo.rpartition("/")[2],
        "repo": one.repo,
        "aliases": [],
        "fits": None,
        "downloaded": [_copy(one, machine)],
        "drafters": [],
        "note": None,
    }


def _print_list(pairs: tuple[Pair, ...], machine: Machine) -> None:
    width = max(len(drafter.mode) for pair in pairs for drafter in pair.drafters)
    for pair in pairs:
        remarks = [remark for remark in (pair.note, _fit_in_words(pair, machine)) if remark]
        shown = f"  ({'; '.join(remarks)})" if remarks else ""
        click.echo(click.style(pair.target, bold=True) + shown)
        for drafter in pair.drafters:
            star = "*" if drafter.measured else " "
            cached = machine.drafter(drafter)
            there = "" if cached is None else f"  [downloaded, {in_bytes(cached.nbytes)}]"
            click.echo(f"  {star} {drafter.mode:{width}}  {drafter.source}{there}")
        for one in machine.copies(pair):
            if one.repo != bundled.NAME:
                click.echo(f"    downloaded: {_in_words(one, machine)}")
    others = machine.others(pairs)
    if others:
        click.echo("\nDownloaded, without a known drafter:")
    for one in others:
        click.echo(f"    {_in_words(one, machine)}")
    click.echo(
        "\n* run with this program; the others are published, and their files are read.\n"
        "`spec pull NAME` downloads a target with its drafter."
    )


def _fit_in_words(pair: Pair, machine: Machine) -> str:
    fits = _fits(pair, machine)
    if fits is None or None in fits.values():
        return ""
    kind = next((kind for kind, fit in fits.items() if fit), None)
    return "too large for this machine" if kind is None else f"fits here in {kind}"


def _in_words(one: Cached, machine: Machine) -> str:
    large = ", too large for this machine" if machine.fits(one.nbytes) is False else ""
    return f"{one.repo}, {in_bytes(one.nbytes)}{large}"
