"""How weights are stored and multiplied: as the device does it fastest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear

from spec_core import blas, packed, skinny
from spec_core.device import on_cuda
from spec_targets.anatomy import dissect
from spec_targets.siblings import (
    Product,
    Siblings,
    alike,
    dense_product,
    groups,
    matrix_of,
    quantised_product,
)


class PackedLinear(QuantizedLinear):
    """Multiplies as `spec_core.packed` does."""

    def __call__(self, x: mx.array) -> mx.array:
        if x.size == x.shape[-1]:  # one row is MLX's, without a detour
            alone: mx.array = super().__call__(x)  # type: ignore[no-untyped-call]
            return alone
        product = packed.multiply(x, matrix_of(self))
        return product + self.bias if "bias" in self else product


class PackedEmbedding(QuantizedEmbedding):
    """Serves as a head that multiplies as `spec_core.packed` does."""

    def as_linear(self, x: mx.array) -> mx.array:
        if x.size == x.shape[-1]:
            alone: mx.array = super().as_linear(x)  # type: ignore[no-untyped-call]
            return alone
        return packed.multiply(x, matrix_of(self))


class SkinnyLinear(Linear):
    """Multiplies a few rows by the kernel for such."""

    def __call__(self, x: mx.array) -> mx.array:
        if not skinny.serves(x, self.weight):
            return super().__call__(x)
        product = skinny.multiply(x, self.weight)
        return product + self.bias if "bias" in self else product


class Sharing(Module):
    """Takes its part of a product that it shares with its siblings, or multiplies by itself."""

    siblings: Siblings
    place: int

    def __call__(self, x: mx.array) -> mx.array:
        part = self.siblings.part(self.place, x)
        return super().__call__(x) if part is None else part

    def __setitem__(self, name: str, held: object) -> None:
        super().__setitem__(name, held)  # somebody gives the layer other weights
        self.siblings.part_for_good()


class SharingLinear(Sharing, SkinnyLinear):
    """A dense layer with siblings."""


class SharingPackedLinear(Sharing, PackedLinear):
    """A quantised layer with siblings."""


class SkinnyEmbedding(Embedding):
    """Serves as a head that multiplies a few rows by the kernel for such."""

    def as_linear(self, x: mx.array) -> mx.array:
        if skinny.serves(x, self.weight):
            return skinny.multiply(x, self.weight)
        head: mx.array = super().as_linear(x)  # type: ignore[no-untyped-call]
        return head


_PACKED: Mapping[type[Module], type[Module]] = MappingProxyType(
    {QuantizedLinear: PackedLinear, QuantizedEmbedding: PackedEmbedding}
)
_SKINNY: Mapping[type[Module], type[Module]] = MappingProxyType(
    {Linear: SkinnyLinear, Embedding: SkinnyEmbedding}
)
_SHARING: Mapping[type[Module], tuple[Callable[[Sequence[Any]], Product], type[Module]]] = (
    MappingProxyType(
        {
            SkinnyLinear: (dense_product, SharingLinear),
            PackedLinear: (quantised_product, SharingPackedLinear),
        }
    )
)


def lay_out(model: Module) -> None:
    """Store float32 matrices column by column where they are multiplied faster so; on CUDA multiply
    a few rows by kernels of our own, and one input with several matrices at once.

    One matrix at a time, so that a load needs the memory of one more. An embedding is among them
    where it serves as the head too.
    """
    modules: list[Module] = model.modules()  # type: ignore[no-untyped-call]
    if on_cuda():
        for module in modules:
            module.__class__ = _class_on_cuda(module)
        for members in groups(model):
            _share(members)
    elif blas.prefers_columns():
        head = _embedding_as_head(model)
        for module in modules:
            if isinstance(module, Linear) or module is head:
                _by_columns(module)


def _class_on_cuda(module: Module) -> type[Module]:
    """The class that multiplies as CUDA does it fastest."""
    kind = type(module)
    if kind in _SKINNY:
        return _SKINNY[kind] if skinny.fits(module.weight) else kind
    return _PACKED.get(kind, kind)


def _share(members: Sequence[Any]) -> None:
    """Let layers multiply together, if they can."""
    kind = type(members[0])
    if kind not in _SHARING or not alike(members):
        return
    product, shared = _SHARING[kind]
    siblings = Siblings(product(members))
    for place, member in enumerate(members):
        member.siblings, member.place = siblings, place
        member.__class__ = shared


def _by_columns(module: Module) -> None:
    weight = module["weight"]
    if weight.dtype == mx.float32 and weight.ndim == 2:
        transposed = mx.contiguous(weight.T)
        mx.eval(transposed)
        module["weight"] = transposed.T


def _embedding_as_head(model: Module) -> Module | None:
    if getattr(model, "layers", None) is None:
        return None
    parts = dissect(model)
    tied = parts.head is None and type(parts.embedding) is Embedding
    return parts.embedding if tied else None
