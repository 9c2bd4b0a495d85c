"""Calibration: the points that are measured, not how long they took."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from spec_core import (
    CostCurves,
    FreeDrafter,
    InvalidValueError,
    RoundCost,
    RowOutcome,
    RowStatus,
    calibrate,
)
from spec_core.calibrate import _ladder, _Meter, _thinned
from spec_core.testing import NoisyOracle, TinyDrafter, TinyTarget

TARGET = TinyTarget()


def lengths(curves: CostCurves, rows: int) -> list[int]:
    shallow = min(point.depth for point in curves.points)
    return [p.length for p in curves.points if (p.rows, p.depth) == (rows, shallow)]


def test_every_length_of_a_short_block_is_measured() -> None:
    curves = calibrate(TARGET, TinyDrafter(TARGET, max_block=4), budget_seconds=10.0)
    assert lengths(curves, 1) == [0, 1, 2, 3, 4]
    assert curves.max_length == 4
    assert all(point.seconds > 0 for point in curves.points)


def test_wider_batches_are_measured_at_some_lengths() -> None:
    drafter = NoisyOracle(TARGET, 0.5, max_block=6)
    curves = calibrate(TARGET, drafter, max_rows=5, budget_seconds=10.0)
    assert sorted({point.rows for point in curves.points}) == [1, 2, 4]
    assert lengths(curves, 4) == [0, 1, 3, 6]


def test_longest_caps_the_block() -> None:
    assert calibrate(TARGET, FreeDrafter(32), longest=3, budget_seconds=1.0).max_length == 3


@pytest.mark.parametrize("budget", [0.0, 1e-3])
def test_without_time_a_few_lengths_are_measured_all_the_same(budget: float) -> None:
    curves = calibrate(TARGET, FreeDrafter(32), max_rows=8, budget_seconds=budget)
    assert lengths(curves, 1) == [0, 1, 7, 32]
    assert lengths(curves, 2) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"longest": 0},
        {"max_rows": 0},
        {"budget_seconds": -1.0},
        {"budget_seconds": float("nan")},
    ],
)
def test_an_argument_out_of_range_is_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidValueError, match=next(iter(wrong))):
        calibrate(TARGET, FreeDrafter(4), **wrong)


@pytest.mark.parametrize("top", [1, 2, 7, 8, 9, 15, 32])
@pytest.mark.parametrize("most", [0, 3, 5, 8, 100])
def test_thinned_lengths_keep_both_ends_and_one(top: int, most: int) -> None:
    whole = _ladder(top)
    kept = _thinned(whole, most)
    assert set(kept) <= set(whole)
    assert kept == sorted(set(kept))
    assert {0, 1, top} <= set(kept)
    assert len(kept) == min(len(whole), max(4, most))


def test_thinned_lengths_are_those_with_a_power_of_two_columns_first() -> None:
    assert _thinned(_ladder(7), 4) == [0, 1, 3, 7]
    assert _thinned(_ladder(15), 5) == [0, 1, 3, 7, 15]
    assert _thinned(_ladder(32), 6) == [0, 1, 3, 7, 15, 32]


@pytest.mark.parametrize(
    ("seconds", "rounds", "measured"),
    [(0.01, 3, [0, 1, 2, 3, 4, 5, 6]), (0.05, 1, [0, 1, 2, 3, 4, 5, 6]), (0.2, 1, [0, 1, 3, 6])],
)
def test_slow_rounds_are_timed_less_often_before_lengths_are_left_out(
    monkeypatch: pytest.MonkeyPatch, seconds: float, rounds: int, measured: list[int]
) -> None:
    used: list[int] = []
    points = _Meter.points

    def spied(meter: _Meter, *arguments: Any) -> list[RoundCost]:
        used.append(meter.rounds)
        return points(meter, *arguments)

    monkeypatch.setattr(_Meter, "once", lambda *_: seconds)
    monkeypatch.setattr(_Meter, "points", spied)
    curves = calibrate(TARGET, NoisyOracle(TARGET, 0.5, max_block=6), budget_seconds=4.0)
    assert (lengths(curves, 1), used[0]) == (measured, rounds)


def test_a_length_is_timed_by_rounds_of_that_length() -> None:
    meter = _Meter(TARGET, NoisyOracle(TARGET, 0.5, max_block=6), 1, 8)
    observed: list[int] = []
    record = meter._dial.observe

    def observe(outcomes: Sequence[RowOutcome], seconds: float) -> None:
        record(outcomes, float(outcomes[0].drafted))

    meter._dial.observe = observe  # type: ignore[method-assign]
    for length in (0, 3, 6, 1, 0, 0, 6):
        observed += meter._rounds(length)
    assert observed == [each for each in (0, 3, 6, 1, 0, 0, 6) for _ in range(3)]


def test_every_length_is_timed_at_the_depth_that_it_says() -> None:
    """However much is accepted meanwhile."""
    meter = _Meter(TARGET, NoisyOracle(TARGET, 1.0, max_block=6), 2, 8)
    depths: list[int] = []
    ask = meter._dial.lengths

    def lengths(rows: Sequence[RowStatus]) -> Sequence[int]:
        depths.extend(row.length for row in rows)
        return ask(rows)

    meter._dial.lengths = lengths  # type: ignore[method-assign]
    for length in 5 * [0, 3, 6]:
        meter._rounds(length)
    assert min(depths) == 8
    assert max(depths) <= 8 + 3 * (6 + 1)


def test_a_drafter_that_is_not_confident_of_anything_has_no_cost_of_cutting() -> None:
    assert calibrate(TARGET, NoisyOracle(TARGET, 0.5, max_block=4), budget_seconds=1.0).cut == 0.0


def test_the_cost_of_cutting_is_that_of_drafting_what_is_cut() -> None:
    meter = _Meter(TARGET, TinyDrafter(TARGET, max_block=6, confident=True), 1, 8)
    asked: list[int] = []
    cut = meter._dial.truncate

    def truncate(
        rows: Sequence[RowStatus], lengths: Sequence[int], scores: Sequence[Sequence[float]]
    ) -> Sequence[int]:
        asked.append(max(lengths))
        return cut(rows, lengths, scores)

    def observe(outcomes: Sequence[RowOutcome], seconds: float) -> None:
        assert outcomes[0].drafted == 1
        meter._dial.seconds.append(10.0 + asked[-1])

    meter._dial.truncate = truncate  # type: ignore[method-assign]
    meter._dial.observe = observe  # type: ignore[method-assign]
    assert meter.cut(6, 0.0) == pytest.approx(1.0)
