"""Small charts as SVG: bars in groups, and lines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 820
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 190, 46, 44
_PLOT_HEIGHT = 210
_COLOURS = (
    "#2f6db3", "#d9822b", "#3a9d5d", "#b8498f", "#7a62c9",
    "#8a6d3b", "#c0392b", "#2aa1a8", "#7f8c8d", "#a3b12c",
)  # fmt: skip
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#333}"
    ".title{font-weight:600;font-size:14px}"
    ".axis{stroke:#999}.grid{stroke:#e8e8e8}.mark{stroke:#888;stroke-dasharray:4 3}"
    ".spread{stroke:#333}.line{fill:none;stroke-width:2}"
)


@dataclass(frozen=True, slots=True)
class Bar:
    """A value with its spread."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Bars:
    """For each series one bar in each group.

    Attributes:
        mark: a value that deserves a line across.
    """

    title: str
    unit: str
    groups: tuple[str, ...]
    series: tuple[tuple[str, tuple[Bar, ...]], ...]
    mark: float | None = None


@dataclass(frozen=True, slots=True)
class Lines:
    """Points by series; x counts from the first position that any series has."""

    title: str
    unit: str
    x_title: str
    series: tuple[tuple[str, tuple[tuple[float, float], ...]], ...]
    top: float | None = None


Chart = Bars | Lines


def page(charts: Sequence[Chart], caption: str) -> str:
    """An SVG document with the charts below each other."""
    parts: list[str] = []
    height = 8
    for chart in charts:
        taken = _height(chart)
        drawn = _bars(chart) if isinstance(chart, Bars) else _lines(chart)
        parts.append(f'<g transform="translate(0,{height})">{"".join(drawn)}</g>')
        height += taken
    parts.append(_text(_LEFT, height + 14, caption))
    height += 28
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" role="img"><style>{_STYLE}</style>'
        f'<rect width="100%" height="100%" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


def _height(chart: Chart) -> int:
    legend = 20 * len(chart.series) + _TOP + 10
    return max(_TOP + _PLOT_HEIGHT + _BOTTOM, legend)


@dataclass(frozen=True, slots=True)
class _Scale:
    """From values to pixels, upwards from zero."""

    top: float
    step: float

    @classmethod
    def up_to(cls, most: float) -> _Scale:
        most = most if most > 0 else 1.0
        rough = most / 4
        magnitude = 10.0 ** math.floor(math.log10(rough))
        step = magnitude * next(f for f in (1, 2, 2.5, 5, 10) if f * magnitude >= rough * 0.999)
        return cls(step * math.ceil(most / step - 1e-9), step)

    def y(self, value: float) -> float:
        return _TOP + _PLOT_HEIGHT * (1 - min(value, self.top) / self.top)

    def ticks(self) -> list[float]:
        return [self.step * n for n in range(round(self.top / self.step) + 1)]


def _frame(chart: Chart, scale: _Scale) -> list[str]:
    parts = [_text(_LEFT, 24, chart.title, css="title")]
    for tick in scale.ticks():
        y = scale.y(tick)
        parts.append(_rule(_LEFT, y, WIDTH - _RIGHT, y, "grid" if tick else "axis"))
        parts.append(_text(_LEFT - 8, y + 4, f"{tick:g}{chart.unit}", anchor="end"))
    for index, (name, _) in enumerate(chart.series):
        y = _TOP + 10 + 20 * index
        x = WIDTH - _RIGHT + 16
        parts.append(f'<rect x="{x}" y="{y - 9}" width="12" height="12" fill="{_colour(index)}"/>')
        parts.append(_text(x + 18, y + 2, name))
    return parts


def _bars(chart: Bars) -> list[str]:
    values = [bar.high for _, bars in chart.series for bar in bars]
    scale = _Scale.up_to(max([*values, chart.mark or 0.0]))
    parts = _frame(chart, scale)
    group_width = (WIDTH - _LEFT - _RIGHT) / len(chart.groups)
    width = min(0.8 * group_width / len(chart.series), 30.0)
    for number, group in enumerate(chart.groups):
        middle = _LEFT + (number + 0.5) * group_width
        parts.append(_text(middle, scale.y(0) + 18, group, anchor="middle"))
        left = middle - width * len(chart.series) / 2
        for index, (name, bars) in enumerate(chart.series):
            parts += _bar(
                left + index * width, width, bars[number], scale, index, f"{name}, {group}"
            )
    if chart.mark is not None:
        y = scale.y(chart.mark)
        parts.append(_rule(_LEFT, y, WIDTH - _RIGHT, y, "mark"))
    return parts


def _bar(left: float, width: float, bar: Bar, scale: _Scale, index: int, about: str) -> list[str]:
    top, centre = scale.y(bar.value), left + width / 2
    return [
        f'<rect x="{left + 1:.1f}" y="{top:.1f}" width="{width - 2:.1f}" '
        f'height="{scale.y(0) - top:.1f}" fill="{_colour(index)}">'
        f"<title>{escape(about)}: {bar.value:.2f}</title></rect>",
        _rule(centre, scale.y(bar.low), centre, scale.y(bar.high), "spread"),
    ]


def _lines(chart: Lines) -> list[str]:
    points = [point for _, line in chart.series for point in line]
    scale = _Scale.up_to(chart.top or max(y for _, y in points))
    first, last = min(x for x, _ in points), max(x for x, _ in points)
    unit = (WIDTH - _LEFT - _RIGHT - 20) / max(last - first, 1)

    def place(x: float, y: float) -> tuple[float, float]:
        return _LEFT + 10 + (x - first) * unit, scale.y(y)

    parts = _frame(chart, scale)
    every = max(1, math.ceil((last - first) / 16))
    for x in range(int(first), int(last) + 1, every):
        parts.append(_text(place(x, 0)[0], scale.y(0) + 18, f"{x}", anchor="middle"))
    parts.append(_text((_LEFT + WIDTH - _RIGHT) / 2, scale.y(0) + 36, chart.x_title, "middle"))
    for index, (_, line) in enumerate(chart.series):
        colour, placed = _colour(index), [place(x, y) for x, y in line]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        parts.append(f'<polyline class="line" stroke="{colour}" points="{path}"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in placed]
    return parts


def _text(x: float, y: float, text: str, anchor: str = "start", css: str = "") -> str:
    style = f' class="{css}"' if css else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{style}>{escape(text)}</text>'


def _rule(x0: float, y0: float, x1: float, y1: float, css: str) -> str:
    return f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}" class="{css}"/>'


def _colour(index: int) -> str:
    return _COLOURS[index % len(_COLOURS)]
