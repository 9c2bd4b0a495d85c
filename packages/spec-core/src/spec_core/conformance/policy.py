"""What every DraftPolicy has to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from spec_core.conformance._findings import ConformanceError, Finding, require, run
from spec_core.seams import DraftPolicy, RowOutcome, RowStatus

_BLOCK = 6
_SCORES = (0.99, 0.9, 0.7, 0.4, 0.1, 0.0)


def policy_findings(make: Callable[[], DraftPolicy]) -> tuple[Finding, ...]:
    """Run every check of `POLICY_CHECKS`; empty if all hold.

    Args:
        make: a new policy, as at the start of a batch.
    """
    return run(make, POLICY_CHECKS)


def check_policy(make: Callable[[], DraftPolicy]) -> None:
    """Like `policy_findings`, but raises ConformanceError if there are any."""
    found = policy_findings(make)
    if found:
        raise ConformanceError(f"policy {type(make()).__name__}", found)


def _statuses(keys: Sequence[int]) -> list[RowStatus]:
    return [RowStatus(key, 10 + key, 1 + 7 * key, None if key % 2 else key) for key in keys]


def _outcomes(rows: Sequence[RowStatus], lengths: Sequence[int]) -> list[RowOutcome]:
    return [
        RowOutcome(row.key, (1,) * (length // 2 + 1), length, length // 2, "drafter")
        for row, length in zip(rows, lengths, strict=True)
    ]


def _asked(policy: DraftPolicy, rows: Sequence[RowStatus]) -> list[int]:
    lengths = list(policy.lengths(rows))
    require(len(lengths) == len(rows), f"{len(lengths)} lengths for {len(rows)} rows")
    require(
        all(type(n) is int and n >= 0 for n in lengths),
        f"lengths {lengths} are not whole numbers of at least 0",
    )
    return lengths


def _lengths(make: Callable[[], DraftPolicy]) -> None:
    policy = make()
    for keys in ([0], [0, 1, 2], [2, 0], [5, 2, 7, 1], [9]):
        rows = _statuses(keys)
        lengths = [min(n, _BLOCK) for n in _asked(policy, rows)]
        policy.observe(_outcomes(rows, lengths), 0.01)
    policy.observe([], 0.0)
    _asked(policy, _statuses([9]))


def _truncate(make: Callable[[], DraftPolicy]) -> None:
    policy, rows = make(), _statuses([0, 1, 2])
    lengths = [_BLOCK, 3, 0]
    cut = list(policy.truncate(rows, lengths, [_SCORES] * 3))
    require(len(cut) == 3, f"truncate gave {len(cut)} lengths for 3 rows")
    require(
        all(type(c) is int and 0 <= c <= n for c, n in zip(cut, lengths, strict=True)),
        f"truncate of {lengths} gave {cut}",
    )


def _truncate_causal(make: Callable[[], DraftPolicy]) -> None:
    rows = _statuses([1])
    for scores in (_SCORES, (0.5,) * _BLOCK, (1.0,) * _BLOCK, (0.9, 0.2, 0.9, 0.9, 0.9, 0.9)):
        cut = make().truncate(rows, [_BLOCK], [scores])[0]
        for later in (0.0, 0.5, 1.0):
            changed = [*scores[: cut + 1], *[later] * (_BLOCK - cut - 1)]
            again = make().truncate(rows, [_BLOCK], [changed])[0]
            require(
                again == cut,
                f"the cut of {list(scores)} is {cut}, but {again} when only later scores change; "
                "a cut that looks ahead is not lossless",
            )


POLICY_CHECKS: Mapping[str, Callable[[Callable[[], DraftPolicy]], None]] = MappingProxyType(
    {"lengths": _lengths, "truncate": _truncate, "truncate-causal": _truncate_causal}
)
"""The checks by name.

- lengths: one whole number of at least 0 a row, while rows come and go.
- truncate: never longer than what was proposed.
- truncate-causal: a cut depends on the scores up to its own slot only.
"""
