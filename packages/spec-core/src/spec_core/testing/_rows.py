"""What the states of this package share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import mlx.core as mx

from spec_core.errors import SeamError


def checked(rows: Sequence[int], have: int) -> list[int]:
    chosen = list(rows)
    if len(set(chosen)) != len(chosen) or any(not 0 <= r < have for r in chosen):
        raise SeamError(f"select({chosen}) must name different rows in 0..{have - 1}")
    return chosen


def newest(array: mx.array, length: int, start: int) -> mx.array:
    """An owned copy of the entries of positions start..length-1, as far as they are held."""
    held = min(array.shape[0], max(length - start, 0))
    copy = mx.contiguous(array[array.shape[0] - held :]) + 0
    mx.eval(copy)
    return copy


def ints(tokens: mx.array) -> list[list[int]]:
    values = tokens.tolist()
    return cast(list[list[int]], values)


def check_count(count: int, max_block: int) -> None:
    if not 1 <= count <= max_block:
        raise SeamError(f"propose: count is {count}; it must lie in 1..{max_block}")
