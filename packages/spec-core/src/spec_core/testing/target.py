"""A target in integer arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

import mlx.core as mx

from spec_core.errors import SeamError, UnsupportedError
from spec_core.kv import RowClock
from spec_core.seams import (
    EmbeddingLender,
    Forward,
    LogitRows,
    PerToken,
    RowState,
    StateImage,
    TargetInfo,
    TargetState,
)
from spec_core.testing._hashes import ODD, half, mix, token_hash, u32
from spec_core.testing._rows import checked, newest


class TinyState:
    """The state of a `TinyTarget`: for each row and layer, what each position contributes."""

    def __init__(self, owner: TinyTarget, rows: int) -> None:
        self.owner = owner
        self.clock = RowClock(rows)
        self.history = [self._empty_row() for _ in range(rows)]
        self.fresh: list[mx.array] = []

    def _empty_row(self) -> list[mx.array]:
        return [mx.zeros((0,), dtype=mx.uint32) for _ in range(self.owner.info.num_layers)]

    @property
    def rows(self) -> int:
        return self.clock.rows

    @property
    def lengths(self) -> Sequence[int]:
        return tuple(self.clock.lengths)

    def commit(self, keep: Sequence[int]) -> None:
        fresh, provisional = self.fresh, self.clock.provisional
        self.clock.commit(keep)
        for row, count in enumerate(keep if provisional else ()):
            self.history[row] = [
                self._appended(old, new[row, :count])
                for old, new in zip(self.history[row], fresh, strict=True)
            ]
        self.fresh = []

    def _appended(self, old: mx.array, new: mx.array) -> mx.array:
        joined = mx.concatenate([old, new])
        if self.owner.recurrent:
            return joined.sum(keepdims=True)
        return joined

    def select(self, rows: Sequence[int]) -> None:
        self.clock.settled()
        chosen = checked(rows, self.rows)
        lengths = self.clock.lengths
        self.history = [self.history[r] for r in chosen]
        self.clock = RowClock(len(chosen))
        self.clock.lengths = [lengths[r] for r in chosen]

    def join(self, other: RowState) -> None:
        if not isinstance(other, TinyState) or other.owner is not self.owner:
            raise SeamError("join: the other state belongs to a different target")
        self.clock.settled()
        other.clock.settled()
        lengths = self.clock.lengths + other.clock.lengths
        self.history = self.history + other.history
        self.clock = RowClock(len(lengths))
        self.clock.lengths = lengths

    def image(self, row: int, start: int = 0) -> StateImage:
        self.clock.settled()
        length = self.clock.lengths[row]
        if self.owner.recurrent:
            arrays = {f"layer{i}": mx.array(h) for i, h in enumerate(self.history[row])}
            mx.eval(list(arrays.values()))
            return StateImage(start, length, at_end=MappingProxyType(arrays))
        tokens = {
            f"layer{i}": PerToken(newest(h, length, start), self.owner.window)
            for i, h in enumerate(self.history[row])
        }
        return StateImage(start, length, per_token=MappingProxyType(tokens))

    def restore(self, row: int, image: StateImage) -> None:
        self.clock.settled()
        if self.clock.lengths[row]:
            raise SeamError(f"restore: row {row} holds {self.clock.lengths[row]} positions, not 0")
        self.history[row] = [self._restored(f"layer{i}", image) for i in range(len(self._layers))]
        self.clock.lengths[row] = image.length

    @property
    def _layers(self) -> range:
        return range(self.owner.info.num_layers)

    def _restored(self, name: str, image: StateImage) -> mx.array:
        recurrent = self.owner.recurrent
        if name not in (image.at_end if recurrent else image.per_token):
            raise SeamError(f"restore: the image has no {name!r}")
        if recurrent:
            return mx.array(image.at_end[name])
        array = image.per_token[name].array
        needed = min(image.length, self.owner.window or image.length)
        if array.shape[0] < needed:
            raise SeamError(
                f"restore: {name!r} holds {array.shape[0]} positions, {needed} are needed"
            )
        return mx.array(array)

    def pending(self) -> Sequence[mx.array]:
        return [array for row in self.history for array in row] + list(self.fresh)


@dataclass(frozen=True, slots=True)
class TinyLender:
    """Embedding and head of a `TinyTarget`."""

    owner: TinyTarget

    def embed(self, tokens: mx.array) -> mx.array:
        """[..., H] embedding rows (`embed_scale` is 1)."""
        base = token_hash(tokens, self.owner.seed)
        return self.owner.hidden(base, mix(base))

    def unembed(self, hidden: mx.array) -> mx.array:
        """[..., V] logits of a last layer's tap; there is no norm."""
        return (hidden @ self.owner.head) * self.owner.scale


class TinyTarget:
    """A target whose next token depends on every earlier token and its position.

    Half of the last hidden state depends on the newest token alone, so that a `TinyDrafter` can
    be right sometimes; the other half is a hash of the whole visible text.

    Args:
        scale: spread of the logits; 3 gives a standard deviation of about 2.8.
        window: a position sees itself and the `window - 1` before it, in each layer.
        recurrent: only a running sum is kept, so that a row's image is valid at its end only.
        tappable: if false, taps are refused.
        has_lender: whether embedding and head are lent.
    """

    def __init__(
        self,
        vocab: int = 32,
        hidden: int = 16,
        layers: int = 2,
        seed: int = 0,
        dtype: mx.Dtype = mx.float32,
        window: int | None = None,
        *,
        scale: float = 3.0,
        recurrent: bool = False,
        tappable: bool = True,
        has_lender: bool = True,
    ) -> None:
        if recurrent and window is not None:
            raise ValueError("a recurrent target has no window; leave one of the two out")
        self.seed, self.dtype, self.window, self.scale = seed, dtype, window, scale
        self.recurrent = recurrent
        self._has_lender = has_lender
        self._info = TargetInfo(
            family="tiny",
            vocab_size=vocab,
            hidden_size=hidden,
            num_layers=layers,
            context_window=4096,
            tappable=tappable,
            taps_refused="" if tappable else "made without taps",
        )
        rows = mix(mx.arange(vocab, dtype=mx.uint32) + u32(seed * 104729 + 5))
        self.head = ((half(rows, hidden) + half(mix(rows), hidden)).T).astype(dtype)

    @property
    def info(self) -> TargetInfo:
        return self._info

    @property
    def lender(self) -> EmbeddingLender | None:
        return TinyLender(self) if self._has_lender else None

    def hidden(self, base: mx.array, x: mx.array) -> mx.array:
        """[..., H] hidden states from [...] hashes of the token and of the visible text."""
        width = self._info.hidden_size
        return (half(base, width) + half(x, width)).astype(self.dtype)

    def new_state(self, rows: int) -> TinyState:
        return TinyState(self, rows)

    def forward(
        self,
        tokens: mx.array,
        state: TargetState,
        *,
        taps: Sequence[int] = (),
        logits: LogitRows = "all",
        valid: Sequence[int] | None = None,
    ) -> Forward:
        if not isinstance(state, TinyState) or state.owner is not self:
            raise SeamError("forward: the state belongs to a different target")
        self._check(tokens, state, taps)
        state.clock.begin(tokens.shape[1], valid)
        base = token_hash(tokens, self.seed)
        streams = self._layers(base, state)
        hidden = {i - 1: self.hidden(base, x) for i, x in enumerate(streams) if i - 1 in taps}
        last = hidden.get(self._info.num_layers - 1)
        last = self.hidden(base, streams[-1]) if last is None else last
        return Forward(
            self._logits(last, logits, state.clock.valid), tuple(hidden[i] for i in taps)
        )

    def _check(self, tokens: mx.array, state: TinyState, taps: Sequence[int]) -> None:
        if tokens.ndim != 2 or tokens.shape[0] != state.rows or tokens.shape[1] < 1:
            raise SeamError(
                f"tokens have shape {tokens.shape}; they must be [{state.rows}, T >= 1]"
            )
        if taps and not self._info.tappable:
            raise UnsupportedError(f"taps {list(taps)} were asked of a target without taps")
        if any(not -1 <= i < self._info.num_layers for i in taps):
            raise SeamError(f"taps {list(taps)} must lie in -1..{self._info.num_layers - 1}")

    def _layers(self, base: mx.array, state: TinyState) -> list[mx.array]:
        """[B, T] hashes after the embedding and after each layer; leaves them in `state.fresh`."""
        positions = state.clock.positions(base.shape[1]).astype(mx.uint32)
        streams, fresh = [mix(base)], []
        for layer in range(self._info.num_layers):
            new = mix(streams[-1] * ODD + positions * 0x27D4EB2F + u32(layer * 97 + self.seed))
            sums = [self._seen(state.history[b][layer], new[b]) for b in range(state.rows)]
            streams.append(mix(streams[-1] * 0x165667B1 + mx.stack(sums)))
            fresh.append(new)
        state.fresh = fresh
        return streams

    def _seen(self, old: mx.array, new: mx.array) -> mx.array:
        """[T] sum of what each new column sees: [n] older and [T] new contributions."""
        have, columns = old.shape[0], new.shape[0]
        both = mx.concatenate([old, new])
        key, query = mx.arange(have + columns)[None], mx.arange(have, have + columns)[:, None]
        visible = key <= query
        if self.window is not None:
            visible = visible & (key > query - self.window)
        return mx.where(visible, both[None], u32(0)).sum(axis=1)

    def _logits(self, last: mx.array, rows: LogitRows, valid: Sequence[int]) -> mx.array | None:
        if rows == "none":
            return None
        if rows == "last":
            at = mx.array([max(v - 1, 0) for v in valid], dtype=mx.int32)
            last = mx.take_along_axis(last, at[:, None, None], axis=1)
        return TinyLender(self).unembed(last)
