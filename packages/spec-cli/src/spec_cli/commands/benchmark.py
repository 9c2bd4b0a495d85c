"""`spec benchmark`: what speculation brings on this machine."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from spec_cli import bundled
from spec_cli.options import (
    bits,
    draft_lengths,
    json_option,
    loading_options,
    model_option,
    names_of,
)

if TYPE_CHECKING:
    from spec_cli.bench.measure import Plan, Result, Runner
    from spec_cli.bench.prompts import PromptSet
    from spec_cli.bench.report import Context
    from spec_cli.bench.trial import Setting
    from spec_server.loading import DrafterChoice, LoadOptions, TargetParts
    from spec_server.text import Tokeniser

SETS = ("chat", "tool", "code")
DRAFTING = ("dspark", "dflash", "eagle3", "lookup")


@click.command()
@model_option
@click.option(
    "--drafter",
    "drafters",
    metavar="FOLDER|ID",
    multiple=True,
    help="A drafter to measure beside those of --modes; may be given several times.",
)
@click.option(
    "--modes",
    metavar="NAME,...",
    callback=names_of(DRAFTING),
    help=f"What to measure beside the baseline, out of {', '.join(DRAFTING)}. "
    "[default: the drafters that were named, or the known ones, and lookup]",
)
@click.option(
    "--max-draft",
    "lengths",
    callback=draft_lengths,
    metavar="N|full,...",
    default="full",
    show_default=True,
    help="Guesses a round at most, each of them measured in every mode.",
)
@click.option(
    "--sets",
    metavar="NAME,...",
    callback=names_of(SETS),
    default=",".join(SETS),
    show_default=True,
    help="Prompt sets that come with the program.",
)
@click.option(
    "--prompts",
    "prompt_files",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    multiple=True,
    help="Your own prompts instead: a JSON list, or a text file with one prompt a line; may be "
    "given several times.",
)
@click.option("--max-prompts", type=click.IntRange(1), help="Only the first N of each set.")
@click.option("--trials", type=click.IntRange(1), default=3, show_default=True)
@click.option("--max-tokens", type=click.IntRange(2), default=128, show_default=True)
@click.option(
    "--confidence-threshold", type=float, help="For the drafters that score their guesses."
)
@loading_options
@click.option(
    "--mlx-lm/--no-mlx-lm", default=True, show_default=True, help="Measure mlx-lm's own loop too."
)
@json_option
def benchmark(**options: Any) -> None:
    """Measure speculation against plain decoding on this machine.

    Greedy; every setting decodes a prompt before the next prompt begins, the baseline first.
    Figures are medians over trials, and over the sets for the totals. Answers are compared with
    the baseline's token by token.
    """
    from spec_cli.bench.measure import measure
    from spec_cli.bench.report import record

    show = _progress(quiet=options["as_json"] and not sys.stderr.isatty())
    show("loading")
    plan, context = _prepare(options)
    results = measure(plan, show)
    show("")
    if options["as_json"]:
        click.echo(json.dumps(record(context, results), indent=2))
    else:
        _print(context, results)


def _progress(quiet: bool) -> Callable[[str], None]:
    """A line on a terminal's stderr that overwrites itself."""

    def show(text: str) -> None:
        if sys.stderr.isatty():
            click.echo(f"\r\x1b[2K{text}", nl=False, err=True)
        elif text and not quiet:
            click.echo(text, err=True)

    return show


def _prepare(options: dict[str, Any]) -> tuple[Plan, Context]:
    from spec_cli.bench.measure import Plan
    from spec_server import LoadOptions, Tokeniser
    from spec_server.loading import load_target_parts, locate_target

    asked = LoadOptions(
        model=bundled.target(options["model"]),
        dtype=options["dtype"],
        kv_bits=bits(options["kv_bits"]),
        drafter_bits=bits(options["drafter_bits"]) or "auto",
        trust_remote_code=options["trust_remote_code"],
    )
    sets = _sets(options)
    folder = locate_target(asked)
    variants = _variants(options, asked, folder)
    parts = load_target_parts(asked, folder)
    tokeniser = Tokeniser.load(folder, trust_remote_code=asked.trust_remote_code)
    plan = Plan(
        target=parts.target,
        tokeniser=tokeniser,
        prompts={one.name: one.tokenised(tokeniser) for one in sets},
        settings=_settings(variants, options["lengths"], parts),
        reference=_reference(parts, tokeniser) if options["mlx_lm"] else {},
        trials=options["trials"],
        max_tokens=options["max_tokens"],
    )
    return plan, _context(options, parts, sets)


def _sets(options: dict[str, Any]) -> list[PromptSet]:
    from spec_cli.bench.prompts import PromptSet, bundled_set, prompt_file

    files = options["prompt_files"]
    found = [prompt_file(f) for f in files] if files else [bundled_set(n) for n in options["sets"]]
    most = options["max_prompts"]
    return [PromptSet(one.name, one.prompts[:most]) for one in found]


def _variants(
    options: dict[str, Any], asked: LoadOptions, folder: Path
) -> list[tuple[LoadOptions, DrafterChoice]]:
    """What drafts, for each mode and named drafter; recognised before any weights are read."""
    from spec_drafters.pairs import find_pair
    from spec_server.loading import choose_drafter

    modes = options["modes"]
    if modes is None:
        pair = None if options["drafters"] else find_pair(asked.model) or find_pair(folder)
        modes = (*(pair.modes if pair else ()), "lookup")
    threshold = options["confidence_threshold"]
    wanted = [
        *(
            replace(asked, drafter=one, confidence_threshold=threshold)
            for one in options["drafters"]
        ),
        *(replace(asked, mode=mode, confidence_threshold=threshold) for mode in modes),
    ]
    return [(variant, choose_drafter(variant, folder)) for variant in wanted]


def _settings(
    variants: Iterable[tuple[LoadOptions, DrafterChoice]],
    lengths: tuple[int | None, ...],
    parts: TargetParts,
) -> list[Setting]:
    """The baseline, then every drafter at every length."""
    import mlx.core as mx

    from spec_cli.bench.trial import Setting
    from spec_core import FixedLength
    from spec_server.loading import load_drafter_parts, policy

    settings = [Setting("baseline", None, None, FixedLength())]
    for variant, choice in variants:
        before = mx.get_active_memory()
        drafting = load_drafter_parts(variant, parts, choice)
        size = mx.get_active_memory() - before
        for length in lengths:
            capped = replace(variant, max_draft=length)
            settings.append(
                Setting(
                    mode=drafting.mode,
                    max_draft=length,
                    drafter=drafting.drafter,
                    policy=policy(capped),
                    source=drafting.source,
                    weight_bytes=size,
                )
            )
    return settings


def _reference(parts: TargetParts, tokeniser: Tokeniser) -> dict[str, Runner]:
    from spec_cli.bench.reference import run_reference

    return {"mlx_lm": lambda prompt, budget: run_reference(parts.model, tokeniser, prompt, budget)}


def _context(options: dict[str, Any], parts: TargetParts, sets: Iterable[PromptSet]) -> Context:
    from spec_cli.bench.report import Context
    from spec_server import device

    return Context(
        command=shlex.join(["spec", *sys.argv[1:]]),
        device=device.describe(),
        model=options["model"] or bundled.NAME,
        dtype=parts.dtype,
        prompts={one.name: len(one.prompts) for one in sets},
        max_tokens=options["max_tokens"],
        trials=options["trials"],
    )


def _print(context: Context, results: list[Result]) -> None:
    from rich.console import Console

    from spec_cli.bench.report import NOTES, tables, verdict

    click.echo(f"{context.model}, {context.dtype}, on {context.device}")
    sets = ", ".join(f"{count} {name}" for name, count in context.prompts.items())
    click.echo(f"{sets} prompts, {context.max_tokens} tokens at most, {context.trials} trials\n")
    for table in tables(results):
        Console().print(table, "")
    click.echo(f"{verdict(results)}\n")
    for note in NOTES:
        click.secho(note, dim=True)
