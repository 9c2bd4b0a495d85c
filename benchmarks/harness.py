"""Shared by the benchmark scripts: stamps, models of a real shape, drafters of stated skill."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from spec_core import Chooser, Drafter, DrafterState, FreeDrafter, Proposal
from spec_targets import ModelTarget, build_target
from spec_targets.layout import lay_out
from spec_targets.mlx_lm_import import mlx_lm_utils

QWEN3 = {
    "model_type": "qwen3",
    "rms_norm_eps": 1e-6,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "head_dim": 128,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 36,
    "tie_word_embeddings": False,
}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "qwen3-4b": {**QWEN3, "hidden_size": 2560, "intermediate_size": 9728},
    "qwen3-8b": {**QWEN3, "hidden_size": 4096, "intermediate_size": 12288},
    "tiny": {
        **QWEN3,
        "vocab_size": 997,
        "head_dim": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 8,
        "hidden_size": 128,
        "intermediate_size": 256,
    },
}
STEP, SHIFT = 5, 17
"""In a chain model token (STEP * a + SHIFT) mod V follows token a."""


def stamp() -> dict[str, Any]:
    """Device, versions and command, for a result file."""
    return {
        "device": device(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("mlx", "mlx-lm", "spec-core")},
        "command": " ".join(["python", *sys.argv]),
        "blas": os.environ.get("LD_PRELOAD", "") and "OpenBLAS preloaded",
        "openblas_threads": os.environ.get("OPENBLAS_NUM_THREADS"),
    }


def device() -> str:
    name = mx.device_info().get("device_name", platform.processor() or platform.machine())
    return f"{name} ({mx.default_device().type.name})"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "from source"


def write(path: str | None, result: Mapping[str, Any]) -> None:
    """Print a result, and write it where asked."""
    text = json.dumps({**stamp(), **result}, indent=1)
    print(text)
    if path:
        Path(path).write_text(text + "\n", encoding="utf-8")


def chain_target(shape: str, *, bits: int | None, layers: int | None = None) -> ModelTarget:
    """A target that is a `chain_model`."""
    model, config = chain_model(shape, bits=bits, layers=layers)
    lay_out(model)
    return build_target(model, config)


def chain_model(
    shape: str, *, bits: int | None, layers: int | None = None
) -> tuple[nn.Module, dict[str, Any]]:
    """A dense model of a real shape whose greedy text is a known chain, as mlx-lm would load it,
    and its config.

    Attention and MLP outputs are zero (they cost what they always cost), so the last hidden state
    is the token's own embedding, and the head points at its successor by a wide margin: no
    near-ties, in any precision.
    """
    config = dict(SHAPES[shape])
    if layers:
        config["num_hidden_layers"] = layers
    model_class, args_class = mlx_lm_utils()._get_classes(config)
    model = model_class(args_class.from_dict(config))
    mx.random.seed(0)
    model.set_dtype(mx.bfloat16)
    for layer in model.model.layers:
        for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
            projection.weight = mx.zeros_like(projection.weight)
    vocab, hidden = config["vocab_size"], config["hidden_size"]
    table = mx.random.normal((vocab, hidden)).astype(mx.bfloat16)
    before = np.empty(vocab, dtype=np.int32)
    before[(np.arange(vocab, dtype=np.int64) * STEP + SHIFT) % vocab] = np.arange(vocab)
    model.model.embed_tokens.weight = table
    model.lm_head.weight = table[mx.array(before)]
    if bits:
        nn.quantize(model, group_size=64, bits=bits)
    mx.eval(model.parameters())
    model.eval()
    return model, config


class Oracle(FreeDrafter):
    """Knows a chain target's text, and is right with a stated probability at each slot.

    Costs nothing by itself; given an inner drafter, it runs that one too and pays its price.
    """

    name = "oracle"

    def __init__(
        self, vocab_size: int, acceptance: float, max_block: int = 7, inner: Drafter | None = None
    ) -> None:
        super().__init__(max_block)
        self._acceptance = acceptance
        self._inner = inner
        self._random = np.random.default_rng(0)
        power, shift, factors, shifts = 1, 0, [], []
        for _ in range(max_block):
            power, shift = power * STEP % vocab_size, (shift * STEP + SHIFT) % vocab_size
            factors.append(power)
            shifts.append(shift)
        self._vocab_size = vocab_size
        self._factors = mx.array(factors, dtype=mx.int64)
        self._shifts = mx.array(shifts, dtype=mx.int64)
        self.taps = () if inner is None else tuple(inner.taps)

    def new_state(self, rows: int, start: int = 0) -> DrafterState:
        return (
            super().new_state(rows, start)
            if self._inner is None
            else self._inner.new_state(rows, start)
        )

    def extend(
        self, state: DrafterState, tokens: mx.array, taps: Sequence[mx.array], keep: Sequence[int]
    ) -> None:
        if self._inner is None:
            super().extend(state, tokens, taps, keep)
        else:
            self._inner.extend(state, tokens, taps, keep)

    def propose(
        self, state: DrafterState, anchor: mx.array, count: int, chooser: Chooser
    ) -> Proposal:
        rows = anchor.shape[0]
        wrong = mx.array(self._random.random((rows, count)) >= self._acceptance)
        right = anchor[:, None].astype(mx.int64) * self._factors[:count] + self._shifts[:count]
        tokens = ((right + wrong) % self._vocab_size).astype(mx.int32)
        if self._inner is not None:
            guessed = self._inner.propose(state, anchor, count, chooser)
            tokens = mx.depends(tokens, guessed.tokens)
        return Proposal(tokens, (count,) * rows, sources=(self.name,) * rows)
