"""Rows that are multiplied together give what each gives alone."""

from __future__ import annotations

import mlx.core as mx
import pytest

from spec_core.device import on_cuda
from spec_core.products import CHEAP_ROWS, join_rows


@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (1, 7), (2, 4), (8, 1), (4, 5)])
@pytest.mark.parametrize("fill", [False, True])
def test_joined_rows_are_those_of_separate_products(shape: tuple[int, int], fill: bool) -> None:
    x = mx.random.normal((*shape, 64), key=mx.random.key(1))
    packed = mx.quantize(mx.random.normal((32, 64), key=mx.random.key(2)), group_size=32, bits=8)
    seen: list[tuple[int, ...]] = []

    def multiply(rows: mx.array) -> mx.array:
        seen.append(rows.shape)
        return mx.quantized_matmul(rows, *packed, group_size=32, bits=8)

    alone = [[multiply(x[b, t][None])[0] for t in range(shape[1])] for b in range(shape[0])]
    seen.clear()
    joined = join_rows(x, multiply, fill=fill)
    expected = mx.stack([mx.stack(row) for row in alone])
    if on_cuda():  # where many rows take another kernel
        assert mx.allclose(joined, expected, rtol=1e-3, atol=1e-3)
    else:
        assert mx.array_equal(joined, expected)
    rows = shape[0] * shape[1]
    if rows >= CHEAP_ROWS or (fill and rows > 1):
        assert seen == [(max(rows, CHEAP_ROWS), 64)]
    else:
        assert seen == [(*shape, 64)]
