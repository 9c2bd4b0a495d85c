"""Rotary angles that the layers of a forward share.

On a CPU `mx.fast.rope` is not one kernel but some thirty small operations, and half of them work
out the angles: the same ones for the queries, and for the keys, of every layer. Here they are
worked out once a forward, by the same operations, so that every bit stays as it is.
"""

from __future__ import annotations

import math

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.positional_encoding import RoPE

from spec_core.device import backend
from spec_targets.swap import Swap

Angles = tuple[mx.array, mx.array]
"""Cosines and sines, in the shape of half the features."""


class SharedAngles:
    """The swaps under which a model's rotary embeddings share their angles; none on a GPU.

    `clear` after each forward.
    """

    def __init__(self, model: Module) -> None:
        modules: list[Module] = model.modules()  # type: ignore[no-untyped-call]
        self.swaps: list[Swap] = []
        if backend() == "cpu":
            self.swaps = [(m, self) for m in modules if type(m) is RoPE and not m.traditional]
        self._known: dict[tuple[object, ...], Angles] = {}
        self._offset: int | mx.array = 0
        self._class = _sharing(self)

    def of(self, cls: type) -> type:
        """The subclass of RoPE that asks for angles here."""
        return self._class

    def clear(self) -> None:
        self._known = {}

    def angles(self, rope: RoPE, x: mx.array, offset: int | mx.array) -> Angles:
        """For [B, heads, T, dim] whose first column stands at `offset` (an int, or [B])."""
        if offset is not self._offset:
            self._known, self._offset = {}, offset
        key = (rope.dims, rope.base, rope.scale, x.dtype, x.shape)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = _angles(rope, x, offset)
        return known


def _sharing(shared: SharedAngles) -> type:
    class Sharing(RoPE):
        def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
            if x.ndim != 4:
                rotated: mx.array = super().__call__(x, offset)  # type: ignore[arg-type]
                return rotated
            cosines, sines = shared.angles(self, x, offset)
            half = self.dims // 2
            first, second = x[..., :half], x[..., half : self.dims]
            turned = [
                first * cosines - second * sines,
                first * sines + second * cosines,
            ]
            rest = [x[..., self.dims :]] if self.dims < x.shape[-1] else []
            return mx.concatenate([*turned, *rest], axis=-1)

    return Sharing


def _angles(rope: RoPE, x: mx.array, offset: int | mx.array) -> Angles:
    """Operation for operation as MLX's own, then spread over the heads."""
    *batch, columns, _ = x.shape
    half = rope.dims // 2
    if isinstance(offset, mx.array) and offset.size > 1:
        offset = offset[:, None, None]
    positions = (mx.arange(columns, dtype=mx.float32) + offset) * rope.scale
    frequencies = mx.exp(mx.arange(0, -half, -1, dtype=mx.float32) * (math.log(rope.base) / half))
    theta = positions[..., None] * frequencies
    shape = (*batch, columns, half)
    cosines, sines = mx.cos(theta).astype(x.dtype), mx.sin(theta).astype(x.dtype)
    return mx.broadcast_to(cosines, shape), mx.broadcast_to(sines, shape)
