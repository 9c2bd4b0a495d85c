"""Running a recurrent mixer again over the columns that a commit keeps.

The mixer's own code does it, on a stand-in whose recorded parts answer with the first columns of
what they gave; what comes after the recurrence is never evaluated. The layers of a state have
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


class _Noting:
    """A part of a mixer that notes what it gives."""

    __slots__ = ("_name", "_outputs", "_part")

    def __init__(self, part: Callable[..., mx.array], name: str, outputs: dict[str, mx.array]):
        self._part = part
        self._name = name
        self._outputs = outputs

    def __call__(self, x: mx.array) -> mx.array:
        if self._name in self._outputs:
            raise SeamError(f"{self._name} of a recurrent layer ran twice in one forward")
        output = self._outputs[self._name] = self._part(x)
        return output


class _Answer:
    """In place of a part of a mixer: gives what it gave."""

    __slots__ = ("_output",)

    def __init__(self, output: mx.array) -> None:
        self._output = output

    def __call__(self, x: mx.array) -> mx.array:
        return self._output


def recording(mixer: Module, names: Sequence[str], outputs: dict[str, mx.array]) -> Module:
    """A stand-in for a mixer that notes in `outputs` what these parts of it give."""
    return _stand_in(mixer, {n: _Noting(mixer[n], n, outputs) for n in names if n in mixer})


def _stand_in(mixer: Module, parts: Mapping[str, Any]) -> Module:
    """A mixer with other parts; everything else is the mixer's own."""
    cls = type(mixer)
    made = cls.__new__(cls)
    made.__dict__.update(mixer.__dict__)
    dict.update(made, mixer)
    dict.update(made, parts)
    return made


def replay(tapes: Sequence[Tape], keep: Sequence[int], weights: Sequence[str]) -> list[Slots]:
    """The slots of each tape after the first keep[b] columns of row b; lazy.

    Args:
        tapes: of one kind.
        keep: at least one of them positive.
        weights: vectors of the mixers that the recurrence reads.
    """
    first, columns, rows = tapes[0], max(keep), len(keep)
    answers = {
        name: _Answer(mx.concatenate([tape.outputs[name][:, :columns] for tape in tapes]))
        for name in first.outputs
    }
    own = {name: _by_row(tapes, name, rows) for name in weights if name in first.mixer}
    lengths = None if min(keep) == columns else mx.array([*keep] * len(tapes), dtype=mx.int32)
    mask = None if lengths is None else mx.arange(columns) < lengths[:, None]
    memory = Memory(_stacked([tape.before for tape in tapes]), lengths)
    unread = mx.zeros((rows * len(tapes), columns, first.shape[2]), dtype=first.dtype)
    stand_in = _stand_in(first.mixer, {**answers, **own})
    first.own(stand_in, unread, mask=mask, cache=memory)
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
