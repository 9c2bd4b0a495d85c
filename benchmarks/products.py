"""What a product costs by the number of rows, by MLX and by this project's kernels: with quantised
weights (spec_core.packed), and with dense ones (bits 16, spec_core.skinny).

Each product has weights of its own in a chain of 24, so that they come from memory; microseconds
a product, medians, everything waited for together. The time to build the chain is not in it.

    python benchmarks/products.py --bits 8 4 --out result.json
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from harness import write

from spec_core import packed, skinny
from spec_core.device import on_cuda
from spec_core.packed import Packed

SHAPES = {  # outputs x inputs of Qwen3-4B
    "queries": (4096, 2560),
    "keys": (1024, 2560),
    "attention out": (2560, 4096),
    "mlp in": (9728, 2560),
    "mlp out": (2560, 9728),
    "mlp": (2560, 2560),
    "head": (151936, 2560),
}
GROUP, CHAIN = 64, 24

Matrix = mx.array | Packed
Multiply = Callable[[mx.array, Matrix], mx.array]
Weights = tuple[Matrix, ...]


def ways(bits: int) -> Mapping[str, Multiply]:
    """How a product is computed, by name."""
    ours = {"ours": packed.multiply if bits < 16 else skinny.multiply} if on_cuda() else {}
    return {"mlx": by_mlx, **ours}  # type: ignore[dict-item]


def by_mlx(x: mx.array, matrix: Matrix) -> mx.array:
    if isinstance(matrix, mx.array):
        return x @ matrix.T
    return mx.quantized_matmul(
        x,
        matrix.weight,
        matrix.scales,
        matrix.biases,
        group_size=matrix.group_size,
        bits=matrix.bits,
    )


def applied(multiply: Multiply, x: mx.array, weights: Weights) -> mx.array:
    """One product, or a whole MLP."""
    if len(weights) == 1:
        return multiply(x, weights[0])
    gate, up, down = weights
    return multiply(nn.silu(multiply(x, gate)) * multiply(x, up), down)


def microseconds(
    multiply: Multiply, weights: Sequence[Weights], inputs: int, rows: int, trials: int
) -> float:
    """One product, from a chain in which each waits for the one before."""
    x = mx.random.normal((rows, inputs)).astype(mx.bfloat16)
    mx.eval(x)
    taken = []
    for _ in range(trials + 1):
        now, product = x, x
        for index in range(CHAIN):
            product = applied(multiply, now, weights[index % len(weights)])
            now = mx.depends(now, product)
        begun = time.perf_counter()
        mx.eval(product)
        taken.append((time.perf_counter() - begun) / CHAIN)
    return 1e6 * median(taken[1:])


def weights_of(name: str, bits: int) -> Weights:
    """What one link of the chain multiplies with."""
    if name == "mlp":
        return tuple(matrix(*SHAPES[each], bits) for each in ("mlp in", "mlp in", "mlp out"))
    return (matrix(*SHAPES[name], bits),)


def matrix(outputs: int, inputs: int, bits: int) -> Matrix:
    weight = mx.random.normal((outputs, inputs)).astype(mx.bfloat16)
    if bits == 16:
        mx.eval(weight)
        return weight
    parts = mx.quantize(weight, group_size=GROUP, bits=bits)
    mx.eval(*parts)
    return Packed(*parts, GROUP, bits)


def main() -> None:
    """Measure what the command line asks for; print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--bits", type=int, nargs="+", default=[8])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--out", help="file for the result, as JSON")
    arguments = parser.parse_args()
    runs: list[dict[str, Any]] = []
    for bits in arguments.bits:
        for name in arguments.shapes:
            weights = [weights_of(name, bits) for _ in range(2 if name == "head" else 12)]
            for rows in arguments.rows:
                for way, multiply in ways(bits).items():
                    at = (multiply, weights, SHAPES[name][1], rows, arguments.trials)
                    found = {"bits": bits, "shape": name, "rows": rows, "by": way}
                    runs.append({**found, "us": round(microseconds(*at), 1)})
                    print(runs[-1], flush=True)
            del weights
            mx.clear_cache()
    write(arguments.out, {"runs": runs})


if __name__ == "__main__":
    main()
