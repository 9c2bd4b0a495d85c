"""Products with quantised weights give what the unpacked weights give, whatever the other rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import mlx.core as mx
import pytest

from spec_core import packed
from spec_core.device import on_cuda
from spec_core.packed import CHEAP_ROWS, Packed

needs_cuda = pytest.mark.skipif(not on_cuda(), reason="the kernel is CUDA's")


def matrix(
    outputs: int, inputs: int, bits: int, group: int, dtype: mx.Dtype = mx.float32
) -> tuple[Packed, mx.array]:
    """Packed, and the same numbers unpacked in float32."""
    weight = mx.random.normal((outputs, inputs), key=mx.random.key(bits + group)) * inputs**-0.5
    parts = mx.quantize(weight.astype(dtype), group_size=group, bits=bits)
    unpacked = mx.dequantize(
        parts[0], *(p.astype(mx.float32) for p in parts[1:]), group_size=group, bits=bits
    )
    return Packed(*parts, group, bits), unpacked


@pytest.fixture
def like_cuda(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """As on CUDA, but for the kernel; gives the shapes of what MLX multiplies."""
    seen: list[tuple[int, ...]] = []
    own = packed._product
    monkeypatch.setattr(packed, "on_cuda", lambda: True)
    monkeypatch.setattr(packed, "has_tile_products", lambda: False)
    monkeypatch.setattr(packed, "_product", lambda x, m: (seen.append(x.shape), own(x, m))[1])
    return seen


@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (1, 7), (2, 4), (8, 1), (4, 5)])
@pytest.mark.parametrize("fill", [False, True])
def test_joined_rows_are_those_of_separate_products(
    shape: tuple[int, int], fill: bool, like_cuda: list[tuple[int, ...]]
) -> None:
    x = mx.random.normal((*shape, 64), key=mx.random.key(1))
    packed_matrix, unpacked = matrix(32, 64, 8, 32)
    joined = packed.multiply(x, packed_matrix, fill=fill)
    assert joined.shape == (*shape, 32)
    assert mx.allclose(joined, x @ unpacked.T, rtol=1e-2, atol=1e-2)
    rows = shape[0] * shape[1]
    if (rows >= CHEAP_ROWS or fill) and rows > 1:
        assert like_cuda == [(max(rows, CHEAP_ROWS), 64)]
    else:
        assert like_cuda == [(*shape, 64)]


@pytest.mark.usefixtures("like_cuda")
def test_a_stack_is_multiplied_matrix_by_matrix() -> None:
    parts = mx.quantize(mx.random.normal((3, 32, 64), key=mx.random.key(2)), group_size=32, bits=4)
    stack, x = Packed(*parts, 32, 4), mx.random.normal((1, 9, 64), key=mx.random.key(3))
    whole = packed.multiply(x, stack)
    assert whole.shape == (3, 9, 32)
    for index in range(3):
        alone = packed.multiply(x, stack[index])
        assert mx.allclose(whole[index : index + 1], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 5, 20])
def test_matrices_that_lie_in_one_give_what_each_gives(rows: int) -> None:
    both, unpacked = matrix(48, 64, 8, 32)
    x = mx.random.normal((1, rows, 64), key=mx.random.key(4))
    for part, begin, end in zip(
        packed.multiply_apart(x, both, (32, 16)), (0, 32), (32, 48), strict=True
    ):
        assert mx.allclose(part, x @ unpacked[begin:end].T, rtol=1e-2, atol=1e-2)


def test_few_rows_and_one_matrix_go_to_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA: which products the kernel is asked for."""
    asked: list[tuple[int, ...]] = []

    def kernel(x: mx.array, m: Packed, widths: Sequence[int]) -> list[mx.array]:
        asked.append(x.shape)
        return list(mx.split(packed._product(x, m), list(accumulate(widths))[:-1], axis=-1))

    monkeypatch.setattr(packed, "on_cuda", lambda: True)
    monkeypatch.setattr(packed, "_few_rows", kernel)
    one, _ = matrix(32, 64, 8, 32, mx.bfloat16)
    for rows in (1, 2, 16, 17):
        packed.multiply(mx.zeros((1, rows, 64), mx.bfloat16), one)
        packed.multiply_apart(mx.zeros((rows, 1, 64), mx.bfloat16), one, (20, 12))
    assert asked == [(1, 2, 64), (2, 1, 64), (1, 16, 64), (16, 1, 64)]
    asked.clear()
    x = mx.zeros((1, 4, 64), mx.bfloat16)
    parts = mx.quantize(mx.zeros((3, 32, 64), mx.bfloat16), group_size=32, bits=8)
    packed.multiply(x, Packed(*parts, 32, 8))
    packed.multiply(x.astype(mx.float32), one)
    packed.multiply(x.astype(mx.float32), matrix(32, 64, 8, 32)[0])
    packed.multiply(x, matrix(32, 64, 6, 32, mx.bfloat16)[0])
    assert not asked


@pytest.mark.skipif(on_cuda(), reason="on CUDA it does")
def test_the_kernel_fits_nothing_elsewhere() -> None:
    assert not matrix(32, 64, 8, 64, mx.bfloat16)[0].fits


@needs_cuda
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize(("bits", "group"), [(b, g) for b in (4, 8) for g in (32, 64, 128)])
@pytest.mark.parametrize(
    ("outputs", "inputs"), [(48, 128), (1000, 1536), (2560, 4096), (20000, 256)]
)
def test_the_kernel_multiplies(
    outputs: int, inputs: int, bits: int, group: int, dtype: mx.Dtype
) -> None:
    """Against float32; a row's product is the same, bit for bit, among any number of rows."""
    packed_matrix, unpacked = matrix(outputs, inputs, bits, group, dtype)
    assert packed_matrix.fits
    x = mx.random.normal((16, inputs), key=mx.random.key(inputs)).astype(dtype)
    whole = packed.multiply(x, packed_matrix)
    exact = x.astype(mx.float32) @ unpacked.T
    assert mx.abs(whole.astype(mx.float32) - exact).max() < 0.02
    for rows in (2, 3, 8, 9, 15):
        few = packed.multiply(x[:rows].reshape(1, rows, inputs), packed_matrix)
        assert few.shape == (1, rows, outputs)
        assert mx.array_equal(few[0], whole[:rows])


@needs_cuda
@pytest.mark.parametrize("widths", [(48, 16, 16), (40, 7, 25), (16000, 4000)])
def test_the_kernel_gives_a_part_what_it_gives_the_whole(widths: tuple[int, ...]) -> None:
    whole, _ = matrix(sum(widths), 128, 8, 64, mx.bfloat16)
    x = mx.random.normal((1, 11, 128), key=mx.random.key(6)).astype(mx.bfloat16)
    begin = 0
    for width, part in zip(widths, packed.multiply_apart(x, whole, widths), strict=True):
        alone = packed.multiply(x, whole[mx.arange(begin, begin + width)])
        assert part.shape == (1, 11, width)
        assert mx.array_equal(part, alone)
        begin += width
