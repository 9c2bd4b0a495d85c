"""Results as JSON and as tables."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from spec_cli.bench.measure import Result, SetResult
from spec_cli.bench.sweeps import Point
from spec_cli.bench.trial import named
from spec_cli.bench.verdict import label, verdict

NOTES = (
    "Speeds are decoding speeds after the first token, text included; speed-ups are medians over "
    "trials, with half their range where there are several: one trial is no measurement. The parts "
    "of a round come from separate runs that wait after each part, which keeps them from "
    "overlapping: they show proportions. Peak memory leaves out the other settings' drafters.",
)
"""What a reader must know to read the figures."""

_PACKAGES = ("spec-core", "spec-drafters", "spec-targets", "spec-server", "spec-cli")


@dataclass(frozen=True, slots=True)
class Context:
    """What was measured, and where.

    Attributes:
        command: as it was typed.
        prompts: how many prompts each set has.
    """

    command: str
    device: str
    model: str
    dtype: str
    prompts: Mapping[str, int]
    max_tokens: int
    trials: int


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that was found out."""

    context: Context
    results: Sequence[Result]
    concurrency: Sequence[Point] = ()
    contexts: Sequence[Point] = ()


@dataclass(frozen=True, slots=True)
class Grid:
    """A table: the first column names the row, the others are figures."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def record(report: Report) -> dict[str, Any]:
    """The object that --json prints."""
    context, results = report.context, report.results
    return {
        "command": context.command,
        "device": context.device,
        "versions": versions(),
        "model": context.model,
        "dtype": context.dtype,
        "drafter": {result.mode: result.source for result in results if result.source},
        "prompts": dict(context.prompts),
        "max_tokens": context.max_tokens,
        "trials": context.trials,
        "runs": [_run(result) for result in results],
        "concurrency": [_point(point, "rows") for point in report.concurrency],
        "contexts": [_point(point, "positions") for point in report.contexts],
        "verdict": verdict(results),
        "notes": list(NOTES),
    }


def _run(result: Result) -> dict[str, Any]:
    times = result.times
    return {
        "mode": result.mode,
        "max_draft": result.max_draft,
        "tokens_per_second": round(result.tokens_per_second, 2),
        "speedup": round(result.speedup, 3),
        "mean_accept_length": round(result.mean_accept_length, 3),
        "accept_by_position": [round(share, 3) for share in result.accept_by_position],
        "draft_ms": None if times is None else round(1e3 * times.draft, 3),
        "verify_ms": None if times is None else round(1e3 * times.verify, 3),
        "accept_ms": None if times is None else round(1e3 * times.accept, 3),
        "overhead_ms": None if times is None else round(1e3 * times.overhead, 3),
        "ttft_ms": round(1e3 * result.ttft_seconds, 2),
        "peak_memory_bytes": result.peak_bytes,
        "identical": result.divergence is None,
        "first_divergence": None if result.divergence is None else asdict(result.divergence),
        "sets": {name: _set(one) for name, one in result.sets.items()},
        "round_ms": _curve(result),
    }


def _set(one: SetResult) -> dict[str, Any]:
    return {
        "tokens_per_second": round(one.tokens_per_second, 2),
        "speedup": round(one.speedup, 3),
        "speedup_range": [round(bound, 3) for bound in one.speedup_range],
        "mean_accept_length": round(one.mean_accept_length, 3),
        "plain_share": round(one.plain_share, 3),
    }


def _curve(result: Result) -> list[dict[str, Any]] | None:
    """The measured round times that an `auto` setting chose by."""
    if result.curves is None:
        return None
    return [
        {"rows": p.rows, "length": p.length, "depth": p.depth, "ms": round(1e3 * p.seconds, 3)}
        for p in result.curves.points
    ]


def _point(point: Point, value: str) -> dict[str, Any]:
    return {
        value: point.value,
        "mode": point.mode,
        "max_draft": point.max_draft,
        "tokens_per_second": round(point.tokens_per_second, 2),
        "speedup": round(point.speedup, 3),
        "speedup_range": [round(bound, 3) for bound in point.speedup_range],
        "mean_accept_length": round(point.mean_accept_length, 3),
        "identical": point.identical,
    }


def versions() -> dict[str, str]:
    """Versions of Python, MLX, mlx-lm and our packages."""
    found = {"python": platform.python_version()}
    for name in ("mlx", "mlx-lm", *_PACKAGES):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


# ---------------------------------------------------------------------- tables


def grids(report: Report) -> list[Grid]:
    """Speeds, where the time goes, and the sweeps that were made."""
    found = [_speeds(report.results), _parts(report.results)]
    if report.concurrency:
        found.append(_sweep("at once", report.concurrency))
    if report.contexts:
        found.append(_sweep("context", report.contexts))
    return found


def _speeds(results: Sequence[Result]) -> Grid:
    sets = tuple(results[0].sets)
    headings = ("", "tokens/s", "speed-up", *sets, "a round", "identical")
    return Grid(headings, tuple(_speed(result) for result in results))


def _speed(result: Result) -> tuple[str, ...]:
    return (
        label(result),
        f"{result.tokens_per_second:.1f}",
        f"{result.speedup:.2f}x",
        *(_spread(one.speedup, one.speedup_range) for one in result.sets.values()),
        f"{result.mean_accept_length:.2f}",
        "yes" if result.divergence is None else "no",
    )


def _parts(results: Sequence[Result]) -> Grid:
    headings = ("ms a round", "draft", "verify", "accept", "host", "first token", "peak MB")
    return Grid(headings, tuple(_part(result) for result in results))


def _part(result: Result) -> tuple[str, ...]:
    times, parts = result.times, ("", "", "", "")
    if times is not None:
        seconds = (times.draft, times.verify, times.accept, times.overhead - times.accept)
        draft, verify, accept, host = (f"{1e3 * part:.1f}" for part in seconds)
        parts = (draft, verify, accept, host)
    memory = f"{result.peak_bytes / 1e6:.0f}"
    return (label(result), *parts, f"{1e3 * result.ttft_seconds:.0f}", memory)


def _sweep(value: str, points: Sequence[Point]) -> Grid:
    headings = (value, "setting", "tokens/s", "speed-up", "a round", "identical")
    rows = (
        (
            str(point.value),
            named(point.mode, point.max_draft),
            f"{point.tokens_per_second:.1f}",
            _spread(point.speedup, point.speedup_range),
            f"{point.mean_accept_length:.2f}",
            "yes" if point.identical else "no",
        )
        for point in points
    )
    return Grid(headings, tuple(rows))


def _spread(middle: float, bounds: tuple[float, float]) -> str:
    """A median and half the range; the range is left out where it is nothing."""
    half = (bounds[1] - bounds[0]) / 2
    return f"{middle:.2f}x" if half < 0.005 else f"{middle:.2f}x ±{half:.2f}"
