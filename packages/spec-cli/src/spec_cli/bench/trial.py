"""One prompt in one setting, timed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from spec_core import Drafter, DraftPolicy, RowOutcome, Target, decode
from spec_server.text import AnswerText, Tokeniser


@dataclass(frozen=True, slots=True)
class Setting:
    """What decodes.

    Attributes:
        mode: as in the results.
        max_draft: cap on guesses a round; None: the whole block.
        drafter: None decodes plainly.
        policy: how far to draft.
        source: folder or id of the drafter's model.
        weight_bytes: what the drafter occupies.
    """

    mode: str
    max_draft: int | None
    drafter: Drafter | None
    policy: DraftPolicy
    source: str | None = None
    weight_bytes: int = 0

    @property
    def label(self) -> str:
        """For instance "dspark at 4", "dflash" for a whole block."""
        return self.mode if self.max_draft is None else f"{self.mode} at {self.max_draft}"


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
    target: Target,
    setting: Setting,
    tokeniser: Tokeniser,
    prompt: Sequence[int],
    max_tokens: int,
) -> Trial:
    """Decode greedily, text included, as an answer to a user would be."""
    trial, text, ids = Trial(), AnswerText(tokeniser), list[int]()
    mx.reset_peak_memory()
    start = time.perf_counter()
    first = start
    rounds = decode(
        target,
        setting.drafter,
        prompt,
        max_tokens=max_tokens,
        end_tokens=tuple(tokeniser.end_tokens),
        policy=setting.policy,
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
