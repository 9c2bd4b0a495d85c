"""A line at the bottom of the terminal while an answer grows."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

import click

from spec_cli.sizes import counted

if TYPE_CHECKING:
    from spec_server import Chunk, Completion, Engine

_EVERY = 0.1
"""Seconds between two pictures of the line."""


def figures(completion: Completion) -> str:
    """An answer's figures in half a line."""
    seen = completion.statistics
    drafting = seen.mode if seen.mode == "baseline" else f"{seen.mode} ({seen.max_draft})"
    return _line(
        completion.completion_tokens,
        seen.tokens_per_second,
        seen.mean_accept_length,
        drafting,
        seen.cached_tokens,
        completion.prompt_tokens,
    )


def _line(
    tokens: int, rate: float, per_round: float, drafting: str, reused: int, prompt: int | None
) -> str:
    of = "" if prompt is None else f" of {prompt}"
    return (
        f"{counted(tokens, 'token')}, {rate:.1f} tokens/s, {per_round:.2f} a round, {drafting}, "
        f"{reused}{of} prompt tokens reused"
    )


class Pace:
    """What is known of an answer while it grows.

    Args:
        engine: what answers; it answers nobody else.
        clock: seconds.
    """

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.perf_counter) -> None:
        self._engine, self._clock = engine, clock
        self._reused_before = engine.activity.cache_hit_tokens
        self._first: float | None = None
        self._tokens = self._rounds = 0

    def count(self, chunk: Chunk) -> None:
        """One more chunk: the prompt's own token first, then one chunk a round."""
        if self._first is None:
            self._first = self._clock()
        elif chunk.token_ids:
            self._rounds += 1
        self._tokens += len(chunk.token_ids)

    def __str__(self) -> str:
        if self._first is None:
            return "reading the prompt"
        labels = self._engine.facts.labels
        drafting = labels.mode if labels.policy is None else f"{labels.mode} ({labels.policy})"
        since = self._clock() - self._first
        later = max(0, self._tokens - 1)
        reused = self._engine.activity.cache_hit_tokens - self._reused_before
        return _line(
            self._tokens,
            later / since if since > 0 else 0.0,
            later / self._rounds if self._rounds else 1.0,
            drafting,
            reused,
            None,
        )


class LiveLine:
    """Keeps the terminal's last row for a line, while the rows above scroll.

    Args:
        text: asked for the line.
        shown: whether there is a terminal that can do that.
    """

    def __init__(self, text: Callable[[], str], *, shown: bool) -> None:
        self._text, self._shown = text, shown
        self._rows, self._drawn = 0, 0.0

    def update(self) -> None:
        """Draw the line anew, unless that was done a moment ago."""
        if self._shown and time.perf_counter() - self._drawn >= _EVERY:
            self._drawn = time.perf_counter()
            size = shutil.get_terminal_size()
            if size.lines != self._rows:
                self._reserve(size.lines)
            self._draw(click.style(self._text()[: size.columns - 1], dim=True))

    def __enter__(self) -> Self:
        self.update()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._rows:
            self._draw("")
            _write("\x1b7\x1b[r\x1b8")

    def _reserve(self, rows: int) -> None:
        """Let all rows but the last scroll, with the cursor on one of them."""
        _write(f"\x1bD\x1b[1A\x1b7\x1b[1;{rows - 1}r\x1b8")
        self._rows = rows

    def _draw(self, line: str) -> None:
        _write(f"\x1b7\x1b[{self._rows};1H\x1b[2K{line}\x1b8")


def terminal_has_rows() -> bool:
    """Whether output goes to a terminal whose rows can be addressed."""
    both = sys.stdout.isatty() and sys.stderr.isatty()
    return both and os.environ.get("TERM", "dumb") != "dumb"


def _write(text: str) -> None:
    """To the terminal, behind what was printed before."""
    sys.stdout.flush()
    sys.stderr.flush()
    sys.stdout.write(text)
    sys.stdout.flush()
