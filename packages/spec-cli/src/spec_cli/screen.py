"""Where an answer goes: text to stdout, everything else to stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from spec_cli.sizes import counted

if TYPE_CHECKING:
    from spec_server import Answer, AnswerStatistics, Chunk, Completion

Watcher = Callable[["Chunk"], None]
"""Told of every chunk after it was written."""

ENDINGS = {"stop": "itself", "length": "the token limit", "cancelled": "Ctrl-C"}


@dataclass(frozen=True, slots=True)
class Output:
    """How an answer is shown."""

    as_json: bool = False
    quiet: bool = False


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

    def end(self, completion: Completion) -> None:
        """Begin a new line after an answer."""
        self.end_thought()
        if completion.text and not completion.text.endswith("\n"):
            sys.stdout.write("\n")
            sys.stdout.flush()

    def remark(self, completion: Completion, dtype: str) -> None:
        """Fallbacks and statistics, for who did not ask for silence."""
        if self._output.quiet:
            return
        notes = (f"note: {fallback}" for fallback in completion.statistics.fallbacks)
        for line in (*notes, statistics_line(completion, dtype)):
            click.secho(line, err=True, dim=True)


def show(answer: Answer, screen: Screen, watch: Watcher | None = None) -> Completion:
    """Write the answer as it grows; Ctrl-C ends it with what there is."""
    try:
        _write(answer, screen, watch)
    except KeyboardInterrupt:
        answer.cancel()
        _write(answer, screen, watch)
    return answer.result()


def _write(answer: Answer, screen: Screen, watch: Watcher | None) -> None:
    for chunk in answer:
        screen.write(chunk)
        if watch is not None:
            watch(chunk)


def statistics_line(completion: Completion, dtype: str) -> str:
    """One line for a reader: what computed how, how fast, how much was accepted, why it ended."""
    from spec_server import device

    seen, library = completion.statistics, device.arithmetic()
    computed = f"{dtype} with {library}" if library and dtype == "float32" else dtype
    parts = [
        f"{_drafting(seen)}, {computed}: {counted(completion.completion_tokens, 'token')}",
        f"{seen.tokens_per_second:.1f} tokens/s",
        f"{seen.mean_accept_length:.2f} tokens a round over {counted(seen.rounds, 'round')}",
        f"first token after {seen.ttft_seconds:.2f} s",
    ]
    if seen.cache_stopped != "off":
        parts.append(f"{seen.cached_tokens} of {completion.prompt_tokens} prompt tokens reused")
    return ", ".join([*parts, f"ended by {ENDINGS[completion.finish_reason]}"])


def _drafting(seen: AnswerStatistics) -> str:
    """For instance "dspark (auto: 7)"; "baseline" where nothing drafts."""
    return seen.mode if seen.mode == "baseline" else f"{seen.mode} ({seen.max_draft})"
