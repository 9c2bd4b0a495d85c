"""What a partial accept costs beyond a full one, for each kind of cache.

Random weights; the context is a short text's state, repeated until it is long enough (what it says
does not matter for the time). One round: verify a block (forward and logits, evaluated), then
commit and evaluate the state. Rounds that keep everything and rounds that keep about half take
turns; figures are medians. The last column has a goal: under 15 % of the verify pass.

    python benchmarks/commit_cost.py --cases dense hybrid --contexts 512 16384 --out result.json
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import mlx.core as mx
from harness import write
from mlx.utils import tree_map_with_path

from spec_core.seams import PerToken, StateImage
from spec_targets import ModelTarget, build_target
from spec_targets.mlx_lm_import import mlx_lm_utils

TEXT = 64  # positions of the state that is repeated
WARM_UP = 2

TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "vocab_size": 97,
    "max_position_embeddings": 65536,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
# One period of Qwen3.5-4B: three gated delta layers and one of full attention.
REAL = {
    **TINY,
    "hidden_size": 2560,
    "num_hidden_layers": 4,
    "intermediate_size": 9216,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 4096,
}
ROPE = {"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
CASES: dict[str, dict[str, Any]] = {
    "dense": {"model_type": "qwen3", **TINY},
    "hybrid": {
        "model_type": "qwen3_5",
        **TINY,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
        "rope_parameters": ROPE,
    },
    "window": {
        "model_type": "gemma3_text",
        **TINY,
        "sliding_window": 512,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 32,
    },
    "short-conv": {
        "model_type": "lfm2",
        **TINY,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "conv", "full_attention", "conv"] * 2,
    },
    "hybrid-real": {
        "model_type": "qwen3_5",
        **REAL,
        "linear_num_value_heads": 32,
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "rope_parameters": ROPE,
    },
    # One period of Gemma 4: five sliding layers and one of full attention, with its head sizes.
    "window-real": {
        "model_type": "gemma4_text",
        **REAL,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "global_head_dim": 512,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
    },
    "dense-real": {"model_type": "qwen3", **REAL},
}


@dataclass(frozen=True, slots=True)
class Cost:
    """Medians in milliseconds."""

    verify: float
    full: float
    partial: float

    @property
    def share(self) -> float:
        """What a partial commit adds, as a share of the verify pass."""
        return (self.partial - self.full) / self.verify


def make_target(config: dict[str, Any], dtype: mx.Dtype) -> ModelTarget:
    """A target with random weights."""
    model_class, args_class = mlx_lm_utils()._get_classes(dict(config))
    model = model_class(args_class.from_dict(dict(config)))
    mx.random.seed(0)
    model.update(
        tree_map_with_path(
            lambda _, p: (mx.random.normal(p.shape) * p.shape[-1] ** -0.5).astype(dtype),
            model.parameters(),
        )
    )
    mx.eval(model.parameters())
    model.eval()
    return build_target(model, config)


def long_state(target: ModelTarget, rows: int, context: int) -> Any:
    """A state of `rows` rows, each of length `context`."""
    short = target.new_state(1)
    text = mx.arange(TEXT, dtype=mx.int32)[None] % target.info.vocab_size
    target.forward(text, short, logits="none")
    short.commit([TEXT])
    image = short.image(0)
    repeats = -(-context // TEXT)
    per_token = {
        name: PerToken(mx.tile(each.array, (repeats, 1, 1))[:context], each.reach)
        for name, each in image.per_token.items()
    }
    state = target.new_state(rows)
    for row in range(rows):
        state.restore(row, StateImage(0, context, per_token, image.at_end))
    return state


def measure(target: ModelTarget, rows: int, columns: int, context: int, trials: int) -> Cost:
    """Rounds of a block of `columns` columns at one context length."""
    state = long_state(target, rows, context)
    everything = [columns] * rows
    part = [max(columns // 2 - row % 3, 1) for row in range(rows)]
    taken: dict[str, list[float]] = {"verify": [], "full": [], "partial": []}
    for trial in range(WARM_UP + trials):
        for name, keep in (("full", everything), ("partial", part)):
            verify, commit = one_round(target, state, keep, columns)
            if trial >= WARM_UP:
                taken["verify"].append(verify)
                taken[name].append(commit)
    return Cost(**{name: 1e3 * median(times) for name, times in taken.items()})


def one_round(
    target: ModelTarget, state: Any, keep: Sequence[int], columns: int
) -> tuple[float, float]:
    """Seconds of the verify pass and of the commit."""
    tokens = mx.arange(columns, dtype=mx.int32) % target.info.vocab_size
    tokens = mx.broadcast_to(tokens, (len(keep), columns))
    begun = time.perf_counter()
    mx.eval(target.forward(tokens, state).logits)
    verified = time.perf_counter()
    state.commit(keep)
    mx.eval(state.pending())
    return verified - begun, time.perf_counter() - verified


def cost_rows(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One entry a case, number of rows and context, as soon as it is there."""
    for case in arguments.cases:
        target = make_target(CASES[case], getattr(mx, arguments.dtype))
        for rows in arguments.rows:
            for context in arguments.contexts:
                cost = measure(target, rows, arguments.columns, context, arguments.trials)
                yield {
                    "case": case,
                    "rows": rows,
                    "context": context,
                    "verify_ms": round(cost.verify, 3),
                    "full_commit_ms": round(cost.full, 3),
                    "partial_commit_ms": round(cost.partial, 3),
                    "share_of_verify": round(cost.share, 4),
                }


def main() -> None:
    """Measure what the command line asks for; print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--contexts", nargs="+", type=int, default=[512, 4096, 16384])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--columns", type=int, default=8, help="the block: anchor and guesses")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--trials", type=int, default=9)
    parser.add_argument("--out", help="file for the result, as JSON")
    arguments = parser.parse_args()
    costs = []
    for each in cost_rows(arguments):
        costs.append(each)
        print(" ".join(f"{name}={value}" for name, value in each.items()), file=sys.stderr)
    write(
        arguments.out,
        {"columns": arguments.columns, "dtype": arguments.dtype, "costs": costs},
    )


if __name__ == "__main__":
    main()
