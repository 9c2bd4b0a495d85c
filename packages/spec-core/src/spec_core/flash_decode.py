"""Attention of a few columns over many keys on CUDA, each row over its own length.

A verify has 2 to 16 columns. MLX's fused attention there (0.32.4) does not split the keys of so
few queries over the device, makes a plan for every new number of keys, and with a mask takes twice
as long again: on an H200 36 layers of 4 columns at 16,384 positions take 15.8 ms, where one column
takes 2.1, host included. This kernel splits the keys (flash-decoding: Dao et al., 2023,
"Flash-Decoding for long-context inference"), puts the queries that share a key head into one matrix
tile, and needs neither mask nor plan: 0.9 ms of the device's time.
"""

from __future__ import annotations

from dataclasses import dataclass
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
_FEWEST_KEYS, _FEWER_SPLITS = 64, 16
"""Keys of a split, at least; and four times as many where there are more than so many splits."""
_MERGERS = 4
"""Threads that share the splits of one number."""


def serves(queries: mx.array, keys: mx.array, values: mx.array) -> bool:
    """Whether `attend` computes these shapes and types."""
    _, heads, columns, dim = queries.shape
    return (
        columns <= MOST_COLUMNS
        and dim == keys.shape[-1]
        and heads % keys.shape[1] == 0
        and queries.dtype == keys.dtype
        and fits(keys, values)
    )


def fits(keys: mx.array, values: mx.array) -> bool:
    """Whether `attend` reads keys and values [B, K, S, D] like these."""
    half = keys.dtype in (mx.bfloat16, mx.float16) and values.dtype == keys.dtype
    alike = values.shape == keys.shape and keys.shape[-1] in (64, 128)
    return half and alike and has_tile_products()


@dataclass(frozen=True, slots=True)
class Columns:
    """Keys and values [B, K, S, D] of columns, or of whole buffers.

    The last axis is contiguous, and rows of it begin at multiples of eight numbers, as heads do in
    what a model projects.
    """

    keys: mx.array
    values: mx.array


def attend(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    ends: mx.array,
    scale: float,
    *,
    causal: bool = True,
    newest: Columns | None = None,
) -> mx.array:
    """Attention over left-aligned rows, on a CUDA stream.

    Args:
        queries: [B, H, T, D], their last axis contiguous.
        keys: [B or more, K, S, D] with H a multiple of K, the last axis contiguous; what lies
            behind a row's end is not read as a number.
        values: as the keys.
        ends: [B] int32, how many positions a row's last column sees.
        scale: of the scores.
        causal: each column sees one position less than the next; otherwise all see the same.
        newest: the last positions before the ends, if they are not stored.

    Returns [B, H, T, D].
    """
    return _attended(queries, Columns(keys, values), newest, ends, scale, causal=causal)[0]


def store_and_attend(
    queries: mx.array,
    stored: Columns,
    newest: Columns,
    ends: mx.array,
    scale: float,
    after: mx.array,
) -> tuple[mx.array, mx.array, Columns]:
    """Attention of the newest columns, which are stored on the way: by the kernel itself, into
    the very buffers.

    MLX knows nothing of that. It writes a buffer in place only while nobody reads it, and copies
    it where the device is behind; here nothing is copied, and two kernels a layer are spared. In
    return nothing but these kernels may read what is stored before the last of them has ended.
    They may run beside whatever reads the buffers meanwhile, and write into memory that other
    arrays share: what those hold for good lies before each row's newest columns, and is not
    written.

    Args:
        queries: [B, H, T, D]; the newest columns' own, causal.
        stored: buffers [B or more, K, S, D] with room for the newest columns.
        newest: T columns.
        ends: as for `attend`.
        scale: as for `attend`.
        after: what the last such kernel over these buffers gave: this one begins after it.

    Returns [B, H, T, D]; something that is there when the kernel has ended; and the buffers, which
    are the same arrays (a stand-in that cannot write into them returns others).
    """
    out, done = _attended(queries, stored, newest, ends, scale, after=after)
    return out, done, stored


def _attended(
    queries: mx.array,
    stored: Columns,
    newest: Columns | None,
    ends: mx.array,
    scale: float,
    *,
    causal: bool = True,
    after: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """The attention, and what the kernel that reads gave."""
    rows, heads, columns, dim = queries.shape
    key_heads, slots = stored.keys.shape[1], stored.keys.shape[2]
    shared = heads // key_heads * columns
    tiles = 1 if shared <= _TILE else 2
    groups = -(-shared // (tiles * _TILE))
    splits = _splits(slots, rows * key_heads * groups)
    last = newest or stored
    factor = _scalar(scale)
    parts, weights = _partial(dim)(
        inputs=[
            queries,
            stored.keys,
            stored.values,
            last.keys,
            last.values,
            ends,
            factor,
            factor if after is None else after,
        ],
        template=[
            ("D", dim),
            ("TILES", tiles),
            ("WARPS", _WARPS),
            ("CAUSAL", causal),
            ("HALF", queries.dtype == mx.float16),
            ("NEWEST", newest is not None),
            ("STORES", after is not None),
        ],
        grid=(splits * _WARPS * 32, key_heads, rows * groups),
        threadgroup=(_WARPS * 32, 1, 1),
        output_shapes=[(rows, heads, columns, splits, dim), (rows, heads, columns, splits, 2)],
        output_dtypes=[mx.float32, mx.float32],
    )
    joined: list[mx.array] = _merge()(
        inputs=[parts, weights],
        template=[("D", dim), ("MERGERS", _MERGERS), ("OUT", queries.dtype)],
        grid=(dim, _MERGERS * columns * heads, rows),
        threadgroup=(dim, _MERGERS, 1),
        output_shapes=[(rows, columns, heads, dim)],
        output_dtypes=[queries.dtype],
    )
    return joined[0].transpose(0, 2, 1, 3), weights


def _splits(slots: int, others: int) -> int:
    """Parts of the keys: enough for the device, none too short."""
    few = min(-(-slots // _FEWEST_KEYS), _FEWER_SPLITS)
    most = max(few, slots // (4 * _FEWEST_KEYS))
    return max(1, min(most, -(-_WANTED_BLOCKS // others)))


@cache
def _scalar(value: float) -> mx.array:
    return mx.array(value, dtype=mx.float32)


@cache
def _partial(dim: int) -> Any:
    return mx.fast.cuda_kernel(
        name="spec_attend",
        input_names=[
            "queries",
            "keys",
            "values",
            "last_keys",
            "last_values",
            "ends",
            "scale",
            "after",
        ],
        output_names=["parts", "weights"],
        header=_HEADER,
        source=_PARTIAL,
        ensure_row_contiguous=False,
        shared_memory=_WARPS * 4 * _TILE * dim * 2,
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

__device__ inline void fetch(uint4* to, const uint4* from) {
  const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(from) : "memory");
}

struct Rows {
  const char* begin;
  int64_t step;
  __device__ const uint4* at(int row, int piece) const {
    return reinterpret_cast<const uint4*>(begin + row * step) + piece;
  }
};

// Where in a stored key or value its piece of eight numbers lies: what threads read at once
// comes from different banks.
__device__ inline int mixed(int piece, int key) {
  return piece ^ (key & 6) ^ ((key & 1) << 2);
}
"""
)

# A warp takes 16 keys at a time and has the next 16 on their way. In a tile product the thread
# (g, j) = (lane / 4, lane % 4) holds columns 2j, 2j + 1, 2j + 8 and 2j + 9 of its rows. Which
# dimension a column stands for is free as long as both factors agree: here they are such that a
# thread reads whole pieces, j of every four of a key, g of every eight of a value.
_PARTIAL = r"""
  constexpr int STEPS = D / 16, COLUMNS = D / 8, PIECES = D / 8, ROWS = TILES * 16;
  constexpr int STORED = 16 * PIECES, PITCH = D + 8;
  extern __shared__ uint4 stored[];
  __shared__ uint4 query_tiles[TILES][STEPS][32];
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
  // Rows of pieces: the stored ones by position, the newest by column.
  auto rows_of = [&](const auto* all, const auto& strides) {
    const auto* begin = all + row * strides[0] + key_head * strides[1];
    return Rows{reinterpret_cast<const char*>(begin), 2 * strides[2]};
  };
  const Rows key_rows = rows_of(keys, keys_strides);
  const Rows value_rows = rows_of(values, values_strides);
  const Rows last_key_rows = rows_of(last_keys, last_keys_strides);
  const Rows last_value_rows = rows_of(last_values, last_values_strides);
  const int start = NEWEST ? end - (int)last_keys_shape[2] : end;
  const float factor = scale[0] * 1.44269504f, NEVER = __int_as_float(0xff800000);

  // Two places of a warp, each for 16 keys and their values.
  uint4* const mine = stored + warp * 4 * STORED;
  auto fetch_tile = [&](int tile, int place) {
    if (tile < to) {
      uint4* const at = mine + place * 2 * STORED;
#pragma unroll
      for (int i = lane; i < STORED; i += 32) {
        const int k = i / PIECES, piece = i % PIECES;
        const int key = min(tile + k, end - 1), slot = k * PIECES + mixed(piece, k);
        const bool last = NEWEST && key >= start;
        fetch(at + slot, last ? last_key_rows.at(key - start, piece) : key_rows.at(key, piece));
        fetch(at + STORED + slot,
              last ? last_value_rows.at(key - start, piece) : value_rows.at(key, piece));
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  fetch_tile(from + warp * 16, 0);

  if (STORES && first_row == 0) {
    const int begin = max(from, start);
    for (int i = threadIdx.x; i < (to - begin) * PIECES; i += WARPS * 32) {
      const int key = begin + i / PIECES, piece = i % PIECES;
      *const_cast<uint4*>(key_rows.at(key, piece)) = *last_key_rows.at(key - start, piece);
      *const_cast<uint4*>(value_rows.at(key, piece)) = *last_value_rows.at(key - start, piece);
    }
  }

  if (warp == 0) {
    for (int m = 0; m < TILES; ++m) {
      unsigned word[2][STEPS][2];
      for (int half = 0; half < 2; ++half) {
        const int r = first_row + m * 16 + half * 8 + g;
        const auto* base = reinterpret_cast<const unsigned*>(
            queries + row * queries_strides[0] +
            (key_head * per_key + r / columns) * queries_strides[1] +
            (r % columns) * queries_strides[2]);
        for (int s = 0; s < STEPS; ++s)
          for (int i = 0; i < 2; ++i)
            word[half][s][i] =
                r < shared_rows ? base[(s / 2 * 4 + j) * 4 + s % 2 * 2 + i] : 0u;
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

  int place = 0;
  for (int tile = from + warp * 16; tile < to; tile += WARPS * 16, place ^= 1) {
    fetch_tile(tile + WARPS * 16, place ^ 1);
    asm volatile("cp.async.wait_group 1;" ::: "memory");
    __syncwarp();
    const uint4* const at = mine + place * 2 * STORED;

    float score[TILES][2][4];
#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) score[m][n][i] = 0.0f;
#pragma unroll
    for (int s = 0; s < STEPS / 2; ++s) {
      uint4 key[2];
#pragma unroll
      for (int n = 0; n < 2; ++n) key[n] = at[(n * 8 + g) * PIECES + mixed(s * 4 + j, g)];
#pragma unroll
      for (int m = 0; m < TILES; ++m) {
        const uint4 low = query_tiles[m][2 * s][lane], high = query_tiles[m][2 * s + 1][lane];
#pragma unroll
        for (int n = 0; n < 2; ++n) multiply<HALF>(score[m][n], low, key[n].x, key[n].y);
#pragma unroll
        for (int n = 0; n < 2; ++n) multiply<HALF>(score[m][n], high, key[n].z, key[n].w);
      }
    }
    uint4 value[4][PIECES / 8];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int k = 2 * j + (i & 1) + 8 * (i >> 1);
#pragma unroll
      for (int s = 0; s < PIECES / 8; ++s)
        value[i][s] = at[STORED + k * PIECES + mixed(g + 8 * s, k)];
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
        float* sums = out[m][t];
        sums[0] *= shrink[0];
        sums[1] *= shrink[0];
        sums[2] *= shrink[1];
        sums[3] *= shrink[1];
        multiply<HALF>(
            sums, weight, __byte_perm(part(0), part(1), pick), __byte_perm(part(2), part(3), pick));
      }
    }
    __syncwarp();
  }

#pragma unroll
  for (int m = 0; m < TILES; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum[m][half] += __shfl_xor_sync(0xffffffff, sum[m][half], 1);
      sum[m][half] += __shfl_xor_sync(0xffffffff, sum[m][half], 2);
    }

  // Warps are merged in pairs: 2 and 3 into 0 and 1, then 1 into 0. Keys and values have been read.
  auto* const others = reinterpret_cast<float*>(stored);
#pragma unroll
  for (int others_left = WARPS / 2; others_left; others_left /= 2) {
    __syncthreads();
    if (warp >= others_left && warp < 2 * others_left) {
      const int other = warp - others_left;
#pragma unroll
      for (int m = 0; m < TILES; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int r = m * 16 + half * 8 + g;
          other_weights[other][r][0] = most[m][half];
          other_weights[other][r][1] = sum[m][half];
#pragma unroll
          for (int t = 0; t < COLUMNS; ++t)
            *reinterpret_cast<float2*>(others + (other * ROWS + r) * PITCH + t * 8 + 2 * j) =
                make_float2(out[m][t][2 * half], out[m][t][2 * half + 1]);
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
          const float own = exp2f(most[m][half] - top), scaled = exp2f(theirs - top);
          most[m][half] = top;
          sum[m][half] = sum[m][half] * own + other_weights[warp][r][1] * scaled;
#pragma unroll
          for (int t = 0; t < COLUMNS; ++t) {
            const float2 added = *reinterpret_cast<const float2*>(
                others + (warp * ROWS + r) * PITCH + t * 8 + 2 * j);
            out[m][t][2 * half] = out[m][t][2 * half] * own + added.x * scaled;
            out[m][t][2 * half + 1] = out[m][t][2 * half + 1] * own + added.y * scaled;
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
          // Column 2j + i of tile t is number t % 8 of piece 2j + i of every eight.
#pragma unroll
          for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int t = 0; t < COLUMNS; t += 4) {
              auto* four = reinterpret_cast<float4*>(
                  parts + at * D + t / 8 * 64 + (2 * j + i) * 8 + t % 8);
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
  const auto* weight = reinterpret_cast<const float2*>(weights) + first;
  const float* part = parts + first * D + threadIdx.x;
  float most = -1e30f;
  for (int s = threadIdx.x & 31; s < splits; s += 32) most = fmaxf(most, weight[s].x);
#pragma unroll
  for (int away = 16; away; away /= 2)
    most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, away));
  float sum = 0.0f, out = 0.0f;
#pragma unroll 4
  for (int s = threadIdx.y; s < splits; s += MERGERS) {
    const float2 each = weight[s];
    const float scaled = exp2f(each.x - most);
    sum += scaled * each.y;
    out += scaled * part[(int64_t)s * D];
  }
  __shared__ float sums[MERGERS], outs[MERGERS][D];
  outs[threadIdx.y][threadIdx.x] = out;
  sums[threadIdx.y] = sum;
  __syncthreads();
  if (threadIdx.y == 0) {
#pragma unroll
    for (int other = 1; other < MERGERS; ++other) {
      sum += sums[other];
      out += outs[other][threadIdx.x];
    }
    joined[(((int64_t)row * columns + column) * heads + head) * D + threadIdx.x] =
        static_cast<OUT>(out / sum);
  }
"""
