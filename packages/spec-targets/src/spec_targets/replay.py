"""Running a recurrent mixer again over the columns that a commit keeps.

The mixer's own code does it, on a stand-in: the parts whose outputs were recorded answer with their
first columns, and what comes after the recurrence is never evaluated. The layers of a state have
mixers of one kind, so that several are run in one call, one behind the other as further rows; with
a few columns, what costs time is the number of operations and not their size.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from spec_core.errors import SeamError

Slots = list[mx.array | None]
"""What one recurrence remembers: arrays whose first axis is the row; None before the first use."""

_TOGETHER_BYTES = 1 << 28  # of state; running layers together copies it


@dataclass(frozen=True, slots=True)
class Tape:
    """One run of a mixer, with all that is needed to run it again over fewer columns.

    Attributes:
        mixer: the module.
        own: its class's own call.
        shape: [B, T, H] of its input.
        dtype: of its input.
        before: its slots from before the run.
        outputs: what its recorded parts gave, by name.
    """

    mixer: Module
    own: Callable[..., Any]
    shape: tuple[int, int, int]
    dtype: mx.Dtype
    before: Slots
    outputs: dict[str, mx.array] = field(default_factory=dict)

    @property
    def state_bytes(self) -> int:
        return sum(slot.nbytes for slot in self.before if slot is not None)

    @property
    def kind(self) -> Hashable:
        """Equal for mixers that can run together."""
        known = tuple(None if slot is None else (slot.shape, slot.dtype) for slot in self.before)
        parts = tuple((name, each.shape, each.dtype) for name, each in self.outputs.items())
        return self.own, self.shape, self.dtype, known, parts


class Memory:
    """What mlx-lm's ArraysCache is to a mixer.

    Attributes:
        slots: read and written by the mixer.
        lengths: [B] how many columns of each row are real, or None for all.
    """

    __slots__ = ("lengths", "slots")

    left_padding = None

    def __init__(self, slots: Slots, lengths: mx.array | None = None) -> None:
        self.slots = slots
        self.lengths = lengths

    def __getitem__(self, index: int) -> mx.array | None:
        return self.slots[index]

    def __setitem__(self, index: int, value: mx.array) -> None:
        # Often the end of something longer, which a slice would keep alive.
        self.slots[index] = mx.contiguous(value)

    def advance(self, columns: int) -> None:
        pass


class Recording:
    """Stands in for a mixer while its own code runs, and notes what some of its parts give."""

    __slots__ = ("_mixer", "_names", "_outputs")

    def __init__(self, mixer: Module, names: frozenset[str], outputs: dict[str, mx.array]) -> None:
        self._mixer = mixer
        self._names = names
        self._outputs = outputs

    def __getattr__(self, name: str) -> Any:
        part = getattr(self._mixer, name)
        return self._noting(name, part) if name in self._names else part

    def _noting(self, name: str, part: Callable[[mx.array], mx.array]) -> Callable[..., mx.array]:
        def call(x: mx.array) -> mx.array:
            if name in self._outputs:
                raise SeamError(f"{name} of a recurrent layer ran twice in one forward")
            self._outputs[name] = part(x)
            return self._outputs[name]

        return call


class _Replaying:
    """Stands in for mixers that run together: recorded parts give what they gave, and weights of
    the mixer itself are each row's own."""

    __slots__ = ("_mixer", "_outputs", "_weights")

    def __init__(
        self, mixer: Module, outputs: Mapping[str, mx.array], weights: Mapping[str, mx.array]
    ) -> None:
        self._mixer = mixer
        self._outputs = outputs
        self._weights = weights

    def __getattr__(self, name: str) -> Any:
        if name in self._outputs:
            return lambda _: self._outputs[name]
        if name in self._weights:
            return self._weights[name]
        return getattr(self._mixer, name)


def replay(tapes: Sequence[Tape], keep: Sequence[int], weights: Sequence[str]) -> list[Slots]:
    """The slots of each tape after the first keep[b] columns of row b; lazy.

    Args:
        tapes: of one kind.
        keep: at least one of them positive.
        weights: vectors of the mixers that the recurrence reads.
    """
    first, columns, rows = tapes[0], max(keep), len(keep)
    outputs = {
        name: mx.concatenate([tape.outputs[name][:, :columns] for tape in tapes])
        for name in first.outputs
    }
    own = {name: _by_row(tapes, name, rows) for name in weights if name in first.mixer}
    lengths = None if min(keep) == columns else mx.array([*keep] * len(tapes), dtype=mx.int32)
    mask = None if lengths is None else mx.arange(columns) < lengths[:, None]
    memory = Memory(_stacked([tape.before for tape in tapes]), lengths)
    unread = mx.zeros((rows * len(tapes), columns, first.shape[2]), dtype=first.dtype)
    first.own(_Replaying(first.mixer, outputs, own), unread, mask=mask, cache=memory)
    parts = [slice(start, start + rows) for start in range(0, rows * len(tapes), rows)]
    return [[None if slot is None else slot[part] for slot in memory.slots] for part in parts]


def groups(tapes: Sequence[Tape]) -> Iterator[list[int]]:
    """Which tapes to run together: of one kind, and with no more state than the limit."""
    by_kind: dict[Hashable, list[int]] = {}
    for index, tape in enumerate(tapes):
        by_kind.setdefault(tape.kind, []).append(index)
    for indices in by_kind.values():
        size = max(1, _TOGETHER_BYTES // max(1, tapes[indices[0]].state_bytes))
        yield from (indices[start : start + size] for start in range(0, len(indices), size))


def _stacked(slots: Sequence[Slots]) -> Slots:
    """Rows of several layers one behind the other."""
    return [
        None if each[0] is None else mx.concatenate([slot for slot in each if slot is not None])
        for each in zip(*slots, strict=True)
    ]


def _by_row(tapes: Sequence[Tape], name: str, rows: int) -> mx.array:
    """A vector of each mixer as [layers * B, 1, N]."""
    return mx.repeat(mx.stack([tape.mixer[name] for tape in tapes])[:, None], rows, axis=0)
