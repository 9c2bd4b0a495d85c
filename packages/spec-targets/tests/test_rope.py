"""Shared rotary angles: every bit is that of MLX's own."""

import mlx.core as mx
import pytest
from mlx.nn import Module, RoPE

from spec_targets.rope import SharedAngles
from spec_targets.swap import swapped

ROWS, HEADS = 3, 2


class Layers(Module):
    def __init__(self, *ropes: RoPE) -> None:
        super().__init__()
        self.ropes = list(ropes)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize("offset", [0, 61, 4001, [7], [0, 61, 4001]])
@pytest.mark.parametrize("columns", [1, 5])
def test_rotated_as_mlx_does(dtype: mx.Dtype, offset: int | list[int], columns: int) -> None:
    ropes = [
        RoPE(64),
        RoPE(64, base=1e6),
        RoPE(64, scale=0.25),
        RoPE(32),
        RoPE(64, traditional=True),
        RoPE(64),
    ]
    at = mx.array(offset) if isinstance(offset, list) else offset
    queries = mx.random.normal((ROWS, HEADS, columns, 64)).astype(dtype)
    keys = mx.random.normal((ROWS, 1, columns, 64)).astype(dtype)
    expected = [rope(x, offset=at) for rope in ropes for x in (queries, keys)]
    with swapped(SharedAngles(Layers(*ropes)).swaps):
        found = [rope(x, at) for rope in ropes for x in (queries, keys)]
    assert all(mx.array_equal(*pair) for pair in zip(found, expected, strict=True))


def test_every_offset_has_its_own_angles() -> None:
    rope = RoPE(64)
    x = mx.random.normal((1, HEADS, 1, 64))
    expected = [rope(x, offset=at) for at in (0, 300, 301, 300)]
    with swapped(SharedAngles(Layers(rope)).swaps):
        found = [rope(x, offset=at) for at in (0, 300, 301, 300)]
    assert all(mx.array_equal(*pair) for pair in zip(found, expected, strict=True))


def test_other_shapes_are_left_to_mlx() -> None:
    rope = RoPE(64)
    x = mx.random.normal((HEADS, 4, 64))
    expected = rope(x, offset=9)
    with swapped(SharedAngles(Layers(rope)).swaps):
        assert mx.array_equal(rope(x, offset=9), expected)
