"""Fixed draft lengths and `auto` on sets of prompts, interleaved: is auto never slower than plain?

    python benchmarks/lengths.py --pair TARGET DRAFTER --prompts prompts.json --out result.json

Needs token ids only, no tokeniser: `--write-prompts` makes the file with one, from the prompt sets
of `spec benchmark`. `auto` is what the commands do where nothing is asked for, copies from the text
included; `auto, no copies` only drafts, as the fixed lengths do. Both measure their curves first,
as the engine does; their experience is new in every set of every trial. Speeds are of decoding; a
prompt's time is its median over the trials.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from harness import write

from spec_core import (
    AdaptiveLength,
    Batch,
    CopyLength,
    Drafter,
    DraftPolicy,
    FixedLength,
    FreeDrafter,
    Request,
    SamplingParams,
    Target,
    WithCopies,
    calibrate,
)

_WARM = 2
"""Prompts of each set that are decoded once before anything counts."""
SETS = ("chat", "code", "math", "copy", "bytes", "prose", "foreign")


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, how to sample what follows, and what ends it."""

    tokens: tuple[int, ...]
    sampling: SamplingParams
    end_tokens: frozenset[int]


@dataclass(frozen=True, slots=True)
class Setting:
    """A name, and how a policy of it is made; no drafter: plain decoding."""

    name: str
    drafter: Drafter | None
    policy: Callable[[], DraftPolicy]


def write_prompts(model: str, count: int, path: Path) -> None:
    """Token ids of the prompt sets that come with the program."""
    from spec_cli.bench.prompts import bundled_set
    from spec_server import Engine

    with Engine.load(model, mode="baseline") as engine:
        sets = {}
        for name in SETS:
            chosen = bundled_set(name).first(count)
            temperature = chosen.sampling.temperature if chosen.sampling else 0.0
            sets[name] = [
                {"tokens": list(ids), "temperature": temperature}
                for ids in chosen.tokenised(engine.tokeniser)
            ]
        ends = sorted(engine.tokeniser.end_tokens)
    path.write_text(json.dumps({"end_tokens": ends, "sets": sets}), encoding="utf-8")


def read_prompts(path: Path) -> dict[str, list[Prompt]]:
    held: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return {
        name: [
            Prompt(
                tuple(each["tokens"]),
                SamplingParams(temperature=each["temperature"], seed=index),
                frozenset(held["end_tokens"]),
            )
            for index, each in enumerate(prompts)
        ]
        for name, prompts in held["sets"].items()
    }


def decode(
    target: Target, setting: Setting, policy: DraftPolicy, prompt: Prompt, tokens: int
) -> tuple[float, list[int]]:
    """Seconds of all tokens after the first, and the text."""
    batch = Batch(target, setting.drafter, policy)
    prefill = batch.prefill(
        Request(prompt.tokens, prompt.sampling, max_tokens=tokens, end_tokens=prompt.end_tokens)
    )
    outcome = None
    while outcome is None:
        outcome = prefill.step(512)
    text = list(outcome.tokens)
    if outcome.finish is not None:
        return 0.0, text
    batch.join(prefill)
    begun = time.perf_counter()
    while batch.busy:
        text += [token for each in batch.step() for token in each.tokens]
    return time.perf_counter() - begun, text


def measure(
    target: Target,
    settings: Sequence[Setting],
    prompts: Sequence[Prompt],
    tokens: int,
    trials: int,
) -> dict[str, Any]:
    """One set: what a token takes in each setting. A prompt's time is its median over the trials;
    settings take turns, prompt by prompt, in an order that is drawn for each."""
    taken: dict[str, list[list[float]]] = {each.name: [[] for _ in prompts] for each in settings}
    weights = [1] * len(prompts)
    identical, states = True, {}
    for trial in range(trials + 1):
        policies = {setting.name: setting.policy() for setting in settings}
        for turn, prompt in enumerate(prompts if trial else prompts[:_WARM]):
            texts = []
            order = random.Random(f"{trial} {turn}")  # what came before may matter
            for setting in order.sample(settings, len(settings)):
                seconds, text = decode(target, setting, policies[setting.name], prompt, tokens)
                texts.append(text)
                if setting is settings[0]:
                    weights[turn] = len(text) - 1
                if trial:  # where roundings differ by width, answers may differ in length
                    taken[setting.name][turn].append(seconds / max(1, len(text) - 1))
            identical = identical and all(text == texts[0] for text in texts)
        states = {name: str(policy) for name, policy in policies.items()}
    spent = {
        name: sum(n * median(each) for n, each in zip(weights, found, strict=True))
        for name, found in taken.items()
    }
    plain = spent[settings[0].name]
    return {
        "identical": identical,
        "auto_ended_at": states["auto"],
        "tokens": sum(weights),
        "plain_tokens_per_second": round(sum(weights) / plain, 2),
        "speedup": {name: round(plain / seconds, 3) for name, seconds in spent.items()},
    }


def verdict(found: dict[str, Any]) -> dict[str, Any]:
    """Auto against the best of all fixed lengths and plain decoding."""
    speedup = found["speedup"]
    best = max(value for name, value in speedup.items() if not name.startswith("auto"))
    shares = {name: speedup[name] / best for name in speedup if name.startswith("auto")}
    return {**found, "of_best": {name: round(share, 3) for name, share in shares.items()}}


def main() -> None:
    """Measure what the command line asks for; print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pair", nargs=2, metavar=("TARGET", "DRAFTER"), required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--write-prompts", type=int, metavar="COUNT", help="so many of each set")
    parser.add_argument("--sets", nargs="+", default=list(SETS))
    parser.add_argument("--lengths", type=int, nargs="*", default=[1, 3, 5, 7])
    parser.add_argument("--dtype")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--out")
    arguments = parser.parse_args()
    if arguments.write_prompts:
        write_prompts(arguments.pair[0], arguments.write_prompts, arguments.prompts)
        return
    from spec_drafters.combined import with_lookup
    from spec_drafters.load import load_drafter
    from spec_targets import load_target

    target = load_target(arguments.pair[0], dtype=arguments.dtype).target
    drafter = load_drafter(arguments.pair[1], target, dtype=arguments.dtype)
    both = with_lookup(drafter)
    curves = calibrate(target, drafter)
    copies = calibrate(target, FreeDrafter(both.lookup.max_block))
    settings = [Setting("plain", None, FixedLength)]
    settings += [
        Setting(str(n), drafter, lambda n=n: FixedLength(n))  # type: ignore[misc]
        for n in arguments.lengths
    ]
    settings += [
        Setting("auto, no copies", drafter, lambda: AdaptiveLength(curves)),
        Setting("auto", both, lambda: WithCopies(CopyLength(copies), AdaptiveLength(curves))),
    ]
    prompts = read_prompts(arguments.prompts)
    points = [[p.rows, p.length, p.depth, round(1e3 * p.seconds, 3)] for p in curves.points]
    sets = {}
    for name in arguments.sets:
        found = measure(target, settings, prompts[name], arguments.tokens, arguments.trials)
        sets[name] = verdict(found)
        write(arguments.out, {"tokens": arguments.tokens, "curves_ms": points, "sets": sets})


if __name__ == "__main__":
    main()
