"""What a block drafter remembers: each layer's keys and values of the context, nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import mlx.core as mx

from spec_core.device import runs_beside_host
from spec_core.errors import SeamError, UnsupportedError
from spec_core.kv import KVRows, RowClock
from spec_core.seams import PerToken, RowState, StateImage
from spec_core.traces import Buffers, TracedClock
from spec_drafters.backbone import KeysValues, Pass, Sight
from spec_drafters.columns import joined
from spec_drafters.rope import Offset
from spec_drafters.spec import LayerAttention

Project = Callable[[Sequence[mx.array], Offset], Sequence[KeysValues]]

_MOST_WAITING, _GROUP = 256, 32
"""Columns that may wait on a CPU, and on a GPU."""


@dataclass(frozen=True, slots=True)
class Lent:
    """What the device knows of a state; whoever keeps a buffer makes MLX copy it.

    Attributes:
        starts: [B] context columns of each row.
        offset: [B] the position of each row's first slot.
        buffers: keys and values of each layer.
    """

    starts: mx.array
    offset: mx.array
    buffers: Buffers

    def block_pass(self, slots: int) -> Pass:
        """The pass over these very buffers, to be traced."""
        clock = TracedClock.over(self.starts, slots, self.buffers)
        caches = [KVRows(clock) for _ in self.buffers]
        for cache, pair in zip(caches, self.buffers, strict=True):
            cache.take(pair)
        return Pass(Sight(clock, slots), self.offset, caches)


class BlockState:
    """Context rows of B rows, in every layer.

    A row may begin at a position above 0 (`origins`): column c of its buffers then holds
    position origin + c, so that what was never seen takes no room and needs no mask.

    Columns that come one by one, as in plain decoding, wait until they are needed or many, and are
    projected together: alone each would cost as much as all of them, and a row that never drafts
    again needs none. A GPU plans its work anew for every new shape, which takes longer than the
    work: there every such group is filled up to one size, and columns that are not kept are
    projected with those that are.

    Args:
        attention: of each layer.
        project: tapped columns and the position of the first to keys and values.
        rows: B.
        start: the first position that will be told.
    """

    def __init__(
        self, attention: Sequence[LayerAttention], project: Project, rows: int, start: int = 0
    ) -> None:
        self._project = project
        self._waiting: list[Sequence[mx.array]] = []
        self._fixed_shapes = runs_beside_host()
        self._most_waiting = _GROUP if self._fixed_shapes else _MOST_WAITING
        self._attention = tuple(attention)
        self._clock = RowClock(rows)
        self._origins = [start] * rows
        self._caches = [KVRows(self._clock) for _ in self._attention]

    @property
    def rows(self) -> int:
        return self._clock.rows

    @property
    def lengths(self) -> list[int]:
        """Positions of each row, counted from 0 even where the row began later."""
        waiting = len(self._waiting)
        return [o + n + waiting for o, n in zip(self._origins, self._clock.lengths, strict=True)]

    def extend(self, taps: Sequence[mx.array], keep: Sequence[int]) -> None:
        """Append the first keep[b] columns of row b; taps are [B, columns, H]. Lazy."""
        if max(keep) < taps[0].shape[1] and not self._fixed_shapes:
            taps = [tap[:, : max(keep)] for tap in taps]
        if taps[0].shape[1] == 1 and all(keep):
            self._waiting.append(taps)
            if len(self._waiting) == self._most_waiting:
                self.settle()
            return
        self.settle()
        self._append(taps, keep)

    def settle(self) -> None:
        """Project what waits. Lazy."""
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            count = len(waiting)
            if self._fixed_shapes:
                waiting += waiting[-1:] * (self._most_waiting - count)
            self._append(joined(waiting), [count] * self.rows)

    def _append(self, taps: Sequence[mx.array], keep: Sequence[int]) -> None:
        context = self._project(taps, self._offset())
        self._clock.begin(taps[0].shape[1])
        for cache, (keys, values) in zip(self._caches, context, strict=True):
            cache.append(keys, values)
        self._clock.commit(keep)

    def _offset(self) -> Offset:
        """The next position: one int if all rows agree, else [B] int32."""
        lengths = self.lengths
        return lengths[0] if len(set(lengths)) == 1 else mx.array(lengths, dtype=mx.int32)

    def block_pass(self, slots: int) -> Pass:
        """For one run of a block of `slots` slots behind every row's context."""
        self.settle()
        return Pass(Sight(self._clock, slots), self._offset(), self._caches)

    @property
    def told(self) -> bool:
        """Whether every layer has buffers, so that a block can be traced over them."""
        return all(cache.written for cache in self._caches)

    def lend(self, slots: int) -> Lent:
        """What a block of `slots` slots is traced over; give the buffers back by `take`."""
        self.settle()
        for cache in self._caches:
            cache.make_room(slots)
        lengths, positions = self._clock.lengths, self.lengths
        return Lent(
            starts=mx.array(lengths, dtype=mx.int32),
            offset=mx.array(positions, dtype=mx.int32),
            buffers=[cache.pending() for cache in self._caches],
        )

    def take(self, buffers: Sequence[Sequence[mx.array]]) -> None:
        """Store what was lent, perhaps written."""
        for cache, pair in zip(self._caches, buffers, strict=True):
            cache.take(pair)

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order. Raises SeamError unless they are distinct rows."""
        self._clock.check_rows(rows)
        self.settle()
        for cache in self._caches:
            cache.select(rows)
        self._clock.select(rows)
        self._origins = [self._origins[row] for row in rows]

    def join(self, other: RowState) -> None:
        """Append the rows of another state of the same drafter. Raises SeamError otherwise."""
        if not isinstance(other, BlockState) or other._attention != self._attention:
            raise SeamError(f"a {type(other).__name__} of another drafter cannot join this one")
        self.settle()
        other.settle()
        for mine, theirs in zip(self._caches, other._caches, strict=True):
            mine.join(theirs)
        self._clock.join(other._clock)
        self._origins = self._origins + other._origins

    def image(self, row: int, start: int = 0) -> StateImage:
        """Arrays "<layer>.keys" and "<layer>.values", [positions, heads, D].

        Raises:
            UnsupportedError: the row was never told the positions from `start` on.
            SeamError: `start` lies beyond the row's length.
        """
        self.settle()
        origin, length = self._origins[row], self.lengths[row]
        if start < origin:
            raise UnsupportedError(
                f"row {row} began at position {origin}; it has no image from position {start}"
            )
        if start > length:
            raise SeamError(f"row {row} has {length} positions; it has no image from {start}")
        arrays = {
            f"{layer}.{name}": PerToken(array, _reach(self._attention[layer]))
            for layer, cache in enumerate(self._caches)
            for name, array in cache.image(row, start - origin).items()
        }
        mx.eval([entry.array for entry in arrays.values()])
        return StateImage(start, length, MappingProxyType(arrays))

    def restore(self, row: int, image: StateImage) -> None:
        """Write an image into an empty row.

        Raises:
            SeamError: the row is not empty, or the image lacks positions that a layer needs.
        """
        self.settle()
        if self._clock.lengths[row] or self._origins[row]:
            raise SeamError(f"row {row} has {self.lengths[row]} positions; restore needs none")
        if image.start and any(kind.window is None for kind in self._attention):
            raise SeamError(f"the image starts at position {image.start}; it must start at 0")
        count = image.length - image.start
        for layer, cache in enumerate(self._caches):
            cache.restore(row, _columns(image, layer, count))
        self._clock.lengths[row] = count
        self._origins[row] = image.start

    def pending(self) -> Sequence[mx.array]:
        return [array for cache in self._caches for array in cache.pending()]


def _reach(attention: LayerAttention) -> int | None:
    """The anchor's slot sees window - 1 positions before itself."""
    return None if attention.window is None else attention.window - 1


def _columns(image: StateImage, layer: int, count: int) -> dict[str, mx.array]:
    """A layer's planes with exactly `count` columns; ones that its reach left out are zero."""
    planes = {}
    for name in ("keys", "values"):
        entry = image.per_token.get(f"{layer}.{name}")
        if entry is None:
            if count:
                raise SeamError(f"the image has no array {layer}.{name}")
            continue
        held = entry.array.shape[0]
        needed = count if entry.reach is None else min(image.length, entry.reach)
        if not needed <= held <= count:
            raise SeamError(f"the image's {layer}.{name} holds {held} of {count} positions")
        planes[name] = mx.pad(entry.array, [(count - held, 0), (0, 0), (0, 0)])
    return planes
