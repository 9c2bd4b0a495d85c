"""`spec generate`: one answer, streamed to stdout."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from spec_cli import loading
from spec_cli.blas import ADVICE, AUTO
from spec_cli.options import (
    answer_options,
    cache_options,
    drafting_options,
    json_option,
    kept_prefixes,
    loading_options,
    log_level_option,
    logprobs_option,
    model_option,
    prompt_file_option,
    sampling_options,
    utf8,
)
from spec_cli.places import Command
from spec_cli.screen import Output, Screen, show

if TYPE_CHECKING:
    from spec_server import Completion, Engine


@click.command(cls=Command)
@click.argument("prompt", required=False)
@prompt_file_option
@model_option
@drafting_options
@loading_options
@answer_options
@click.option("--no-chat-template", is_flag=True, help="Continue the prompt as it stands.")
@sampling_options(shown=True)
@logprobs_option
@cache_options
@json_option
@click.option("-q", "--quiet", is_flag=True, help="No thought and no statistics on stderr.")
@log_level_option("warning")
@click.pass_context
def generate(context: click.Context, /, **options: Any) -> None:
    """Answer PROMPT (- reads it from stdin).

    The answer goes to stdout as it is accepted; the model's thought, statistics and warnings go
    to stderr.
    """
    prompt = _prompt(options["prompt"], options["prompt_file"])
    output = Output(options["as_json"], options["quiet"])
    _check(context, options)
    sampling = loading.sampling(options)
    note = loading.idle_sampling(context, sampling.temperature)
    if note is not None and not output.quiet:
        loading.announce(f"note: {note}")
    with _engine(options, output) as engine:
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
        completion = show(answer, screen)
    if output.as_json:
        click.echo(json.dumps(record(completion)))
    else:
        screen.end(completion)
        screen.remark(completion, engine.facts.dtype)
        _advise(options["cpu_blas"], output)
    if completion.finish_reason == "cancelled":
        context.exit(130)


def _check(context: click.Context, options: dict[str, Any]) -> None:
    loading.refuse_idle_options(context)
    if options["prefix_cache_ram"] is not None and options["prefix_cache_dir"] is None:
        raise click.UsageError("--prefix-cache-ram alone is of no use here; add --prefix-cache-dir")
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
        text = _read(file or "-") if given in (None, "-") else utf8(str(given), "the prompt")
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


def _engine(options: dict[str, Any], output: Output) -> Engine:
    from spec_server import Limits

    return loading.load_engine(
        options,
        limits=Limits(max_batch=1),
        prefix_cache=None if options["prefix_cache_dir"] is None else kept_prefixes(options),
        announce=None if output.quiet or output.as_json else loading.announce,
    )


def _advise(cpu_blas: str, output: Output) -> None:
    """Tell a person at a terminal what would make this machine faster."""
    from spec_server import device

    unoptimised = cpu_blas == AUTO and device.arithmetic() == device.BUNDLED_BLAS
    if unoptimised and sys.stderr.isatty() and not output.quiet:
        click.secho(f"note: {ADVICE}", err=True, dim=True)


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
