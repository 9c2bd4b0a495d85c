"""Taps are the layers' outputs, and leave no trace on the model."""

from __future__ import annotations

import gc
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache

from spec_core import SeamError, UnsupportedError
from spec_targets import build_target

TOKENS = mx.array([[3, 14, 15, 92, 65, 35]])


def test_taps_are_the_layers_run_by_hand(tiny_target: Any) -> None:
    target, model = tiny_target("qwen3")
    taps = target.forward(TOKENS, target.new_state(1), taps=(-1, 0, 1, 2)).taps
    hidden = model.model.embed_tokens(TOKENS)
    assert mx.array_equal(taps[0], hidden)
    for layer, tap in zip(model.layers, taps[1:], strict=True):
        hidden = layer(hidden, "causal", None)
        assert mx.abs(tap - hidden).max().item() < 1e-5


def test_taps_come_in_the_order_asked_and_do_not_change_logits(tiny_target: Any) -> None:
    target, _ = tiny_target("llama")
    plain = target.forward(TOKENS, target.new_state(1))
    tapped = target.forward(TOKENS, target.new_state(1), taps=(2, -1, 0, 2))
    each = [target.forward(TOKENS, target.new_state(1), taps=(t,)).taps[0] for t in (2, -1, 0, 2)]
    assert mx.array_equal(plain.logits, tapped.logits)
    assert all(mx.array_equal(a, b) for a, b in zip(tapped.taps, each, strict=True))


def test_a_tap_has_one_row_for_each_chunk_position_and_row(tiny_target: Any) -> None:
    target, _ = tiny_target("qwen2")
    state = target.new_state(2)
    both = mx.concatenate([TOKENS, TOKENS])
    whole = target.forward(both, state, taps=(1,), logits="none").taps[0]
    state.commit([2, 4])
    again = mx.array([[15, 92], [65, 35]])
    part = target.forward(again, state, taps=(1,), logits="last").taps[0]
    assert mx.array_equal(part[0], whole[0, 2:4])
    assert mx.array_equal(part[1], whole[1, 4:6])


def test_the_model_is_as_before_even_after_an_error(tiny_target: Any) -> None:
    target, model = tiny_target("qwen3")
    classes = [type(module) for module in model.modules()]
    state = target.new_state(1)
    target.forward(TOKENS, state, taps=(0, 2), logits="last")
    state.commit([6])
    wide = model.model.layers[1].mlp.up_proj.weight
    model.model.layers[1].mlp.up_proj.weight = wide[:, :3]
    with pytest.raises(ValueError, match="matmul"):
        target.forward(TOKENS, state, taps=(0, 2), logits="last")
    model.model.layers[1].mlp.up_proj.weight = wide
    assert [type(module) for module in model.modules()] == classes
    assert state.lengths == (6,)
    after = target.forward(TOKENS, state).logits
    fresh = target.new_state(1)
    target.forward(TOKENS, fresh)
    fresh.commit([6])
    assert mx.array_equal(after, target.forward(TOKENS, fresh).logits)


def test_nothing_recorded_is_kept(tiny_target: Any) -> None:
    target, _ = tiny_target("qwen3")
    state = target.new_state(1)

    def step() -> int:
        forward = target.forward(mx.zeros((1, 64), dtype=mx.int32), state, taps=(-1, 0, 1, 2))
        mx.eval(forward.logits, forward.taps, state.pending())
        state.commit([0])
        del forward
        gc.collect()
        return mx.get_active_memory()

    first = step()
    assert [step() for _ in range(5)] == [first] * 5


def test_taps_out_of_range_are_refused(tiny_target: Any) -> None:
    target, _ = tiny_target("qwen3")
    for tap in (-2, 3):
        with pytest.raises(SeamError, match="taps"):
            target.forward(TOKENS, target.new_state(1), taps=(tap,))


def test_a_model_that_runs_its_layers_twice_has_no_taps(tiny: Any) -> None:
    model, config = tiny("qwen3")
    inner, outer = type(model.model), type(model)

    class Looped(inner):  # type: ignore[misc, valid-type]
        def __call__(self, inputs: mx.array, cache: Any = None, *_: Any) -> mx.array:
            hidden = self.embed_tokens(inputs)
            mask = create_attention_mask(hidden, cache[0])
            for layer, c in zip([*self.layers, *self.layers], cache, strict=True):
                hidden = layer(hidden, mask, c)
            return self.norm(hidden)

    caches = {"make_cache": lambda self: [KVCache() for _ in range(6)]}
    model.model.__class__, model.__class__ = Looped, type(outer.__name__, (outer,), caches)
    target = build_target(model, config)
    assert not target.info.tappable
    assert "ran 6 times" in target.info.taps_refused
    with pytest.raises(UnsupportedError, match="no taps"):
        target.forward(TOKENS, target.new_state(1), taps=(0,))


@pytest.mark.parametrize(
    ("family", "scale", "cap"), [("qwen3", 1.0, None), ("gemma2", 8.0, 30.0), ("llama", 1.0, None)]
)
def test_embedding_and_head_are_lent_without_scale_and_cap(
    tiny_target: Any, family: str, scale: float, cap: float | None
) -> None:
    target, model = tiny_target(family)
    assert (target.info.embed_scale, target.info.logit_softcap) == (scale, cap)
    embedded = target.lender.embed(TOKENS)
    assert mx.array_equal(embedded, model.model.embed_tokens.weight[TOKENS])
    tap = target.forward(TOKENS, target.new_state(1), taps=(-1,)).taps[0]
    assert mx.abs(embedded * scale - tap).max().item() < 1e-5
    head = model.model.embed_tokens if family != "qwen3" else model.lm_head
    raw = target.lender.unembed(tap)
    assert mx.abs(raw - tap @ head.weight.T).max().item() < 1e-4


def test_a_head_with_another_factor_is_not_lent(tiny_target: Any) -> None:
    target, _ = tiny_target("granite")
    assert target.lender is None
    assert target.info.tappable
