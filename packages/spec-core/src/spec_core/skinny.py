"""A few rows times a matrix of half precision on CUDA.

MLX's product of two rows or more (0.32.4) goes through cuBLAS, and each call asks it for a plan and
captures what it starts: host work, seven times a layer, that takes longer than the product. This
kernel serves 2 to 16 rows (for one row MLX has its own), and what it gives for a row does not
depend on how many there are. On an H200 a verify of eight columns of SmolLM2-135M, 30 layers, went
from 8.1 to 6.4 ms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx

from spec_core._tiles import TILE_PRODUCT, finish, has_tile_products
from spec_core.device import on_cuda

FEWEST_ROWS, MOST_ROWS = 2, 16
"""More rows are a prefill, or a wide batch: there cuBLAS is as fast or faster."""
_OUTPUTS = 16
"""Outputs of a block of threads: the height of a tile product."""
_DEPTH = 32
"""Inputs that a warp multiplies at once."""
_WARPS, _MANY_WARPS, _MANY_INPUTS = 8, 16, 4096
"""Warps that share a block's inputs, and from how many inputs on they are more."""


def fits(weight: mx.array) -> bool:
    """Whether `multiply` serves matrices [..., outputs, inputs] on the default device."""
    return (
        on_cuda()
        and weight.dtype in (mx.bfloat16, mx.float16)
        and weight.shape[-1] % _DEPTH == 0
        and has_tile_products()
    )


def serves(x: mx.array, weight: mx.array) -> bool:
    """Whether `multiply` serves these rows with a matrix that fits (a stack of them: no)."""
    rows = math.prod(x.shape[:-1])
    return FEWEST_ROWS <= rows <= MOST_ROWS and x.dtype == weight.dtype and weight.ndim == 2


def multiply(x: mx.array, weight: mx.array) -> mx.array:
    """x W^T for [..., inputs] and [outputs, inputs], both of one half precision, on a CUDA stream.

    Sums are float32. Every element is summed in one order, whatever the number of rows.
    """
    return multiply_apart(x, weight, weight.shape[:1])[0]


def multiply_apart(x: mx.array, weight: mx.array, widths: Sequence[int]) -> list[mx.array]:
    """`multiply` with several matrices that lie in one, [outputs, inputs]: as many arrays, of
    `widths` outputs each, which add up to all."""
    *batch, inputs = x.shape
    outputs, rows = weight.shape[0], math.prod(batch)
    warps = _MANY_WARPS if inputs >= _MANY_INPUTS else _WARPS
    threads = 32 * warps
    products: list[mx.array] = _kernel(len(widths))(
        inputs=[x, weight],
        template=[
            ("TILES", -(-rows // 8)),
            ("WARPS", warps),
            ("HALF", x.dtype == mx.float16),
            ("OUT", x.dtype),
            *((f"WIDTH{part}", width) for part, width in enumerate(widths[:-1])),
        ],
        grid=(-(-outputs // _OUTPUTS) * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(*batch, width) for width in widths],
        output_dtypes=[x.dtype] * len(widths),
    )
    return products


@cache
def _kernel(parts: int) -> Any:
    return mx.fast.cuda_kernel(
        name=f"spec_multiply_{parts}",
        input_names=["x", "weight"],
        output_names=[f"product{part}" for part in range(parts)],
        header=TILE_PRODUCT,
        source=_SOURCE.replace("FINISH", finish(parts)),
    )


# The weights' rows are the tile's rows, those of x its columns. In a tile product the thread
# (g, j) = (lane / 4, lane % 4) holds columns 2j, 2j + 1, 2j + 8 and 2j + 9 of rows g and g + 8.
# Which input a column stands for is free as long as both factors agree: here thread j takes eight
# inputs that follow each other, so that it reads them at once, for two products.
_SOURCE = r"""
  __shared__ float sums[WARPS][TILES * 8][17];

  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, j = lane & 3;
  const int outputs = weight_shape[0], inputs = weight_shape[1], steps = inputs / 32;
  const int first = blockIdx.x * 16;
  int rows = 1;
  for (int i = 0; i < x_ndim - 1; ++i) rows *= x_shape[i];
  const auto* low = reinterpret_cast<const uint4*>(
      weight + (int64_t)min(first + g, outputs - 1) * inputs) + j;
  const auto* high = reinterpret_cast<const uint4*>(
      weight + (int64_t)min(first + g + 8, outputs - 1) * inputs) + j;
  const uint4* column[TILES];
  float sum[TILES][4];
#pragma unroll
  for (int t = 0; t < TILES; ++t) {
    column[t] = reinterpret_cast<const uint4*>(x + (int64_t)min(t * 8 + g, rows - 1) * inputs) + j;
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[t][i] = 0.0f;
  }

#pragma unroll 4
  for (int step = warp; step < steps; step += WARPS) {
    const uint4 a = low[step * 4], b = high[step * 4];
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
      const uint4 c = column[t][step * 4];
      multiply<HALF>(sum[t], make_uint4(a.x, b.x, a.y, b.y), c.x, c.y);
      multiply<HALF>(sum[t], make_uint4(a.z, b.z, a.w, b.w), c.z, c.w);
    }
  }

FINISH"""
