"""Where a round's time goes on a model of a real shape, and what speculation brings there.

For each draft length: the round as it runs (median), its draft and its verify alone (each waited
for), and the rest as overhead; tokens a second with an oracle of stated acceptance against plain
decoding, and against tokens per round / (draft + verify). Also plain decoding against mlx-lm's own
loop, and rounds at other depths. Chain targets and the oracle: see harness.py.

    python benchmarks/rounds.py --shape qwen3-4b --bits 8 --drafter --out result.json
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

import mlx.core as mx
from harness import SHAPES, Oracle, chain_model, chain_target, write

from spec_core import Batch, Drafter, FixedLength, Request, RowOutcome, RowStatus
from spec_core.chooser import Sampler
from spec_targets import ModelTarget

_TURNS, _UNCOUNTED = 5, 4


class Meter(FixedLength):
    """A fixed length that remembers what rounds took."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.seconds: list[float] = []
        self.tokens: list[int] = []

    def lengths(self, rows: Sequence[RowStatus]) -> Sequence[int]:
        return super().lengths(rows)

    def observe(self, outcomes: Sequence[RowOutcome], seconds: float) -> None:
        self.seconds.append(seconds)
        self.tokens.append(sum(len(outcome.tokens) for outcome in outcomes))


def prompt_of(depth: int, vocab: int) -> tuple[int, ...]:
    return tuple((31 * i + 7) % vocab for i in range(depth))


class Running:
    """A row that decodes behind a prompt of `depth` tokens, some rounds at a time."""

    def __init__(
        self, target: ModelTarget, drafter: Drafter | None, length: int, depth: int
    ) -> None:
        self.meter = Meter(length)
        self._batch = Batch(target, drafter, self.meter)
        prompt = prompt_of(depth, target.info.vocab_size)
        prefill = self._batch.prefill(Request(prompt, max_tokens=10**6))
        while prefill.step(2048) is None:
            pass
        self._batch.join(prefill)

    def go(self, count: int) -> list[float]:
        """Seconds of `count` rounds, behind a few that are not counted."""
        for _ in range(count + _UNCOUNTED):
            self._batch.step()
        return self.meter.seconds[-count:]


def rounds(
    target: ModelTarget, drafter: Drafter | None, length: int, depth: int, count: int
) -> tuple[float, float]:
    """Median seconds of a round, and mean tokens a round."""
    running = Running(target, drafter, length, depth)
    seconds = running.go(count)
    return median(seconds), mean(running.meter.tokens[-count:])


def alone(repeat: int, run: Callable[[], Any]) -> float:
    """Median seconds of something that is waited for."""
    taken = []
    for _ in range(repeat + 3):
        begun = time.perf_counter()
        run()
        taken.append(time.perf_counter() - begun)
    return median(taken[3:])


def verify_alone(target: ModelTarget, columns: int, depth: int, repeat: int) -> float:
    """A forward of `columns` columns and the argmax of its logits."""
    state = target.new_state(1)
    vocab = target.info.vocab_size
    prompt = prompt_of(depth, vocab)
    for at in range(0, depth, 2048):
        chunk = mx.array([prompt[at : at + 2048]], dtype=mx.int32)
        target.forward(chunk, state, logits="none")
        state.commit([chunk.shape[1]])
        mx.eval(state.pending())
    tokens = mx.array([prompt_of(columns, vocab)], dtype=mx.int32)

    def run() -> None:
        forward = target.forward(tokens, state)
        assert forward.logits is not None
        mx.eval(mx.argmax(forward.logits, axis=-1))
        state.commit([0])

    return alone(repeat, run)


def draft_alone(drafter: Drafter, target: ModelTarget, length: int, repeat: int) -> float:
    """One proposal of `length` guesses after 64 positions of context."""
    state = drafter.new_state(1)
    hidden = target.info.hidden_size
    taps = [mx.random.normal((1, 64, hidden)).astype(mx.bfloat16) for _ in drafter.taps]
    drafter.extend(state, mx.zeros((1, 64), dtype=mx.int32), taps, [64])
    sampler = Sampler(target.info.vocab_size, [Request((1,))])
    anchor = mx.array([3], dtype=mx.int32)
    return alone(
        repeat,
        lambda: mx.eval(drafter.propose(state, anchor, length, sampler.round([65])).tokens),
    )


def dspark_folder(shape: str) -> str:
    """A DSpark drafter with random weights in the published shape (5 layers, rank 256)."""
    config, layers, rank = dict(SHAPES[shape]), 5, 256
    hidden, inner, vocab = (config[k] for k in ("hidden_size", "intermediate_size", "vocab_size"))
    dim, heads, kv = (config[k] for k in ("head_dim", "num_attention_heads", "num_key_value_heads"))
    shapes = {
        "embed_tokens.weight": (vocab, hidden),
        "lm_head.weight": (vocab, hidden),
        "fc.weight": (hidden, 5 * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
        "markov_head.markov_w1.weight": (vocab, rank),
        "markov_head.markov_w2.weight": (vocab, rank),
        "confidence_head.proj.weight": (1, hidden + rank),
        "confidence_head.proj.bias": (1,),
    }
    for i in range(layers):
        for name, size in {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (heads * dim, hidden),
            "self_attn.k_proj": (kv * dim, hidden),
            "self_attn.v_proj": (kv * dim, hidden),
            "self_attn.o_proj": (hidden, heads * dim),
            "self_attn.q_norm": (dim,),
            "self_attn.k_norm": (dim,),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }.items():
            shapes[f"layers.{i}.{name}.weight"] = size
    weights = {
        name: (mx.random.normal(size) * 0.02).astype(mx.bfloat16) for name, size in shapes.items()
    }
    folder = Path(tempfile.mkdtemp())
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    depth = config["num_hidden_layers"]
    (folder / "config.json").write_text(
        json.dumps(
            {
                **config,
                "architectures": ["Qwen3DSparkModel"],
                "num_hidden_layers": layers,
                "num_target_layers": depth,
                "layer_types": ["full_attention"] * layers,
                "block_size": 7,
                "mask_token_id": vocab - 1,
                "target_layer_ids": [1 + i * (depth - 3) // 4 for i in range(5)],
                "markov_rank": rank,
                "markov_head_type": "vanilla",
                "enable_confidence_head": True,
                "confidence_head_with_markov": True,
                "attention_bias": False,
                "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
                "dtype": "bfloat16",
            }
        ),
        encoding="utf-8",
    )
    return str(folder)


def of_lengths(
    target: ModelTarget, arguments: argparse.Namespace, inner: Drafter | None
) -> list[dict[str, Any]]:
    """Parts and rounds of each length, taking turns."""
    results: list[dict[str, Any]] = []
    some = max(4, arguments.rounds // _TURNS)
    for length in arguments.lengths:
        plains, verifies, drafts = [], [], []
        taken: dict[float, list[tuple[float, float]]] = {a: [] for a in arguments.acceptance}
        for _ in range(_TURNS):
            plains.append(rounds(target, None, 0, 64, some)[0])
            verifies.append(verify_alone(target, length + 1, 64, some))
            if inner is not None:
                drafts.append(draft_alone(inner, target, length, some))
            for acceptance, found in taken.items():
                oracle = Oracle(target.info.vocab_size, acceptance, inner=inner)
                found.append(rounds(target, oracle, length, 64, some))
        plain, draft, verify = median(plains), median(drafts or [0.0]), median(verifies)
        for acceptance, found in taken.items():
            seconds = median(each for each, _ in found)
            tokens = mean(each for _, each in found)
            results.append(
                {
                    "length": length,
                    "acceptance": acceptance,
                    "round_ms": round(1e3 * seconds, 3),
                    "plain_ms": round(1e3 * plain, 3),
                    "draft_ms": round(1e3 * draft, 3),
                    "verify_ms": round(1e3 * verify, 3),
                    "overhead_share": round(1 - (draft + verify) / seconds, 4),
                    "tokens_per_round": round(tokens, 3),
                    "speedup": round(tokens * plain / seconds, 3),
                    "of_model": round((draft + verify) / seconds, 4),
                }
            )
            print(results[-1], flush=True)
    return results


def against_mlx_lm(target: ModelTarget, arguments: argparse.Namespace) -> dict[str, float]:
    """Milliseconds a token of plain decoding, ours and mlx-lm's generate_step, taking turns; its
    model has the same weights and is as it loads it."""
    from mlx_lm.generate import generate_step

    model, _ = chain_model(arguments.shape, bits=arguments.bits, layers=arguments.layers)
    count = arguments.rounds
    prompt = prompt_of(64, target.info.vocab_size)
    ours, theirs = [], []
    for _ in range(_TURNS):
        ours.append(rounds(target, None, 0, 64, count)[0])
        times = []
        for _ in generate_step(mx.array(prompt), model, max_tokens=count):
            times.append(time.perf_counter())
        theirs.append(median(b - a for a, b in pairwise(times[4:])))
    return {
        "ours_ms": round(1e3 * median(ours), 3),
        "mlx_lm_ms": round(1e3 * median(theirs), 3),
        "ratio": round(median(theirs) / median(ours), 4),
    }


def of_depths(
    target: ModelTarget, arguments: argparse.Namespace, inner: Drafter | None
) -> list[dict[str, Any]]:
    """Rounds behind other texts, taking turns; what one brings against a plain one, and how much
    of that is left in comparison with the first depth."""
    oracle = Oracle(target.info.vocab_size, 0.7, inner=inner)
    running = {
        (depth, length): Running(target, oracle if length else None, length, depth)
        for depth in arguments.depths
        for length in (0, 3, 7)
    }
    taken: dict[tuple[int, int], list[float]] = {at: [] for at in running}
    for _ in range(arguments.rounds):
        for at, one in running.items():  # depths take turns too: a host has slow minutes
            taken[at] += one.go(2)
    seconds = {at: median(found) for at, found in taken.items()}
    results: list[dict[str, Any]] = []
    for depth, length in running:
        share = seconds[depth, 0] / seconds[depth, length]
        at_first = seconds[arguments.depths[0], 0] / seconds[arguments.depths[0], length]
        results.append(
            {
                "depth": depth,
                "length": length,
                "round_ms": round(1e3 * seconds[depth, length], 3),
                "plain_rounds": round(1.0 / share, 3),
                "of_first_depth": round(share / at_first, 3),
            }
        )
        print(results[-1], flush=True)
    return results


def main() -> None:
    """Parse, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=list(SHAPES), default="tiny")
    parser.add_argument("--bits", type=int, help="weights; bf16 if left out")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--lengths", type=int, nargs="*", default=[1, 2, 3, 5, 7])
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.5, 0.7, 0.9])
    parser.add_argument("--drafter", action="store_true", help="pay for a real-shape DSpark")
    parser.add_argument("--drafter-bits", type=int)
    parser.add_argument("--depths", type=int, nargs="*", default=[])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--out")
    arguments = parser.parse_args()
    target = chain_target(arguments.shape, bits=arguments.bits, layers=arguments.layers)
    inner = None
    if arguments.drafter:
        from spec_drafters.load import load_drafter

        inner = load_drafter(dspark_folder(arguments.shape), target, bits=arguments.drafter_bits)
    write(
        arguments.out,
        {
            "shape": arguments.shape,
            "bits": arguments.bits,
            "drafter": arguments.drafter and {"bits": arguments.drafter_bits},
            "plain": against_mlx_lm(target, arguments),
            "runs": of_lengths(target, arguments, inner),
            "depths": of_depths(target, arguments, inner),
        },
    )


if __name__ == "__main__":
    main()
