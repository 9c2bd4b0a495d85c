"""Rotary positions: read from a config, and applied.

Scaled kinds follow transformers (modeling_rope_utils): for pair i of D/2, the unscaled frequency
is f_i = theta^(-2i/D) a position.
"""

from __future__ import annotations

from math import ceil, floor, log, pi

import mlx.core as mx

from spec_drafters.config import Config
from spec_drafters.errors import PackagingError
from spec_drafters.spec import Linear, Llama3, Rope, RopeScaling, Yarn

Offset = int | mx.array
"""The absolute position of the first column: one int, or [B] int32."""


class Rotary:
    """RoPE over the last axis of [B, heads, T, D], at absolute positions."""

    def __init__(self, rope: Rope, dim: int) -> None:
        self._dim = dim
        self._interleaved = rope.interleaved
        self._theta = rope.theta
        self._periods = _periods(rope, dim)
        self._scale = rope.scaling.attention_factor if isinstance(rope.scaling, Yarn) else 1.0

    def __call__(self, x: mx.array, offset: Offset) -> mx.array:
        if self._scale != 1:
            x = x * mx.array(self._scale, dtype=x.dtype)
        return mx.fast.rope(
            x,
            self._dim,
            traditional=self._interleaved,
            base=self._theta if self._periods is None else None,
            scale=1.0,
            offset=offset,
            freqs=self._periods,
        )


def _periods(rope: Rope, dim: int) -> mx.array | None:
    """1 / f of each pair, infinite for those that do not turn; None: all unscaled."""
    if rope.partial == 1 and rope.scaling is None:
        return None
    moving = int(rope.partial * dim / 2)
    frequencies = rope.theta ** -(mx.arange(0, 2 * moving, 2, dtype=mx.float32) / dim)
    if isinstance(rope.scaling, Linear):
        frequencies = frequencies / rope.scaling.factor
    elif isinstance(rope.scaling, Llama3):
        frequencies = _llama3(frequencies, rope.scaling)
    elif isinstance(rope.scaling, Yarn):
        frequencies = _yarn(frequencies, rope.scaling, rope.theta, dim)
    still = mx.full((dim // 2 - moving,), float("inf"))
    return mx.concatenate([1 / frequencies, still])


def _llama3(frequencies: mx.array, scaling: Llama3) -> mx.array:
    """Low frequencies are divided by the factor, high ones kept, those between blended."""
    turns = scaling.original_positions * frequencies / (2 * pi)
    kept = mx.clip((turns - scaling.low) / (scaling.high - scaling.low), 0, 1)
    return kept * frequencies + (1 - kept) * frequencies / scaling.factor


def _yarn(frequencies: mx.array, scaling: Yarn, theta: float, dim: int) -> mx.array:
    """As Llama 3's, but the blend is linear in the pair's number."""
    first, last = (
        dim * log(scaling.original_positions / (turns * 2 * pi)) / (2 * log(theta))
        for turns in (scaling.beta_fast, scaling.beta_slow)
    )
    if scaling.truncate:
        first, last = floor(first), ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    width = max(last - first, 0.001)
    pairs = mx.arange(frequencies.size, dtype=mx.float32)
    scaled = mx.clip((pairs - first) / width, 0, 1)
    return (1 - scaled) * frequencies + scaled * frequencies / scaling.factor


# --- reading ------------------------------------------------------------------------------------


def rope_theta(config: Config) -> float:
    """The base, from `rope_parameters` (transformers 5) or the top level (before)."""
    return config.section("rope_parameters").over(config).number("rope_theta")


def read_rope(config: Config, packaging: str, *, interleaved: bool = False) -> Rope:
    """Base and scaling, from `rope_parameters` or from `rope_theta` and `rope_scaling`.

    Raises:
        CheckpointError: a field is missing or out of range.
        PackagingError: the kind of scaling is not supported.
    """
    if "rope_type" in config.section("rope_parameters"):
        own = config.section("rope_parameters")
    else:
        own = config.section("rope_scaling").over(config.section("rope_parameters"))
    theta = own.over(config).number("rope_theta")
    return Rope(theta, interleaved=interleaved, scaling=_scaling(own, config, packaging))


def _scaling(own: Config, config: Config, packaging: str) -> RopeScaling | None:
    kind = own.text("rope_type", own.text("type", "default"))
    if kind == "default":
        return None
    if own.number("partial_rotary_factor", 1.0) != 1:
        raise PackagingError(packaging, f"not supported with {kind} positions on a part of a head")
    if kind == "linear":
        return Linear(own.number("factor"))
    if kind == "llama3":
        return Llama3(
            own.number("factor"),
            own.number("low_freq_factor"),
            own.number("high_freq_factor"),
            own.integer("original_max_position_embeddings"),
        )
    if kind == "yarn":
        return _read_yarn(own, config)
    raise PackagingError(packaging, f"not supported with rotary positions of type {kind!r}")


def _read_yarn(own: Config, config: Config) -> Yarn:
    factor = own.number("factor")
    longest = "max_position_embeddings"
    original = f"original_{longest}"
    return Yarn(
        factor=factor,
        original_positions=own.integer(original) if original in own else config.integer(longest),
        beta_fast=own.number("beta_fast", 32.0),
        beta_slow=own.number("beta_slow", 1.0),
        attention_factor=own.number("attention_factor", _attention_factor(own, factor)),
        truncate=own.flag("truncate", True),
    )


def _attention_factor(own: Config, factor: float) -> float:
    """What queries and keys are multiplied with: 1 + 0.1 ln(factor), or DeepSeek's ratio."""

    def growth(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * log(factor) + 1.0

    if "mscale" in own and "mscale_all_dim" in own:
        return growth(own.number("mscale")) / growth(own.number("mscale_all_dim"))
    return growth(1.0)
