"""Attention of a few columns: what it serves, and on CUDA what it computes."""

from __future__ import annotations

import mlx.core as mx
import pytest

from spec_core import flash_decode
from spec_core.device import on_cuda
from spec_core.flash_decode import Columns


def plainly(
    queries: mx.array, keys: mx.array, values: mx.array, ends: list[int], scale: float, causal: bool
) -> mx.array:
    """The same in float32, step by step."""
    q, k, v = (each.astype(mx.float32) for each in (queries, keys, values))
    shared, columns = q.shape[1] // k.shape[1], q.shape[2]
    k, v = mx.repeat(k, shared, axis=1), mx.repeat(v, shared, axis=1)
    before = mx.arange(columns)[::-1] if causal else mx.zeros((columns,), dtype=mx.int32)
    seen = mx.arange(k.shape[2]) < (mx.array(ends)[:, None] - before)[:, None, :, None]
    scores = mx.where(seen, (q @ k.swapaxes(-1, -2)) * scale, -1e30)
    return mx.softmax(scores, axis=-1) @ v


def made(
    heads: int, key_heads: int, dim: int, columns: int, ends: list[int], dtype: mx.Dtype
) -> tuple[mx.array, mx.array, mx.array]:
    """Queries as a model lays them out, and slices of buffers that are larger; what lies behind a
    row's end is large."""
    rows, slots = len(ends), max(ends) + 5
    key = mx.random.split(mx.random.key(heads + columns), 3)
    queries = 3 * mx.random.normal((rows, columns, heads, dim), key=key[0])
    stored = [mx.random.normal((rows + 1, key_heads, slots + 9, dim), key=each) for each in key[1:]]
    behind = mx.arange(slots + 9)[:, None] >= mx.array([*ends, 0])[:, None, None, None]
    keys, values = (mx.where(behind, 50.0, each).astype(dtype)[:rows, :, :slots] for each in stored)
    return queries.astype(dtype).transpose(0, 2, 1, 3), keys, values


@pytest.mark.parametrize(
    ("shape", "served"),
    [
        ((1, 8, 4, 128), True),
        ((3, 8, 1, 64), True),
        ((1, 8, 17, 128), False),
        ((1, 8, 4, 96), False),
        ((1, 9, 4, 64), False),
    ],
)
def test_it_says_what_it_serves(shape: tuple[int, ...], served: bool) -> None:
    queries = mx.zeros(shape, dtype=mx.bfloat16)
    keys = mx.zeros((shape[0], 2, 10, shape[3]), dtype=mx.bfloat16)
    assert flash_decode.serves(queries, keys, keys) is served
    assert not flash_decode.serves(*[each.astype(mx.float32) for each in (queries, keys, keys)])
    assert not flash_decode.serves(queries, keys, keys[..., :32])


@pytest.mark.skipif(not on_cuda(), reason="the kernel is CUDA's")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize(
    ("heads", "key_heads", "dim", "columns", "ends"),
    [
        (32, 8, 128, 4, [704]),
        (32, 8, 128, 8, [16392]),
        (32, 8, 128, 16, [1219]),
        (9, 3, 64, 5, [105, 42, 806]),
        (8, 8, 64, 8, [508, 9]),
        (32, 8, 128, 2, [2]),
        (32, 8, 128, 3, [4003, 13, 2003, 80]),
        (14, 2, 64, 1, [2907, 33]),
    ],
)
def test_it_attends(
    heads: int,
    key_heads: int,
    dim: int,
    columns: int,
    ends: list[int],
    dtype: mx.Dtype,
    causal: bool,
) -> None:
    queries, keys, values = made(heads, key_heads, dim, columns, ends, dtype)
    assert flash_decode.serves(queries, keys, values)
    scale = dim**-0.5
    ended = mx.array(ends, dtype=mx.int32)
    got = flash_decode.attend(queries, keys, values, ended, scale, causal=causal)
    want = plainly(queries, keys, values, ends, scale, causal)
    off = float(mx.max(mx.abs(got.astype(mx.float32) - want)).item())
    assert off < (0.02 if dtype == mx.bfloat16 else 0.003)


@pytest.mark.skipif(not on_cuda(), reason="the kernel is CUDA's")
def test_a_column_is_what_it_is_among_fewer() -> None:
    """The same numbers in every bit: what a column sees does not depend on its neighbours."""
    queries, keys, values = made(32, 8, 128, 4, [3000], mx.bfloat16)
    whole = flash_decode.attend(queries, keys, values, mx.array([3000], dtype=mx.int32), 0.09)
    first = flash_decode.attend(
        queries[:, :, :2], keys, values, mx.array([2998], dtype=mx.int32), 0.09
    )
    assert mx.array_equal(whole[:, :, :2], first)


@pytest.mark.skipif(not on_cuda(), reason="the kernel is CUDA's")
@pytest.mark.parametrize(
    ("heads", "key_heads", "dim", "columns", "ends"),
    [
        (32, 8, 128, 1, [705]),
        (32, 8, 128, 8, [16392, 90]),
        (32, 8, 128, 16, [16]),
        (9, 3, 64, 5, [105, 5, 806]),
        (14, 2, 64, 3, [2907, 33]),
    ],
)
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_the_newest_columns_need_not_be_stored(
    heads: int, key_heads: int, dim: int, columns: int, ends: list[int], dtype: mx.Dtype
) -> None:
    """Attention is the same in every bit; the second time they are stored, and nothing else is."""
    queries, keys, values = made(heads, key_heads, dim, columns, ends, dtype)
    slots = mx.arange(keys.shape[2])
    last = mx.array(ends)[:, None]
    fresh = (slots < last) & (slots >= last - columns)
    at = mx.array([list(range(end - columns, end)) for end in ends])[:, None, :, None]
    # Buffers of one more row and a few more slots, of which nothing of the newest is known yet.
    known = [
        mx.pad(
            mx.where(fresh[:, None, :, None], 7.0, each).astype(dtype),
            [(0, 1), (0, 0), (0, 3), (0, 0)],
        )
        for each in (keys, values)
    ]
    newest = Columns(
        *(
            mx.take_along_axis(each, mx.broadcast_to(at, (*each.shape[:2], columns, dim)), axis=2)
            for each in (keys, values)
        )
    )
    swapped = Columns(
        *(
            mx.contiguous(each.swapaxes(1, 2)).swapaxes(1, 2)
            for each in (newest.keys, newest.values)
        )
    )
    ended = mx.array(ends, dtype=mx.int32)
    mx.eval(known, newest.keys, newest.values, swapped.keys, swapped.values)
    before = [mx.array(each) + 0 for each in known]
    mx.eval(before)
    want = flash_decode.attend(queries, keys, values, ended, 0.1)
    for columns_of in (newest, swapped):
        got = flash_decode.attend(queries, *known, ended, 0.1, newest=columns_of)
        assert mx.array_equal(got, want)
    assert all(mx.array_equal(*pair) for pair in zip(known, before, strict=True))
    out, done, stored = flash_decode.store_and_attend(
        queries, Columns(*known), swapped, ended, 0.1, mx.zeros((1,))
    )
    # What comes after it reads what it stored.
    again, done, stored = flash_decode.store_and_attend(queries, stored, newest, ended, 0.1, done)
    mx.eval(out, again, done)
    assert mx.array_equal(out, want)
    assert mx.array_equal(again, want)
    rows = len(ends)
    for buffer, held, each in zip(
        (stored.keys, stored.values), before, (keys, values), strict=True
    ):
        whole = mx.where(fresh[:, None, :, None], each, held[:rows, :, :-3])
        assert mx.array_equal(buffer[:rows, :, :-3], whole)
        assert mx.array_equal(buffer[rows:], held[rows:])
        assert mx.array_equal(buffer[:, :, -3:], held[:, :, -3:])


@pytest.mark.skipif(not on_cuda(), reason="the kernel is CUDA's")
def test_steps_that_are_launched_ahead_see_what_was_stored() -> None:
    """A hundred columns, one after the other in one evaluation, into the same buffer."""
    count, (queries, keys, values) = 100, made(32, 8, 128, 1, [900], mx.bfloat16)
    stored = Columns(mx.zeros_like(keys) + 0, mx.zeros_like(values) + 0)
    mx.eval(stored.keys, stored.values)
    done, outs = mx.zeros((1,)), []
    for at in range(count):
        newest = Columns(keys[:, :, at : at + 1], values[:, :, at : at + 1])
        end = mx.array([at + 1], dtype=mx.int32)
        out, done, stored = flash_decode.store_and_attend(queries, stored, newest, end, 0.1, done)
        outs.append(out)
    mx.eval(outs)
    for at in (0, 40, 99):
        end = mx.array([at + 1], dtype=mx.int32)
        assert mx.array_equal(outs[at], flash_decode.attend(queries, keys, values, end, 0.1))
    assert mx.array_equal(stored.keys[:, :, :count], keys[:, :, :count])
