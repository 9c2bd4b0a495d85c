"""From a command's options to an engine and to how it samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Literal

import click
from click.core import ParameterSource

from spec_cli import bundled
from spec_cli.options import BITS, DEFAULT_MAX_DRAFT, MaxDraft, bits

if TYPE_CHECKING:
    from spec_core import SamplingParams
    from spec_server import CacheOptions, Engine, Limits, LoadOptions


def drafting(options: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `Engine.load` that say how to load and draft."""
    return {
        "drafter": options["drafter"],
        "mode": options["mode"],
        "max_draft": max_draft(options),
        "lookup_drafts": options["lookup_drafts"],
        "confidence_threshold": options["confidence_threshold"],
        "dtype": options["dtype"],
        "kv_bits": bits(options["kv_bits"]),
        "drafter_bits": bits(options["drafter_bits"]),
        "trust_remote_code": options["trust_remote_code"],
    }


def max_draft(options: Mapping[str, Any]) -> MaxDraft:
    """The draft length in force: where none was asked for, auto, or the whole block below a
    confidence threshold, which auto does not go with."""
    asked: int | Literal["full", "auto"] | None = options["max_draft"]
    if asked is None:
        return DEFAULT_MAX_DRAFT if options["confidence_threshold"] is None else None
    return None if asked == "full" else asked


def load_options(options: Mapping[str, Any]) -> LoadOptions:
    """What `load_engine` would load.

    Raises:
        InvalidValueError: an option is out of range, or two contradict each other.
    """
    from spec_server import LoadOptions

    return LoadOptions(bundled.target(options["model"]), **drafting(options))


def load_engine(
    options: Mapping[str, Any],
    *,
    limits: Limits,
    prefix_cache: CacheOptions | None,
    announce: Callable[[str], None] | None = None,
) -> Engine:
    """The engine that `model_option`, `drafting_options` and `loading_options` describe.

    Raises:
        SpecError: as `Engine.load`.
    """
    from spec_server import Engine

    return Engine.load(
        bundled.target(options["model"]),
        **drafting(options),
        limits=limits,
        prefix_cache=prefix_cache,
        announce=announce,
    )


def sampling(options: Mapping[str, Any], default: SamplingParams | None = None) -> SamplingParams:
    """The sampling options that are not None, over a default.

    Raises:
        InvalidValueError: one of them is out of range.
    """
    from spec_core import SamplingParams

    names = [field.name for field in fields(SamplingParams)]
    given = {name: options[name] for name in names if options.get(name) is not None}
    return replace(default or SamplingParams(), **given)


def typed(context: click.Context, name: str) -> bool:
    """Whether an option stands on the command line."""
    return context.get_parameter_source(name) is ParameterSource.COMMANDLINE


def refuse_idle_in_lookup(context: click.Context) -> None:
    """Refuse what a lookup alone has no use for.

    Raises:
        click.UsageError: copies were switched off, or a drafter's bits given.
    """
    if typed(context, "lookup_drafts") and not context.params["lookup_drafts"]:
        raise click.UsageError("--no-lookup-drafts has no place in mode lookup, which only copies")
    if _quantises(context):
        raise click.UsageError("--drafter-bits has no place in mode lookup, which has no drafter")


def refuse_idle_options(context: click.Context) -> None:
    """Refuse what would have no effect.

    Raises:
        click.UsageError: a draft length or copies were typed for a mode that drafts nothing, or
            switched off in one that only copies, a drafter's bits for one without a drafter, or a
            folder's size without a folder.
    """
    options = context.params
    if options["mode"] == "baseline":
        _refuse_idle_in_baseline(context)
    if options["mode"] == "lookup":
        refuse_idle_in_lookup(context)
    if typed(context, "prefix_cache_disk") and options["prefix_cache_dir"] is None:
        raise click.UsageError("--prefix-cache-disk has no folder; add --prefix-cache-dir")


def _refuse_idle_in_baseline(context: click.Context) -> None:
    copies = context.params["lookup_drafts"] and typed(context, "lookup_drafts")
    for name, given in (
        ("--max-draft", typed(context, "max_draft")),
        ("--lookup-drafts", copies),
        ("--drafter-bits", _quantises(context)),
    ):
        if given:
            raise click.UsageError(f"{name} has no place in --mode baseline, which drafts nothing")


def _quantises(context: click.Context) -> bool:
    """Whether a drafter's bits were typed."""
    return typed(context, "drafter_bits") and context.params["drafter_bits"] in BITS.choices


_DRAWING = ("seed", "top_k", "top_p", "min_p")


def idle_sampling(context: click.Context, temperature: float) -> str | None:
    """A note on sampling options that were typed but do nothing where nothing is drawn."""
    idle = [f"--{name.replace('_', '-')}" for name in _DRAWING if typed(context, name)]
    if temperature > 0 or not idle:
        return None
    verb = "has" if len(idle) == 1 else "have"
    return f"{', '.join(idle)} {verb} no effect at temperature 0, which is greedy"


def announce(sentence: str) -> None:
    """Say on stderr what takes a while."""
    click.secho(sentence, err=True, dim=True)
