"""Products with quantised weights.

On CUDA MLX's kernels (0.32.4) read the weights anew for each entry of a batch, and for each row
below eight. From eight rows on they read them once, but slowly where inputs are many: on an H200
the MLPs of Qwen3-4B in 8 bit take 6.4 ms for eight rows, and 2.4 in bfloat16. So 2 to 16 rows go
through a kernel of our own there (2.4 ms): its cost hardly depends on how many they are, and what
it gives for a row not at all. The rest is MLX's, all rows as one matrix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from typing import Any

import mlx.core as mx

from spec_core._tiles import TILE_PRODUCT, finish, has_tile_products
from spec_core.device import on_cuda

CHEAP_ROWS = 8
"""From so many rows on, a product by MLX on CUDA costs what one row costs."""
FEWEST_ROWS, MOST_ROWS = 2, 16
"""Of the kernel. For one row MLX has its own, and for a prefill a better one."""
_WARPS, _FEW_WARPS, _MANY_OUTPUTS = 8, 4, 4096
"""Warps that share a block's inputs, and from how many outputs on they are fewer."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A matrix [outputs, inputs] as `mx.quantize` packs it, or a stack of them."""

    weight: mx.array
    scales: mx.array
    biases: mx.array | None
    group_size: int
    bits: int
    mode: str = "affine"

    def __getitem__(self, index: int | mx.array) -> Packed:
        """Rows of the matrix, or a matrix of the stack."""
        biases = None if self.biases is None else self.biases[index]
        return replace(self, weight=self.weight[index], scales=self.scales[index], biases=biases)

    @property
    def fits(self) -> bool:
        """Whether a few rows are multiplied with it by the kernel."""
        return has_kernel(self.bits, self.group_size, self.mode, self.scales.dtype)


def has_kernel(bits: int, group_size: int, mode: str, dtype: mx.Dtype) -> bool:
    """Whether the kernel multiplies a few rows of this type with matrices packed so, on the default
    device."""
    return (
        on_cuda()
        and mode == "affine"
        and bits in (4, 8)
        and group_size in (32, 64, 128)
        and dtype in (mx.bfloat16, mx.float16)
        and has_tile_products()
    )


def multiply(x: mx.array, matrix: Packed, *, fill: bool = False) -> mx.array:
    """x W^T for [..., inputs] and one matrix: [..., outputs].

    Args:
        x: as the layer was given it.
        matrix: the weights.
        fill: where rows are too few to be cheap for MLX, add some. It costs two more kernels: worth
            it in a drafter, not in a target, whose tokens are filled up instead.
    """
    if _serves(x, matrix):
        return _few_rows(x, matrix, matrix.weight.shape[:1])[0]
    return _by_mlx(x, matrix, fill)


def multiply_apart(x: mx.array, matrix: Packed, widths: Sequence[int]) -> list[mx.array]:
    """`multiply` with several matrices that lie in one: as many arrays, of `widths` outputs each,
    which add up to all."""
    if _serves(x, matrix):
        return _few_rows(x, matrix, widths)
    return list(mx.split(_by_mlx(x, matrix), list(accumulate(widths))[:-1], axis=-1))


def _serves(x: mx.array, matrix: Packed) -> bool:
    """Whether the kernel multiplies these rows with this matrix (a stack of them: no)."""
    rows = math.prod(x.shape[:-1])
    return (
        FEWEST_ROWS <= rows <= MOST_ROWS
        and x.dtype == matrix.scales.dtype
        and matrix.weight.ndim == 2
        and matrix.fits
    )


def _by_mlx(x: mx.array, matrix: Packed, fill: bool = False) -> mx.array:
    """All rows as one matrix where that makes them cheap."""
    *batch, width = x.shape
    rows = math.prod(batch)
    alone = not on_cuda() or matrix.weight.ndim > 2 or rows == 1
    if alone or (rows < CHEAP_ROWS and not fill):
        return _product(x, matrix)
    flat = x.reshape(rows, width)
    if rows < CHEAP_ROWS:
        flat = mx.pad(flat, [(0, CHEAP_ROWS - rows), (0, 0)])
    product = _product(flat, matrix)
    return product[:rows].reshape(*batch, product.shape[-1])


def _product(x: mx.array, matrix: Packed) -> mx.array:
    return mx.quantized_matmul(
        x,
        matrix.weight,
        matrix.scales,
        matrix.biases,
        transpose=True,
        group_size=matrix.group_size,
        bits=matrix.bits,
        mode=matrix.mode,
    )


def _few_rows(x: mx.array, matrix: Packed, widths: Sequence[int]) -> list[mx.array]:
    """The kernel. Integers are multiplied exactly, a group's sum is scaled in float32, and every
    element is summed in one order, whatever the number of rows."""
    *batch, _ = x.shape
    outputs, rows = matrix.weight.shape[0], math.prod(batch)
    warps = _FEW_WARPS if outputs >= _MANY_OUTPUTS else _WARPS
    threads = 32 * warps
    products: list[mx.array] = _kernel(len(widths))(
        inputs=[x, matrix.weight, matrix.scales, matrix.biases],
        template=[
            ("BITS", matrix.bits),
            ("GROUP", matrix.group_size),
            ("TILES", -(-rows // 8)),
            ("WARPS", warps),
            ("HALF", x.dtype == mx.float16),
            ("OUT", x.dtype),
            *((f"WIDTH{part}", width) for part, width in enumerate(widths[:-1])),
        ],
        grid=(-(-outputs // 16) * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(*batch, width) for width in widths],
        output_dtypes=[x.dtype] * len(widths),
    )
    return products


@cache
def _kernel(parts: int) -> Any:
    return mx.fast.cuda_kernel(
        name=f"spec_multiply_packed_{parts}",
        input_names=["x", "weight", "scales", "biases"],
        output_names=[f"product{part}" for part in range(parts)],
        header=TILE_PRODUCT + _UNPACK,
        source=_SOURCE.replace("FINISH", finish(parts)),
    )


# A word's integers become pairs of half precision without rounding: an integer is the low end of
# the mantissa of a power of two, which is then taken away.
_UNPACK = r"""
template <int WORDS>
__device__ inline void read(unsigned* to, const unsigned* from) {
  if constexpr (WORDS % 4 == 0) {
#pragma unroll
    for (int i = 0; i < WORDS / 4; ++i) {
      const uint4 four = reinterpret_cast<const uint4*>(from)[i];
      to[4 * i] = four.x, to[4 * i + 1] = four.y, to[4 * i + 2] = four.z, to[4 * i + 3] = four.w;
    }
  } else if constexpr (WORDS == 2) {
    const uint2 two = *reinterpret_cast<const uint2*>(from);
    to[0] = two.x, to[1] = two.y;
  } else {
    to[0] = *from;
  }
}

template <bool HALF>
__device__ inline unsigned less(unsigned pair, unsigned power) {
  if constexpr (HALF) {
    __half2 left = __hsub2(
        *reinterpret_cast<__half2*>(&pair), *reinterpret_cast<__half2*>(&power));
    return *reinterpret_cast<unsigned*>(&left);
  } else {
    __nv_bfloat162 left = __hsub2(
        *reinterpret_cast<__nv_bfloat162*>(&pair), *reinterpret_cast<__nv_bfloat162*>(&power));
    return *reinterpret_cast<unsigned*>(&left);
  }
}

// 8 bit: pairs (0, 1), (2, 3). 4 bit: pairs (0, 4), (1, 5), (2, 6), (3, 7).
template <int BITS, bool HALF>
__device__ inline void unpack(unsigned* pairs, unsigned word) {
  constexpr unsigned POWER = HALF ? 0x64006400u : 0x43004300u;
  if constexpr (BITS == 4) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      pairs[i] = less<HALF>(((word >> (4 * i)) & 0x000F000Fu) | POWER, POWER);
  } else if constexpr (HALF) {
    pairs[0] = less<HALF>(__byte_perm(word, POWER, 0x5150), POWER);
    pairs[1] = less<HALF>(__byte_perm(word, POWER, 0x5352), POWER);
  } else {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float power = 8388608.0f;
      const float low = __uint_as_float(__byte_perm(word, 0x4B000000u, 0x7540 + 2 * i)) - power;
      const float high = __uint_as_float(__byte_perm(word, 0x4B000000u, 0x7541 + 2 * i)) - power;
      __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
      pairs[i] = *reinterpret_cast<unsigned*>(&pair);
    }
  }
}

// Eight inputs of x in the order of the pairs.
template <int BITS>
__device__ inline void pair_up(unsigned* pairs, uint4 x) {
  if constexpr (BITS == 4) {
    pairs[0] = __byte_perm(x.x, x.z, 0x5410), pairs[1] = __byte_perm(x.x, x.z, 0x7632);
    pairs[2] = __byte_perm(x.y, x.w, 0x5410), pairs[3] = __byte_perm(x.y, x.w, 0x7632);
  } else {
    pairs[0] = x.x, pairs[1] = x.y, pairs[2] = x.z, pairs[3] = x.w;
  }
}
"""

# As in spec_core.skinny the weights' rows are the tile's rows, and thread j of four takes inputs
# that follow each other: a quarter of a group. With q the integers, a group gives
# scale * (q x) + bias * (1 x), both by tile products.
_SOURCE = r"""
  constexpr int EACH = GROUP / 4, WORDS = EACH * BITS / 32;
  constexpr unsigned ONES = HALF ? 0x3C003C00u : 0x3F803F80u;
  __shared__ float sums[WARPS][TILES * 8][17];

  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, j = lane & 3;
  const int outputs = weight_shape[0], groups = scales_shape[1], inputs = groups * GROUP;
  const int64_t row_words = weight_shape[1];
  const int first = blockIdx.x * 16;
  int rows = 1;
  for (int i = 0; i < x_ndim - 1; ++i) rows *= x_shape[i];
  const int64_t at_output[2] = {min(first + g, outputs - 1), min(first + g + 8, outputs - 1)};
  float sum[TILES][4];
#pragma unroll
  for (int t = 0; t < TILES; ++t)
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[t][i] = 0.0f;

#pragma unroll 2
  for (int group = warp; group < groups; group += WARPS) {
    unsigned words[2][WORDS];
    float scale[2], bias[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const auto* row = reinterpret_cast<const unsigned*>(weight) + at_output[h] * row_words;
      read<WORDS>(words[h], row + (group * 4 + j) * WORDS);
      scale[h] = static_cast<float>(scales[at_output[h] * groups + group]);
      bias[h] = static_cast<float>(biases[at_output[h] * groups + group]);
    }
    unsigned low[EACH / 2], high[EACH / 2];
#pragma unroll
    for (int w = 0; w < WORDS; ++w) {
      unpack<BITS, HALF>(low + w * (16 / BITS), words[0][w]);
      unpack<BITS, HALF>(high + w * (16 / BITS), words[1][w]);
    }
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
      const auto* from = reinterpret_cast<const uint4*>(
          x + (int64_t)min(t * 8 + g, rows - 1) * inputs + group * GROUP + j * EACH);
      unsigned column[EACH / 2];
#pragma unroll
      for (int i = 0; i < EACH / 8; ++i) pair_up<BITS>(column + 4 * i, from[i]);
      float part[4] = {0.0f, 0.0f, 0.0f, 0.0f}, whole[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int p = 0; p < EACH / 2; p += 2) {
        multiply<HALF>(
            part, make_uint4(low[p], high[p], low[p + 1], high[p + 1]), column[p], column[p + 1]);
        multiply<HALF>(whole, make_uint4(ONES, ONES, ONES, ONES), column[p], column[p + 1]);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i)
        sum[t][i] = fmaf(scale[i >> 1], part[i], fmaf(bias[i >> 1], whole[i], sum[t][i]));
    }
  }

FINISH"""
