"""A verify over rows of very different length: in one rectangle, each row alone, and one by one.

Random weights; contexts as in commit_cost.py. "together" attends over one rectangle of the longest
row, "alone" over each row's own positions in the same forward (what the target chooses by itself
where the padding is long), "one_by_one" is the sum of separate forwards.

    python benchmarks/mixed_lengths.py --lengths 16384 500 500 500 --out result.json
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import mlx.core as mx
from commit_cost import CASES, long_state, make_target
from harness import write

from spec_targets import ModelTarget
from spec_targets.target import Runner

WARM_UP = 2


def attending(target: ModelTarget, waste: float) -> ModelTarget:
    """The same target with another bound on padding."""
    bones = target._runner._bones
    runner = Runner(replace(bones, options=replace(bones.options, waste=waste)))
    return ModelTarget(runner, target.info, target.lender, target.batch_refused)


def joined(target: ModelTarget, lengths: Sequence[int]) -> Any:
    state = long_state(target, 1, lengths[0])
    for length in lengths[1:]:
        state.join(long_state(target, 1, length))
    return state


def forward(target: ModelTarget, state: Any, columns: int) -> float:
    """Seconds of a forward, which is taken back."""
    tokens = mx.broadcast_to(mx.arange(columns, dtype=mx.int32), (state.rows, columns))
    begun = time.perf_counter()
    mx.eval(target.forward(tokens, state).logits)
    taken = time.perf_counter() - begun
    state.commit([0] * state.rows)
    return taken


def measure(
    target: ModelTarget, lengths: Sequence[int], columns: int, trials: int
) -> dict[str, float]:
    """Median milliseconds of each way; they take turns."""
    ways: dict[str, Callable[[], float]] = {
        name: partial(forward, each, joined(each, lengths), columns)
        for name, each in (
            ("together", attending(target, math.inf)),
            ("alone", attending(target, 0.0)),
        )
    }
    singles = [long_state(target, 1, length) for length in lengths]
    ways["one_by_one"] = lambda: sum(forward(target, state, columns) for state in singles)
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for trial in range(WARM_UP + trials):
        for name, way in ways.items():
            seconds = way()
            if trial >= WARM_UP:
                taken[name].append(seconds)
    return {f"{name}_ms": round(1e3 * median(times), 3) for name, times in taken.items()}


def main() -> None:
    """Measure what the command line asks for; print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=["dense"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[16384, 500, 500, 500])
    parser.add_argument("--columns", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--trials", type=int, default=7)
    parser.add_argument("--out", help="file for the result, as JSON")
    arguments = parser.parse_args()
    runs = []
    for case in arguments.cases:
        target = make_target(CASES[case], getattr(mx, arguments.dtype))
        for columns in arguments.columns:
            taken = measure(target, arguments.lengths, columns, arguments.trials)
            runs.append({"case": case, "columns": columns, **taken})
            print(runs[-1], flush=True)
    write(arguments.out, {"lengths": arguments.lengths, "dtype": arguments.dtype, "runs": runs})


if __name__ == "__main__":
    main()
