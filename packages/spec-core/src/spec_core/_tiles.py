"""Products of small tiles, for kernels on CUDA."""

from __future__ import annotations

from functools import cache

import mlx.core as mx


@cache
def has_tile_products() -> bool:
    """Whether the device has those of half precision that are used here (compute capability 8)."""
    major = mx.device_info().get("compute_capability_major")
    return not isinstance(major, int) or major >= 8


def finish(parts: int) -> str:
    """C++ that ends a kernel of 16 outputs a block: adds up the warps' `sum` of each output in one
    order, and puts it where it belongs among so many matrices, see `_store`."""
    return _FINISH.replace("STORE", _store(parts))


def _store(parts: int) -> str:
    """C++ that puts the total of output `at` of a row into the one of so many matrices that it
    belongs to; their widths are WIDTH0, WIDTH1, ..., and what is left."""
    code, begin = "", "0"
    for part in range(parts - 1):
        width = f"WIDTH{part}"
        code += (
            f"if (at < {begin} + {width})\n"
            f"        product{part}[(int64_t)row * {width} + at - ({begin})] = total;\n"
            "      else "
        )
        begin += f" + {width}"
    last = f"(outputs - ({begin}))"
    return f"{code}product{parts - 1}[(int64_t)row * {last} + at - ({begin})] = total;"


TILE_PRODUCT = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>

// c += a * b for a tile of 16 x 8 with 16 products each.
template <bool HALF>
__device__ inline void multiply(float* c, uint4 a, unsigned b0, unsigned b1) {
  if constexpr (HALF) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
  }
}
"""

_FINISH = r"""#pragma unroll
  for (int t = 0; t < TILES; ++t)
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[warp][t * 8 + 2 * j + (i & 1)][g + 8 * (i >> 1)] = sum[t][i];
  __syncthreads();

  for (int i = threadIdx.x; i < 16 * rows; i += WARPS * 32) {
    const int row = i / 16, output = i % 16, at = first + output;
    if (at < outputs) {
      float sum_of_warps = 0.0f;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) sum_of_warps += sums[w][row][output];
      const OUT total = static_cast<OUT>(sum_of_warps);
      STORE
    }
  }
"""
