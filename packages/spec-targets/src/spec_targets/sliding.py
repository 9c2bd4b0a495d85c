"""Sliding attention: looks like mlx-lm's RotatingKVCache, stores in a ring with slack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from spec_core.ring import RingRows
from spec_core.seams import PerToken
from spec_targets.errors import UnsupportedTargetError
from spec_targets.layers import Frame, LayerCache, LayerImage, LayerOptions, Mask


class SlidingLayer:
    """A layer that sees the newest `window` positions. Its mask is over the ring's slots.

    Args:
        frame: the state's.
        window: position p sees p - window + 1 .. p.
        slack: as for `spec_core.ring.Ring`.
    """

    __slots__ = ("_frame", "_rows")

    def __init__(self, frame: Frame, window: int, slack: int | None = None) -> None:
        self._frame = frame
        self._rows = RingRows(frame.ring(window, slack))

    # Towards the model.

    @property
    def offset(self) -> int | mx.array:
        return self._frame.offset

    @property
    def max_size(self) -> int:
        return self._rows.ring.window

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return self._rows.append(keys, values)

    def make_mask(
        self, columns: int, return_array: bool = False, window_size: int | None = None
    ) -> Mask:
        return self._rows.ring.mask(columns, window_size, return_array)

    # Towards the state.

    def begin(self, columns: int) -> None:
        pass

    def commit(self, keep: Sequence[int]) -> None:
        self._rows.commit(keep)

    def select(self, rows: Sequence[int]) -> None:
        self._rows.select(rows)

    def join(self, other: SlidingLayer) -> None:
        self._rows.join(other._rows)

    def image(self, row: int, start: int) -> LayerImage:
        reach = self._rows.ring.window - 1
        arrays = self._rows.image(row, start)
        return LayerImage({name: PerToken(array, reach) for name, array in arrays.items()})

    def restore(self, row: int, image: LayerImage, start: int, length: int) -> None:
        arrays = {name: each.array for name, each in image.per_token.items()}
        self._rows.restore(row, arrays, length)

    def pending(self) -> Sequence[mx.array]:
        return self._rows.pending()


def sliding_layer(like: Any, frame: Frame, options: LayerOptions) -> LayerCache:
    """A layer cache in place of mlx-lm's RotatingKVCache.

    Raises UnsupportedTargetError if the model wants its first positions kept beyond the window.
    """
    if like.keep:
        raise UnsupportedTargetError(
            f"the model wants its first {like.keep} positions kept beyond a window of "
            f"{like.max_size}, which no ring here does"
        )
    return SlidingLayer(frame, like.max_size, options.slack)
