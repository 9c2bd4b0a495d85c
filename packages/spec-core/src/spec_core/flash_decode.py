"""Attention of a few columns over many keys on CUDA, each row over its own length.

A verify has 2 to 16 columns. MLX's fused attention there (0.32.4) does not split the keys of so
few queries over the device, makes a plan for every new number of keys, and with a mask takes twice
as long again: on an H200 36 layers of 4 columns at 16,384 positions take 15.8 ms, where one column
takes 2.1. This kernel splits the keys (flash-decoding: Dao et al., 2023, "Flash-Decoding for
long-context inference"), puts the queries that share a key head into one matrix tile, and needs
neither mask nor plan: 3.3 ms. At 512 positions both take about 2.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx

from spec_core._tiles import TILE_PRODUCT, has_tile_products

MOST_COLUMNS = 16
"""More columns are a prefill: MLX's own kernels serve them better."""
_TILE = 16
_WARPS = 4
_WANTED_BLOCKS = 264
"""Two for each multiprocessor of an H100 or H200."""
_FEWEST_KEYS = 128
"""Keys of a split, at least."""


def serves(queries: mx.array, keys: mx.array) -> bool:
    """Whether `attend` computes these shapes and types."""
    _, heads, columns, dim = queries.shape
    return (
        columns <= MOST_COLUMNS
        and dim == keys.shape[-1]
        and heads % keys.shape[1] == 0
        and queries.dtype == keys.dtype
        and fits(keys)
    )


def fits(keys: mx.array) -> bool:
    """Whether `attend` reads keys [B, K, S, D] like these."""
    half = keys.dtype in (mx.bfloat16, mx.float16)
    return half and keys.shape[-1] in (64, 128) and has_tile_products()


def attend(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    ends: mx.array,
    scale: float,
    *,
    causal: bool = True,
) -> mx.array:
    """Attention over left-aligned rows, on a CUDA stream.

    Args:
        queries: [B, H, T, D], their last axis contiguous.
        keys: [B, K, S, D] with H a multiple of K, the last axis contiguous; what lies behind a
            row's end is not read as a number.
        values: as the keys.
        ends: [B] int32, how many positions a row's last column sees.
        scale: of the scores.
        causal: each column sees one position less than the next; otherwise all see the same.

    Returns [B, H, T, D].
    """
    rows, heads, columns, dim = queries.shape
    key_heads, slots = keys.shape[1], keys.shape[2]
    shared = heads // key_heads * columns
    tiles = 1 if shared <= _TILE else 2
    groups = -(-shared // (tiles * _TILE))
    splits = _splits(slots, rows * key_heads * groups)
    half = queries.dtype == mx.float16
    parts, weights = _partial()(
        inputs=[queries, keys, values, ends, _scalar(scale)],
        template=[
            ("D", dim),
            ("TILES", tiles),
            ("WARPS", _WARPS),
            ("CAUSAL", causal),
            ("HALF", half),
        ],
        grid=(splits * _WARPS * 32, key_heads, rows * groups),
        threadgroup=(_WARPS * 32, 1, 1),
        output_shapes=[(rows, heads, columns, splits, dim), (rows, heads, columns, splits, 2)],
        output_dtypes=[mx.float32, mx.float32],
    )
    joined: list[mx.array] = _merge()(
        inputs=[parts, weights],
        template=[("D", dim), ("OUT", queries.dtype)],
        grid=(dim, columns * heads, rows),
        threadgroup=(dim, 1, 1),
        output_shapes=[(rows, columns, heads, dim)],
        output_dtypes=[queries.dtype],
    )
    return joined[0].transpose(0, 2, 1, 3)


def _splits(slots: int, others: int) -> int:
    """Parts of the keys: enough for the device, none too short."""
    most = -(-slots // _FEWEST_KEYS)
    return max(1, min(most, -(-_WANTED_BLOCKS // others)))


@cache
def _scalar(value: float) -> mx.array:
    return mx.array(value, dtype=mx.float32)


@cache
def _partial() -> Any:
    return mx.fast.cuda_kernel(
        name="spec_attend",
        input_names=["queries", "keys", "values", "ends", "scale"],
        output_names=["parts", "weights"],
        header=_HEADER,
        source=_PARTIAL,
        ensure_row_contiguous=False,
    )


@cache
def _merge() -> Any:
    return mx.fast.cuda_kernel(
        name="spec_attend_merge",
        input_names=["parts", "weights"],
        output_names=["joined"],
        source=_MERGE,
    )


_HEADER = (
    TILE_PRODUCT
    + r"""
template <bool HALF>
__device__ inline unsigned pack(float low, float high) {
  if constexpr (HALF) {
    __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<unsigned*>(&pair);
  } else {
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<unsigned*>(&pair);
  }
}
"""
)

# In a tile product the thread (g, j) = (lane / 4, lane % 4) holds columns 2j, 2j + 1, 2j + 8 and
# 2j + 9 of its rows. Which dimension a column stands for is free as long as both factors agree:
# here thread j takes D / 4 dimensions that follow each other, so that it reads them at once.
_PARTIAL = r"""
  constexpr int STEPS = D / 16, COLUMNS = D / 8, ROWS = TILES * 16;
  __shared__ uint4 query_tiles[TILES][STEPS][32];
  __shared__ float others[2][ROWS][D];
  __shared__ float other_weights[2][ROWS][2];

  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, j = lane & 3;
  const int heads = queries_shape[1], columns = queries_shape[2];
  const int per_key = heads / keys_shape[1], shared_rows = per_key * columns;
  const int groups = (shared_rows + ROWS - 1) / ROWS;
  const int split = blockIdx.x, splits = gridDim.x, key_head = blockIdx.y;
  const int row = blockIdx.z / groups, first_row = (blockIdx.z % groups) * ROWS;
  const int end = ends[row];
  const int chunk = ((end + splits - 1) / splits + 63) / 64 * 64;
  const int from = split * chunk, to = min(end, from + chunk);
  const auto* key_base = reinterpret_cast<const char*>(
      keys + row * keys_strides[0] + key_head * keys_strides[1]);
  const auto* value_base = reinterpret_cast<const char*>(
      values + row * values_strides[0] + key_head * values_strides[1]);
  const int64_t key_step = 2 * keys_strides[2], value_step = 2 * values_strides[2];
  const float factor = scale[0] * 1.44269504f, NEVER = __int_as_float(0xff800000);

  if (warp == 0) {
    for (int m = 0; m < TILES; ++m) {
      unsigned word[2][STEPS][2];
      for (int half = 0; half < 2; ++half) {
        const int r = first_row + m * 16 + half * 8 + g;
        const auto* base = reinterpret_cast<const unsigned*>(
            queries + row * queries_strides[0] +
            (key_head * per_key + r / columns) * queries_strides[1] +
            (r % columns) * queries_strides[2] + j * (D / 4));
        for (int s = 0; s < STEPS; ++s)
          for (int i = 0; i < 2; ++i)
            word[half][s][i] = r < shared_rows ? base[2 * s + i] : 0u;
      }
      for (int s = 0; s < STEPS; ++s)
        query_tiles[m][s][lane] =
            make_uint4(word[0][s][0], word[1][s][0], word[0][s][1], word[1][s][1]);
    }
  }
  __syncthreads();

  int visible[TILES][2];
  float most[TILES][2], sum[TILES][2], out[TILES][COLUMNS][4];
  for (int m = 0; m < TILES; ++m)
    for (int half = 0; half < 2; ++half) {
      const int r = first_row + m * 16 + half * 8 + g;
      const int seen = CAUSAL ? end - columns + r % columns + 1 : end;
      visible[m][half] = r < shared_rows ? seen : 0;
      most[m][half] = -1e30f;
      sum[m][half] = 0.0f;
    }
#pragma unroll
  for (int m = 0; m < TILES; ++m)
#pragma unroll
    for (int t = 0; t < COLUMNS; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i) out[m][t][i] = 0.0f;

  for (int tile = from + warp * 16; tile < to; tile += WARPS * 16) {
    float score[TILES][2][4];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int key = min(tile + n * 8 + g, end - 1);
      const auto* base =
          reinterpret_cast<const uint4*>(key_base + key * key_step) + j * (D / 32);
      uint4 loaded[STEPS / 2];
#pragma unroll
      for (int s = 0; s < STEPS / 2; ++s) loaded[s] = base[s];
#pragma unroll
      for (int m = 0; m < TILES; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) score[m][n][i] = 0.0f;
#pragma unroll
        for (int s = 0; s < STEPS / 2; ++s) {
          multiply<HALF>(score[m][n], query_tiles[m][2 * s][lane], loaded[s].x, loaded[s].y);
          multiply<HALF>(score[m][n], query_tiles[m][2 * s + 1][lane], loaded[s].z, loaded[s].w);
        }
      }
    }
    uint4 value[4][COLUMNS / 8];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = min(tile + 2 * j + (i & 1) + 8 * (i >> 1), end - 1);
      const auto* base =
          reinterpret_cast<const uint4*>(value_base + key * value_step) + g * (D / 64);
#pragma unroll
      for (int s = 0; s < COLUMNS / 8; ++s) value[i][s] = base[s];
    }
#pragma unroll
    for (int m = 0; m < TILES; ++m) {
      float shrink[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float top = most[m][half];
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float& at = score[m][n][2 * half + i];
            at = tile + n * 8 + 2 * j + i < visible[m][half] ? at * factor : NEVER;
            top = fmaxf(top, at);
          }
        top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 1));
        top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 2));
        shrink[half] = exp2f(most[m][half] - top);
        most[m][half] = top;
        float added = 0.0f;
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float& at = score[m][n][2 * half + i];
            at = exp2f(at - top);
            added += at;
          }
        sum[m][half] = sum[m][half] * shrink[half] + added;
      }
      const uint4 weight = make_uint4(
          pack<HALF>(score[m][0][0], score[m][0][1]), pack<HALF>(score[m][0][2], score[m][0][3]),
          pack<HALF>(score[m][1][0], score[m][1][1]), pack<HALF>(score[m][1][2], score[m][1][3]));
#pragma unroll
      for (int t = 0; t < COLUMNS; ++t) {
        const int word = t / 2, s = word / 4, lane_word = word % 4;
        const unsigned pick = t % 2 ? 0x7632u : 0x5410u;
        auto part = [&](int i) {
          const uint4& all = value[i][s];
          return lane_word == 0 ? all.x : lane_word == 1 ? all.y : lane_word == 2 ? all.z : all.w;
        };
        float* at = out[m][t];
        at[0] *= shrink[0];
        at[1] *= shrink[0];
        at[2] *= shrink[1];
        at[3] *= shrink[1];
        multiply<HALF>(
            at, weight, __byte_perm(part(0), part(1), pick), __byte_perm(part(2), part(3), pick));
      }
    }
  }

#pragma unroll
  for (int m = 0; m < TILES; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum[m][half] += __shfl_xor_sync(0xffffffff, sum[m][half], 1);
      sum[m][half] += __shfl_xor_sync(0xffffffff, sum[m][half], 2);
    }

  // Warps are merged in pairs: 2 and 3 into 0 and 1, then 1 into 0.
#pragma unroll
  for (int others_left = WARPS / 2; others_left; others_left /= 2) {
    __syncthreads();
    if (warp >= others_left && warp < 2 * others_left) {
      const int place = warp - others_left;
#pragma unroll
      for (int m = 0; m < TILES; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int r = m * 16 + half * 8 + g;
          other_weights[place][r][0] = most[m][half];
          other_weights[place][r][1] = sum[m][half];
#pragma unroll
          for (int t = 0; t < COLUMNS; ++t)
#pragma unroll
            for (int i = 0; i < 2; ++i)
              others[place][r][t * 8 + 2 * j + i] = out[m][t][2 * half + i];
        }
    }
    __syncthreads();
    if (warp < others_left) {
#pragma unroll
      for (int m = 0; m < TILES; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int r = m * 16 + half * 8 + g;
          const float theirs = other_weights[warp][r][0];
          const float top = fmaxf(most[m][half], theirs);
          const float mine = exp2f(most[m][half] - top), scaled = exp2f(theirs - top);
          most[m][half] = top;
          sum[m][half] = sum[m][half] * mine + other_weights[warp][r][1] * scaled;
#pragma unroll
          for (int t = 0; t < COLUMNS; ++t)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              float& at = out[m][t][2 * half + i];
              at = at * mine + others[warp][r][t * 8 + 2 * j + i] * scaled;
            }
        }
    }
  }

  if (warp == 0) {
#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = first_row + m * 16 + half * 8 + g;
        if (r < shared_rows) {
          const int64_t at =
              (((int64_t)row * heads + key_head * per_key + r / columns) * columns + r % columns) *
                  splits + split;
          if (j == 0) {
            weights[2 * at] = most[m][half];
            weights[2 * at + 1] = sum[m][half];
          }
          // Thread j holds dimensions j * D / 4 and on: column 2j + i of tile t is number
          // (2j + i) * D / 8 + t.
#pragma unroll
          for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int t = 0; t < COLUMNS; t += 4) {
              auto* four = reinterpret_cast<float4*>(
                  parts + at * D + (2 * j + i) * COLUMNS + t);
              *four = make_float4(
                  out[m][t][2 * half + i], out[m][t + 1][2 * half + i],
                  out[m][t + 2][2 * half + i], out[m][t + 3][2 * half + i]);
            }
        }
      }
  }
"""

_MERGE = r"""
  const int splits = parts_shape[3], heads = parts_shape[1], columns = parts_shape[2];
  const int head = blockIdx.y / columns, column = blockIdx.y % columns, row = blockIdx.z;
  const int64_t first = (((int64_t)row * heads + head) * columns + column) * splits;
  float most = -1e30f;
  for (int s = 0; s < splits; ++s) most = fmaxf(most, weights[2 * (first + s)]);
  float sum = 0.0f, out = 0.0f;
  for (int s = 0; s < splits; ++s) {
    const float scaled = exp2f(weights[2 * (first + s)] - most);
    sum += scaled * weights[2 * (first + s) + 1];
    out += scaled * parts[(first + s) * D + threadIdx.x];
  }
  joined[(((int64_t)row * columns + column) * heads + head) * D + threadIdx.x] =
      static_cast<OUT>(out / sum);
"""
