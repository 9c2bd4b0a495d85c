"""How far copies go, on synthetic curves and texts: seeded, no clocks."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from spec_core import (
    AdaptiveLength,
    CopyLength,
    CostCurves,
    FixedLength,
    RoundCost,
    RowOutcome,
    RowStatus,
    WithCopies,
    decode,
)
from spec_core.conformance import check_policy
from spec_core.testing import ScriptedDrafter, TinyTarget

# Milliseconds of a round by columns beyond the first: nearly free, dear, and as dear as a plain
# round each, where copying cannot pay.
CHEAP = [14.0 + 0.3 * n for n in range(33)]
DEAR = [26.0 + 20.0 * (n > 0) + 6.0 * n for n in range(33)]
LINEAR = [20.0 * (1 + n) for n in range(33)]


def curves(costs: Sequence[float], rows: Sequence[int] = (1,)) -> CostCurves:
    return CostCurves(RoundCost(r, n, 0, r * ms) for r in rows for n, ms in enumerate(costs))


def simulate(
    policy: WithCopies,
    costs: Sequence[float],
    matches: Callable[[random.Random], int],
    rate: Callable[[int], float],
    rounds: int,
    seed: int,
) -> tuple[float, list[tuple[int, int]]]:
    """Tokens a millisecond, and (match, length) of each round with a match."""
    rng, tokens, time = random.Random(seed), 0.0, 0.0
    asked: list[tuple[int, int]] = []
    for _ in range(rounds):
        match = matches(rng)
        row = RowStatus(0, 100, 1000, copies=match)
        (length,) = policy.lengths([row])
        length = min(length, match)
        accepted = 0
        while accepted < length and rng.random() < rate(match):
            accepted += 1
        taken = costs[length] * (1 + 0.1 * (rng.random() - 0.5))
        tokens, time = tokens + accepted + 1, time + taken
        if match:
            asked.append((match, length))
        policy.observe([RowOutcome(0, (1,) * (accepted + 1), length, accepted)], taken)
    return tokens / time, asked


def best(costs: Sequence[float], match: int, rate: float) -> int:
    def speed(length: int) -> float:
        return sum(rate**k for k in range(length + 1)) / costs[length]

    return max(range(match + 1), key=speed)


@pytest.mark.parametrize("costs", [CHEAP, DEAR])
@pytest.mark.parametrize(("match", "rate"), [(2, 0.6), (6, 0.85), (12, 0.95), (32, 0.99)])
def test_a_match_is_copied_about_as_far_as_is_best(
    costs: list[float], match: int, rate: float
) -> None:
    policy = WithCopies(CopyLength(curves(costs)))
    _, asked = simulate(policy, costs, lambda _: match, lambda _: rate, 300, seed=1)
    wanted = best(costs, match, rate)
    late = [length for _, length in asked[100:]]
    speed = [sum(rate**k for k in range(n + 1)) / costs[n] for n in range(match + 1)]
    assert sum(speed[n] for n in late) / len(late) >= 0.95 * speed[wanted]


def test_long_matches_are_copied_where_short_ones_do_not_pay() -> None:
    policy = WithCopies(CopyLength(curves(DEAR)))
    _, asked = simulate(
        policy,
        DEAR,
        lambda rng: rng.choice([2, 32]),
        lambda match: 0.3 if match < 8 else 0.97,
        400,
        seed=2,
    )
    late = asked[200:]
    short = [length for match, length in late if match == 2]
    long = [length for match, length in late if match == 32]
    assert sum(n == 0 for n in short) > 0.8 * len(short)
    assert min(long) >= 8


@pytest.mark.parametrize("costs", [CHEAP, DEAR, LINEAR])
def test_copies_that_are_never_right_cost_little(costs: list[float]) -> None:
    policy = WithCopies(CopyLength(curves(costs)))
    speed, _ = simulate(policy, costs, lambda _: 4, lambda _: 0.0, 1000, seed=3)
    assert speed >= 0.96 / costs[0]


def test_where_columns_are_not_cheaper_than_rounds_nothing_is_copied() -> None:
    policy = WithCopies(CopyLength(curves(LINEAR)))
    _, asked = simulate(policy, LINEAR, lambda _: 8, lambda _: 0.95, 100, seed=4)
    assert all(length == 0 for _, length in asked)


def test_text_that_begins_to_repeat_itself_is_found_out() -> None:
    policy = WithCopies(CopyLength(curves(DEAR)))
    simulate(policy, DEAR, lambda _: 8, lambda _: 0.0, 200, seed=5)
    _, asked = simulate(policy, DEAR, lambda _: 8, lambda _: 1.0, 300, seed=6)
    assert all(length == 8 for _, length in asked[-50:])


def test_copies_that_take_longer_than_measured_are_left() -> None:
    policy = WithCopies(CopyLength(curves(CHEAP)))
    slow = [CHEAP[0], *(10 * ms for ms in CHEAP[1:])]
    _, asked = simulate(policy, slow, lambda _: 4, lambda _: 0.7, 300, seed=7)
    late = [length for _, length in asked[200:]]
    assert sum(n == 0 for n in late) > 0.8 * len(late)


def test_a_slow_spell_of_the_whole_machine_changes_nothing() -> None:
    policy = WithCopies(CopyLength(curves(CHEAP)))
    slow = [4 * ms for ms in CHEAP]
    _, asked = simulate(policy, slow, lambda rng: rng.choice([0, 6]), lambda _: 0.9, 300, seed=8)
    assert all(length >= 4 for _, length in asked[100:])


def test_matches_and_other_rows_go_by_different_rules() -> None:
    copies = CopyLength(curves(CHEAP, rows=(1, 2, 4)))
    policy = WithCopies(copies, FixedLength(3))
    rows = [RowStatus(0, 50, 100), RowStatus(1, 50, 100, copies=20), RowStatus(2, 50, 3, copies=20)]
    lengths = policy.lengths(rows)
    assert lengths[0] == 3
    assert lengths[1] > 8
    assert lengths[2] <= 2 or lengths[2] == 3
    assert policy.truncate(rows, [3, 12, 2], [[0.1] * 12] * 3) == [3, 12, 2]


@pytest.mark.parametrize("copied", [1, 12, 32])
def test_a_copy_beside_drafts_that_are_cut_stays_whole(copied: int) -> None:
    """However much longer than a draft it is."""
    dear = CostCurves(RoundCost(1, n, 0, 10.0 + (n > 0) + 3.0 * n) for n in range(8))
    policy = WithCopies(CopyLength(curves(CHEAP, rows=(1, 2, 4))), AdaptiveLength(dear))
    rows = [RowStatus(key, 50, 100, copies=copied * (key == 1)) for key in range(3)]
    lengths, scores = [7, copied, 7], [[0.1] * 32 for _ in rows]
    for _ in range(8):
        policy.lengths(rows)
        cut = policy.truncate(rows, lengths, scores)
        assert cut[1] == copied
        outcomes = [RowOutcome(key, (1, 1), cut[key], 1) for key in range(3)]
        policy.observe(outcomes, 20.0)
    assert max(cut[0], cut[2]) < 7


def test_a_rows_own_cap_holds_for_copies() -> None:
    policy = WithCopies(CopyLength(curves(CHEAP)))
    assert policy.lengths([RowStatus(0, 50, 100, max_draft=5, copies=20)]) == [5]
    assert policy.lengths([RowStatus(0, 50, 100, max_draft=0, copies=20)]) == [0]


def test_the_drafts_policy_is_not_told_of_copies() -> None:
    adaptive = AdaptiveLength(curves(CHEAP[:8]))
    policy = WithCopies(CopyLength(curves(CHEAP)), adaptive)
    simulate(policy, CHEAP, lambda _: 20, lambda _: 0.0, 30, seed=9)
    assert not adaptive.parked
    assert str(policy) == str(adaptive) == f"auto: {adaptive.length}"


@pytest.mark.parametrize("drafts", [None, FixedLength(2), AdaptiveLength(curves(CHEAP[:8]))])
def test_it_keeps_the_policies_contract(drafts: FixedLength | AdaptiveLength | None) -> None:
    check_policy(lambda: WithCopies(CopyLength(curves(DEAR)), drafts))


class Copying(ScriptedDrafter):
    """A Copier that knows the text, and finds matches here and there."""

    copies_only = True

    def copies(self, state: object, anchors: Sequence[int]) -> Sequence[int]:
        return [self._match(row.tokens, a) for row, a in zip(state.text, anchors, strict=True)]  # type: ignore[attr-defined]

    def _match(self, text: Sequence[int], anchor: int) -> int:
        return len(self.script((*text, anchor)))

    def verifying(self, state: object, lengths: Sequence[int]) -> None:
        pass


@pytest.mark.parametrize("right", [True, False])
def test_copies_are_lossless_and_misses_are_pipelined(right: bool) -> None:
    target, prompt = TinyTarget(), (5, 1, 9)
    plain = target.greedy(prompt, 40)
    whole = [*prompt, *plain]

    def script(text: tuple[int, ...]) -> Sequence[int]:
        if len(text) % 7 > 2:
            return ()
        ahead = whole[len(text) : len(text) + 6]
        return ahead if right else [(t + 1) % 8 for t in ahead]

    costs = curves([ms / 1e4 for ms in CHEAP])
    policy = WithCopies(CopyLength(costs))
    outcomes = list(
        decode(target, Copying(script, max_block=6), prompt, max_tokens=40, policy=policy)
    )
    assert [t for outcome in outcomes for t in outcome.tokens] == plain
    drafted = [outcome.drafted for outcome in outcomes if outcome.drafted]
    assert drafted
    assert right == (sum(outcome.accepted for outcome in outcomes) > 0)
