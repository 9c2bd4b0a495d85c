"""Rows that attend alone give what they give in one rectangle, and what they give by themselves."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_core import flash_decode
from spec_core.conformance import check_target
from spec_targets import attention, layers
from spec_targets.attention import RowByRow
from spec_targets.target import ModelTarget, Runner


def with_waste(target: ModelTarget, waste: float) -> ModelTarget:
    """The same target whose rows attend alone from so much padding on."""
    bones = target._runner._bones
    options = replace(bones.options, waste=waste)
    runner = Runner(replace(bones, options=options))
    return ModelTarget(runner, target.info, target.lender, target.batch_refused)


@pytest.mark.parametrize(
    ("family", "how"),
    [("qwen3", {}), ("gemma2", {}), ("llama", {"kv_bits": 8}), ("qwen3", {"dtype": mx.bfloat16})],
)
def test_targets_conform_when_their_rows_attend_alone(
    tiny_target: Any, family: str, how: dict[str, Any]
) -> None:
    target, _ = tiny_target(family, **how)
    check_target(with_waste(target, 0), tolerance=2e-5)


@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=2, max_size=4),
    columns=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_alone_or_together_makes_no_difference(
    make_target: Any, lengths: list[int], columns: int, seed: int
) -> None:
    target, _ = make_target("qwen3")
    vocab, longest = target.info.vocab_size, max(lengths)
    prompts = mx.random.randint(0, vocab, (len(lengths), longest), key=mx.random.key(seed))
    block = mx.random.randint(0, vocab, (len(lengths), columns), key=mx.random.key(seed + 1))
    found = []
    for waste in (0, math.inf):
        each = with_waste(target, waste)
        state = each.new_state(len(lengths))
        each.forward(prompts, state, logits="none", valid=lengths)
        state.commit(lengths)
        found.append(each.forward(block, state).logits)
    assert mx.array_equal(found[0], found[1])


def test_attention_is_found_in_every_layer(make_target: Any) -> None:
    target, model = make_target("qwen3")
    assert len(RowByRow(model).swaps()) == target.info.num_layers


def test_a_model_that_attends_otherwise_keeps_its_rectangle(tiny_target: Any) -> None:
    """Nothing to exchange: rows share one call, whatever the padding."""
    _, model = tiny_target("qwen3")
    attention = type(model.model.layers[0].self_attn)
    hidden = type(attention.__name__, (attention,), {"__call__": lambda *a, **k: None})
    for layer in model.model.layers:
        layer.self_attn.__class__ = hidden
    assert RowByRow(model).swaps() == []


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_on_cuda_few_columns_are_told_where_their_rows_end(
    tiny_target: Any, monkeypatch: pytest.MonkeyPatch, family: str, plainly: Any
) -> None:
    """With the kernel's contract in its place, a batch gives what it gives without."""
    target, _ = tiny_target(family)
    vocab, lengths = target.info.vocab_size, [3, 40, 17]
    prompts = mx.random.randint(0, vocab, (3, 40), key=mx.random.key(0))
    block = mx.random.randint(0, vocab, (3, 4), key=mx.random.key(1))
    calls: list[list[int]] = []

    def told(queries: Any, keys: Any, values: Any, ends: mx.array, scale: float) -> mx.array:
        calls.append(ends.tolist())  # type: ignore[arg-type]
        return plainly(queries, keys, values, ends, scale)

    def decoded() -> list[mx.array]:
        state = target.new_state(3)
        target.forward(prompts, state, logits="none", valid=lengths)
        state.commit(lengths)
        first = target.forward(block, state, valid=[4, 2, 4]).logits
        state.commit([1, 2, 4])
        second = target.forward(block[:, :1], state).logits
        state.commit([1, 1, 1])
        assert first is not None
        assert second is not None
        return [first, second]

    want = decoded()
    monkeypatch.setattr(layers, "on_cuda", lambda: True)
    monkeypatch.setattr(flash_decode, "serves", lambda queries, keys, values: True)
    monkeypatch.setattr(flash_decode, "attend", told)
    got = decoded()
    ends = [call for index, call in enumerate(calls) if not index or calls[index - 1] != call]
    assert ends == [[7, 44, 21], [5, 43, 22]]
    for ours, theirs in zip(got, want, strict=True):
        assert mx.allclose(ours, theirs, atol=2e-5)


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3"])
def test_on_cuda_too_a_model_attends_apart_however_it_names_its_arguments(
    make_target: Any, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """gpt-oss gives its scale by position."""
    monkeypatch.setattr(layers, "on_cuda", lambda: True)
    target, _ = make_target(family)
    assert target.info.tappable
    assert target.batch_refused == ""
    assert target._runner._bones.options.waste is None


def test_what_is_not_proven_is_not_used(make_target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention that cannot be exchanged costs its speed, not the model."""

    def broken(own: Any) -> Any:
        def attend(*args: Any, **kwargs: Any) -> mx.array:
            raise TypeError("no such arguments")

        return attend

    monkeypatch.setattr(layers, "on_cuda", lambda: True)
    monkeypatch.setattr(attention, "_row_by_row", broken)
    target, _ = make_target("qwen3")
    assert target.batch_refused == ""
    assert target._runner._bones.options.waste == math.inf
    state = target.new_state(2)
    target.forward(mx.array([[1, 2, 3], [4, 5, 6]]), state)
    state.commit([1, 3])
