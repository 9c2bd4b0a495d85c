"""Options that several commands share."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click

from spec_cli import blas

if TYPE_CHECKING:
    from spec_server import CacheOptions

Decorated = TypeVar("Decorated", bound=Callable[..., Any])

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}

MODES = ("auto", "dspark", "dflash", "eagle3", "lookup", "baseline")
DTYPES = ("float32", "float16", "bfloat16")


MaxDraft = int | Literal["auto"] | None

DEFAULT_MAX_DRAFT = "full"
"""As `spec_server.loading.DEFAULT_MAX_DRAFT`, which is too heavy to import for a help text."""

MAX_DRAFT_HELP = (
    "Guesses a round at most; full (or 0) is the drafter's whole block; auto takes the length "
    "with the most tokens a second, from round times that are measured once on this device, and "
    "decodes plainly where that is faster."
)


def draft_length(context: click.Context, parameter: click.Parameter, value: str) -> MaxDraft:
    """A cap on guesses a round: a number, None for `full` (or 0), the whole block, or "auto"."""
    text = value.strip()
    if text == "auto":
        return "auto"
    if text == "full":
        return None
    if not text.isdecimal():
        raise click.BadParameter(f"{text!r} is neither a whole number nor 'full' nor 'auto'")
    return int(text) or None


def draft_lengths(
    context: click.Context, parameter: click.Parameter, value: str
) -> tuple[MaxDraft, ...]:
    """Several draft lengths, separated by commas."""
    return tuple(draft_length(context, parameter, part) for part in value.split(","))


def size(context: click.Context, parameter: click.Parameter, value: str | int | None) -> int | None:
    """A number of bytes, with K, M, G or T behind it if need be."""
    if value is None or isinstance(value, int):
        return value
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", value.strip(), re.IGNORECASE)
    if match is None:
        raise click.BadParameter(f"{value!r} is no size; write for instance 512M or 8G")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def whole_numbers(
    context: click.Context, parameter: click.Parameter, value: str
) -> tuple[int, ...]:
    """Numbers of at least 1, separated by commas; none for an empty text."""
    texts = [part.strip() for part in value.split(",")] if value.strip() else []
    for text in texts:
        if not text.isdecimal() or int(text) < 1:
            raise click.BadParameter(f"{text!r} is not a whole number of at least 1")
    return tuple(map(int, texts))


def names_of(allowed: tuple[str, ...]) -> Callable[..., tuple[str, ...] | None]:
    """A callback for names out of a fixed set, separated by commas."""

    def parse(
        context: click.Context, parameter: click.Parameter, value: str | None
    ) -> tuple[str, ...] | None:
        if value is None:
            return None
        names = tuple(part.strip() for part in value.split(","))
        for name in names:
            if name not in allowed:
                raise click.BadParameter(f"{name!r} is not one of {', '.join(allowed)}")
        return names

    return parse


def apply(*options: Callable[[Decorated], Decorated]) -> Callable[[Decorated], Decorated]:
    """Several option decorators as one, in the order of the help text."""

    def decorate(function: Decorated) -> Decorated:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


BITS = click.Choice(("4", "8"))

model_option = click.option(
    "--model", metavar="FOLDER|ID", help="Target model. [default: the bundled spec-tiny]"
)

cpu_blas_option = click.option(
    "--cpu-blas",
    metavar="auto|bundled|PATH",
    envvar="SPEC_CPU_BLAS",
    default=blas.AUTO,
    show_default=True,
    callback=blas.option,
    help="On a Linux CPU: the library that multiplies float32 matrices. auto takes an OpenBLAS "
    "that is installed; bundled is MLX's own, whose sums are the same for every draft length.",
)

loading_options = apply(
    click.option(
        "--dtype",
        type=click.Choice(DTYPES),
        help="Cast weights and activations. [default: the checkpoint's own; on a Linux CPU "
        "float32, which is faster there, if memory allows]",
    ),
    cpu_blas_option,
    click.option("--kv-bits", type=BITS, help="Quantise keys and values."),
    click.option("--drafter-bits", type=BITS, help="Quantise the drafter's matrices."),
    click.option(
        "--trust-remote-code", is_flag=True, help="Import Python code that the checkpoint brings."
    ),
)

cache_options = apply(
    click.option(
        "--prefix-cache-ram",
        metavar="SIZE",
        callback=size,
        help="Memory for prefixes that are kept for reuse; it is taken off the memory limit. "
        "[default: an eighth of what is left for requests, 4G at most]",
    ),
    click.option(
        "--prefix-cache-dir",
        type=click.Path(file_okay=False),
        help="Keep prefixes in this folder too, beyond the process's life. Several processes may "
        "share it.",
    ),
    click.option(
        "--prefix-cache-disk",
        metavar="SIZE",
        callback=size,
        default="16G",
        show_default=True,
        help="The most that --prefix-cache-dir may hold.",
    ),
)
"""Read by `kept_prefixes`."""


def kept_prefixes(options: dict[str, Any]) -> CacheOptions:
    """The options of a prefix cache."""
    from spec_server import CacheOptions

    folder = options["prefix_cache_dir"]
    if folder is None:
        return CacheOptions(options["prefix_cache_ram"])
    return CacheOptions(
        options["prefix_cache_ram"], options["prefix_cache_disk"], Path(folder).expanduser()
    )


prompt_file_option = click.option(
    "--prompt-file",
    type=click.Path(exists=True, dir_okay=False, allow_dash=True),
    help="Read the prompt from a file.",
)

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


def bits(value: str | None) -> Any:
    """The number in a --*-bits option."""
    return None if value is None else int(value)
