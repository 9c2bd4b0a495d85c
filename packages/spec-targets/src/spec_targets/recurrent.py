"""Recurrent layers: a state that cannot be trimmed is rebuilt from what the recurrence was fed.

While a forward is provisional, a layer keeps the state from before it and what the mixer's
projections gave, a few columns of each. A commit of everything keeps what the forward left behind,
a commit of nothing the state from before; in between, the recurrence runs once more over the kept
columns, all layers together: see spec_targets.replay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from spec_core.errors import SeamError
from spec_targets.anatomy import Anatomy
from spec_targets.families import Family
from spec_targets.kinds import LAYER_KINDS
from spec_targets.layers import Frame, LayerCache, LayerImage, LayerMaker, LayerOptions
from spec_targets.replay import Memory, Slots, Tape, groups, recording, replay
from spec_targets.swap import Swap, Wrapping


class RecurrentFamily(Family):
    """Models with layers whose memory is mlx-lm's ArraysCache.

    Their mixers are called as mixer(x, mask, cache), take zeros where a slot is None, and leave
    columns beyond `cache.lengths` out of their state.

    Args:
        model_types: the `model_type`s of config.json that it is for.
        mixer: a decoder layer's attribute that holds the recurrent mixer, where it has one.
        recorded: the mixer's parts whose outputs, [B, T, ...], decide its next state.
        weights: the mixer's own vectors that decide it, too.
        aliases: model types that mlx-lm knows under another name.
    """

    kinds: Mapping[str, LayerMaker]

    def __init__(
        self,
        model_types: Sequence[str],
        mixer: str,
        recorded: Sequence[str],
        weights: Sequence[str] = (),
        aliases: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.model_types = (*model_types, *aliases)
        self.aliases = aliases
        self.kinds = {**LAYER_KINDS, "ArraysCache": recurrent_layer}
        self._mixer = mixer
        self._recorded = tuple(recorded)
        self._weights = tuple(weights)
        self._recording = Wrapping(self._record)

    def new_layers(
        self, own: Sequence[Any], frame: Frame, options: LayerOptions
    ) -> list[LayerCache]:
        layers = super().new_layers(own, frame, options)
        recurrent = [layer for layer in layers if isinstance(layer, RecurrentLayer)]
        rebuild = Rebuild(len(recurrent), self._weights)
        for layer in recurrent:
            layer.rebuild = rebuild
        return layers

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
        return own(recording(mixer, self._recorded, tape.outputs), *args, **kwargs)


class Rebuild:
    """Rebuilds the recurrent layers of one state together, once all of them were told to commit.

    Args:
        layers: how many there are.
        weights: as for RecurrentFamily.
    """

    def __init__(self, layers: int, weights: Sequence[str] = ()) -> None:
        self._layers = layers
        self._weights = weights
        self._waiting: list[tuple[RecurrentLayer, Tape]] = []

    def clear(self) -> None:
        self._waiting = []

    def add(self, layer: RecurrentLayer, tape: Tape, keep: Sequence[int]) -> None:
        """One layer keeps the first keep[b] columns of row b, as all others do."""
        self._waiting.append((layer, tape))
        if len(self._waiting) == self._layers:
            waiting, self._waiting = self._waiting, []
            tapes = [tape for _, tape in waiting]
            for group in groups(tapes):
                rebuilt = replay([tapes[index] for index in group], keep, self._weights)
                for index, slots in zip(group, rebuilt, strict=True):
                    waiting[index][0].slots = slots


class RecurrentLayer(Memory):
    """One recurrence of B rows: looks like mlx-lm's ArraysCache.

    Args:
        frame: of the state.
        size: how many arrays the recurrence remembers.

    Attributes:
        rebuild: what rebuilds it, shared with the other recurrences of the state.
    """

    __slots__ = ("_before", "_frame", "_tape", "rebuild")

    def __init__(self, frame: Frame, size: int) -> None:
        super().__init__([None] * size)
        self._frame = frame
        self._before: Slots = []
        self._tape: Tape | None = None
        self.rebuild = Rebuild(1)

    def open_tape(self, mixer: Module, own: Callable[..., Any], x: mx.array) -> Tape:
        """A mixer begins to run over [B, T, H]."""
        if self._tape is not None:
            raise SeamError("a recurrent layer ran twice in one forward")
        rows, columns, width = x.shape
        self._tape = Tape(mixer, own, (rows, columns, width), x.dtype, self._before)
        return self._tape

    def make_mask(self, columns: int) -> None:
        """Columns beyond `valid` are left out by the commit, so that a forward needs no mask."""

    # Towards the state.

    def begin(self, columns: int) -> None:
        self._before = list(self.slots)
        self.rebuild.clear()

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
            self.rebuild.add(self, tape, keep)

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
