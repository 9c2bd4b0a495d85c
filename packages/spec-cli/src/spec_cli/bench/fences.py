"""Where the time goes: the same round with a wait after each part.

A wait keeps parts from overlapping, so these times show proportions and must not be taken for
throughput, which is measured without them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from spec_cli.bench.trial import Setting, Task
from spec_core import decode
from spec_core.seams import (
    Chooser,
    Copier,
    Drafter,
    DrafterState,
    DraftPolicy,
    EmbeddingLender,
    Forward,
    LogitRows,
    Proposal,
    RowOutcome,
    RowStatus,
    Target,
    TargetInfo,
    TargetState,
)


@dataclass(slots=True)
class Clock:
    """Seconds spent in each part since the last `reset`."""

    draft: float = 0.0
    verify: float = 0.0
    accept: float = 0.0
    _verified: float | None = None

    def reset(self) -> None:
        self.draft = self.verify = self.accept = 0.0
        self._verified = None

    def verified(self) -> None:
        """A forward is done; what comes next is acceptance."""
        self._verified = time.perf_counter()

    def accepted(self) -> None:
        """The verdict has been read."""
        if self._verified is not None:
            self.accept += time.perf_counter() - self._verified
        self._verified = None


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """Means over rounds, in seconds.

    Attributes:
        draft: proposing, and telling the drafter what was kept.
        verify: the target's forward.
        accept: from there until the verdict is read; a part of the overhead.
        overhead: everything but draft and verify.
    """

    draft: float
    verify: float
    accept: float
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
        self._clock.verified()
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
        self._clock.accepted()
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
        self.copies_only = copier.copies_only

    def copies(self, state: DrafterState, anchors: Sequence[int]) -> Sequence[int]:
        start = time.perf_counter()
        found = self._copier.copies(state, anchors)
        self._clock.draft += time.perf_counter() - start
        return found

    def verifying(self, state: DrafterState, lengths: Sequence[int]) -> None:
        self._copier.verifying(state, lengths)


def fenced(drafter: Drafter | None, clock: Clock) -> Drafter | None:
    """The drafter with fences, as what it is."""
    if drafter is None:
        return None
    if isinstance(drafter, Copier):
        return FencedCopier(drafter, clock)
    return FencedDrafter(drafter, clock)


class FencedPolicy:
    """A policy that tells the clock when a round is settled."""

    def __init__(self, policy: DraftPolicy, clock: Clock) -> None:
        self._policy = policy
        self._clock = clock

    @property
    def needs_confidence(self) -> bool:
        return self._policy.needs_confidence

    def lengths(self, rows: Sequence[RowStatus]) -> Sequence[int]:
        return self._policy.lengths(rows)

    def truncate(
        self,
        rows: Sequence[RowStatus],
        lengths: Sequence[int],
        confidence: Sequence[Sequence[float]],
    ) -> Sequence[int]:
        return self._policy.truncate(rows, lengths, confidence)

    def observe(self, outcomes: Sequence[RowOutcome], seconds: float | None) -> None:
        self._clock.accepted()
        self._policy.observe(outcomes, seconds)


def time_rounds(
    target: Target, setting: Setting, task: Task, end_tokens: Sequence[int]
) -> tuple[RoundTimes, int] | None:
    """Mean times of one answer's rounds, and how many there were; None without a round."""
    clock = Clock()
    outcomes = decode(
        FencedTarget(target, clock),
        fenced(setting.drafter, clock),
        task.prompt,
        sampling=task.sampling,
        max_tokens=task.max_tokens,
        end_tokens=end_tokens,
        policy=FencedPolicy(setting.policy(), clock),
    )
    next(outcomes)
    clock.reset()
    start = time.perf_counter()
    rounds = sum(1 for _ in outcomes)
    wall = time.perf_counter() - start
    if not rounds:
        return None
    overhead = max(wall - clock.draft - clock.verify, 0.0)
    parts = (clock.draft, clock.verify, min(clock.accept, overhead), overhead)
    return RoundTimes(*(part / rounds for part in parts)), rounds
