"""The load-time proof refuses what it cannot prove, and says why."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import ArraysCache, KVCache

from spec_core import InvalidValueError
from spec_targets import UnsupportedTargetError, build_target

TOKENS = mx.array([[3, 14, 15, 92, 65, 35]])


def _with_call(model: Any, call: Any) -> None:
    """Give the inner model another forward."""
    inner = type(model.model)
    model.model.__class__ = type(inner.__name__, (inner,), {"__call__": call})


def test_a_model_that_counts_positions_itself_is_refused(tiny: Any) -> None:
    model, config = tiny("qwen3")
    own = type(model.model).__call__
    seen = [0]

    def call(self: Any, inputs: mx.array, cache: Any = None, *rest: Any) -> mx.array:
        seen[0] += inputs.shape[1]
        return own(self, inputs, cache, *rest) * (1 + seen[0])

    _with_call(model, call)
    with pytest.raises(UnsupportedTargetError, match="cannot be decoded exactly"):
        build_target(model, config)


def test_a_model_that_reads_unknown_cache_attributes_is_refused(tiny: Any) -> None:
    model, config = tiny("qwen3")
    own = type(model.model).__call__

    def call(self: Any, inputs: mx.array, cache: Any = None, *rest: Any) -> mx.array:
        cache[0].is_trimmable()
        return own(self, inputs, cache, *rest)

    _with_call(model, call)
    with pytest.raises(UnsupportedTargetError, match="is_trimmable"):
        build_target(model, config)


def test_unknown_cache_kinds_are_refused_by_name(tiny: Any) -> None:
    model, config = tiny("qwen3")
    cls = type(model)
    made = [KVCache(), ArraysCache(2), KVCache()]
    model.__class__ = type(cls.__name__, (cls,), {"make_cache": lambda self: made})
    with pytest.raises(
        UnsupportedTargetError, match="cache 1 of the model is mlx-lm's ArraysCache"
    ):
        build_target(model, config)


def test_taps_that_are_not_the_whole_output_are_refused(tiny: Any) -> None:
    model, config = tiny("qwen3")

    def call(self: Any, inputs: mx.array, cache: Any = None, *rest: Any) -> mx.array:
        hidden = first = self.embed_tokens(inputs)
        for layer, c in zip(self.layers, cache, strict=True):
            hidden = layer(hidden, create_attention_mask(hidden, cache[0]), c)
        return self.norm(hidden + first)

    _with_call(model, call)
    target = build_target(model, config)
    assert not target.info.tappable
    assert "tap of layer" in target.info.taps_refused
    assert target.forward(TOKENS, target.new_state(1)).logits is not None


def test_rows_that_cannot_share_a_forward_run_one_by_one(tiny_target: Any, own: Any) -> None:
    """mlx-lm's Gemma 2 gives a mask with a row axis the axis of its heads."""
    target, model = tiny_target("gemma2")
    assert "rows of different length" in target.batch_refused
    state = target.new_state(2)
    target.forward(mx.concatenate([TOKENS, TOKENS]), state, valid=[6, 2])
    state.commit([6, 2])
    ours = target.forward(mx.array([[7], [15]]), state).logits
    for row, text in enumerate(([3, 14, 15, 92, 65, 35, 7], [3, 14, 15])):
        assert mx.abs(ours[row, 0] - own(model).feed(text)[-1]).max().item() < 1e-4


def test_families_that_share_forwards_say_so(tiny_target: Any) -> None:
    for family in ("qwen3", "llama", "mistral", "qwen2", "phi3", "granite"):
        target, _ = tiny_target(family)
        assert target.batch_refused == ""


def test_kv_bits_are_checked(tiny: Any) -> None:
    with pytest.raises(InvalidValueError, match="kv_bits is 3"):
        build_target(*tiny("qwen3"), kv_bits=3)
    with pytest.raises(UnsupportedTargetError, match=r"heads of size \[16\].*multiple of 32"):
        build_target(*tiny("qwen3", head_dim=16), kv_bits=8)
