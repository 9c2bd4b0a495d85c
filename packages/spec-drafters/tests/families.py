"""A small drafter of every family, with random weights, for a `TinyTarget`.

Eight tokens, so that random guesses are accepted now and then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx

from spec_core.testing import TinyTarget
from spec_drafters.block import BlockDrafter
from spec_drafters.eagle import EagleDrafter
from spec_drafters.fit import fit
from spec_drafters.linear import Precision, Weights
from spec_drafters.load import build
from spec_drafters.spec import (
    BlockSpec,
    Confidence,
    Convolution,
    DrafterSpec,
    EagleSpec,
    LayerAttention,
    Markov,
    Rope,
    Selector,
    Yarn,
)

VOCAB, HIDDEN, LAYERS = 8, 16, 4

BLOCK = BlockSpec(
    packaging="test",
    mode="dspark",
    backbone="qwen3",
    hidden_size=HIDDEN,
    intermediate_size=24,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=VOCAB,
    norm_eps=1e-6,
    rope=Rope(10000.0),
    attention=(LayerAttention(),) * 2,
    taps=(0, 2),
    num_target_layers=LAYERS,
    block_size=5,
    mask_token=7,
    first_slot=0,
    own_embedding=True,
    own_head=True,
    markov=Markov("vanilla", 4),
    confidence=Confidence(with_markov=True),
)
EAGLE = EagleSpec(
    packaging="test",
    mode="eagle3",
    backbone="qwen3",
    hidden_size=HIDDEN,
    intermediate_size=24,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=VOCAB,
    norm_eps=1e-6,
    rope=Rope(10000.0),
    taps=(0, 1, 2),
    num_target_layers=LAYERS,
    own_embedding=True,
    own_head=True,
    draft_length=4,
)
PLAIN = replace(BLOCK, mode="dflash", first_slot=1, markov=None, confidence=None)
GEMMA = {"backbone": "gemma4", "keys_as_values": True, "embed_scale": 4.0, "softcap": 5.0}

FAMILIES: dict[str, DrafterSpec] = {
    "dspark": BLOCK,
    "dspark of a part of the vocabulary": replace(BLOCK, draft_vocab_size=5),
    "dspark with a silent anchor": replace(BLOCK, markov=Markov("rnn", 4), first_slot=1),
    "dspark gemma4": replace(BLOCK, markov=Markov("gated", 4), **GEMMA),
    "dflash borrowing": replace(PLAIN, own_embedding=False, own_head=False),
    "dflash with windows and YaRN": replace(
        PLAIN,
        attention=(LayerAttention(True, 6), LayerAttention()),
        rope=Rope(10000.0, scaling=Yarn(4.0, 16, attention_factor=1.2)),
    ),
    "dflash2": replace(
        PLAIN,
        attention=(LayerAttention(False, 7),) * 2,
        selector=Selector(4, 3),
        convolution=Convolution(2, 4),
    ),
    "eagle3": EAGLE,
    "eagle3 gemma4": replace(EAGLE, **GEMMA),
    "eagle3 of a part of the vocabulary": replace(
        EAGLE,
        draft_vocab_size=5,
        own_embedding=False,
        attention_biases=True,
        query_key_norms=False,
        tap_norm="each",
        norm_before_residual=True,
        norm_output=True,
    ),
}


def target(seed: int = 0) -> TinyTarget:
    return TinyTarget(vocab=VOCAB, hidden=HIDDEN, layers=LAYERS, seed=seed)


def drafter(
    family: str, target: TinyTarget, seed: int = 0, **changes: Any
) -> BlockDrafter | EagleDrafter:
    """With weights that depend on the family and the seed alone; `changes` are to its spec."""
    spec = fit(replace(FAMILIES[family], **changes), target.info, lends=True)
    shapes = sorted(spec.tensors().items())
    keys = mx.random.split(mx.random.key(seed), len(shapes))
    tensors = {n: _weight(n, s, k) for (n, s), k in zip(shapes, keys, strict=True)}
    return build(spec, Weights(tensors, Precision(mx.float32)), target.lender)


def _weight(name: str, shape: tuple[int, ...], key: mx.array) -> mx.array:
    if name == "d2t":
        # Draft ids 0.. stand for target ids 1, 2, 4, 5, 7.
        return mx.array([1, 1, 2, 2, 3], dtype=mx.int64)
    special: Callable[[mx.array], mx.array] = (
        (lambda x: 1 + 0.2 * x) if name.endswith("norm.weight") else (lambda x: 0.5 * x)
    )
    return special(mx.random.normal(shape, key=key))
