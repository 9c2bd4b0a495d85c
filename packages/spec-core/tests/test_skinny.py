"""A few rows times a matrix: what is served, and on CUDA what is computed."""

from __future__ import annotations

import mlx.core as mx
import pytest

from spec_core import skinny
from spec_core.device import on_cuda


@pytest.mark.parametrize(
    ("shape", "served"),
    [((1, 2, 64), True), ((2, 8, 64), True), ((1, 1, 64), False), ((17, 64), False)],
)
def test_it_serves_a_few_rows(shape: tuple[int, ...], served: bool) -> None:
    weight = mx.zeros((48, 64), dtype=mx.bfloat16)
    assert skinny.serves(mx.zeros(shape, dtype=mx.bfloat16), weight) is served
    assert not skinny.serves(mx.zeros(shape, dtype=mx.float32), weight)


@pytest.mark.skipif(on_cuda(), reason="on CUDA it does")
def test_it_fits_nothing_elsewhere() -> None:
    assert not skinny.fits(mx.zeros((48, 64), dtype=mx.bfloat16))


@pytest.mark.skipif(not on_cuda(), reason="the kernel is CUDA's")
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize(
    ("outputs", "inputs"), [(48, 64), (576, 576), (1000, 1536), (24, 32), (2560, 9728)]
)
def test_it_multiplies(outputs: int, inputs: int, dtype: mx.Dtype) -> None:
    """Against float32; a row's product is the same, bit for bit, among any number of rows."""
    keys = mx.random.split(mx.random.key(inputs), 2)
    weight = (mx.random.normal((outputs, inputs), key=keys[0]) * inputs**-0.5).astype(dtype)
    x = mx.random.normal((16, inputs), key=keys[1]).astype(dtype)
    assert skinny.fits(weight)
    whole = skinny.multiply(x, weight)
    exact = x.astype(mx.float32) @ weight.astype(mx.float32).T
    assert mx.abs(whole.astype(mx.float32) - exact).max() < 0.02
    for rows in (2, 3, 8, 9, 15):
        few = skinny.multiply(x[:rows].reshape(1, rows, inputs), weight)
        assert few.shape == (1, rows, outputs)
        assert mx.array_equal(few[0], whole[:rows])
    apart = mx.stack([x[:4], x[4:8]], axis=1)  # rows that do not follow each other
    assert mx.array_equal(skinny.multiply(apart[:, 0], weight), whole[:4])


@pytest.mark.skipif(not on_cuda(), reason="the kernel is CUDA's")
@pytest.mark.parametrize("widths", [(48, 16, 16), (40, 7, 25), (5, 67)])
def test_matrices_that_lie_in_one_give_what_each_gives_alone(widths: tuple[int, ...]) -> None:
    keys = mx.random.split(mx.random.key(5), 2)
    weight = mx.random.normal((sum(widths), 96), key=keys[0]).astype(mx.bfloat16)
    x = mx.random.normal((1, 11, 96), key=keys[1]).astype(mx.bfloat16)
    begin = 0
    for width, part in zip(widths, skinny.multiply_apart(x, weight, widths), strict=True):
        alone = skinny.multiply(x, mx.contiguous(weight[begin : begin + width]))
        assert part.shape == (1, 11, width)
        assert mx.array_equal(part, alone)
        begin += width
