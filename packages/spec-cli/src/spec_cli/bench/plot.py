"""A report as a picture: speed-ups, acceptance by position, round times."""

from __future__ import annotations

from collections.abc import Sequence

from spec_cli.bench.measure import BASELINE, Result
from spec_cli.bench.report import Report
from spec_cli.bench.svg import Bar, Bars, Chart, Lines, page
from spec_cli.bench.verdict import label
from spec_cli.sizes import counted


def plot(report: Report) -> str:
    """An SVG document."""
    context = report.context
    caption = (
        f"{context.model}, {context.dtype}, {counted(context.trials, 'trial')}, on {context.device}"
    )
    charts = (_speedups(report.results), _acceptance(report.results), _rounds(report.results))
    return page([chart for chart in charts if chart is not None], caption)


def _speedups(results: Sequence[Result]) -> Chart:
    others = [r for r in results if r.mode != BASELINE] or list(results)
    return Bars(
        title="Speed against plain decoding, by prompt set (median, with its range)",
        unit="x",
        groups=tuple(results[0].sets),
        series=tuple(
            (label(r), tuple(Bar(s.speedup, *s.speedup_range) for s in r.sets.values()))
            for r in others
        ),
        mark=1.0,
    )


def _acceptance(results: Sequence[Result]) -> Chart | None:
    """Of each mode, the setting that drafts farthest."""
    longest: dict[str, Result] = {}
    for result in results:
        known = longest.get(result.mode)
        if known is None or len(result.accept_by_position) > len(known.accept_by_position):
            longest[result.mode] = result
    series = tuple(
        (label(r), tuple((n + 1.0, 100.0 * share) for n, share in enumerate(r.accept_by_position)))
        for r in longest.values()
        if r.accept_by_position
    )
    if not series:
        return None
    return Lines(
        title="Guesses accepted, by position, where all before them were",
        unit="%",
        x_title="position in the draft",
        series=series,
        top=100.0,
    )


def _rounds(results: Sequence[Result]) -> Chart | None:
    """What rounds of one request cost, of the settings whose lengths were chosen by it."""
    series: list[tuple[str, tuple[tuple[float, float], ...]]] = []
    for result in results:
        if result.curves is not None:
            depth = min(point.depth for point in result.curves.points)
            line = tuple(
                (float(p.length), 1e3 * p.seconds)
                for p in result.curves.points
                if (p.rows, p.depth) == (1, depth)
            )
            series.append((result.mode, line))
    if not series:
        return None
    return Lines(
        title="Time of a round, by guesses (0 is plain decoding)",
        unit=" ms",
        x_title="guesses",
        series=tuple(series),
    )
