"""Matrices and lookup tables, dense or quantised, laid out for the device they run on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from spec_core import blas, packed, skinny
from spec_core.packed import Packed

GROUP_SIZES = (64, 32)


@dataclass(frozen=True, slots=True)
class Precision:
    """What weights are held in.

    Attributes:
        dtype: of dense weights and of all activations.
        bits: 4 or 8 to quantise matrices (affine, groups of 64, or 32 where 64 does not divide
            the inner size; a matrix that neither divides stays dense); None: dense.
    """

    dtype: mx.Dtype
    bits: int | None = None

    def group_size(self, inner: int) -> int | None:
        """The group size for a matrix with this many columns, or None to leave it dense."""
        if self.bits is None:
            return None
        return next((g for g in GROUP_SIZES if inner % g == 0), None)


class Linear(Protocol):
    """y = x W^T, or one such product for each matrix of a stack [L, out, in]."""

    def __call__(self, x: mx.array) -> mx.array: ...

    def __getitem__(self, index: int) -> Linear:
        """One matrix of a stack; shares its memory."""


class Table(Protocol):
    """Rows looked up by token id."""

    def __call__(self, ids: mx.array) -> mx.array:
        """[...] ids to [..., columns] rows."""


@dataclass(frozen=True, slots=True)
class _Dense:
    transposed: mx.array

    def __call__(self, x: mx.array) -> mx.array:
        return x @ self.transposed

    def __getitem__(self, index: int) -> Linear:
        return _Dense(self.transposed[index])


@dataclass(frozen=True, slots=True)
class _Skinny:
    """A dense matrix or stack; one matrix multiplies a few rows by the kernel for such."""

    weight: mx.array

    def __call__(self, x: mx.array) -> mx.array:
        if skinny.serves(x, self.weight):
            return skinny.multiply(x, self.weight)
        return x @ self.weight.swapaxes(-1, -2)

    def __getitem__(self, index: int) -> Linear:
        return _Skinny(self.weight[index])


@dataclass(frozen=True, slots=True)
class _Quantized:
    matrix: Packed

    def __call__(self, x: mx.array) -> mx.array:
        return packed.multiply(x, self.matrix, fill=True)

    def __getitem__(self, index: int) -> Linear:
        return _Quantized(self.matrix[index])


@dataclass(frozen=True, slots=True)
class _Biased:
    """y = x W^T + b; b is [out], or [L, out] for a stack."""

    linear: Linear
    bias: mx.array

    def __call__(self, x: mx.array) -> mx.array:
        bias = self.bias if self.bias.ndim == 1 else self.bias[:, None]
        return self.linear(x) + bias

    def __getitem__(self, index: int) -> Linear:
        return _Biased(self.linear[index], self.bias[index])


@dataclass(frozen=True, slots=True)
class _DenseTable:
    weight: mx.array

    def __call__(self, ids: mx.array) -> mx.array:
        return self.weight[ids]


@dataclass(frozen=True, slots=True)
class _QuantizedTable:
    matrix: Packed

    def __call__(self, ids: mx.array) -> mx.array:
        rows = self.matrix[ids]
        return mx.dequantize(
            rows.weight, rows.scales, rows.biases, group_size=rows.group_size, bits=rows.bits
        )


class Weights:
    """A checkpoint's tensors on their way into a model: each is taken once, and what is made of
    it is evaluated at once, so that a load needs little more memory than the model.

    Args:
        tensors: arrays by DeepSpec name; emptied as they are taken.
        precision: what they become.
        prefix: put before every name asked for.
    """

    def __init__(
        self, tensors: dict[str, mx.array], precision: Precision, prefix: str = ""
    ) -> None:
        self._tensors = tensors
        self._prefix = prefix
        self.precision = precision

    def under(self, prefix: str) -> Weights:
        return Weights(self._tensors, self.precision, self._prefix + prefix)

    def raw(self, name: str, dtype: mx.Dtype | None = None) -> mx.array:
        """A tensor in this dtype (the model's, if None), lazy."""
        return self._tensors.pop(self._prefix + name).astype(dtype or self.precision.dtype)

    def vector(self, name: str, dtype: mx.Dtype | None = None) -> mx.array:
        """A tensor that is used as it is."""
        array = self.raw(name, dtype)
        mx.eval(array)
        return array

    def linear(self, *names: str, biased: bool = False) -> Linear:
        """A matrix [out, in], or several with the same input as one, `biased` or not."""
        return _with_bias(
            self._joined(names, "weight"),
            self._joined(names, "bias") if biased else None,
            self.precision,
        )

    def _joined(self, names: Sequence[str], kind: str) -> mx.array:
        arrays = [self.raw(f"{name}.{kind}") for name in names]
        return arrays[0] if len(arrays) == 1 else mx.concatenate(arrays)

    def stack(self, layers: Sequence[str], names: Sequence[str], biased: bool = False) -> Linear:
        """The same matrices of several layers, [L, out, in]; `layers` are prefixes."""
        each = [self.under(layer) for layer in layers]
        return _with_bias(
            mx.stack([at._joined(names, "weight") for at in each]),
            mx.stack([at._joined(names, "bias") for at in each]) if biased else None,
            self.precision,
        )

    def table(self, name: str) -> Table:
        """A lookup table [ids, columns]."""
        weight = self.raw(name)
        group_size = self.precision.group_size(weight.shape[-1])
        if group_size is not None:
            return _QuantizedTable(_packed(weight, group_size, self.precision))
        mx.eval(weight)
        return _DenseTable(weight)

    def left(self) -> list[str]:
        """Names that nobody took."""
        return sorted(self._tensors)


def _with_bias(weight: mx.array, bias: mx.array | None, precision: Precision) -> Linear:
    matrix = linear(weight, precision)
    if bias is None:
        return matrix
    mx.eval(bias)
    return _Biased(matrix, bias)


def linear(weight: mx.array, precision: Precision) -> Linear:
    """A matrix [out, in], or a stack of them [L, out, in], evaluated."""
    weight = weight.astype(precision.dtype)
    group_size = precision.group_size(weight.shape[-1])
    if group_size is not None:
        return _Quantized(_packed(weight, group_size, precision))
    if skinny.fits(weight):
        mx.eval(weight)
        return _Skinny(weight)
    transposed = weight.swapaxes(-1, -2)
    if precision.dtype == mx.float32 and blas.prefers_columns():
        transposed = mx.contiguous(transposed)
    mx.eval(transposed)
    return _Dense(transposed)


def _packed(weight: mx.array, group_size: int, precision: Precision) -> Packed:
    assert precision.bits is not None
    weight, scales, biases = mx.quantize(weight, group_size=group_size, bits=precision.bits)
    mx.eval(weight, scales, biases)
    return Packed(weight, scales, biases, group_size, precision.bits)
