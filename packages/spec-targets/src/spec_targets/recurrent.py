"""Recurrent layers: a state that cannot be trimmed is rebuilt from what the recurrence was fed.

While a forward is provisional, a layer keeps the state from before it and what the mixer's
projections gave, a few columns of each. A commit of everything keeps what the forward left behind,
a commit of nothing the state from before; in between, the mixer's own code runs once more over the
kept columns, its projections answered from the recording. That is the recurrence alone: no
projection is computed, and what the mixer does after the recurrence is never evaluated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from spec_core.errors import SeamError
from spec_targets.anatomy import Anatomy
from spec_targets.families import Family
from spec_targets.kinds import LAYER_KINDS
from spec_targets.layers import (
    Frame,
    LayerCache,
    LayerImage,
    LayerMaker,
    LayerOptions,
)
from spec_targets.swap import Swap, Wrapping

Slots = list[mx.array | None]
"""What one recurrence remembers: arrays whose first axis is the row; None before the first use."""


class RecurrentFamily(Family):
    """Models with layers whose memory is mlx-lm's ArraysCache.

    Their mixers are called as mixer(x, mask, cache), take zeros where a slot is None, and leave
    columns beyond `cache.lengths` out of their state.

    Args:
        model_types: the `model_type`s of config.json that it is for.
        mixer: a decoder layer's attribute that holds the recurrent mixer, where it has one.
        recorded: the mixer's parts whose outputs, [B, T, ...], decide its next state.
        aliases: model types that mlx-lm knows under another name.
    """

    kinds: Mapping[str, LayerMaker]

    def __init__(
        self,
        model_types: Sequence[str],
        mixer: str,
        recorded: Sequence[str],
        aliases: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.model_types = (*model_types, *aliases)
        self.aliases = aliases
        self.kinds = {**LAYER_KINDS, "ArraysCache": recurrent_layer}
        self._mixer = mixer
        self._recorded = frozenset(recorded)
        self._recording = Wrapping(self._record)

    def swaps(self, anatomy: Anatomy, layers: Sequence[LayerCache]) -> Sequence[Swap]:
        mixers = (layer.get(self._mixer) for layer in anatomy.layers)
        return [(mixer, self._recording) for mixer in mixers if isinstance(mixer, Module)]

    def _record(
        self, mixer: Module, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        found = (each for each in (*args, *kwargs.values()) if isinstance(each, RecurrentLayer))
        layer = next(found, None)
        if layer is None:
            return own(mixer, *args, **kwargs)
        tape = layer.open_tape(mixer, own, args[0])
        return own(_Recording(mixer, self._recorded, tape.outputs), *args, **kwargs)


@dataclass(frozen=True, slots=True)
class Tape:
    """One run of a mixer, with all that is needed to run it again over fewer columns.

    Attributes:
        mixer: the module.
        own: its class's own call.
        shape: [B, T, H] of its input.
        dtype: of its input.
        outputs: what its recorded parts gave, by name.
    """

    mixer: Module
    own: Callable[..., Any]
    shape: tuple[int, int, int]
    dtype: mx.Dtype
    outputs: dict[str, mx.array] = field(default_factory=dict)

    def replay(self, before: Slots, keep: Sequence[int]) -> Slots:
        """The slots after the first keep[b] columns of each row; lazy."""
        rows, _, width = self.shape
        columns = max(keep)
        lengths = None if min(keep) == columns else mx.array(list(keep), dtype=mx.int32)
        mask = None if lengths is None else mx.arange(columns) < lengths[:, None]
        memory = _Memory(list(before), lengths)
        unread = mx.zeros((rows, columns, width), dtype=self.dtype)
        self.own(_Replaying(self.mixer, self.outputs, columns), unread, mask=mask, cache=memory)
        return memory.slots


class _Recording:
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
    """Stands in for a mixer whose recorded parts answer with their first columns."""

    __slots__ = ("_columns", "_mixer", "_outputs")

    def __init__(self, mixer: Module, outputs: Mapping[str, mx.array], columns: int) -> None:
        self._mixer = mixer
        self._outputs = outputs
        self._columns = columns

    def __getattr__(self, name: str) -> Any:
        if name not in self._outputs:
            return getattr(self._mixer, name)
        return lambda _: self._outputs[name][:, : self._columns]


class _Memory:
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

    def make_mask(self, columns: int) -> None:
        """Columns beyond `valid` are left out by the commit, so that a forward needs no mask."""


class RecurrentLayer(_Memory):
    """One recurrence of B rows: looks like mlx-lm's ArraysCache.

    Args:
        frame: of the state.
        size: how many arrays the recurrence remembers.
    """

    __slots__ = ("_before", "_frame", "_tape")

    def __init__(self, frame: Frame, size: int) -> None:
        super().__init__([None] * size)
        self._frame = frame
        self._before: Slots = []
        self._tape: Tape | None = None

    def open_tape(self, mixer: Module, own: Callable[..., Any], x: mx.array) -> Tape:
        """A mixer begins to run over [B, T, H]."""
        if self._tape is not None:
            raise SeamError("a recurrent layer ran twice in one forward")
        rows, columns, width = x.shape
        self._tape = Tape(mixer, own, (rows, columns, width), x.dtype)
        return self._tape

    # Towards the state.

    def begin(self, columns: int) -> None:
        self._before = list(self.slots)

    def commit(self, keep: Sequence[int]) -> None:
        before, tape, columns = self._before, self._tape, self._frame.clock.provisional
        self._before, self._tape = [], None
        kept = set(keep)
        if kept <= {columns}:
            return
        if kept == {0}:
            self.slots = before
        elif kept == {0, columns}:
            self.slots = _chosen(keep, self.slots, before)
        elif tape is None:
            raise SeamError(f"a recurrent layer was not recorded and cannot keep {list(keep)}")
        else:
            self.slots = tape.replay(before, keep)

    def select(self, rows: Sequence[int]) -> None:
        if not rows:
            self.slots = [None] * len(self.slots)
            return
        index = mx.array(list(rows), dtype=mx.int32)
        self.slots = [None if s is None else mx.take(s, index, axis=0) for s in self.slots]

    def join(self, other: RecurrentLayer) -> None:
        ours, theirs = self._frame.clock.rows, other._frame.clock.rows
        pairs = zip(self.slots, other.slots, strict=True)
        self.slots = [_joined(mine, more, ours, theirs) for mine, more in pairs]

    def image(self, row: int, start: int) -> LayerImage:
        # A gather owns what it gives; a slice would be a view of the live state.
        index = mx.array([row], dtype=mx.int32)
        taken = {
            _name(i): mx.take(slot, index, axis=0).squeeze(0)
            for i, slot in enumerate(self.slots)
            if slot is not None
        }
        return LayerImage(at_end=taken)

    def restore(self, row: int, image: LayerImage, start: int, length: int) -> None:
        names = [_name(index) for index in range(len(self.slots))]
        if length and set(image.at_end) != set(names):
            raise SeamError(
                f"a recurrence resumes only from its state at exactly {length}: arrays "
                f"{names}; the image has {sorted(image.at_end)}"
            )
        for index, name in enumerate(names):
            if length:
                self.slots[index] = self._with_row(row, self.slots[index], image.at_end[name])

    def pending(self) -> Sequence[mx.array]:
        return [slot for slot in self.slots if slot is not None]

    def _with_row(self, row: int, slot: mx.array | None, value: mx.array) -> mx.array:
        rows = self._frame.clock.rows
        if rows == 1:
            return value[None]
        if slot is None:
            slot = mx.zeros((rows, *value.shape), dtype=value.dtype)
        _check_alike(slot, value[None])
        slot[row] = value
        return slot


def recurrent_layer(like: Any, frame: Frame, options: LayerOptions) -> LayerCache:
    """A layer cache in place of mlx-lm's ArraysCache."""
    return RecurrentLayer(frame, len(like.cache))


def _name(slot: int) -> str:
    return f"slot{slot}"


def _chosen(keep: Sequence[int], after: Slots, before: Slots) -> Slots:
    """Rows that keep all take `after`, rows that keep nothing `before`."""
    rows = mx.array([bool(count) for count in keep])
    return [
        None if new is None else _where(rows, new, mx.zeros_like(new) if old is None else old)
        for new, old in zip(after, before, strict=True)
    ]


def _where(rows: mx.array, new: mx.array, old: mx.array) -> mx.array:
    return mx.where(rows.reshape(-1, *[1] * (new.ndim - 1)), new, old)


def _joined(
    mine: mx.array | None, more: mx.array | None, ours: int, theirs: int
) -> mx.array | None:
    """The rows of both; rows that have no state yet count as zeros."""
    if mine is None and more is None:
        return None
    if mine is None:
        assert more is not None
        mine = mx.zeros((ours, *more.shape[1:]), dtype=more.dtype)
    elif more is None:
        more = mx.zeros((theirs, *mine.shape[1:]), dtype=mine.dtype)
    _check_alike(mine, more)
    return mx.concatenate([mine, more])


def _check_alike(mine: mx.array, other: mx.array) -> None:
    if mine.shape[1:] != other.shape[1:] or mine.dtype != other.dtype:
        raise SeamError(
            f"recurrent state of shape {other.shape[1:]} in {other.dtype} does not fit rows of "
            f"shape {mine.shape[1:]} in {mine.dtype}"
        )
