"""The same settings with several requests at once, and behind long contexts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, cycle, islice

from spec_cli.bench.measure import Plan, ratio, runners
from spec_cli.bench.trial import Setting, Task
from spec_core import Batch, Request, RowOutcome, SamplingParams, Statistics
from spec_core.errors import InvalidValueError

_CHUNK = 512


@dataclass(frozen=True, slots=True)
class Point:
    """One setting at one place of a sweep: medians over sets and trials.

    Attributes:
        value: requests at once, or positions of context.
        speedup_range: over sets and trials.
        tokens_per_second: of all requests together.
        identical: every answer was the baseline's there.
    """

    value: int
    mode: str
    max_draft: int | str | None
    tokens_per_second: float
    speedup: float
    speedup_range: tuple[float, float]
    mean_accept_length: float
    identical: bool


@dataclass(slots=True)
class _Run:
    """What one run over some tasks gave."""

    ids: list[tuple[int, ...]]
    seconds: float
    counts: Statistics

    @property
    def rate(self) -> float:
        return sum(max(len(ids) - 1, 0) for ids in self.ids) / max(self.seconds, 1e-9)


@dataclass(slots=True)
class _Place:
    """All runs of one setting at one place."""

    setting: Setting
    runs: list[_Run] = field(default_factory=list)

    def point(self, value: int, base: _Place) -> Point:
        speedups = [ratio(a.rate, b.rate) for a, b in zip(self.runs, base.runs, strict=True)]
        rounds = sum(run.counts.rounds for run in self.runs)
        accepted = sum(run.counts.accepted for run in self.runs)
        return Point(
            value=value,
            mode=self.setting.mode,
            max_draft=self.setting.max_draft,
            tokens_per_second=statistics.median(run.rate for run in self.runs),
            speedup=statistics.median(speedups),
            speedup_range=(min(speedups), max(speedups)),
            mean_accept_length=1.0 + (accepted / rounds if rounds else 0.0),
            identical=all(a.ids == b.ids for a, b in zip(self.runs, base.runs, strict=True)),
        )


def concurrency(plan: Plan, counts: Sequence[int], progress: Callable[[str], None]) -> list[Point]:
    """Every setting with so many requests at once: the first ones of each set, again if need be."""
    points: list[Point] = []
    for count in counts:
        places = [_Place(setting) for setting in plan.settings]
        for trial in range(plan.trials):
            for name, tasks in plan.sets.items():
                progress(f"{count} at once, trial {trial + 1}/{plan.trials}, {name}")
                together = list(islice(cycle(tasks), count))
                for place in places:
                    place.runs.append(_together(plan, place.setting, together))
        points += [place.point(count, places[0]) for place in places]
    return points


def contexts(plan: Plan, depths: Sequence[int], progress: Callable[[str], None]) -> list[Point]:
    """Every setting with the first prompt of each set behind so many positions of other text.

    Raises:
        InvalidValueError: as `deep_tasks`.
    """
    points: list[Point] = []
    for depth in depths:
        places = [_Place(setting) for setting in plan.settings]
        deep = deep_tasks(plan, depth)
        for trial in range(plan.trials):
            for index, task in enumerate(deep):
                progress(
                    f"context {depth}, trial {trial + 1}/{plan.trials}, {index + 1}/{len(deep)}"
                )
                fresh = runners(plan)
                for place in places:
                    result = fresh[place.setting.label](task)
                    counts = _counted(result.outcomes)
                    place.runs.append(_Run([result.token_ids], result.decode_seconds, counts))
        points += [place.point(depth, places[0]) for place in places]
    return points


def deep_tasks(plan: Plan, depth: int) -> list[Task]:
    """The first prompt of each set behind other text.

    Raises:
        InvalidValueError: it does not fit into the model's context, or is shorter than a prompt.
    """
    return [_behind(plan, tasks[0], depth) for tasks in plan.sets.values()]


def _behind(plan: Plan, task: Task, depth: int) -> Task:
    """The task after text of other prompts, `depth` positions in all."""
    window = plan.target.info.context_window
    if depth + task.max_tokens > window:
        raise InvalidValueError(
            "contexts", depth, f"at most {window - task.max_tokens} with this model and answer"
        )
    missing = depth - len(task.prompt)
    if missing < 0:
        raise InvalidValueError(
            "contexts", depth, f"at least {len(task.prompt)}, a prompt's length"
        )
    others = [one.prompt for tasks in plan.sets.values() for one in tasks]
    filler = tuple(islice(cycle(chain.from_iterable(others)), missing))
    return replace(task, prompt=(*filler, *task.prompt))


def _together(plan: Plan, setting: Setting, tasks: Sequence[Task]) -> _Run:
    """Decode tasks in one batch; the time starts when all of them have their first token."""
    batch = Batch(plan.target, setting.drafter, setting.policy())
    answers: dict[int, list[int]] = {}
    for task in tasks:
        prefill = batch.prefill(_request(plan, task))
        while (first := prefill.step(_CHUNK)) is None:
            pass
        answers[first.key] = [*first.tokens]
        if first.finish is None:
            batch.join(prefill)
    outcomes: list[RowOutcome] = []
    start = time.perf_counter()
    while batch.rows:
        outcomes += batch.step()
    seconds = time.perf_counter() - start
    for outcome in outcomes:
        answers[outcome.key] += outcome.tokens
    return _Run([tuple(ids) for ids in answers.values()], seconds, _counted(outcomes))


def _request(plan: Plan, task: Task) -> Request:
    return Request(
        prompt=task.prompt,
        sampling=task.sampling or SamplingParams(),
        max_tokens=task.max_tokens,
        end_tokens=frozenset(plan.end_tokens),
    )


def _counted(outcomes: Sequence[RowOutcome]) -> Statistics:
    counts = Statistics()
    for outcome in outcomes:
        counts.add(outcome)
    return counts
