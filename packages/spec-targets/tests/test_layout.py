"""Weights stored by columns: the same numbers, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn

from spec_core import packed
from spec_targets import layout, target


class Tiny(nn.Module):
    """An embedding, a layer, and perhaps a head of its own."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.model = SimpleModel()
        if not tied:
            self.lm_head = nn.Linear(24, 40, bias=False)

    @property
    def layers(self) -> list[nn.Module]:
        layers: list[nn.Module] = self.model.layers
        return layers

    def __call__(self, tokens: mx.array) -> mx.array:
        hidden = self.model(tokens)
        head: Callable[[mx.array], mx.array] = (
            self.lm_head if "lm_head" in self else self.model.embed_tokens.as_linear
        )
        return head(hidden)


class SimpleModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(40, 24)
        self.layers = [nn.Linear(24, 24, bias=False), nn.Linear(24, 24, bias=False)]

    def __call__(self, tokens: mx.array) -> mx.array:
        hidden = self.embed_tokens(tokens)
        for layer in self.layers:
            hidden = nn.silu(layer(hidden))
        return hidden


def by_columns(array: mx.array) -> bool:
    """Whether its transpose is stored row by row."""
    strides: tuple[int, ...] = memoryview(array).strides  # type: ignore[assignment]
    return strides[0] < strides[1]


@pytest.fixture
def preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "blas", SimpleNamespace(prefers_columns=lambda: True))


@pytest.mark.usefixtures("preferred")
@pytest.mark.parametrize("tied", [True, False])
def test_the_same_logits_and_only_factors_of_products_move(tied: bool) -> None:
    mx.random.seed(3)
    model, tokens = Tiny(tied), mx.array([[1, 5, 39, 0, 7]])
    before = model(tokens)
    mx.eval(before)
    layout.lay_out(model)
    assert mx.array_equal(model(tokens), before)
    assert all(by_columns(layer["weight"]) for layer in model.layers)
    assert by_columns(model.model.embed_tokens["weight"]) == tied
    assert tied or by_columns(model.lm_head["weight"])


def test_a_bias_is_added_to_the_same_sums() -> None:
    linear, inputs = nn.Linear(256, 64), mx.random.normal((3, 256))
    before = linear(inputs)
    mx.eval(before)
    layout._by_columns(linear)
    assert mx.allclose(linear(inputs), before, rtol=0.0, atol=1e-6)


@pytest.mark.usefixtures("preferred")
@pytest.mark.parametrize("rows", [2, 3, 5, 8, 17])
@pytest.mark.parametrize(("inner", "outer"), [(24, 40), (256, 704), (576, 192)])
def test_rows_stay_what_they_are_alone(inner: int, outer: int, rows: int) -> None:
    """What makes greedy output the same at every draft length."""
    linear = nn.Linear(inner, outer)
    layout._by_columns(linear)
    inputs = mx.random.normal((1, rows, inner))
    together = linear(inputs)
    for row in range(rows):
        assert mx.array_equal(linear(inputs[:, row : row + 1]), together[:, row : row + 1])


@pytest.mark.usefixtures("preferred")
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_other_types_stay_as_they_are(dtype: mx.Dtype) -> None:
    model = Tiny(tied=True)
    model.set_dtype(dtype)
    layout.lay_out(model)
    assert not by_columns(model.layers[0]["weight"].view(mx.uint16))


def test_where_columns_are_not_preferred_nothing_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "blas", SimpleNamespace(prefers_columns=lambda: False))
    model = Tiny(tied=True)
    mx.eval(model.parameters())
    layout.lay_out(model)
    assert not by_columns(model.layers[0]["weight"])


def test_on_cuda_quantised_layers_multiply_as_packed_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(40, 64)
            self.linear = nn.Linear(64, 64)

        def __call__(self, tokens: mx.array) -> mx.array:
            return self.table.as_linear(self.linear(self.table(tokens)))

    model = Pair()
    nn.quantize(model, group_size=32, bits=8)
    before = [mx.zeros((rows, 2), dtype=mx.int32) + mx.arange(2) for rows in (1, 3, 8)]
    expected = [model(tokens) for tokens in before]
    monkeypatch.setattr(layout, "on_cuda", lambda: True)
    layout.lay_out(model)
    assert type(model.linear) is layout.PackedLinear
    assert type(model.table) is layout.PackedEmbedding
    for tokens, logits in zip(before, expected, strict=True):
        assert mx.array_equal(model(tokens), logits)


@pytest.mark.parametrize(("bits", "cost"), [(8, False), (6, True), (None, False)])
def test_columns_are_added_for_packings_that_have_no_kernel(
    make_target: Any, monkeypatch: pytest.MonkeyPatch, bits: int | None, cost: bool
) -> None:
    monkeypatch.setattr(target, "on_cuda", lambda: True)
    monkeypatch.setattr(packed, "on_cuda", lambda: True)
    model = make_target("qwen3", weight_bits=bits, dtype=mx.bfloat16)[0]._runner._model
    assert target._columns_cost(model) is cost
