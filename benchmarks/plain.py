"""Plain decoding against mlx-lm's own loop, on the same model, taking turns every few tokens.

Both decode one prompt: ours as `spec_core.Batch`, theirs as `generate_step`. The rate is the median
over turns of their time divided by ours in the same turn; above 1 ours is faster.

    python benchmarks/plain.py --model TARGET --dtype float32 --out result.json
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from statistics import median, stdev
from typing import Any

import mlx.core as mx
from harness import write

from spec_core import Batch, Request
from spec_targets import ModelTarget, load_target

_RESTART = 256
"""Tokens after which both begin anew, so that depth stays what it is."""
_ENDLESS = 10**6


def ours(target: ModelTarget, prompt: tuple[int, ...]) -> Iterator[int]:
    """Tokens as our batch settles them."""
    batch = Batch(target)
    prefill = batch.prefill(Request(prompt, max_tokens=_ENDLESS))
    while prefill.step(512) is None:
        pass
    batch.join(prefill)
    while True:
        for outcome in batch.step():
            yield from outcome.tokens


def theirs(target: ModelTarget, prompt: tuple[int, ...]) -> Iterator[int]:
    """Tokens of mlx-lm's loop over the same model."""
    from mlx_lm.generate import generate_step

    model = target._runner._bones.anatomy.model
    for token, _ in generate_step(mx.array(prompt), model, max_tokens=_ENDLESS):
        yield int(token)


def turns(
    target: ModelTarget, prompt: tuple[int, ...], count: int, tokens: int
) -> list[tuple[float, float]]:
    """Seconds of (ours, theirs) in each turn; who goes first alternates."""
    taken = []
    loops: tuple[Iterator[int], Iterator[int]] | None = None
    for turn in range(count):
        if loops is None or turn * tokens % _RESTART == 0:
            loops = ours(target, prompt), theirs(target, prompt)
            for loop in loops:
                list(islice(loop, 4))
        seconds = [0.0, 0.0]
        for which in (0, 1) if turn % 2 else (1, 0):
            mx.synchronize()
            begun = time.perf_counter()
            list(islice(loops[which], tokens))
            seconds[which] = time.perf_counter() - begun
        taken.append((seconds[0], seconds[1]))
    return taken


def summary(taken: list[tuple[float, float]], tokens: int) -> dict[str, Any]:
    rates = sorted(b / a for a, b in taken)
    trimmed = rates[len(rates) // 8 : len(rates) - len(rates) // 8]
    return {
        "turns": len(taken),
        "tokens_a_turn": tokens,
        "ours_ms": round(1e3 * median(a for a, _ in taken) / tokens, 3),
        "mlx_lm_ms": round(1e3 * median(b for _, b in taken) / tokens, 3),
        "rate": round(median(rates), 4),
        "standard_error": round(1.25 * stdev(trimmed) / len(rates) ** 0.5, 4),
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--dtype")
    parser.add_argument("--prompt", type=int, default=64, help="its length in tokens")
    parser.add_argument("--turns", type=int, default=240)
    parser.add_argument("--tokens", type=int, default=8, help="of a turn; must divide 256")
    parser.add_argument("--out")
    arguments = parser.parse_args()
    target = load_target(arguments.model, dtype=arguments.dtype).target
    assert isinstance(target, ModelTarget)
    vocab = target.info.vocab_size
    prompt = tuple((31 * i + 7) % vocab for i in range(arguments.prompt))
    taken = turns(target, prompt, arguments.turns, arguments.tokens)
    found = summary(taken, arguments.tokens)
    write(arguments.out, {"model": arguments.model.name, "dtype": arguments.dtype, **found})


if __name__ == "__main__":
    main()
