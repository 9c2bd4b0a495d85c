"""Attention of a few columns over many keys on CUDA: this project's kernel against MLX's.

Times a chain of attentions, one for each layer of a model, each waiting for the one before: MLX's
own kernel with the mask that a verify needs, and spec_core.flash_decode. Also MLX's for a single
column, as plain decoding calls it.

    python benchmarks/attention.py --out result.json
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import mlx.core as mx
from harness import write

from spec_core import flash_decode


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a model's attention."""

    layers: int
    heads: int
    key_heads: int
    dim: int


SHAPES = {"qwen3-4b": Shape(36, 32, 8, 128), "smollm2-135m": Shape(30, 9, 3, 64)}


def chain(shape: Shape, queries: mx.array, attend: Callable[[mx.array], mx.array]) -> float:
    """Median milliseconds of one attention after the other, of all layers."""
    taken = []
    for _ in range(12):
        begun = time.perf_counter()
        out = queries
        for _ in range(shape.layers):
            out = attend(out)
        mx.eval(out)
        taken.append(time.perf_counter() - begun)
    return round(1e3 * median(taken[2:]), 3)


def measure(shape: Shape, depth: int, columns: int) -> dict[str, Any]:
    """One depth and number of columns."""
    slots, scale = depth + 2048, shape.dim**-0.5
    keys, values = (
        mx.random.normal((1, shape.key_heads, slots, shape.dim)).astype(mx.bfloat16)
        for _ in range(2)
    )
    queries = mx.random.normal((1, shape.heads, columns, shape.dim)).astype(mx.bfloat16)
    end = depth + columns
    ends = mx.array([end], dtype=mx.int32)
    seen = mx.arange(end - columns, end)[:, None]
    step = max(256, (1 << end.bit_length()) >> 4)
    reads = -(-end // step) * step
    mask = None if columns == 1 else (mx.arange(reads) <= seen)[None, None]
    upto = end if columns == 1 else reads
    mx.eval(keys, values, queries, ends, *([] if mask is None else [mask]))

    def theirs(x: mx.array) -> mx.array:
        return mx.fast.scaled_dot_product_attention(
            x, keys[:, :, :upto], values[:, :, :upto], scale=scale, mask=mask
        )

    def ours(x: mx.array) -> mx.array:
        return flash_decode.attend(x, keys[:, :, :end], values[:, :, :end], ends, scale)

    return {
        "depth": depth,
        "columns": columns,
        "mlx_ms": chain(shape, queries, theirs),
        "flash_decode_ms": chain(shape, queries, ours),
    }


def main() -> None:
    """Measure all; print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--depths", type=int, nargs="+", default=[512, 4096, 16384])
    parser.add_argument("--columns", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--out")
    arguments = parser.parse_args()
    found = {
        name: [measure(shape, d, c) for d in arguments.depths for c in arguments.columns]
        for name, shape in SHAPES.items()
    }
    write(arguments.out, {"chains": found})


if __name__ == "__main__":
    main()
