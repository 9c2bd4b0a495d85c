"""What a model takes in memory, from its configuration and its files' headers alone.

`spec_server.memory` measures the same on a loaded model, and is what an engine goes by.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from spec_drafters.checkpoint import read_header
from spec_drafters.spec import BlockSpec, DrafterSpec
from spec_server.memory import RowCost
from spec_targets.anatomy import text_config

_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "U64": 8, "I32": 4, "U32": 4}
_SIZES |= {"I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1}
_FLOATS = ("F64", "F32", "F16", "BF16")
_GROUP = 64
ITEM = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of a number."""

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Layers:
    """How many layers keep what.

    Attributes:
        full: keys and values of every position.
        sliding: those of a window.
        recurrent: a state of fixed size.
    """

    full: int
    sliding: int
    recurrent: int


def weight_bytes(folder: Path, item: int | None) -> int:
    """What a folder's weights take.

    Args:
        folder: holds *.safetensors.
        item: bytes of a number after casting; None: as it is stored.
    """
    headers = (h for file in folder.glob("*.safetensors") for h in read_header(file).values())
    total = 0
    for header in headers:
        cast = item is not None and header.dtype in _FLOATS
        total += prod(header.shape) * (item if cast and item else _SIZES.get(header.dtype, 1))
    return total


def drafter_bytes(spec: DrafterSpec, item: int, bits: int | None) -> int:
    """What a drafter's weights take, its matrices quantised to `bits`."""
    total = 0.0
    for shape in spec.tensors().values():
        packed = bits is not None and len(shape) == 2 and shape[-1] % _GROUP == 0
        total += prod(shape) * (_packed(bits or 0, item) if packed else item)
    return int(total)


def _packed(bits: int, item: int) -> float:
    """Bytes of a quantised number: its bits, and its share of a group's scale and bias."""
    return bits / 8 + 2 * item / _GROUP


def target_row(config: Config, item: int, kv_bits: int | None) -> RowCost:
    """What one request's state takes in a target."""
    facts = text_config(config)
    layers = layers_of(config)
    heads, size = _heads(facts), _head_size(facts)
    wide = facts.get("num_global_key_value_heads") or heads
    wide_size = facts.get("global_head_dim") or size
    kept = item if kv_bits is None else _packed(kv_bits, item)
    window = facts.get("sliding_window") or 0
    return RowCost(
        per_token=2.0 * layers.full * wide * wide_size * kept,
        per_recent_token=2.0 * layers.sliding * heads * size * item,
        reach=int(window) - 1 if layers.sliding and window else 0,
        fixed=float(layers.recurrent * _recurrent_bytes(facts, item)),
    )


def drafter_row(spec: DrafterSpec, item: int) -> RowCost:
    """What one request's state takes in a drafter."""
    layer = 2.0 * spec.num_kv_heads * spec.head_dim * item
    windows: Sequence[int | None] = [None] * spec.num_layers
    if isinstance(spec, BlockSpec):
        windows = [attention.window for attention in spec.attention]
    sliding = [window for window in windows if window is not None]
    return RowCost(
        per_token=layer * (len(windows) - len(sliding)),
        per_recent_token=layer * len(sliding),
        reach=max(sliding, default=1) - 1,
    )


def layers_of(config: Config) -> Layers:
    """The kinds of a model's layers."""
    kinds = _kinds(text_config(config))
    sliding = sum("sliding" in kind or "chunked" in kind for kind in kinds)
    recurrent = sum("linear" in kind or kind == "conv" for kind in kinds)
    return Layers(len(kinds) - sliding - recurrent, sliding, recurrent)


def _kinds(facts: Config) -> list[str]:
    """The kind of each layer that has a state of its own."""
    count = facts.get("num_hidden_layers") or facts.get("n_layer") or 0
    named = facts.get("layer_types")
    every = facts.get("full_attention_interval")
    pattern = facts.get("sliding_window_pattern")
    if isinstance(named, list):
        kinds = [str(kind) for kind in named]
    elif every:
        kinds = _every(count, every, "linear_attention")
    elif pattern and facts.get("sliding_window"):
        kinds = _every(count, pattern, "sliding_attention")
    else:
        kinds = ["full_attention"] * count
    shared = facts.get("num_kv_shared_layers") or 0
    return kinds[: len(kinds) - shared]


def _every(count: int, interval: int, others: str) -> list[str]:
    """Every so manieth layer is a full one."""
    return [others if (layer + 1) % interval else "full_attention" for layer in range(count)]


def _heads(facts: Config) -> int:
    return int(facts.get("num_key_value_heads") or facts.get("num_attention_heads") or 1)


def _head_size(facts: Config) -> int:
    named = facts.get("head_dim")
    return int(named or facts.get("hidden_size", 0) // (facts.get("num_attention_heads") or 1))


def _recurrent_bytes(facts: Config, item: int) -> int:
    """Of one layer: a matrix for each head in float32, and the last inputs of a convolution."""
    if "linear_num_value_heads" not in facts:
        return (int(facts.get("conv_L_cache", 3)) - 1) * int(facts.get("hidden_size", 0)) * item
    values = facts["linear_num_value_heads"] * facts["linear_value_head_dim"]
    keys = facts["linear_num_key_heads"] * facts["linear_key_head_dim"]
    state = values * facts["linear_key_head_dim"] * 4
    return int(state + (facts["linear_conv_kernel_dim"] - 1) * (2 * keys + values) * item)
