"""Layers that multiply the same input, as one product.

Queries, keys and values are three products with one input, gate and up are two. For a few rows
the device is done with each before the host has asked for the next, so that fewer and larger
products are faster. The layers of mlx-lm's model stay where they are: the one that is called first
multiplies for all, the others take their part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear

from spec_core import packed, skinny
from spec_core.packed import Packed

TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of layers that a module calls with the same input, if it has them all."""

Product = Callable[[mx.array], list[mx.array]]
"""Every layer's product with [..., inputs]."""


class Siblings:
    """What the layers of one group share: a product, until each of them has taken its part.

    A part is given only for the very array that was multiplied, so nothing has to be known of the
    model's code. Where an input is followed by another one before all parts of it were taken, the
    layers are no siblings after all: from then on each multiplies by itself.
    """

    def __init__(self, multiply: Product) -> None:
        self._multiply: Product | None = multiply
        self._input: mx.array | None = None
        self._parts: dict[int, mx.array] = {}

    def part(self, place: int, x: mx.array) -> mx.array | None:
        """The product of the layer in this place with x, or None: it has to multiply by itself."""
        if x is not self._input:
            if self._parts:
                self.part_for_good()
            if self._multiply is None:
                return None
            self._parts = dict(enumerate(self._multiply(x)))
            self._input = x
        part = self._parts.pop(place, None)
        if not self._parts:
            self._input = None
        return part

    def part_for_good(self) -> None:
        """From now on each layer multiplies by itself: they have other weights, or other inputs."""
        self._multiply = None
        self.forget()

    def forget(self) -> None:
        """Let go of what was not taken: the forward was given up."""
        self._input, self._parts = None, {}


def siblings_of(model: Module) -> list[Siblings]:
    """What the layers of a model share."""
    modules: list[Module] = model.modules()  # type: ignore[no-untyped-call]
    found = [getattr(module, "siblings", None) for module in modules]
    return list({id(each): each for each in found if isinstance(each, Siblings)}.values())


def groups(model: Module) -> Iterator[list[Any]]:
    """Layers that may be siblings, by name."""
    modules: list[Module] = model.modules()  # type: ignore[no-untyped-call]
    for module in modules:
        for names in TOGETHER:
            found = [module.get(name) for name in names]
            if all(isinstance(each, Module) for each in found):
                yield found


def joined(members: Sequence[Any], name: str) -> mx.array:
    """The members' arrays of this name as one; theirs become views of it."""
    bounds = [0, *accumulate(member[name].shape[0] for member in members)]
    whole = mx.concatenate([member[name] for member in members])
    mx.eval(whole)
    for member, (begin, end) in zip(members, pairwise(bounds), strict=True):
        member[name] = whole[begin:end]
        mx.eval(member[name])
    return whole


_PACKING = ("bits", "group_size", "mode")
"""What quantised layers have to agree on besides."""


def alike(members: Sequence[Any]) -> bool:
    """Whether the members agree on their class, their inputs, types and packing, and on which
    arrays they have."""

    def signature(member: Any) -> tuple[object, ...]:
        arrays = [(name, held) for name, held in member.items() if isinstance(held, mx.array)]
        kinds = tuple((name, array.dtype, array.shape[1:]) for name, array in arrays)
        return (type(member), kinds, *(getattr(member, fact, None) for fact in _PACKING))

    return len({signature(member) for member in members}) == 1


def dense_product(members: Sequence[Linear]) -> Product:
    """Of alike layers: by `spec_core.skinny` for a few rows, else by MLX."""
    widths = [member.weight.shape[0] for member in members]
    ends = list(accumulate(widths))[:-1]
    weight = joined(members, "weight")
    columns = weight.T
    bias = joined(members, "bias") if "bias" in members[0] else None

    def multiply(x: mx.array) -> list[mx.array]:
        if skinny.serves(x, weight):
            products = skinny.multiply_apart(x, weight, widths)
            if bias is None:
                return products
            return [p + m.bias for p, m in zip(products, members, strict=True)]
        product = x @ columns if bias is None else mx.addmm(bias, x, columns)
        return list(mx.split(product, ends, axis=-1))

    return multiply


def quantised_product(members: Sequence[Any]) -> Product:
    """Of alike layers with quantised weights, as `spec_core.packed` does it."""
    widths = [member["scales"].shape[0] for member in members]
    matrix = matrix_of(members[0], lambda name: joined(members, name))
    bias = joined(members, "bias") if "bias" in members[0] else None

    def multiply(x: mx.array) -> list[mx.array]:
        products = packed.multiply_apart(x, matrix, widths)
        if bias is None:
            return products
        return [p + m.bias for p, m in zip(products, members, strict=True)]

    return multiply


def matrix_of(layer: Any, array: Callable[[str], mx.array] | None = None) -> Packed:
    """The quantised weights of a layer, or of as many as `array` has joined by name."""
    array = array or layer.__getitem__
    return Packed(
        weight=array("weight"),
        scales=array("scales"),
        biases=array("biases") if layer.get("biases") is not None else None,
        group_size=layer.group_size,
        bits=layer.bits,
        mode=layer.mode,
    )
