"""Aggregate tokens a second of batches: rows x modes, interleaved, medians over trials.

    python benchmarks/batch.py --pair TARGET DSPARK --prompts prompts.json --out result.json
    python benchmarks/batch.py --shape qwen3-4b --bits 8 --acceptance 0.7 --out result.json

A pair decodes real prompts plainly, with its DSpark drafter and with lookup. A shape is a chain
target (see harness.py) with random weights and an oracle drafter of stated acceptance, at no cost.
Rows start together; a trial ends when the first row has its tokens.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
from harness import Oracle, chain_target, write

from spec_core import Batch, Drafter, FixedLength, Request, SamplingParams, Target


@dataclass(frozen=True, slots=True)
class Mode:
    """A way to decode, and how far it drafts (None: whole block)."""

    name: str
    drafter: Drafter | None
    length: int | None = None


def trial(
    target: Target, mode: Mode, prompts: Sequence[Sequence[int]], tokens: int
) -> tuple[float, float]:
    """Tokens a second of all rows together, and mean tokens a row and round."""
    batch = Batch(target, mode.drafter, FixedLength(mode.length))
    for prompt in prompts:
        prefill = batch.prefill(Request(tuple(prompt), SamplingParams(), max_tokens=tokens))
        while prefill.step(256) is None:
            pass
        batch.join(prefill)
    emitted = rounds = 0
    batch.step()
    begun = time.perf_counter()
    while batch.rows == len(prompts):
        outcomes = batch.step()
        emitted += sum(len(outcome.tokens) for outcome in outcomes)
        rounds += len(outcomes)
    return emitted / (time.perf_counter() - begun), emitted / rounds


def measure(
    target: Target,
    modes: Sequence[Mode],
    prompts: Sequence[Sequence[int]],
    rows: Sequence[int],
    tokens: int,
    trials: int,
) -> list[dict[str, Any]]:
    """One entry for each number of rows and mode; modes take turns within a trial."""
    results = []
    for count in rows:
        chosen = [prompts[i % len(prompts)] for i in range(count)]
        speeds: dict[str, list[float]] = {mode.name: [] for mode in modes}
        per_round: dict[str, float] = {}
        for index in range(trials + 1):
            for mode in modes:
                speed, per_round[mode.name] = trial(target, mode, chosen, tokens)
                if index:
                    speeds[mode.name].append(speed)
        for mode in modes:
            results.append(
                {
                    "rows": count,
                    "mode": mode.name,
                    "tokens_per_second": round(median(speeds[mode.name]), 2),
                    "spread": [round(min(speeds[mode.name]), 2), round(max(speeds[mode.name]), 2)],
                    "tokens_per_row_and_round": round(per_round[mode.name], 3),
                }
            )
            print(results[-1], flush=True)
        mx.clear_cache()
    return results


def of_pair(arguments: argparse.Namespace) -> tuple[Target, list[Mode], list[list[int]]]:
    from spec_drafters.load import load_drafter
    from spec_drafters.lookup import Lookup
    from spec_targets import load_target

    folder, drafter = arguments.pair
    target = load_target(folder, dtype=arguments.dtype).target
    given = json.loads(Path(arguments.prompts).read_text(encoding="utf-8"))
    sets: Mapping[str, list[list[int]]] = given.get("prompts") or {
        name: each["prompts"] for name, each in given["sets"].items()
    }
    prompts = [prompt for group in zip(*sets.values(), strict=False) for prompt in group]
    dspark = load_drafter(drafter, target, dtype=arguments.dtype)
    modes = [Mode("plain", None)]
    modes += [Mode(f"dspark-{n or 'whole'}", dspark, n) for n in arguments.lengths]
    return target, [*modes, Mode("lookup", Lookup())], prompts


def of_shape(arguments: argparse.Namespace) -> tuple[Target, list[Mode], list[list[int]]]:
    target = chain_target(arguments.shape, bits=arguments.bits, layers=arguments.layers)
    vocab = target.info.vocab_size
    modes = [Mode("plain", None)]
    for acceptance in arguments.acceptance:
        oracle = Oracle(vocab, acceptance)
        modes += [Mode(f"oracle-{acceptance}-{n or 7}", oracle, n) for n in arguments.lengths]
    prompts = [[(97 * row + 31 * i) % vocab for i in range(64)] for row in range(16)]
    return target, modes, prompts


def main() -> None:
    """Parse, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pair", nargs=2, metavar=("TARGET", "DSPARK"))
    parser.add_argument(
        "--prompts", help="token ids: {prompts: {set: [[..], ..]}}, or a file of tests/eval"
    )
    parser.add_argument("--shape", default="tiny")
    parser.add_argument("--bits", type=int)
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--dtype")
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.7])
    parser.add_argument("--lengths", type=int, nargs="+", default=[0], help="0: the whole block")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--out")
    arguments = parser.parse_args()
    arguments.lengths = [n or None for n in arguments.lengths]
    target, modes, prompts = of_pair(arguments) if arguments.pair else of_shape(arguments)
    runs = measure(target, modes, prompts, arguments.rows, arguments.tokens, arguments.trials)
    write(arguments.out, {"runs": runs, "tokens": arguments.tokens, "trials": arguments.trials})


if __name__ == "__main__":
    main()
