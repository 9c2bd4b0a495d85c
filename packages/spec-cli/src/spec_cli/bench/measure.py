"""Interleaved trials over prompt sets, and what follows from them.

Every prompt is decoded by every setting before the next prompt begins, the baseline first, so
that whatever else the machine does falls on all of them alike. A policy that learns starts anew
with each set of each trial. Figures are medians over trials.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import mlx.core as mx

from spec_cli.bench.fences import RoundTimes, time_rounds
from spec_cli.bench.trial import Setting, Task, Trial, run_trial
from spec_core import CostCurves, Statistics, Target
from spec_server.text import Tokeniser

BASELINE = "baseline"

Runner = Callable[[Task], Trial]

_WARM_UP_TOKENS = 16
_TIMED_PROMPTS = 2


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where an answer first left the baseline's.

    Attributes:
        set_name, prompt: which prompt, counted from 0.
        position: index into the answer.
        expected, got: the baseline's token and the other one; None where the answer had ended.
        margin: gap of the target's two best logits there: small at a near-tie.
    """

    set_name: str
    prompt: int
    position: int
    expected: int | None
    got: int | None
    margin: float


@dataclass(slots=True)
class Samples:
    """All trials of one setting: [trial][set name] to the trials of that set's prompts."""

    rounds: list[dict[str, list[Trial]]] = field(default_factory=list)

    def add(self, trial: int, set_name: str, result: Trial) -> None:
        while len(self.rounds) <= trial:
            self.rounds.append({})
        self.rounds[trial].setdefault(set_name, []).append(result)

    def rates(self, set_name: str) -> list[float]:
        """Tokens a second of each trial over a whole set."""
        return [_rate(trial[set_name]) for trial in self.rounds]

    def of(self, set_name: str) -> list[Trial]:
        return [one for trial in self.rounds for one in trial[set_name]]

    def every(self) -> list[Trial]:
        return [one for trial in self.rounds for results in trial.values() for one in results]


@dataclass(frozen=True, slots=True)
class SetResult:
    """One setting on one set: medians over trials, and their range.

    Attributes:
        plain_share: of the rounds, those that checked no guess.
    """

    tokens_per_second: float
    speedup: float
    speedup_range: tuple[float, float]
    mean_accept_length: float
    plain_share: float


@dataclass(frozen=True, slots=True)
class Result:
    """One setting on all sets; rates and speed-ups are medians of the sets' figures."""

    mode: str
    max_draft: int | str | None
    source: str | None
    tokens_per_second: float
    speedup: float
    mean_accept_length: float
    accept_by_position: tuple[float, ...]
    times: RoundTimes | None
    ttft_seconds: float
    peak_bytes: int
    sets: Mapping[str, SetResult]
    divergence: Divergence | None
    curves: CostCurves | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure.

    Attributes:
        sets: the tasks of each set.
        settings: the baseline first.
        reference: other plain decoders to compare with, by name. Where they sample, their text
            is their own.
    """

    target: Target
    tokeniser: Tokeniser
    sets: Mapping[str, Sequence[Task]]
    settings: Sequence[Setting]
    reference: Mapping[str, Runner]
    trials: int

    @property
    def end_tokens(self) -> tuple[int, ...]:
        return tuple(self.tokeniser.end_tokens)


def measure(plan: Plan, progress: Callable[[str], None]) -> list[Result]:
    """Run the plan; `progress` is told what comes next."""
    progress("warming up")
    first = next(iter(plan.sets.values()))[0]
    short = replace(first, max_tokens=min(first.max_tokens, _WARM_UP_TOKENS))
    for run in runners(plan).values():
        run(short)
    samples: dict[str, Samples] = {label: Samples() for label in runners(plan)}
    for trial in range(plan.trials):
        for name, tasks in plan.sets.items():
            fresh = runners(plan)
            for index, task in enumerate(tasks):
                progress(f"trial {trial + 1}/{plan.trials}, {name} {index + 1}/{len(tasks)}")
                for label, run in fresh.items():
                    samples[label].add(trial, name, run(task))
    progress("timing the parts of a round")
    return [_result(plan, label, samples) for label in samples]


def runners(plan: Plan) -> dict[str, Runner]:
    """Every setting by its label, without experience: the baseline, then other plain decoders."""

    def runner(setting: Setting) -> Runner:
        policy = setting.policy()
        return lambda task: run_trial(plan.target, setting.drafter, policy, plan.tokeniser, task)

    first, *others = plan.settings
    return {
        first.label: runner(first),
        **plan.reference,
        **{setting.label: runner(setting) for setting in others},
    }


def _result(plan: Plan, label: str, samples: Mapping[str, Samples]) -> Result:
    setting = next((s for s in plan.settings if s.label == label), None)
    own, base = samples[label], samples[plan.settings[0].label]
    sets = {name: _set_result(name, own, base) for name in plan.sets}
    counts = _counts(own.every())
    return Result(
        mode=label if setting is None else setting.mode,
        max_draft=None if setting is None else setting.max_draft,
        source=None if setting is None else setting.source,
        tokens_per_second=statistics.median(s.tokens_per_second for s in sets.values()),
        speedup=statistics.median(s.speedup for s in sets.values()),
        mean_accept_length=counts.mean_accept_length,
        accept_by_position=tuple(counts.accept_by_position),
        times=None if setting is None else _times(plan, setting),
        ttft_seconds=statistics.median(trial.ttft_seconds for trial in own.every()),
        peak_bytes=max(trial.peak_bytes for trial in own.every()) - _others(plan, setting),
        sets=sets,
        divergence=_divergence(plan, own, base, greedy_only=label in plan.reference),
        curves=None if setting is None else setting.curves,
    )


def _others(plan: Plan, setting: Setting | None) -> int:
    """Bytes of the loaded drafters that this setting does not use."""
    loaded = {id(s.drafter): s.weight_bytes for s in plan.settings}
    own = None if setting is None else setting.drafter
    return sum(size for key, size in loaded.items() if key != id(own))


def _set_result(name: str, own: Samples, base: Samples) -> SetResult:
    speedups = list(map(ratio, own.rates(name), base.rates(name)))
    outcomes = [o for trial in own.of(name) for o in trial.outcomes if not o.prefill]
    return SetResult(
        tokens_per_second=statistics.median(own.rates(name)),
        speedup=statistics.median(speedups),
        speedup_range=(min(speedups), max(speedups)),
        mean_accept_length=_counts(own.of(name)).mean_accept_length,
        plain_share=sum(o.drafted == 0 for o in outcomes) / max(1, len(outcomes)),
    )


def ratio(rate: float, plain: float) -> float:
    """A speed-up; 1 where nothing was decoded."""
    return rate / plain if plain > 0 else 1.0


def _rate(trials: Sequence[Trial]) -> float:
    seconds = sum(trial.decode_seconds for trial in trials)
    return sum(trial.decoded for trial in trials) / max(seconds, 1e-9)


def _counts(trials: Iterable[Trial]) -> Statistics:
    total = Statistics()
    for trial in trials:
        for outcome in trial.outcomes:
            total.add(outcome)
    return total


def _times(plan: Plan, setting: Setting) -> RoundTimes | None:
    """Mean over the rounds of the first prompts of each set."""
    measured = [
        time_rounds(plan.target, setting, task, plan.end_tokens)
        for tasks in plan.sets.values()
        for task in tasks[:_TIMED_PROMPTS]
    ]
    known = [m for m in measured if m is not None]
    rounds = sum(count for _, count in known)
    if not rounds:
        return None
    return RoundTimes(
        draft=sum(times.draft * count for times, count in known) / rounds,
        verify=sum(times.verify * count for times, count in known) / rounds,
        accept=sum(times.accept * count for times, count in known) / rounds,
        overhead=sum(times.overhead * count for times, count in known) / rounds,
    )


def _divergence(plan: Plan, own: Samples, base: Samples, *, greedy_only: bool) -> Divergence | None:
    """The first answer, in order, that is not the baseline's."""
    for mine, plain in zip(own.rounds, base.rounds, strict=True):
        for name, tasks in plan.sets.items():
            for index, (task, a, b) in enumerate(zip(tasks, mine[name], plain[name], strict=True)):
                comparable = task.sampling is None or not greedy_only
                if comparable and a.token_ids != b.token_ids:
                    return _located(plan.target, name, index, task.prompt, b, a)
    return None


def _located(
    target: Target, name: str, index: int, prompt: Sequence[int], plain: Trial, other: Trial
) -> Divergence:
    expected, got = plain.token_ids, other.token_ids
    shared = min(len(expected), len(got))
    position = next((i for i in range(shared) if expected[i] != got[i]), shared)
    return Divergence(
        set_name=name,
        prompt=index,
        position=position,
        expected=expected[position] if position < len(expected) else None,
        got=got[position] if position < len(got) else None,
        margin=margin(target, [*prompt, *expected[:position]]),
    )


def margin(target: Target, tokens: Sequence[int]) -> float:
    """Gap of the target's two best logits after these tokens."""
    state = target.new_state(1)
    forward = target.forward(mx.array([list(tokens)], dtype=mx.int32), state, logits="last")
    state.commit([len(tokens)])
    assert forward.logits is not None
    best = mx.sort(forward.logits[0, 0].astype(mx.float32))[-2:]
    gap: float = (best[1] - best[0]).item()  # type: ignore[assignment]
    return gap
