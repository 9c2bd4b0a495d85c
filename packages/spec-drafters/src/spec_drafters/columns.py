"""Single columns of taps, joined.

On CUDA MLX copies what it joins by a kernel for each array; for 32 columns of five taps they take
longer than all that is done with the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx

from spec_core.device import on_cuda

_MOST = 256
"""Arrays that one kernel reads."""
_THREADS = 128


def joined(columns: Sequence[Sequence[mx.array]]) -> list[mx.array]:
    """[B, 1, H] of each tap, column by column, to [B, columns, H] of each tap; or to one array
    [B, columns, taps * H] of them side by side, as they are read anyway."""
    parts = [tap for column in columns for tap in column]
    alike = len({tap.dtype for tap in parts}) == 1
    if on_cuda() and alike and len(parts) <= _MOST:
        return [_side_by_side(parts, len(columns))]
    return [mx.concatenate(list(each), axis=1) for each in zip(*columns, strict=True)]


def _side_by_side(parts: list[mx.array], columns: int) -> mx.array:
    rows, _, width = parts[0].shape
    each = len(parts) // columns * width
    made: list[mx.array] = _kernel(len(parts))(
        inputs=parts,
        template=[("T", parts[0].dtype), ("WIDTH", width)],
        grid=(_THREADS, len(parts), rows),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[(rows, columns, each)],
        output_dtypes=[parts[0].dtype],
    )
    return made[0]


@cache
def _kernel(count: int) -> Any:
    names = [f"part{index}" for index in range(count)]
    return mx.fast.cuda_kernel(
        name=f"spec_join_{count}",
        input_names=names,
        output_names=["rows"],
        source=_SOURCE.replace("PARTS", ", ".join(names)),
    )


_SOURCE = r"""
  const T* const parts[] = {PARTS};
  const int row = blockIdx.z, part = blockIdx.y;
  const T* from = parts[part] + (int64_t)row * WIDTH;
  T* to = rows + ((int64_t)row * gridDim.y + part) * WIDTH;
  for (int i = threadIdx.x; i < WIDTH; i += blockDim.x) to[i] = from[i];
"""
