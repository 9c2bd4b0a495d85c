"""One prompt in one setting, timed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import mlx.core as mx

from spec_core import (
    CostCurves,
    Drafter,
    DraftPolicy,
    RowOutcome,
    SamplingParams,
    Target,
    decode,
)
from spec_server.text import AnswerText, Tokeniser


@dataclass(frozen=True, slots=True)
class Task:
    """What is to be answered.

    Attributes:
        prompt: token ids.
        max_tokens: the answer's length at most.
        sampling: greedy if None.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams | None = None


@dataclass(frozen=True, slots=True)
class Setting:
    """What decodes.

    Attributes:
        mode: as in the results.
        max_draft: cap on guesses a round; None: the whole block; "auto": measured lengths.
        drafter: None decodes plainly.
        policy: makes a policy without experience.
        source: folder or id of the drafter's model.
        weight_bytes: what the drafter occupies.
        curves: what rounds cost, where that was measured.
    """

    mode: str
    max_draft: int | Literal["auto"] | None
    drafter: Drafter | None
    policy: Callable[[], DraftPolicy]
    source: str | None = None
    weight_bytes: int = 0
    curves: CostCurves | None = None

    @property
    def label(self) -> str:
        """For instance "dspark at 4", "dspark auto", "dflash" for a whole block."""
        return named(self.mode, self.max_draft)


def drafter_of(mode: str) -> str:
    """The mode, whether copies stand beside it or not."""
    return mode.partition("+")[0]


def named(mode: str, max_draft: int | str | None) -> str:
    """A setting for a reader."""
    if max_draft is None:
        return mode
    return f"{mode} auto" if max_draft == "auto" else f"{mode} at {max_draft}"


@dataclass(slots=True)
class Trial:
    """What one run gave.

    Attributes:
        token_ids: the answer.
        decode_seconds: from the first token to the last.
        ttft_seconds: from the start to the first token.
        peak_bytes: MLX's peak memory, weights included.
        outcomes: what every round did; empty for another program's decoder.
    """

    token_ids: tuple[int, ...] = ()
    decode_seconds: float = 0.0
    ttft_seconds: float = 0.0
    peak_bytes: int = 0
    outcomes: list[RowOutcome] = field(default_factory=list)

    @property
    def decoded(self) -> int:
        """Tokens after the first."""
        return max(len(self.token_ids) - 1, 0)


def run_trial(
    target: Target, drafter: Drafter | None, policy: DraftPolicy, tokeniser: Tokeniser, task: Task
) -> Trial:
    """Answer a task, text included, as a user would be answered."""
    trial, text, ids = Trial(), AnswerText(tokeniser), list[int]()
    mx.reset_peak_memory()
    start = time.perf_counter()
    first = start
    rounds = decode(
        target,
        drafter,
        task.prompt,
        sampling=task.sampling,
        max_tokens=task.max_tokens,
        end_tokens=tuple(tokeniser.end_tokens),
        policy=policy,
    )
    for outcome in rounds:
        if outcome.prefill:
            first = time.perf_counter()
        text.feed(outcome.tokens)
        ids += outcome.tokens
        trial.outcomes.append(outcome)
    trial.decode_seconds = time.perf_counter() - first
    trial.ttft_seconds = first - start
    trial.peak_bytes = mx.get_peak_memory()
    trial.token_ids = tuple(ids)
    return trial
