"""What a product costs by the number of rows: with quantised weights (see spec_core.products), and
with dense ones (bits 16), by MLX and by the kernel of spec_core.skinny.

Each product has weights of its own in a chain of 24, so that they come from memory; microseconds
a product, medians, everything waited for together.

    python benchmarks/products.py --bits 8 4 --out result.json
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import mlx.core as mx
from harness import write

from spec_core import skinny

SHAPES = {  # outputs x inputs of Qwen3-4B
    "queries": (4096, 2560),
    "keys": (1024, 2560),
    "attention out": (2560, 4096),
    "mlp in": (9728, 2560),
    "mlp out": (2560, 9728),
    "head": (151936, 2560),
}
GROUP, CHAIN = 64, 24

Packed = tuple[mx.array, ...]
Multiply = Callable[[mx.array, Packed], mx.array]


def ways(bits: int) -> Mapping[str, Multiply]:
    """How a product is computed, by name."""
    if bits < 16:
        return {"mlx": lambda x, w: mx.quantized_matmul(x, *w, group_size=GROUP, bits=bits)}
    dense: dict[str, Multiply] = {"mlx": lambda x, w: x @ w[0].T}
    if skinny.fits(mx.zeros((16, 32), dtype=mx.bfloat16)):
        dense["skinny"] = lambda x, w: skinny.multiply(x, w[0])
    return dense


def microseconds(
    multiply: Multiply, weights: Sequence[Packed], inputs: int, rows: int, trials: int
) -> float:
    """One product, from a chain in which each waits for the one before."""
    x = mx.random.normal((rows, inputs)).astype(mx.bfloat16)
    mx.eval(x)
    taken = []
    for _ in range(trials + 1):
        begun, now, product = time.perf_counter(), x, x
        for index in range(CHAIN):
            product = multiply(now, weights[index % len(weights)])
            now = mx.depends(now, product)
        mx.eval(product)
        taken.append((time.perf_counter() - begun) / CHAIN)
    return 1e6 * median(taken[1:])


def packed(outputs: int, inputs: int, bits: int) -> Packed:
    weight = mx.random.normal((outputs, inputs)).astype(mx.bfloat16)
    made = (weight,) if bits == 16 else tuple(mx.quantize(weight, group_size=GROUP, bits=bits))
    mx.eval(*made)
    return made


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
            weights = [packed(*SHAPES[name], bits) for _ in range(2 if name == "head" else 12)]
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
