"""The adaptive length on synthetic curves and acceptance processes: seeded, no clocks."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from spec_core import InvalidValueError, RowOutcome, RowStatus
from spec_core.acceptance import expected_tokens
from spec_core.adaptive import AdaptiveLength
from spec_core.curves import CostCurves, RoundCost

# Milliseconds of a round with 0..7 guesses, in the shapes that were met: nearly free columns,
# columns that cost, and a machine on which eight columns cost less than seven.
CHEAP = [14.0, 19.0, 20.0, 20.5, 21.0, 21.5, 22.0, 22.5]
DEAR = [26.0, 50.0, 56.0, 62.0, 66.0, 72.0, 78.0, 84.0]
BLAS = [12.6, 20.7, 22.9, 26.2, 26.3, 28.5, 29.4, 30.2]
SLOW = [111.0, 197.0, 243.0, 290.0, 336.0, 383.0, 431.0, 479.0]
UNEVEN = [5.5, 10.0, 13.0, 14.0, 16.0, 17.0, 18.0, 16.0]
ALL_CURVES = [CHEAP, DEAR, SLOW, UNEVEN]


def policy(curve: Sequence[float]) -> AdaptiveLength:
    return AdaptiveLength(CostCurves(RoundCost(1, n, 0, ms) for n, ms in enumerate(curve)))


AHEAD = 0.85
"""How much of a plain round that was launched ahead is computed before its predecessor settles."""


def plain_time(each: float, launched: bool, ahead: bool) -> float:
    """Of a plain round in a pipeline: the first one also waits for most of the second, the last one
    for little. `launched`: it was launched ahead; `ahead`: so is the next one."""
    return each * (1.0 + AHEAD * (ahead - launched))


def simulate(
    adaptive: AdaptiveLength,
    curve: Sequence[float],
    accepts: Callable[[int], float],
    rounds: int,
    *,
    seed: int,
    noise: float = 0.1,
) -> tuple[float, list[int]]:
    """Tokens a millisecond, and the policy's length after each round.

    As a batch does, it asks again before a plain round is observed: a policy that wants no draft
    then has its next plain round launched already.
    """
    rng = random.Random(seed)
    tokens = time = 0.0
    history: list[int] = []
    row, launched = RowStatus(key=0, length=10, remaining=1000), False
    for _ in range(rounds):
        (length,) = [0] if launched else adaptive.lengths([row])
        accepted = 0
        while accepted < length and rng.random() < accepts(accepted):
            accepted += 1
        ahead = not length and not any(adaptive.lengths([row]))
        taken = curve[length] if length else plain_time(curve[0], launched, ahead)
        taken *= 1 + noise * (rng.random() - 0.5)
        tokens, time, launched = tokens + accepted + 1, time + taken, ahead
        outcome = RowOutcome(0, tuple(range(accepted + 1)), length, accepted)
        adaptive.observe([outcome], taken)
        history.append(adaptive.length)
    return tokens / time, history


def best_speed(curve: Sequence[float], rate: float) -> float:
    tokens = expected_tokens([rate] * (len(curve) - 1))
    return max(t / c for t, c in zip(tokens, curve, strict=True))


def mean_speed(curve: Sequence[float], rate: float) -> float:
    speeds = [
        simulate(policy(curve), curve, lambda _: rate, 800, seed=seed)[0] for seed in range(8)
    ]
    return sum(speeds) / len(speeds)


@pytest.mark.parametrize("curve", ALL_CURVES)
@pytest.mark.parametrize("rate", [0.05, 0.3, 0.5, 0.7, 0.8, 0.9, 0.97])
def test_speed_comes_close_to_the_best_fixed_length(curve: list[float], rate: float) -> None:
    assert mean_speed(curve, rate) >= 0.92 * best_speed(curve, rate)


@pytest.mark.parametrize("curve", ALL_CURVES)
@pytest.mark.parametrize("rate", [0.0, 0.05, 0.2, 0.3])
def test_hopeless_text_costs_two_percent_at_most(curve: list[float], rate: float) -> None:
    assert mean_speed(curve, rate) >= 0.98 / curve[0]


@pytest.mark.parametrize("curve", ALL_CURVES)
def test_it_parks_comes_back_and_parks_again(curve: list[float]) -> None:
    adaptive = policy(curve)
    simulate(adaptive, curve, lambda _: 0.0, 100, seed=1)
    assert adaptive.parked
    _, history = simulate(adaptive, curve, lambda _: 0.98, 120, seed=2)
    assert history[-1] >= 4
    _, history = simulate(adaptive, curve, lambda _: 0.0, 64, seed=3)
    assert history[-1] == 0


def test_a_parked_policy_that_calls_for_a_draft_makes_one() -> None:
    """A batch that is asked for a draft lets its pipeline run empty, for nothing if none comes."""
    adaptive = policy(DEAR)
    row = RowStatus(key=0, length=10, remaining=100_000)
    simulate(adaptive, DEAR, lambda _: 0.0, 100, seed=1)
    calls = 0
    for _ in range(1000):
        called = any(adaptive.lengths([row]))
        adaptive.observe([RowOutcome(0, (1,), 0, 0)], DEAR[0])
        if called:
            (length,) = adaptive.lengths([row])
            assert length
            adaptive.observe([RowOutcome(0, (1,), length, 0)], DEAR[length])
            calls += 1
    assert 1 <= calls <= 10


def test_while_drafting_a_change_is_followed_within_32_rounds() -> None:
    adaptive = policy(DEAR)
    simulate(adaptive, DEAR, lambda _: 0.95, 60, seed=4)
    assert adaptive.length == 7
    _, history = simulate(adaptive, DEAR, lambda slot: 0.95 if slot < 2 else 0.1, 32, seed=5)
    assert 1 <= history[-1] <= 3


@pytest.mark.parametrize("curve", ALL_CURVES)
@pytest.mark.parametrize("rate", [0.2, 0.5, 0.7, 0.9])
def test_stationary_text_changes_the_length_once_in_sixteen_rounds_at_most(
    curve: list[float], rate: float
) -> None:
    for seed in range(6):
        _, history = simulate(policy(curve), curve, lambda _: rate, 400, seed=seed)
        changes = [i for i in range(1, len(history)) if history[i] != history[i - 1]]
        late = [i for i in changes if i > 32]
        assert all(b - a >= 16 for a, b in pairwise(late))


def test_a_slow_spell_of_the_whole_machine_does_not_change_the_length() -> None:
    adaptive = policy(CHEAP)
    simulate(adaptive, CHEAP, lambda _: 0.85, 100, seed=6)
    before = adaptive.length
    slowed = [3.0 * ms for ms in CHEAP]
    _, history = simulate(adaptive, slowed, lambda _: 0.85, 100, seed=7)
    assert set(history) == {before}


def test_a_length_that_is_dearer_than_measured_is_left() -> None:
    adaptive = policy(CHEAP)
    simulate(adaptive, CHEAP, lambda _: 0.8, 60, seed=8)
    wrong = [*CHEAP[:4], *(4 * ms for ms in CHEAP[4:])]
    _, history = simulate(adaptive, wrong, lambda _: 0.8, 400, seed=9)
    assert 1 <= history[-1] <= 3


def test_rows_of_a_batch_share_a_length_that_weighs_them_all() -> None:
    points = [RoundCost(1, n, 0, ms) for n, ms in enumerate(DEAR)]
    adaptive = AdaptiveLength(CostCurves(points))
    rows = [RowStatus(key=key, length=10, remaining=100) for key in range(3)]
    for _ in range(100):
        lengths = adaptive.lengths(rows)
        assert len(set(lengths)) == 1
        outcomes = [
            RowOutcome(key, (1,), lengths[key], min(lengths[key], 7 * (key == 0)))
            for key in range(3)
        ]
        adaptive.observe(outcomes, DEAR[lengths[0]])
    assert adaptive.length == 7 or adaptive.parked


def test_rows_that_leave_without_an_end_are_forgotten() -> None:
    adaptive = policy(CHEAP)
    for key in range(2000):
        (length,) = adaptive.lengths([RowStatus(key=key, length=10, remaining=100)])
        adaptive.observe([RowOutcome(key, (1, 1), length, 1)], CHEAP[length])
    assert len(adaptive._rows) < 600


def test_a_rows_cap_counts_in_the_choice() -> None:
    adaptive = policy(DEAR)
    rows = [RowStatus(key=0, length=10, remaining=1000, max_draft=1)]
    for _ in range(200):
        length = min(adaptive.lengths(rows)[0], 1)
        adaptive.observe([RowOutcome(0, (1,) * (1 + length), length, length)], DEAR[length])
    assert adaptive.length <= 1


def test_it_says_where_it_stands() -> None:
    adaptive = policy(DEAR)
    assert str(adaptive) == f"auto: {adaptive.length}"
    simulate(adaptive, DEAR, lambda _: 0.0, 100, seed=1)
    assert str(adaptive) == "auto: parked"


RECORDED: dict[str, list[list[int]]] = json.loads(
    (Path(__file__).parent / "golden" / "acceptance.json").read_text()
)
"""For prompts of several kinds, at each position of the answer: how many of seven guesses are
right there (a small model and its DSpark drafter)."""
HARD = ("bytes", "prose", "foreign")


CATCH_UP = 0.15
"""What the first round that drafts takes on top, as a share of a plain one: a drafter that was
parked makes up for what it was spared."""


class Reader:
    """Goes through a recorded answer, as a batch does: plain rounds are launched ahead."""

    def __init__(self, key: int, right: Sequence[int], policy: AdaptiveLength | int) -> None:
        self.key, self.right, self.policy = key, right, policy
        self.at, self.tokens, self.time = 0, 0, 0.0

    def wish(self) -> int:
        """Guesses for the round that is launched next."""
        row = RowStatus(self.key, self.at + 100, len(self.right) - self.at + 1)
        if isinstance(self.policy, int):
            return min(self.policy, row.remaining - 1)
        return min(self.policy.lengths([row])[0], row.remaining - 1)

    def read(self, curve: Sequence[float]) -> None:
        launched, drafted = False, True
        while self.at < len(self.right):
            length = 0 if launched else self.wish()
            ahead = not length and self.at + 1 < len(self.right) and not self.wish()
            taken = curve[length] if length else plain_time(curve[0], launched, ahead)
            taken += 0.0 if drafted or not length else CATCH_UP * curve[0]
            launched, drafted = ahead, bool(length)
            self._settle(length, taken)

    def _settle(self, length: int, taken: float) -> None:
        accepted = min(length, self.right[self.at])
        self.at += accepted + 1
        self.tokens += accepted + 1
        self.time += taken
        if isinstance(self.policy, int):
            return
        outcome = RowOutcome(self.key, (1,) * (accepted + 1), length, accepted)
        self.policy.observe([outcome], taken)


def read_on(
    answers: Sequence[Sequence[int]],
    curve: Sequence[float],
    choose: AdaptiveLength | int,
) -> float:
    """Tokens a millisecond over recorded answers, one after the other."""
    readers = [Reader(key, right, choose) for key, right in enumerate(answers)]
    for reader in readers:
        reader.read(curve)
    return sum(reader.tokens for reader in readers) / sum(reader.time for reader in readers)


@pytest.mark.parametrize("curve", [*ALL_CURVES, BLAS])
@pytest.mark.parametrize("kind", RECORDED)
def test_on_recorded_text_it_is_never_slower_and_close_to_the_best_length(
    curve: list[float], kind: str
) -> None:
    """In several orders, since one try that comes a token earlier changes all that follow it."""
    orders = [4 * (RECORDED[kind][n:] + RECORDED[kind][:n]) for n in range(3)]
    fixed = [read_on(orders[0], curve, length) for length in range(len(curve))]
    reached = [read_on(order, curve, policy(curve)) for order in orders]
    mean = sum(reached) / len(reached)
    assert min(reached) >= 0.96 * fixed[0]
    assert mean >= 0.98 * fixed[0]
    assert mean >= 0.96 * max(fixed)


@pytest.mark.parametrize("kind", ["chat", "copy", "math"])
def test_true_curves_stay_believed(kind: str) -> None:
    """The ends of a run of plain rounds take more or less than a plain round: not the curve's
    fault."""
    adaptive = policy(BLAS)
    read_on(4 * RECORDED[kind], BLAS, adaptive)
    assert all(0.92 < adaptive._pace.factor(length) < 1.08 for length in range(8))


BUSY = [19.6, 26.6, 22.5, 28.2, 35.0, 33.0, 43.5, 38.4]
"""Measured for BLAS on a machine that did something else: plain rounds look too dear."""


@pytest.mark.parametrize("kind", HARD)
def test_curves_that_flatter_drafting_are_corrected(kind: str) -> None:
    answers = 4 * RECORDED[kind]
    assert read_on(answers, BLAS, policy(BUSY)) >= 0.97 * read_on(answers, BLAS, 0)


@pytest.mark.parametrize("curve", [*ALL_CURVES, BLAS])
def test_where_answers_differ_it_is_as_good_as_the_best_length_for_all_of_them(
    curve: list[float],
) -> None:
    """Each answer is looked at anew: a hard one does not spoil an easy one behind it."""
    kinds = ["bytes", "code", "prose", "tool", "foreign", "math", "chat", "code", "bytes", "tool"]
    answers = [RECORDED[kind][turn] for turn in range(3) for kind in kinds]
    best = max(read_on(answers, curve, length) for length in range(len(curve)))
    assert read_on(answers, curve, policy(curve)) >= 0.98 * best


def test_a_row_that_may_not_draft_is_not_waited_for() -> None:
    adaptive = policy(DEAR)
    simulate(adaptive, DEAR, lambda _: 0.0, 100, seed=1)
    for _ in range(8):
        rows = [RowStatus(key=1, length=10, remaining=1000, max_draft=0)]
        assert adaptive.lengths(rows) == [0]
        adaptive.observe([RowOutcome(1, (1,), 0, 0)], DEAR[0])


GOOD = [(1, 0, 0, 1.0), (1, 1, 0, 1.5)]


@pytest.mark.parametrize(
    "points",
    [
        [],
        [(1, 0, 0, 1.0)],
        [(2, 0, 0, 1.0), (2, 1, 0, 1.0)],
        [(1, 0, 0, 1.0), (1, 1, 0, 0.0)],
        [(1, 0, 0, 1.0), (1, 1, 0, float("nan"))],
        [(1, 0, 0, 1.0), (1, 1, 0, float("inf"))],
        [(1, 0, 0, 1.0), (1, 0, 0, 2.0)],
        [*GOOD, (1, 1, 0, 1.5)],
        [*GOOD, (1, -1, 0, 1.5)],
        [*GOOD, (0, 1, 0, 1.5)],
        [*GOOD, (1, 1, -64, 1.5)],
    ],
)
def test_points_that_do_not_suffice_are_refused(points: list[tuple[int, int, int, float]]) -> None:
    with pytest.raises(InvalidValueError):
        CostCurves(RoundCost(*point) for point in points)


@pytest.mark.parametrize("cut", [-1.0, float("nan"), float("inf")])
def test_a_cost_of_cutting_that_cannot_be_is_refused(cut: float) -> None:
    with pytest.raises(InvalidValueError, match="cut"):
        CostCurves([RoundCost(*point) for point in GOOD], cut)


@pytest.mark.parametrize(
    "wrong",
    [
        {"longest": 0},
        {"longest": -1},
        {"dwell": 0},
        {"probe_share": 0.0},
        {"probe_share": 2.0},
        {"probe_share": float("nan")},
    ],
)
def test_an_argument_out_of_range_is_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidValueError, match=next(iter(wrong))):
        AdaptiveLength(CostCurves([RoundCost(*point) for point in GOOD]), **wrong)


def test_several_depths_of_a_length_count_by_the_deepest() -> None:
    deep = [RoundCost(1, n, depth, 1.0 + depth / 1000) for n in (0, 1) for depth in (0, 500, 1000)]
    assert CostCurves(deep).seconds(1, 1, 2000) == pytest.approx(3.0)


def test_where_nothing_was_drafted_nothing_is_cut() -> None:
    adaptive = policy(DEAR)
    rows = [RowStatus(key=key, length=10, remaining=1) for key in range(2)]
    assert adaptive.truncate(rows, [0, 0], [[], []]) == [0, 0]


def test_curves_interpolate_by_length_rows_and_depth() -> None:
    curves = CostCurves(
        [
            RoundCost(1, 0, 64, 10.0),
            RoundCost(1, 4, 64, 18.0),
            RoundCost(1, 0, 1064, 20.0),
            RoundCost(1, 4, 1064, 38.0),
            RoundCost(4, 0, 64, 16.0),
            RoundCost(4, 4, 64, 42.0),
        ]
    )
    assert curves.seconds(1, 2, 64) == pytest.approx(14.0)
    assert curves.seconds(2, 0, 64) == pytest.approx(12.0)
    assert curves.seconds(1, 4, 564) == pytest.approx(28.0)
    assert curves.seconds(1, 6, 64) == pytest.approx(22.0)
    assert curves.seconds(4, 0, 1064) == pytest.approx(16.0 + 4 * 10.0)


def scored(
    curve: Sequence[float], believed: Callable[[float], float] | None, *, seed: int
) -> tuple[float, AdaptiveLength]:
    """Speed on text in which each block has its own rate, told by scores (None: no scores)."""
    rng = random.Random(seed)
    adaptive = policy(curve)
    tokens = time = 0.0
    for _ in range(600):
        rate = rng.choice([0.25, 0.6, 0.97])
        rows = [RowStatus(key=0, length=10, remaining=1000)]
        (length,) = adaptive.lengths(rows)
        if length and believed and adaptive.needs_confidence:
            (length,) = adaptive.truncate(rows, [length], [[believed(rate)] * length])
        accepted = 0
        while accepted < length and rng.random() < rate:
            accepted += 1
        taken = curve[length] * (1 + 0.1 * (rng.random() - 0.5))
        tokens, time = tokens + accepted + 1, time + taken
        adaptive.observe([RowOutcome(0, tuple(range(accepted + 1)), length, accepted)], taken)
    return tokens / time, adaptive


LINEAR = [10.0, 14.0, 17.0, 20.0, 23.0, 26.0, 29.0, 32.0]


def total(curve: Sequence[float], believed: Callable[[float], float] | None) -> float:
    return sum(scored(curve, believed, seed=seed)[0] for seed in range(6))


@pytest.mark.parametrize("curve", [LINEAR, DEAR, UNEVEN])
@pytest.mark.parametrize("believed", [lambda rate: rate, lambda rate: 1.0 - rate])
def test_scores_that_tell_something_make_it_faster(
    curve: list[float], believed: Callable[[float], float]
) -> None:
    """Whatever they mean: that is learnt."""
    assert total(curve, believed) > 1.04 * total(curve, None)


@pytest.mark.parametrize("score", [0.3, 0.9])
def test_scores_that_tell_nothing_cost_next_to_nothing(score: float) -> None:
    assert total(LINEAR, lambda _: score) > 0.97 * total(LINEAR, None)


def test_scores_are_not_asked_for_where_columns_are_nearly_free() -> None:
    assert not policy(CHEAP).needs_confidence
    assert policy(DEAR).needs_confidence
