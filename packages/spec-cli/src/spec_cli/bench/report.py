"""Results as JSON and as a table, with a verdict in words."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from spec_cli.bench.measure import BASELINE, Result

if TYPE_CHECKING:
    from rich.table import Table

NOTES = (
    "Speeds are decoding speeds after the first token, text included. The parts of a round come "
    "from separate runs that wait after each part, which keeps them from overlapping: they show "
    "proportions. Peak memory leaves out the other settings' drafters.",
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


def record(context: Context, results: Sequence[Result]) -> dict[str, Any]:
    """The object that --json prints."""
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
        "overhead_ms": None if times is None else round(1e3 * times.overhead, 3),
        "ttft_ms": round(1e3 * result.ttft_seconds, 2),
        "peak_memory_bytes": result.peak_bytes,
        "identical": result.divergence is None,
        "first_divergence": None if result.divergence is None else asdict(result.divergence),
        "sets": {
            name: {
                "tokens_per_second": round(one.tokens_per_second, 2),
                "speedup": round(one.speedup, 3),
                "speedup_range": [round(bound, 3) for bound in one.speedup_range],
                "mean_accept_length": round(one.mean_accept_length, 3),
            }
            for name, one in result.sets.items()
        },
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


def verdict(results: Sequence[Result]) -> str:
    """What the figures say, in a sentence or two."""
    drafted = [r for r in results if r.mode not in (BASELINE, "mlx_lm")]
    if not drafted:
        return "Nothing was drafted; these are the figures of plain decoding."
    best = max(drafted, key=lambda r: r.speedup)
    sets = ", ".join(f"{name} {one.speedup:.2f}x" for name, one in best.sets.items())
    if best.speedup < 1.0:
        said = f"No setting is faster than plain decoding here; the best, {_named(best)}, is "
    else:
        said = f"{_named(best)} is the fastest: "
    return f"{said}{best.speedup:.2f}x plain decoding ({sets}). {_equality(results)}"


def _equality(results: Sequence[Result]) -> str:
    others = [r for r in results if r.divergence is not None]
    if not others:
        return "All answers are identical to plain decoding's."
    first = others[0].divergence
    assert first is not None
    names = ", ".join(_named(r) for r in others)
    return (
        f"Answers that differ from plain decoding's: {names}; the first at token "
        f"{first.position} of {first.set_name} prompt {first.prompt}, where the two best logits "
        f"are {first.margin:.2g} apart."
    )


def _named(result: Result) -> str:
    return result.mode if result.max_draft is None else f"{result.mode} at {result.max_draft}"


def tables(results: Sequence[Result]) -> tuple[Table, Table]:
    """The figures for a terminal: speeds, and where the time goes."""
    return _speeds(results), _parts(results)


def _speeds(results: Sequence[Result]) -> Table:
    shown = _table("", "tokens/s", "speed-up", *results[0].sets, "a round", "identical")
    for result in results:
        shown.add_row(
            _named(result),
            f"{result.tokens_per_second:.1f}",
            f"{result.speedup:.2f}x",
            *(f"{one.speedup:.2f}x" for one in result.sets.values()),
            f"{result.mean_accept_length:.2f}",
            "yes" if result.divergence is None else "no",
        )
    return shown


def _parts(results: Sequence[Result]) -> Table:
    shown = _table("ms a round", "draft", "verify", "rest", "first token", "peak MB")
    for result in results:
        times = result.times
        parts = () if times is None else (times.draft, times.verify, times.overhead)
        shown.add_row(
            _named(result),
            *([f"{1e3 * part:.1f}" for part in parts] or ["", "", ""]),
            f"{1e3 * result.ttft_seconds:.0f}",
            f"{result.peak_bytes / 1e6:.0f}",
        )
    return shown


def _table(first: str, *headings: str) -> Table:
    from rich.table import Table

    shown = Table(box=None, pad_edge=False)
    shown.add_column(first, no_wrap=True)
    for heading in headings:
        shown.add_column(heading, justify="right", no_wrap=True)
    return shown
