"""Layers that multiply the same input share a product, and give what each gives alone."""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import SimpleNamespace

import mlx.core as mx
import pytest
from mlx import nn

from spec_targets import layout, siblings
from spec_targets.siblings import Siblings


class Attention(nn.Module):
    """Queries of one input, keys and values of the same or another one."""

    def __init__(self, bias: bool = False, keys: int = 32) -> None:
        super().__init__()
        self.q_proj = nn.Linear(64, 64, bias=bias)
        self.k_proj = nn.Linear(64, keys, bias=bias)
        self.v_proj = nn.Linear(64, keys, bias=bias)

    def __call__(self, x: mx.array, other: mx.array | None = None) -> list[mx.array]:
        y = x if other is None else other
        return [self.q_proj(x), self.k_proj(y), self.v_proj(y)]


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(64, 96, bias=False)
        self.up_proj = nn.Linear(64, 96, bias=False)

    def __call__(self, x: mx.array) -> list[mx.array]:
        return [self.gate_proj(x), self.up_proj(x)]


@pytest.fixture(autouse=True)
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense layers fit the kernel, which then serves no rows: there is none here."""
    kernel = SimpleNamespace(fits=lambda weight: True, serves=lambda x, weight: False)
    monkeypatch.setattr(layout, "on_cuda", lambda: True)
    monkeypatch.setattr(layout, "skinny", kernel)
    monkeypatch.setattr(siblings, "skinny", kernel)


def count_products(module: nn.Module) -> list[tuple[int, ...]]:
    """The inputs' shapes of the products that a module's layers share from here on."""
    seen: list[tuple[int, ...]] = []
    shared = next(iter(module.children().values())).siblings
    own = shared._multiply

    def multiply(x: mx.array) -> list[mx.array]:
        seen.append(x.shape)
        return own(x)

    shared._multiply = multiply
    return seen


def same(found: list[mx.array], expected: list[mx.array]) -> bool:
    return all(mx.array_equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("bits", [None, 4, 8])
@pytest.mark.parametrize("make", [Attention, lambda: Attention(bias=True), Gated])
def test_one_product_gives_what_each_layer_gives(
    make: Callable[[], nn.Module], bits: int | None
) -> None:
    mx.random.seed(4)
    module = make()
    if bits:
        nn.quantize(module, group_size=32, bits=bits)
    inputs = [mx.random.normal(shape) for shape in ((1, 1, 64), (1, 5, 64), (3, 1, 64), (2, 9, 64))]
    expected = [module(x) for x in inputs]
    mx.eval(expected)
    layout.lay_out(module)
    seen = count_products(module)
    for x, alone in zip(inputs, expected, strict=True):
        assert all(mx.allclose(a, b, atol=1e-5) for a, b in zip(module(x), alone, strict=True))
    assert seen == [x.shape for x in inputs]


def test_parameters_stay_what_they_were_and_lie_in_one_place() -> None:
    module = Attention(bias=True)
    nn.quantize(module, group_size=32, bits=8)
    mx.eval(module.parameters())
    before = {name: mx.array(held) for name, held in module.q_proj.items()}
    mx.eval(before)
    gc.collect()
    mx.clear_cache()  # a buffer from there may be larger than was asked for
    held = mx.get_active_memory()
    layout.lay_out(module)
    assert all(mx.array_equal(module.q_proj[name], array) for name, array in before.items())
    assert mx.get_active_memory() <= held + 4096


def test_layers_with_different_inputs_multiply_by_themselves() -> None:
    """Cross attention: found out at the first call, right all along."""
    module, x, y = Attention(), mx.random.normal((1, 1, 64)), mx.random.normal((1, 7, 64))
    expected = module(x, y)
    mx.eval(expected)
    layout.lay_out(module)
    seen = count_products(module)
    for _ in range(3):
        assert same(module(x, y), expected)
    assert seen == [x.shape]


def test_equal_inputs_are_not_the_same_input() -> None:
    """What is in an array may change; only the very array that was multiplied has a part."""
    shared = Siblings(lambda x: [x + 1, x + 2])
    x = mx.zeros((2,))
    assert mx.array_equal(shared.part(0, x), x + 1)
    assert shared.part(1, mx.zeros((2,))) is None


def test_an_input_can_come_again() -> None:
    """A layer that is called twice, and all of them with the input before."""
    shared = Siblings(lambda x: [x + 1, x + 2])
    x = mx.zeros((2,))
    for _ in range(2):
        assert mx.array_equal(shared.part(0, x), x + 1)
        assert shared.part(0, x) is None
        assert mx.array_equal(shared.part(1, x), x + 2)


@pytest.mark.parametrize(
    "change",
    [
        lambda module: setattr(module, "k_proj", nn.Linear(64, 32, bias=True)),
        lambda module: setattr(module, "k_proj", nn.Linear(32, 32, bias=False)),
        lambda module: module.v_proj.set_dtype(mx.float16),
        lambda module: setattr(module, "v_proj", nn.Identity()),
        lambda module: module.pop("v_proj"),
        lambda module: setattr(
            module, "q_proj", nn.QuantizedLinear.from_linear(module.q_proj, 32, 8)
        ),
    ],
)
def test_unlike_layers_stay_apart(change: Callable[[nn.Module], object]) -> None:
    module = Attention()
    change(module)
    layout.lay_out(module)
    assert not any(hasattr(layer, "siblings") for layer in module.children().values())


def test_quantised_alike_in_all_but_their_bits_stay_apart() -> None:
    module = Gated()
    module.gate_proj = nn.QuantizedLinear.from_linear(module.gate_proj, 32, 8)
    module.up_proj = nn.QuantizedLinear.from_linear(module.up_proj, 32, 4)
    layout.lay_out(module)
    assert type(module.gate_proj) is layout.PackedLinear


def test_new_weights_are_used() -> None:
    """Adapters and merges replace what was loaded."""
    module, x = Attention(), mx.random.normal((1, 2, 64))
    layout.lay_out(module)
    module(x)
    other = Attention(bias=False)
    expected = other(x)
    mx.eval(expected)
    module.k_proj.update({"weight": other.k_proj.weight})
    assert mx.array_equal(module(x)[1], expected[1])
    module.update(other.parameters())
    assert same(module(x), expected)


def test_a_forward_that_was_given_up_leaves_nothing_behind() -> None:
    module, x = Attention(), mx.random.normal((1, 2, 64))
    layout.lay_out(module)
    seen = count_products(module)
    module.q_proj(x)
    for shared in siblings.siblings_of(module):
        shared.forget()
    module(mx.zeros((1, 3, 64)))
    assert seen == [(1, 2, 64), (1, 3, 64)]
