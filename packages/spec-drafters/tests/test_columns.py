"""Joined columns of taps."""

from __future__ import annotations

import mlx.core as mx
import pytest

from spec_core.device import on_cuda
from spec_drafters.columns import joined


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32])
@pytest.mark.parametrize(("columns", "taps", "width"), [(32, 5, 576), (1, 1, 8), (90, 5, 40)])
def test_columns_follow_each_other(
    rows: int, dtype: mx.Dtype, columns: int, taps: int, width: int
) -> None:
    whole = mx.random.normal((taps, rows, columns, width), key=mx.random.key(1)).astype(dtype)
    parts = [[whole[tap, :, at : at + 1] for tap in range(taps)] for at in range(columns)]
    got = joined(parts)
    assert len(got) == (1 if on_cuda() and columns * taps <= 256 else taps)
    assert mx.array_equal(mx.concatenate(got, axis=-1), mx.concatenate(list(whole), axis=-1))
