"""What an autoregressive drafter remembers: keys and values of its rows, and the newest tap row.

Row i of the drafter joins the fused taps of position i with the token of position i + 1, so it
can only be computed once that token is known. A state that was told n positions holds n - 1
rows, and the fused taps of its last position, which wait for the next token: the anchor.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

import mlx.core as mx

from spec_core.errors import SeamError, UnsupportedError
from spec_core.kv import KVRows, RowClock
from spec_core.seams import PerToken, RowState, StateImage
from spec_drafters.backbone import KeysValues
from spec_drafters.rope import Offset
from spec_drafters.spec import EagleSpec

_NEWEST = "fused"
_PLANES = ("keys", "values")


class EagleState:
    """The rows of B texts.

    A text may begin at a position above 0 (`origins`), of which nothing before is known.

    Args:
        spec: sizes.
        dtype: of everything stored.
        rows: B.
        start: the first position that will be told.
    """

    def __init__(self, spec: EagleSpec, dtype: mx.Dtype, rows: int, start: int = 0) -> None:
        self._spec = spec
        self._clock = RowClock(rows)
        self._cache = KVRows(self._clock)
        self._origins = [start] * rows
        self._told = [0] * rows
        # [B, W, H]: fused taps of the newest W positions; more than one in a state of one row only.
        self._fused = mx.zeros((rows, 1, spec.hidden_size), dtype=dtype)

    @property
    def rows(self) -> int:
        return self._clock.rows

    @property
    def lengths(self) -> list[int]:
        """Positions of each text, counted from 0 even where it began later."""
        return [o + n for o, n in zip(self._origins, self._told, strict=True)]

    @property
    def begun(self) -> list[bool]:
        """Whether a text has fused taps that wait for their token."""
        return [n > 0 for n in self._told]

    @property
    def waiting(self) -> mx.array:
        """[B, H] fused taps of the last position; zeros where nothing was told."""
        return self._fused[:, -1]

    @property
    def depths(self) -> list[int]:
        """Rows in the cache."""
        return self._clock.lengths

    def offset(self) -> Offset:
        """The position of the next row: one int if all texts agree, else [B] int32."""
        places = [o + n for o, n in zip(self._origins, self._clock.lengths, strict=True)]
        return places[0] if len(set(places)) == 1 else mx.array(places, dtype=mx.int32)

    def pair(self, fused: mx.array, tokens: mx.array) -> tuple[mx.array, mx.array]:
        """Rows that new positions complete: fused taps [B, T', H] with the tokens after them.

        Args:
            fused: [B, T, H] of the new positions.
            tokens: [B, T] at them; the first one completes the row that waits.
        """
        stream, columns = mx.concatenate([self.waiting[:, None], fused], axis=1), tokens.shape[1]
        if all(self.begun):
            return stream[:, :columns], tokens
        if not any(self.begun):
            return fused[:, : columns - 1], tokens[:, 1:]
        # Texts that just began have no row for their first token: theirs are one column ahead.
        # What the last column repeats is never kept.
        first = mx.array([not begun for begun in self.begun], dtype=mx.int32)[:, None]
        index = mx.minimum(first + mx.arange(columns, dtype=mx.int32), columns - 1)
        paired = mx.take_along_axis(stream, index[..., None], axis=1)
        return paired, mx.take_along_axis(tokens, index, axis=1)

    def extend(self, rows: KeysValues | None, fused: mx.array, keep: Sequence[int]) -> None:
        """Append paired rows of the first keep[b] new positions.

        Args:
            rows: keys and values [B, heads, T', D] of what `pair` gave; None for no column.
            fused: [B, T, H] of the new positions.
            keep: how many of them are kept, in each text.
        """
        if rows is not None:
            self._clock.begin(rows[0].shape[2])
            self._cache.append(*rows)
            self._clock.commit(
                [max(0, k - (not begun)) for k, begun in zip(keep, self.begun, strict=True)]
            )
        if self.rows == 1:
            self._fused = fused[:, : keep[0]] if keep[0] else self._fused
        else:
            stream = mx.concatenate([self.waiting[:, None], fused], axis=1)
            index = mx.array(list(keep), dtype=mx.int32)[:, None, None]
            self._fused = mx.take_along_axis(stream, index, axis=1)
        self._told = [n + k for n, k in zip(self._told, keep, strict=True)]

    def provisional(self, keys: mx.array, values: mx.array) -> KeysValues:
        """Write one row [B, heads, 1, D] behind each text's own, to be overwritten later; gives
        the buffers [B, heads, longest + 1, D], for use at once."""
        return self._cache.append(keys, values)

    def select(self, rows: Sequence[int]) -> None:
        """Keep these texts, in this order. Raises SeamError unless they are distinct rows."""
        self._clock.check_rows(rows)
        self._cache.select(rows)
        self._clock.select(rows)
        self._origins = [self._origins[row] for row in rows]
        self._told = [self._told[row] for row in rows]
        self._fused = self._fused[mx.array(list(rows), dtype=mx.int32)]

    def join(self, other: RowState) -> None:
        """Append the texts of another state of the same drafter. Raises SeamError otherwise."""
        if not isinstance(other, EagleState) or other._spec != self._spec:
            raise SeamError(f"a {type(other).__name__} of another drafter cannot join this one")
        self._cache.join(other._cache)
        self._clock.join(other._clock)
        self._origins = self._origins + other._origins
        self._told = self._told + other._told
        self._fused = mx.concatenate([self._fused[:, -1:], other._fused[:, -1:]])

    def image(self, row: int, start: int = 0) -> StateImage:
        """Arrays "keys", "values" and "fused", [positions, ...].

        Entry i of the first two is the row that the token at i completed, so that each entry
        depends on the text up to its own position only; there is none at a text's beginning.

        Raises:
            UnsupportedError: the text was never told the positions from `start` on.
            SeamError: `start` lies beyond its length.
        """
        origin, length = self._origins[row], self.lengths[row]
        if start < origin:
            raise UnsupportedError(
                f"row {row} began at position {origin}; it has no image from position {start}"
            )
        if start > length:
            raise SeamError(f"row {row} has {length} positions; it has no image from {start}")
        if length == origin:
            return StateImage(start, length)
        window = self._fused.shape[1]
        newest = self._fused[row, window - min(window, length - start) :]
        arrays = {_NEWEST: PerToken(mx.contiguous(newest), 1)}
        shape = (int(start == origin), self._spec.num_kv_heads, self._spec.head_dim)
        blank = mx.zeros(shape, dtype=newest.dtype)
        held = self._cache.image(row, max(start - origin - 1, 0))
        for name in _PLANES:
            parts = [blank, held[name]] if name in held else [blank]
            arrays[name] = PerToken(mx.concatenate(parts))
        mx.eval([entry.array for entry in arrays.values()])
        return StateImage(start, length, MappingProxyType(arrays))

    def restore(self, row: int, image: StateImage) -> None:
        """Write an image into an empty row.

        Raises:
            SeamError: the row is not empty, or the image does not hold the whole text.
        """
        if self._told[row] or self._origins[row]:
            raise SeamError(f"row {row} has {self.lengths[row]} positions; restore needs none")
        if image.start:
            raise SeamError(f"the image starts at position {image.start}; it must start at 0")
        if not image.length:
            return
        if image.length > 1:
            planes = {name: _whole(image, name)[1:] for name in _PLANES}
            self._cache.restore(row, planes)
        self._clock.lengths[row] = image.length - 1
        self._told[row] = image.length
        newest = _entry(image, _NEWEST)[-1:]
        others = self._fused[:, -1:]
        self._fused = mx.concatenate([others[:row], newest[None], others[row + 1 :]])

    def pending(self) -> Sequence[mx.array]:
        return [*self._cache.pending(), self._fused]


def _entry(image: StateImage, name: str) -> mx.array:
    entry = image.per_token.get(name)
    if entry is None or not entry.array.shape[0]:
        raise SeamError(f"the image has no array {name}")
    return entry.array


def _whole(image: StateImage, name: str) -> mx.array:
    array = _entry(image, name)
    if array.shape[0] != image.length:
        raise SeamError(f"the image's {name} holds {array.shape[0]} of {image.length} positions")
    return array
