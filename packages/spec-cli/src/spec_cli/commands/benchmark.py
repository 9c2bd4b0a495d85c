"""`spec benchmark`: what speculation brings on this machine."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from spec_cli import bundled, loading
from spec_cli.options import (
    bits,
    checkpoint,
    copies_option,
    draft_lengths,
    json_option,
    loading_options,
    log_level_option,
    model_option,
    names_of,
    whole_numbers,
)
from spec_cli.places import Command
from spec_cli.sizes import counted

if TYPE_CHECKING:
    from rich.table import Table

    from spec_cli.bench.measure import Plan, Runner
    from spec_cli.bench.prompts import PromptSet
    from spec_cli.bench.report import Context, Grid, Report
    from spec_cli.bench.trial import Setting
    from spec_core import Drafter
    from spec_server.loading import DrafterChoice, LoadOptions, MaxDraft, Mode, TargetParts
    from spec_server.text import Tokeniser

EVERYDAY = ("chat", "tool", "code")
SETS = (*EVERYDAY, "math", "copy", "bytes", "prose", "foreign")
DRAFTING = ("dspark", "dflash", "eagle3", "lookup")


def _picture(context: click.Context, parameter: click.Parameter, value: Path | None) -> Path | None:
    """Callback of --plot: refused before anything is measured."""
    if value is None:
        return None
    if value.suffix.lower() != ".svg":
        raise click.BadParameter(f"{str(value)!r} does not end in .svg, the only kind it can draw")
    if not value.parent.is_dir():
        raise click.BadParameter(f"there is no folder {str(value.parent)!r}")
    if not value.exists() and not os.access(value.parent, os.W_OK):
        raise click.BadParameter(f"the folder {str(value.parent)!r} is not writable")
    return value


@click.command(cls=Command)
@model_option
@click.option(
    "--drafter",
    "drafters",
    metavar="FOLDER|ID",
    callback=checkpoint,
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
    "--caps",
    "--max-draft",
    "lengths",
    callback=draft_lengths,
    metavar="N|full|auto,...",
    default="full",
    show_default=True,
    help="Guesses a round at most, each of them measured in every mode; auto chooses the length "
    "by itself.",
)
@click.option(
    "--sets",
    metavar="NAME,...",
    callback=names_of(SETS),
    default=",".join(EVERYDAY),
    show_default=True,
    help=f"Prompt sets that come with the program, out of {', '.join(SETS)}. The last three are "
    "hard to guess: sampled text after random bytes, at a high temperature, and in other "
    "languages.",
)
@click.option(
    "--prompts",
    "prompt_files",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    multiple=True,
    help="Your own prompts instead: a JSON file, or a text file with one prompt a line; may be "
    "given several times.",
)
@click.option("--max-prompts", type=click.IntRange(1), help="Only the first N of each set.")
@click.option("--trials", type=click.IntRange(1), default=3, show_default=True)
@click.option("--max-tokens", type=click.IntRange(2), default=128, show_default=True)
@click.option(
    "--concurrency",
    metavar="N,...",
    callback=whole_numbers,
    default="",
    help="Measure so many requests at once, too.",
)
@click.option(
    "--contexts",
    metavar="N,...",
    callback=whole_numbers,
    default="",
    help="Measure behind so many positions of other text, too.",
)
@click.option(
    "--confidence-threshold", type=float, help="For the drafters that score their guesses."
)
@copies_option
@loading_options
@click.option(
    "--mlx-lm/--no-mlx-lm", default=True, show_default=True, help="Measure mlx-lm's own loop too."
)
@click.option(
    "--plot",
    metavar="FILE.svg",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    callback=_picture,
    help="Draw speeds, acceptance and round times into a file.",
)
@click.option("--markdown", "as_markdown", is_flag=True, help="Print a page in Markdown.")
@json_option
@log_level_option("warning")
@click.pass_context
def benchmark(context: click.Context, /, **options: Any) -> None:
    """Measure speculation against plain decoding on this machine.

    Every setting decodes a prompt before the next prompt begins, the baseline first. Figures are
    medians over trials, and over the sets for the totals. Answers are compared with the
    baseline's token by token. Greedy, but for the sets that are sampled (with a seed, so that
    they can be compared as well).
    """
    from spec_cli.bench.measure import measure
    from spec_cli.bench.report import Report
    from spec_cli.bench.sweeps import concurrency, contexts, deep_tasks

    if options["as_json"] and options["as_markdown"]:
        raise click.UsageError("--json and --markdown exclude each other")
    if options["prompt_files"] and loading.typed(context, "sets"):
        raise click.UsageError("--prompts and --sets exclude each other; choose one")
    if options["modes"] == ("lookup",) and not options["drafters"]:
        loading.refuse_idle_in_lookup(context)
    show = _progress(quiet=options["as_json"] and not sys.stderr.isatty())
    show("loading")
    plan, measured = _prepare(options, show)
    for depth in options["contexts"]:
        deep_tasks(plan, depth)  # refused before anything is measured
    report = Report(
        measured,
        measure(plan, show),
        concurrency(plan, options["concurrency"], show),
        contexts(plan, options["contexts"], show),
    )
    show("")
    _give(report, options)


def _give(report: Report, options: dict[str, Any]) -> None:
    from spec_cli.bench.markdown import markdown
    from spec_cli.bench.plot import plot
    from spec_cli.bench.report import record

    if options["plot"] is not None:
        options["plot"].write_text(plot(report), encoding="utf-8")
    if options["as_json"]:
        click.echo(json.dumps(record(report), indent=2))
    elif options["as_markdown"]:
        click.echo(markdown(report), nl=False)
    else:
        _print(report)


def _progress(quiet: bool) -> Callable[[str], None]:
    """A line on a terminal's stderr that overwrites itself."""

    def show(text: str) -> None:
        if sys.stderr.isatty():
            click.echo(f"\r\x1b[2K{text}", nl=False, err=True)
        elif text and not quiet:
            click.echo(text, err=True)

    return show


def _prepare(options: dict[str, Any], show: Callable[[str], None]) -> tuple[Plan, Context]:
    from spec_cli.bench.measure import Plan
    from spec_server import LoadOptions, Tokeniser
    from spec_server.loading import load_target_parts, locate_target

    asked = LoadOptions(
        model=bundled.target(options["model"]),
        dtype=options["dtype"],
        kv_bits=bits(options["kv_bits"]),
        drafter_bits=bits(options["drafter_bits"]),
        trust_remote_code=options["trust_remote_code"],
        lookup_drafts=options["lookup_drafts"],
    )
    sets = _sets(options)
    folder = locate_target(asked)
    variants = _variants(options, asked, folder)
    parts = load_target_parts(asked, folder)
    tokeniser = Tokeniser.load(folder, trust_remote_code=asked.trust_remote_code)
    plan = Plan(
        target=parts.target,
        tokeniser=tokeniser,
        sets={one.name: one.tasks(tokeniser, options["max_tokens"]) for one in sets},
        settings=_settings(variants, options, parts, show),
        reference=_reference(parts, tokeniser) if options["mlx_lm"] else {},
        trials=options["trials"],
    )
    return plan, _context(options, parts, sets)


def _sets(options: dict[str, Any]) -> list[PromptSet]:
    from spec_cli.bench.prompts import bundled_set, prompt_file

    files = options["prompt_files"]
    found = [prompt_file(f) for f in files] if files else [bundled_set(n) for n in options["sets"]]
    return [one.first(options["max_prompts"]) for one in found]


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
        *(_in_mode(replace(asked, confidence_threshold=threshold), mode) for mode in modes),
    ]
    return [(variant, choose_drafter(variant, folder)) for variant in wanted]


def _in_mode(asked: LoadOptions, mode: Mode) -> LoadOptions:
    """Copies beside a drafter are nothing that mode lookup could do without."""
    beside = None if mode == "lookup" else asked.lookup_drafts
    return replace(asked, mode=mode, lookup_drafts=beside)


def _settings(
    variants: Iterable[tuple[LoadOptions, DrafterChoice]],
    options: dict[str, Any],
    parts: TargetParts,
    show: Callable[[str], None],
) -> list[Setting]:
    """The baseline, then every drafter at every length."""
    import mlx.core as mx

    from spec_cli.bench.trial import Setting
    from spec_core import FixedLength
    from spec_server.loading import load_drafter_parts, measure_rounds, policy

    settings = [Setting("baseline", None, None, FixedLength)]
    for variant, choice in variants:
        before = mx.get_active_memory()
        trained = load_drafter_parts(variant, parts, choice)
        size = mx.get_active_memory() - before
        for length in _in_force(options["lengths"], trained.under(variant).drafter):
            capped = replace(variant, max_draft=length)
            drafting = trained.under(capped)
            curves = None
            if length == "auto":
                rows = max([1, *options["concurrency"]])
                measured = measure_rounds(capped, parts, drafting, max_rows=rows, announce=show)
                make, curves = measured.policy, measured.drafts or measured.copies
            else:
                make = partial(policy, capped)
            settings.append(
                Setting(
                    mode=drafting.mode,
                    max_draft=length,
                    drafter=drafting.drafter,
                    policy=make,
                    source=drafting.source,
                    weight_bytes=size,
                    curves=curves,
                )
            )
    return settings


def _in_force(lengths: Iterable[MaxDraft], drafter: Drafter | None) -> list[MaxDraft]:
    """The lengths, none beyond the drafter's block, and none twice."""
    block = 0 if drafter is None else drafter.max_block
    return list(dict.fromkeys(min(n, block) if isinstance(n, int) else n for n in lengths))


def _reference(parts: TargetParts, tokeniser: Tokeniser) -> dict[str, Runner]:
    from spec_cli.bench.reference import run_reference

    return {"mlx_lm": partial(run_reference, parts.model, tokeniser)}


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


def _print(report: Report) -> None:
    from rich.console import Console

    from spec_cli.bench.report import NOTES, grids
    from spec_cli.bench.verdict import verdict

    context = report.context
    click.echo(f"{context.model}, {context.dtype}, on {context.device}")
    sets = ", ".join(f"{count} {name}" for name, count in context.prompts.items())
    click.echo(
        f"{sets} prompts, {context.max_tokens} tokens at most, {counted(context.trials, 'trial')}\n"
    )
    for grid in grids(report):
        Console().print(_table(grid), "")
    click.echo(f"{verdict(report.results)}\n")
    for note in NOTES:
        click.secho(note, dim=True)


def _table(grid: Grid) -> Table:
    from rich.table import Table

    first, *others = grid.headings
    shown = Table(box=None, pad_edge=False)
    shown.add_column(first, no_wrap=True)
    for heading in others:
        shown.add_column(heading, justify="right", no_wrap=True)
    for row in grid.rows:
        shown.add_row(*row)
    return shown
