"""`spec generate`: one answer, streamed to stdout."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from spec_cli import bundled
from spec_cli.blas import ADVICE, AUTO
from spec_cli.options import (
    DEFAULT_MAX_DRAFT,
    MAX_DRAFT_HELP,
    MODES,
    apply,
    bits,
    cache_options,
    draft_length,
    json_option,
    kept_prefixes,
    loading_options,
    model_option,
    prompt_file_option,
)

if TYPE_CHECKING:
    from spec_core import SamplingParams
    from spec_server import Answer, AnswerStatistics, Chunk, Completion, Engine


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


sampling_options = apply(
    click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy."),
    click.option("--top-k", type=int, default=0, show_default=True, help="0 is off."),
    click.option("--top-p", type=float, default=1.0, show_default=True, help="1 is off."),
    click.option("--min-p", type=float, default=0.0, show_default=True, help="0 is off."),
    click.option("--presence-penalty", type=float, default=0.0, show_default=True),
    click.option("--frequency-penalty", type=float, default=0.0, show_default=True),
    click.option(
        "--repetition-penalty", type=float, default=1.0, show_default=True, help="1 is off."
    ),
    click.option(
        "--logit-bias",
        metavar="ID=VALUE",
        multiple=True,
        callback=_logit_bias,
        help="Add VALUE to a token's logit; may be given several times.",
    ),
    click.option("--seed", type=int, help="Makes sampled text repeatable, in every mode."),
    click.option(
        "--logprobs",
        type=click.IntRange(0, 20),
        help="With --json: the log-probability of each token, with N alternatives.",
    ),
)


@dataclass(frozen=True, slots=True)
class Output:
    """How an answer is shown."""

    as_json: bool
    quiet: bool


@click.command()
@click.argument("prompt", required=False)
@prompt_file_option
@model_option
@click.option(
    "--drafter", metavar="FOLDER|ID", help="Drafter. [default: the one known for the target]"
)
@click.option(
    "--mode",
    type=click.Choice(MODES),
    default="auto",
    show_default=True,
    help="What drafts. auto takes the drafter that is named or known, lookup where there is none; "
    "baseline decodes plainly.",
)
@click.option(
    "--max-draft",
    callback=draft_length,
    metavar="N|full|auto",
    default=DEFAULT_MAX_DRAFT,
    show_default=True,
    help=MAX_DRAFT_HELP,
)
@click.option(
    "--confidence-threshold",
    type=float,
    help="Cut each draft before the first guess whose confidence is below this, in (0, 1].",
)
@click.option(
    "--lookup-drafts/--no-lookup-drafts",
    default=False,
    show_default=True,
    help="Copy from the text so far where it repeats itself, instead of asking the drafter.",
)
@loading_options
@click.option("--system", help="A system message before the prompt.")
@click.option(
    "--thinking/--no-thinking",
    default=None,
    help="Switch the model's thought on or off. [default: as its template does]",
)
@click.option("--no-chat-template", is_flag=True, help="Continue the prompt as it stands.")
@click.option(
    "--max-tokens", type=int, default=1024, show_default=True, help="The answer's length at most."
)
@click.option(
    "--stop", multiple=True, metavar="TEXT", help="End before TEXT; may be given several times."
)
@sampling_options
@cache_options
@json_option
@click.option("-q", "--quiet", is_flag=True, help="No thought and no statistics on stderr.")
@click.pass_context
def generate(context: click.Context, /, **options: Any) -> None:
    """Answer PROMPT (- reads it from stdin).

    The answer goes to stdout as it is accepted; the model's thought, statistics and warnings go
    to stderr.
    """
    prompt = _prompt(options["prompt"], options["prompt_file"])
    output = Output(options["as_json"], options["quiet"])
    _check(options)
    sampling = _sampling(options)
    with _engine(options) as engine:
        answer = engine.stream(
            prompt,
            chat=not options["no_chat_template"],
            system=options["system"],
            thinking=options["thinking"],
            sampling=sampling,
            max_tokens=options["max_tokens"],
            stop=options["stop"],
        )
        screen = Screen(output)
        completion = _show(answer, screen)
    if output.as_json:
        click.echo(json.dumps(record(completion)))
    else:
        screen.end_thought()
        _report(completion, engine, output)
        _advise(options["cpu_blas"], output)
    if completion.finish_reason == "cancelled":
        context.exit(130)


def _check(options: dict[str, Any]) -> None:
    if options["prefix_cache_ram"] is not None and options["prefix_cache_dir"] is None:
        raise click.UsageError("--prefix-cache-ram alone is of no use here; add --prefix-cache-dir")
    length = click.get_current_context().get_parameter_source("max_draft")
    if options["mode"] == "baseline" and length is click.core.ParameterSource.COMMANDLINE:
        raise click.UsageError("--max-draft has no place in --mode baseline, which drafts nothing")
    if options["logprobs"] is not None and not options["as_json"]:
        raise click.UsageError("--logprobs has no place in plain text; add --json")
    if options["no_chat_template"]:
        for name in ("system", "thinking"):
            if options[name] is not None:
                raise click.UsageError(f"--{name} needs the chat template; drop --no-chat-template")


def _prompt(given: str | None, file: str | None) -> str:
    """The prompt, from exactly one place."""
    if (given is None) == (file is None):
        raise click.UsageError(
            "give the prompt once: as an argument, '-' for stdin, or --prompt-file FILE"
        )
    try:
        text = _read(file) if file is not None else _read("-") if given == "-" else str(given)
    except UnicodeDecodeError as error:
        raise click.UsageError(f"the prompt is not UTF-8 text: {error}") from error
    if not text.strip():
        raise click.UsageError("the prompt is empty")
    return text


def _read(file: str) -> str:
    """A file's text; "-" is stdin."""
    if file == "-":
        return sys.stdin.buffer.read().decode("utf-8")
    return Path(file).read_text(encoding="utf-8")


def _sampling(options: dict[str, Any]) -> SamplingParams:
    from spec_core import SamplingParams

    return SamplingParams(**{field.name: options[field.name] for field in fields(SamplingParams)})


def _engine(options: dict[str, Any]) -> Engine:
    from spec_server import Engine, Limits

    return Engine.load(
        bundled.target(options["model"]),
        drafter=options["drafter"],
        mode=options["mode"],
        max_draft=options["max_draft"],
        lookup_drafts=options["lookup_drafts"],
        confidence_threshold=options["confidence_threshold"],
        dtype=options["dtype"],
        kv_bits=bits(options["kv_bits"]),
        drafter_bits=bits(options["drafter_bits"]),
        trust_remote_code=options["trust_remote_code"],
        limits=Limits(max_batch=1),
        prefix_cache=None if options["prefix_cache_dir"] is None else kept_prefixes(options),
        announce=None if options["quiet"] or options["as_json"] else _announce,
    )


def _announce(sentence: str) -> None:
    """Say on stderr what takes a while."""
    click.secho(sentence, err=True, dim=True)


def _show(answer: Answer, screen: Screen) -> Completion:
    """Write the answer as it grows; Ctrl-C ends it with what there is."""
    try:
        for chunk in answer:
            screen.write(chunk)
    except KeyboardInterrupt:
        answer.cancel()
        for chunk in answer:
            screen.write(chunk)
    return answer.result()


class Screen:
    """Where an answer goes while it grows: text to stdout, thought to stderr."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._in_thought = False

    def write(self, chunk: Chunk) -> None:
        if self._output.as_json:
            return
        if chunk.reasoning and not self._output.quiet:
            click.secho(chunk.reasoning, nl=False, err=True, dim=True)
            self._in_thought = True
        if chunk.text:
            self.end_thought()
            sys.stdout.write(chunk.text)
            sys.stdout.flush()

    def end_thought(self) -> None:
        """Begin a new line after a thought."""
        if self._in_thought:
            click.echo(err=True)
            self._in_thought = False


def _report(completion: Completion, engine: Engine, output: Output) -> None:
    if completion.text and not completion.text.endswith("\n"):
        sys.stdout.write("\n")
        sys.stdout.flush()
    if output.quiet:
        return
    for line in (*_notes(completion), statistics_line(completion, engine.facts.dtype)):
        click.secho(line, err=True, dim=True)


def _advise(cpu_blas: str, output: Output) -> None:
    """Tell a person at a terminal what would make this machine faster."""
    from spec_server import device

    unoptimised = cpu_blas == AUTO and device.arithmetic() == device.BUNDLED_BLAS
    if unoptimised and sys.stderr.isatty() and not output.quiet:
        click.secho(f"note: {ADVICE}", err=True, dim=True)


def _notes(completion: Completion) -> Iterable[str]:
    return (f"note: {fallback}" for fallback in completion.statistics.fallbacks)


def statistics_line(completion: Completion, dtype: str) -> str:
    """One line for a reader: what computed how, how fast, how much was accepted, why it ended."""
    from spec_server import device

    seen, library = completion.statistics, device.arithmetic()
    computed = f"{dtype} with {library}" if library and dtype == "float32" else dtype
    parts = [
        f"{_drafting(seen)}, {computed}: {completion.completion_tokens} tokens",
        f"{seen.tokens_per_second:.1f} tokens/s",
        f"{seen.mean_accept_length:.2f} tokens a round over {seen.rounds} rounds",
        f"first token after {seen.ttft_seconds:.2f} s",
        f"ended by {_ENDINGS[completion.finish_reason]}",
    ]
    return ", ".join(parts)


def _drafting(seen: AnswerStatistics) -> str:
    """For instance "dspark (auto: 7)"; "baseline" where nothing drafts."""
    return seen.mode if seen.mode == "baseline" else f"{seen.mode} ({seen.max_draft})"


_ENDINGS = {"stop": "itself", "length": "the token limit", "cancelled": "Ctrl-C"}


def record(completion: Completion) -> dict[str, Any]:
    """The object that --json prints; `logprobs` and `cached_tokens` only where asked for."""
    seen = completion.statistics
    fields: dict[str, Any] = {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "prompt_tokens": completion.prompt_tokens,
        "completion_tokens": completion.completion_tokens,
        "finish_reason": completion.finish_reason,
        "mode": seen.mode,
        "drafter": seen.drafter,
        "max_draft": seen.max_draft,
        "rounds": seen.rounds,
        "drafted": seen.drafted,
        "accepted": seen.accepted,
        "mean_accept_length": seen.mean_accept_length,
        "round_accepts": list(seen.round_accepts),
        "accept_by_position": list(seen.accept_by_position),
        "tokens_per_second": seen.tokens_per_second,
        "ttft_seconds": seen.ttft_seconds,
        "seconds": seen.seconds,
        "fallbacks": list(seen.fallbacks),
    }
    if seen.cache_stopped != "off":
        fields["cached_tokens"] = seen.cached_tokens
    if completion.logprobs is not None:
        fields["logprobs"] = [
            {"token": entry.token, "logprob": entry.logprob, "top": [list(t) for t in entry.top]}
            for entry in completion.logprobs
        ]
    return fields
