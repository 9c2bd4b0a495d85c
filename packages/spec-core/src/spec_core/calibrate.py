"""Measure what rounds cost here, by running them."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from itertools import pairwise
from statistics import mean

import mlx.core as mx

from spec_core.batch import Batch, RowImage
from spec_core.curves import CostCurves, RoundCost
from spec_core.errors import InvalidValueError
from spec_core.policy import FixedLength
from spec_core.request import Request
from spec_core.seams import (
    Chooser,
    Drafter,
    DrafterState,
    Proposal,
    RowOutcome,
    RowState,
    RowStatus,
    StateImage,
    Target,
)

_SWEEPS = 12
"""Passes over all lengths, as many as there is time for; the first warms up (kernels compile,
buffers grow) and is not counted. A machine may be slow half of the time: with many passes each
length meets it at its best."""
_FEWEST_SWEEPS = 2
_ROUNDS, _FEWEST_ROUNDS = 3, 1
"""Rounds of a length that are timed in a pass: fewer where there is no time for all lengths, since
a length that is guessed from its neighbours can be wrong by more than noise makes it."""
_FEWEST_LENGTHS = 4
_BASE_SHARE, _OTHER_SHARE = 0.6, 0.08
"""The share of the time that goes to one row at a small depth, and to each thing beside: what a cut
costs, a deep context, a wider batch."""
_BASE_DEPTH, _DEEP = 64, 1024


def calibrate(
    target: Target,
    drafter: Drafter,
    *,
    longest: int | None = None,
    max_rows: int = 1,
    budget_seconds: float = 4.0,
) -> CostCurves:
    """Time rounds of this target and drafter on this device, for a few seconds.

    One row is measured at every length up to `longest`, or at some of them where rounds are slow
    or many (blocks of 2, 4, 8, ... columns first, since kernels are made for those); and, while
    there is time, what a cut costs (0 where there is none), a deep context and wider batches.
    Kernels that have to be compiled first take their own time on top.

    Args:
        target: the target, with its weights loaded.
        drafter: what guesses; `FreeDrafter` stands in for one that searches text.
        longest: the longest draft of interest; the drafter's block if None.
        max_rows: the widest batch of interest.
        budget_seconds: about how long it may take; a few rounds are measured in any case.

    Raises:
        InvalidValueError: `longest` or `max_rows` is below 1, or the time negative or not finite.
    """
    if longest is not None and longest < 1:
        raise InvalidValueError("longest", longest, "at least 1, or None")
    if max_rows < 1:
        raise InvalidValueError("max_rows", max_rows, "at least 1")
    if not 0.0 <= budget_seconds < math.inf:
        raise InvalidValueError("budget_seconds", budget_seconds, "0 or more, and finite")
    began = time.perf_counter()
    top = drafter.max_block if longest is None else min(longest, drafter.max_block)

    def affordable(seconds: float, prefill: float = 0.0) -> bool:
        left = budget_seconds - (time.perf_counter() - began)
        return prefill + _least_time(seconds) < left

    some_time = budget_seconds * _OTHER_SHARE
    meter = _Meter(target, drafter, 1, _BASE_DEPTH)
    seconds = meter.once([0, top])
    cut = meter.cut(top, some_time) if top > 1 and affordable(2 * seconds) else 0.0
    every, base_time = _ladder(top), budget_seconds * _BASE_SHARE
    if base_time < len(every) * _least_time(seconds):
        meter.rounds = _FEWEST_ROUNDS
    lengths = _thinned(every, int(base_time / _least_time(seconds, meter.rounds)))
    points = meter.points(lengths, base_time)
    seconds = points[-1].seconds
    deep_prefill = meter.prefill_seconds * _DEEP / _BASE_DEPTH
    if target.info.context_window > 2 * _DEEP and affordable(2 * seconds, deep_prefill):
        points += _Meter(target, drafter, 1, _DEEP).points([0, top], some_time)
    rows, some = 2, _thinned(every, _FEWEST_LENGTHS)
    while rows <= max_rows and affordable(len(some) * seconds * rows):
        points += _Meter(target, drafter, rows, _BASE_DEPTH).points(some, some_time)
        rows *= 2
    return CostCurves(points, cut)


def _least_time(seconds: float, rounds: int = _ROUNDS) -> float:
    """What measuring a length whose round takes so long takes at least."""
    return seconds * _FEWEST_SWEEPS * (rounds + 2)


def _ladder(top: int) -> list[int]:
    """0..8 one by one, then ever coarser, ending with `top`."""
    steps = [n for n in (*range(9), 10, 12, 15, 20, 24, 32) if n < top]
    return [*steps, top]


def _thinned(lengths: list[int], most: int) -> list[int]:
    """At most so many lengths (but four, if there are), spread over all: both ends, 1, and what
    halves the widest gaps, lengths with a power of two columns before others."""
    chosen = sorted({0, min(1, len(lengths) - 1), len(lengths) - 1})
    while len(chosen) < min(len(lengths), max(_FEWEST_LENGTHS, most)):
        below, above = max(pairwise(chosen), key=lambda gap: gap[1] - gap[0])
        inner = range(below + 1, above)
        even = [index for index in inner if (lengths[index] + 1).bit_count() == 1]
        middle = min(even or inner, key=lambda index: abs(2 * index - below - above))
        chosen = sorted([*chosen, middle])
    return [lengths[index] for index in chosen]


class _Dial(FixedLength):
    """A length that can be turned, and a memory of what rounds took. Where it needs confidence, it
    cuts blocks to one guess."""

    def __init__(self) -> None:
        super().__init__(0)
        self.length = 0
        self.cuts = 0
        self.seconds: list[float] = []

    def truncate(
        self,
        rows: Sequence[RowStatus],
        lengths: Sequence[int],
        confidence: Sequence[Sequence[float]],
    ) -> Sequence[int]:
        self.cuts += 1
        return [1] * len(rows)

    def lengths(self, rows: Sequence[RowStatus]) -> Sequence[int]:
        return [self.length] * len(rows)

    def observe(self, outcomes: Sequence[RowOutcome], seconds: float | None) -> None:
        assert seconds is not None, "nothing but rounds runs while they are timed"
        self.seconds.append(seconds)


class _Meter:
    """Rows of arbitrary text at one depth, decoded for timing only.

    Attributes:
        rounds: how many rounds are timed in each pass.
    """

    def __init__(self, target: Target, drafter: Drafter, rows: int, depth: int) -> None:
        self._target, self._drafter = target, drafter
        self._rows, self._depth, self._dial = rows, depth, _Dial()
        self.rounds = _ROUNDS
        vocab = target.info.vocab_size
        started = time.perf_counter()
        self._kept: list[tuple[Request, RowImage]] = []
        for row in range(rows):
            prompt = tuple((row + 7 * i * i + 3 * i) % vocab for i in range(depth))
            request = Request(prompt, max_tokens=2**30)
            prefill = Batch(target, drafter).prefill(request)
            prefill.step(depth - 1)
            self._kept.append((request, prefill.image()))
        self.prefill_seconds = (time.perf_counter() - started) / rows

    def once(self, lengths: Sequence[int]) -> float:
        """Mean seconds of a round of these lengths, warmed up."""
        for length in lengths:
            self._rounds(length)
        taken = [min(self._rounds(length)) for length in lengths]
        return sum(taken) / len(taken)

    def points(self, lengths: Sequence[int], budget_seconds: float) -> list[RoundCost]:
        """The cost of each length."""
        timed = self._timed(lengths, budget_seconds)
        return [RoundCost(self._rows, n, self._depth, seconds) for n, seconds in timed.items()]

    def cut(self, top: int, budget_seconds: float) -> float:
        """Seconds that a guess costs which is drafted, looked at and cut; 0 where the drafter is
        not confident of anything."""
        cut = 0.0
        self._dial.needs_confidence = True
        self._rounds(top)
        if self._dial.cuts:
            timed = self._timed([top, 1], budget_seconds)
            cut = max(0.0, timed[top] - timed[1]) / (top - 1)
        self._dial.needs_confidence = False
        return cut

    def _timed(self, lengths: Sequence[int], budget_seconds: float) -> dict[int, float]:
        """Seconds of a round of each length: of its fastest pass, since noise only ever adds."""
        began = time.perf_counter()
        seconds: dict[int, list[float]] = {length: [] for length in lengths}
        for sweep in range(_SWEEPS):
            if sweep >= _FEWEST_SWEEPS and time.perf_counter() - began > budget_seconds:
                break
            for length in lengths:
                taken = self._rounds(length)
                if sweep:
                    seconds[length].append(mean(taken))
        return {length: min(taken) for length, taken in seconds.items()}

    def _rounds(self, length: int) -> list[float]:
        """Seconds of rounds of a length, from the depth on. The first is not counted: caches grow,
        and the pipeline of plain rounds fills."""
        batch = Batch(self._target, self._drafter, self._dial)
        for request, image in self._kept:
            prefill = batch.prefill(request, image)
            prefill.step(1)
            batch.join(prefill)
        self._dial.length = length
        for _ in range(self.rounds + 1):
            batch.step()
        taken, self._dial.seconds = self._dial.seconds, []
        return taken[1:]


class _NoState:
    """The state of a drafter that remembers nothing but lengths."""

    def __init__(self, rows: int, start: int) -> None:
        self.lengths: list[int] = [start] * rows

    @property
    def rows(self) -> int:
        return len(self.lengths)

    def select(self, rows: Sequence[int]) -> None:
        self.lengths = [self.lengths[row] for row in rows]

    def join(self, other: RowState) -> None:
        self.lengths += list(other.lengths)

    def image(self, row: int, start: int = 0) -> StateImage:
        return StateImage(start, self.lengths[row])

    def restore(self, row: int, image: StateImage) -> None:
        self.lengths[row] = image.length

    def pending(self) -> Sequence[mx.array]:
        return ()


class FreeDrafter:
    """Proposes the anchor over and over at no cost: the stand-in for a drafter that searches text
    (its proposals cost nothing measurable, and arbitrary text has none)."""

    name = "free"
    taps: Sequence[int] = ()
    needs_host_tokens = False

    def __init__(self, max_block: int = 32) -> None:
        self.max_block = max_block

    def new_state(self, rows: int, start: int = 0) -> DrafterState:
        return _NoState(rows, start)

    def extend(
        self,
        state: DrafterState,
        tokens: mx.array,
        taps: Sequence[mx.array],
        keep: Sequence[int],
    ) -> None:
        assert isinstance(state, _NoState)
        state.lengths = [n + k for n, k in zip(state.lengths, keep, strict=True)]

    def propose(
        self, state: DrafterState, anchor: mx.array, count: int, chooser: Chooser
    ) -> Proposal:
        tokens = mx.broadcast_to(anchor[:, None], (anchor.shape[0], count))
        return Proposal(tokens, (count,) * anchor.shape[0], sources=(self.name,) * anchor.shape[0])
