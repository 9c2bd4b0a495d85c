"""Where the time goes: the same round with a wait after each part.

A wait keeps parts from overlapping, so these times show proportions and must not be taken for
throughput, which is measured without them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from spec_cli.bench.trial import Setting
from spec_core import decode
from spec_core.seams import (
    Chooser,
    Copier,
    Drafter,
    DrafterState,
    EmbeddingLender,
    Forward,
    LogitRows,
    Proposal,
    Target,
    TargetInfo,
    TargetState,
)


@dataclass(slots=True)
class Clock:
    """Seconds spent in each part since the last `reset`."""

    draft: float = 0.0
    verify: float = 0.0

    def reset(self) -> None:
        self.draft = self.verify = 0.0


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """Means over rounds, in seconds: proposing and telling the drafter, the target's forward, and
    everything else."""

    draft: float
    verify: float
    overhead: float


class FencedTarget:
    """A target whose forwards are waited for and timed, the building of their graph included."""

    def __init__(self, target: Target, clock: Clock) -> None:
        self._target = target
        self._clock = clock

    @property
    def info(self) -> TargetInfo:
        return self._target.info

    @property
    def lender(self) -> EmbeddingLender | None:
        return self._target.lender

    def new_state(self, rows: int) -> TargetState:
        return self._target.new_state(rows)

    def forward(
        self,
        tokens: mx.array,
        state: TargetState,
        *,
        taps: Sequence[int] = (),
        logits: LogitRows = "all",
        valid: Sequence[int] | None = None,
    ) -> Forward:
        mx.eval(tokens)
        start = time.perf_counter()
        forward = self._target.forward(tokens, state, taps=taps, logits=logits, valid=valid)
        mx.eval(forward.logits, *forward.taps)
        self._clock.verify += time.perf_counter() - start
        return forward


class FencedDrafter:
    """A drafter whose proposals and extensions are waited for and timed."""

    def __init__(self, drafter: Drafter, clock: Clock) -> None:
        self._drafter = drafter
        self._clock = clock

    @property
    def name(self) -> str:
        return self._drafter.name

    @property
    def taps(self) -> Sequence[int]:
        return self._drafter.taps

    @property
    def max_block(self) -> int:
        return self._drafter.max_block

    @property
    def needs_host_tokens(self) -> bool:
        return self._drafter.needs_host_tokens

    def new_state(self, rows: int, start: int = 0) -> DrafterState:
        return self._drafter.new_state(rows, start)

    def extend(
        self,
        state: DrafterState,
        tokens: mx.array,
        taps: Sequence[mx.array],
        keep: Sequence[int],
    ) -> None:
        start = time.perf_counter()
        self._drafter.extend(state, tokens, taps, keep)
        mx.eval(*state.pending())
        self._clock.draft += time.perf_counter() - start

    def propose(
        self, state: DrafterState, anchor: mx.array, count: int, chooser: Chooser
    ) -> Proposal:
        mx.eval(anchor)
        start = time.perf_counter()
        proposal = self._drafter.propose(state, anchor, count, chooser)
        mx.eval(proposal.tokens)
        self._clock.draft += time.perf_counter() - start
        return proposal


class FencedCopier(FencedDrafter):
    """The same for a drafter that copies from the text."""

    def __init__(self, copier: Copier, clock: Clock) -> None:
        super().__init__(copier, clock)
        self._copier = copier

    def copies(self, state: DrafterState, anchors: Sequence[int]) -> Sequence[int]:
        start = time.perf_counter()
        found = self._copier.copies(state, anchors)
        self._clock.draft += time.perf_counter() - start
        return found


def fenced(drafter: Drafter | None, clock: Clock) -> Drafter | None:
    """The drafter with fences, as what it is."""
    if drafter is None:
        return None
    if isinstance(drafter, Copier):
        return FencedCopier(drafter, clock)
    return FencedDrafter(drafter, clock)


def time_rounds(
    target: Target, setting: Setting, prompt: Sequence[int], end_tokens: Sequence[int], budget: int
) -> tuple[RoundTimes, int] | None:
    """Mean times of one answer's rounds, and how many there were; None without a round."""
    clock = Clock()
    outcomes = decode(
        FencedTarget(target, clock),
        fenced(setting.drafter, clock),
        prompt,
        max_tokens=budget,
        end_tokens=end_tokens,
        policy=setting.policy,
    )
    next(outcomes)
    clock.reset()
    start = time.perf_counter()
    rounds = sum(1 for _ in outcomes)
    wall = time.perf_counter() - start
    if not rounds:
        return None
    overhead = max(wall - clock.draft - clock.verify, 0.0)
    return RoundTimes(clock.draft / rounds, clock.verify / rounds, overhead / rounds), rounds
