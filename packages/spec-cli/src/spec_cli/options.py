"""Options that several commands share."""

from __future__ import annotations

import logging
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

DEFAULT_MAX_DRAFT: MaxDraft = "auto"
"""Of the commands that answer, without a confidence threshold. The library's own default is the
drafter's whole block."""


def checkpoint(
    context: click.Context, parameter: click.Parameter, value: str | tuple[str, ...] | None
) -> str | tuple[str, ...] | None:
    """Folders or hub names of models and drafters, as they were given; none of them is empty."""
    names = (value,) if isinstance(value, str) else value or ()
    if not all(name.strip() for name in names):
        raise click.BadParameter("it is empty: name a folder or owner/name, or leave it out")
    return value


def draft_length(context: click.Context, parameter: click.Parameter, value: str | int) -> MaxDraft:
    """A cap on guesses a round: a number (a configuration file has it as one; 0 is plain
    decoding), None for `full`, the whole block, or "auto"."""
    text = str(value).strip()
    if text == "auto":
        return "auto"
    if text == "full":
        return None
    if not text.isdecimal():
        raise click.BadParameter(
            f"{text!r} is neither a whole number (0 or more) nor 'full' nor 'auto'"
        )
    return int(text)


def asked_length(
    context: click.Context, parameter: click.Parameter, value: str | int | None
) -> int | Literal["full", "auto"] | None:
    """As `draft_length`, but with "full" as it was written; None: left open, as
    `spec_cli.loading.max_draft` settles it."""
    if value is None:
        return None
    length = draft_length(context, parameter, value)
    return "full" if length is None else length


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
        raise click.BadParameter(
            f"{value!r} is no size; write for instance 512M or 8G (K, M, G or T)"
        )
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


def _logit_bias(
    context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> dict[int, float]:
    """Token ids and what is added to their logits."""
    biases: dict[int, float] = {}
    for value in values:
        token, _, bias = value.partition("=")
        try:
            biases[int(token)] = float(bias)
        except ValueError as error:
            raise click.BadParameter(
                f"{value!r} is not of the form ID=VALUE, for instance 42=-100"
            ) from error
    return biases


def utf8(text: str, name: str) -> str:
    """A text from the command line or from stdin, where bytes that are not UTF-8 come as lone
    surrogates.

    Raises:
        click.UsageError: it has such bytes.
    """
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeError as error:
        raise click.UsageError(f"{name} is not UTF-8 text: {error}") from error


def _texts(
    context: click.Context, parameter: click.Parameter, value: str | tuple[str, ...] | None
) -> str | tuple[str, ...] | None:
    """Callback of options whose texts the model sees."""
    if value is None:
        return None
    if isinstance(value, str):
        return utf8(value, parameter.opts[0])
    return tuple(utf8(text, parameter.opts[0]) for text in value)


def apply(*options: Callable[[Decorated], Decorated]) -> Callable[[Decorated], Decorated]:
    """Several option decorators as one, in the order of the help text."""

    def decorate(function: Decorated) -> Decorated:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


LOG_LEVELS = ("debug", "info", "warning", "error")


def log_level_option(
    default: str, text: str = "What is logged to stderr.", *, timed: bool = False
) -> Callable[[Decorated], Decorated]:
    """What is logged to stderr while the command runs.

    Args:
        default: the level of who does not choose.
        text: what the help says.
        timed: each line begins with the time.
    """

    def start(context: click.Context, parameter: click.Parameter, value: str) -> str:
        if not context.resilient_parsing:
            _log_to_stderr(value, timed)
        return value

    return click.option(
        "--log-level",
        type=click.Choice(LOG_LEVELS),
        default=default,
        show_default=True,
        envvar="SPEC_LOG_LEVEL",
        callback=start,
        help=text,
    )


class _ToStderr(logging.Handler):
    """Writes to whatever stderr is at the moment."""

    def emit(self, record: logging.LogRecord) -> None:
        click.echo(self.format(record), err=True)


def _log_to_stderr(level: str, timed: bool) -> None:
    handler = _ToStderr()
    time = "%(asctime)s " if timed else ""
    handler.setFormatter(logging.Formatter(f"{time}%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(handlers=[handler], level=level.upper())
    logging.getLogger("huggingface_hub").setLevel(level.upper())  # it has a level of its own
    if level == "info":
        logging.getLogger("uvicorn").setLevel(logging.WARNING)


BITS = click.Choice(("4", "8"))


model_option = click.option(
    "--model",
    metavar="FOLDER|ID",
    callback=checkpoint,
    help="Target model. [default: the bundled spec-tiny]",
)

cpu_blas_option = click.option(
    "--cpu-blas",
    metavar="auto|bundled|PATH",
    envvar="SPEC_CPU_BLAS",
    default=blas.AUTO,
    show_default=True,
    callback=blas.option,
    help="On a Linux CPU: the library that multiplies float32 matrices. auto takes an OpenBLAS "
    "that is installed (with --kv-bits it does not); bundled is MLX's own, whose sums are the same "
    "for every draft length.",
)

loading_options = apply(
    click.option(
        "--dtype",
        type=click.Choice(DTYPES),
        help="Cast weights and activations. [default: the checkpoint's own; on a Linux CPU "
        "float32, which is faster there, if memory allows]",
    ),
    cpu_blas_option,
    click.option("--kv-bits", type=BITS, is_eager=True, help="Quantise keys and values."),
    click.option(
        "--drafter-bits",
        type=click.Choice(("auto", "none", *BITS.choices)),
        default="auto",
        show_default=True,
        help="Quantise the drafter's matrices; auto: to 4 bits on a GPU, not at all on a CPU.",
    ),
    click.option(
        "--trust-remote-code", is_flag=True, help="Import Python code that the checkpoint brings."
    ),
)

copies_option = click.option(
    "--lookup-drafts/--no-lookup-drafts",
    default=None,
    help="Where the text repeats itself, copy from it instead of asking the drafter. "
    "[default: where the draft length is auto]",
)

drafting_options = apply(
    click.option(
        "--drafter",
        metavar="FOLDER|ID",
        callback=checkpoint,
        help="Drafter. [default: the one known for the target]",
    ),
    click.option(
        "--mode",
        type=click.Choice(MODES),
        default="auto",
        show_default=True,
        help="What drafts. auto takes the drafter that is named or known, lookup where there is "
        "none; baseline decodes plainly.",
    ),
    click.option(
        "--max-draft",
        callback=asked_length,
        metavar="N|full|auto",
        envvar="SPEC_MAX_DRAFT",
        help="Guesses a round at most: 0 decodes plainly, full is the drafter's whole block; auto "
        "takes the length with the most tokens a second, from round times that are measured once "
        "on this device, and decodes plainly where that is faster. "
        f"[default: {DEFAULT_MAX_DRAFT}; full with --confidence-threshold]",
    ),
    click.option(
        "--confidence-threshold",
        type=float,
        help="Cut each draft before the first guess whose confidence is below this, in (0, 1].",
    ),
    copies_option,
)

answer_options = apply(
    click.option("--system", callback=_texts, help="A system message before the prompt."),
    click.option(
        "--thinking/--no-thinking",
        default=None,
        help="Switch the model's thought on or off. [default: as its template does]",
    ),
    click.option(
        "--max-tokens",
        type=int,
        default=1024,
        show_default=True,
        help="The answer's length at most.",
    ),
    click.option(
        "--stop",
        multiple=True,
        metavar="TEXT",
        callback=_texts,
        help="End before TEXT; may be given several times.",
    ),
)


def sampling_options(*, shown: bool) -> Callable[[Decorated], Decorated]:
    """How tokens are drawn.

    Args:
        shown: an option that is left out has the neutral default, and the help says so; otherwise
            it is None.
    """

    def option(name: str, kind: type, default: float, text: str = "") -> Any:
        value = default if shown else None
        return click.option(f"--{name}", type=kind, default=value, show_default=shown, help=text)

    return apply(
        option("temperature", float, 0.0, "0 is greedy."),
        option("top-k", int, 0, "0 is off."),
        option("top-p", float, 1.0, "1 is off."),
        option("min-p", float, 0.0, "0 is off."),
        option("presence-penalty", float, 0.0, "0 is off."),
        option("frequency-penalty", float, 0.0, "0 is off."),
        option("repetition-penalty", float, 1.0, "1 is off."),
        click.option(
            "--logit-bias",
            metavar="ID=VALUE",
            multiple=True,
            callback=_logit_bias,
            help="Add VALUE to a token's logit; may be given several times.",
        ),
        click.option("--seed", type=int, help="Makes sampled text repeatable, in every mode."),
    )


logprobs_option = click.option(
    "--logprobs",
    type=click.IntRange(0, 20),
    help="With --json: the log-probability of each token, with N alternatives.",
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
    """The options of a prefix cache.

    Raises:
        click.UsageError: the folder is below an unknown home.
    """
    from spec_server import CacheOptions

    folder = options["prefix_cache_dir"]
    if folder is None:
        return CacheOptions(options["prefix_cache_ram"])
    try:
        place = Path(folder).expanduser()
    except RuntimeError as error:
        raise click.UsageError(
            f"--prefix-cache-dir is {folder!r}, below the home of a user that there is not; "
            "name another folder"
        ) from error
    return CacheOptions(options["prefix_cache_ram"], options["prefix_cache_disk"], place)


prompt_file_option = click.option(
    "--prompt-file",
    type=click.Path(exists=True, dir_okay=False, allow_dash=True),
    help="Read the prompt from a file.",
)

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


def yes_option(text: str) -> Callable[[Decorated], Decorated]:
    """Go ahead without asking."""
    return click.option("-y", "--yes", is_flag=True, help=text)


def bits(value: str | None) -> Any:
    """The number in a --*-bits option; None for none, and "auto" as it is."""
    return value if value == "auto" else None if value in (None, "none") else int(str(value))
