"""A target in integer arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

import mlx.core as mx
import numpy as np

from spec_core.errors import SeamError, UnsupportedError
from spec_core.kv import RowClock
from spec_core.seams import (
    EmbeddingLender,
    Forward,
    LogitRows,
    PerToken,
    RowState,
    StateImage,
    Target,
    TargetInfo,
    TargetState,
)
from spec_core.testing._hashes import ODD, halves, scatter, u32, words
from spec_core.testing._rows import checked, ints, newest

_CONTEXTS = 4096


class TinyState:
    """The state of a `TinyTarget`.

    Attributes:
        history: for each row, [n, layers] what each of its positions contributes; for a
            recurrent target [1, layers], their sum.
        fresh: [B, T, layers] contributions of the provisional positions, or None.
    """

    def __init__(self, owner: TinyTarget, rows: int) -> None:
        self.owner = owner
        self.clock = RowClock(rows)
        self.history = [mx.zeros((0, owner.info.num_layers), dtype=mx.uint32)] * rows
        self.fresh: mx.array | None = None

    @property
    def rows(self) -> int:
        return self.clock.rows

    @property
    def lengths(self) -> Sequence[int]:
        return tuple(self.clock.lengths)

    def commit(self, keep: Sequence[int]) -> None:
        self.clock.commit(keep)
        if self.fresh is not None:
            self.history = [
                self._appended(old, self.fresh[row, : keep[row]]) if keep[row] else old
                for row, old in enumerate(self.history)
            ]
        self.fresh = None

    def _appended(self, old: mx.array, new: mx.array) -> mx.array:
        joined = mx.concatenate([old, new])
        return joined.sum(axis=0, keepdims=True) if self.owner.recurrent else joined

    def select(self, rows: Sequence[int]) -> None:
        self.clock.settled()
        chosen = checked(rows, self.rows)
        self.history = [self.history[r] for r in chosen]
        self.clock.select(chosen)

    def join(self, other: RowState) -> None:
        if not isinstance(other, TinyState) or other.owner is not self.owner:
            raise SeamError("join: the other state belongs to a different target")
        self.clock.join(other.clock)
        self.history = self.history + other.history

    def image(self, row: int, start: int = 0) -> StateImage:
        self.clock.settled()
        length, held = self.clock.lengths[row], self.history[row]
        if self.owner.recurrent:
            whole = newest(held, held.shape[0], 0)
            sums = {name: whole[:, i] + 0 for i, name in enumerate(self._names)}
            mx.eval(sums)
            return StateImage(start, length, at_end=MappingProxyType(sums))
        parts = {
            name: PerToken(newest(held[:, i], length, start), self.owner.window)
            for i, name in enumerate(self._names)
        }
        return StateImage(start, length, per_token=MappingProxyType(parts))

    def restore(self, row: int, image: StateImage) -> None:
        self.clock.settled()
        if self.clock.lengths[row]:
            raise SeamError(f"restore: row {row} holds {self.clock.lengths[row]} positions, not 0")
        columns = [self._restored(name, image) for name in self._names]
        self.history[row] = mx.stack(columns, axis=1)
        self.clock.lengths[row] = image.length

    @property
    def _names(self) -> list[str]:
        return [f"layer{i}" for i in range(self.owner.info.num_layers)]

    def _restored(self, name: str, image: StateImage) -> mx.array:
        recurrent = self.owner.recurrent
        if name not in (image.at_end if recurrent else image.per_token):
            raise SeamError(f"restore: the image has no {name!r}")
        if recurrent:
            return image.at_end[name]
        array = image.per_token[name].array
        needed = min(image.length, self.owner.window or image.length)
        if array.shape[0] < needed:
            raise SeamError(
                f"restore: {name!r} holds {array.shape[0]} positions, {needed} are needed"
            )
        return array[array.shape[0] - needed :]

    def pending(self) -> Sequence[mx.array]:
        return self.history if self.fresh is None else [*self.history, self.fresh]


@dataclass(frozen=True, slots=True)
class TinyLender:
    """Embedding and head of a `TinyTarget`."""

    owner: TinyTarget

    def embed(self, tokens: mx.array) -> mx.array:
        """[..., H] embedding rows (`embed_scale` is 1)."""
        return self.owner.hidden(tokens, self.owner.token_words[tokens])

    def unembed(self, hidden: mx.array) -> mx.array:
        """[..., V] logits of a last layer's tap; there is no norm."""
        return (hidden @ self.owner.head) * self.owner.scale


class TinyTarget:
    """A target whose next token depends on every earlier token and its position.

    The larger part of a hidden state depends on the newest token alone, so that a `TinyDrafter`
    can be right sometimes; the other part is a hash of the whole visible text.

    Args:
        vocab: V.
        hidden: H.
        layers: how many.
        seed: of all its tables.
        dtype: of taps and logits.
        window: a position sees itself and the `window - 1` before it, in each layer.
        scale: spread of the logits; 2 gives a standard deviation of about 2.
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
        scale: float = 2.0,
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
        self.token_words = mx.array(words(vocab, 1, seed * 10 + 1)[:, 0])
        self._token_halves = 2.0 * halves(vocab, hidden, seed * 10 + 2)
        self._context_halves = halves(_CONTEXTS, hidden, seed * 10 + 3)
        first, second = halves(hidden, vocab, seed * 10 + 4), halves(hidden, vocab, seed * 10 + 5)
        self.head = (first + second).astype(dtype)
        self.known: dict[tuple[int, ...], int] = {}

    @property
    def info(self) -> TargetInfo:
        return self._info

    @property
    def lender(self) -> EmbeddingLender | None:
        return TinyLender(self) if self._has_lender else None

    def hidden(self, tokens: mx.array, context: mx.array) -> mx.array:
        """[..., H] hidden states from [...] tokens and [...] hashes of the visible text."""
        half = self._context_halves[context >> 20]
        return (self._token_halves[tokens] + half).astype(self.dtype)

    def greedy(self, text: Sequence[int], count: int) -> list[int]:
        """The `count` tokens that the target itself puts after `text`, which is not empty.

        Remembered, so that asking again is cheap.
        """
        return continuation(self, text, count, self.known)

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
        streams = self._streams(tokens, state)
        tapped = tuple(self.hidden(tokens, streams[i + 1]) for i in taps)
        if logits == "none":
            return Forward(None, tapped)
        last = self.hidden(tokens, streams[-1])
        if logits == "last":
            at = mx.array([max(v - 1, 0) for v in state.clock.valid], dtype=mx.int32)
            last = mx.take_along_axis(last, at[:, None, None], axis=1)
        return Forward(TinyLender(self).unembed(last), tapped)

    def _check(self, tokens: mx.array, state: TinyState, taps: Sequence[int]) -> None:
        if tokens.ndim != 2 or tokens.shape[0] != state.rows or tokens.shape[1] < 1:
            raise SeamError(
                f"tokens have shape {tokens.shape}; they must be [{state.rows}, T >= 1]"
            )
        if taps and not self._info.tappable:
            raise UnsupportedError(f"taps {list(taps)} were asked of a target without taps")
        if any(not -1 <= i < self._info.num_layers for i in taps):
            raise SeamError(f"taps {list(taps)} must lie in -1..{self._info.num_layers - 1}")

    def _streams(self, tokens: mx.array, state: TinyState) -> list[mx.array]:
        """[B, T] hashes after the embedding and after each layer; leaves them in `state.fresh`."""
        places = state.clock.positions(tokens.shape[1]).astype(mx.uint32) * ODD
        streams, fresh = [self.token_words[tokens]], []
        totals = self._totals(state)
        for layer in range(self._info.num_layers):
            new = scatter(streams[-1] + places + u32(layer * 977 + self.seed))
            seen = self._windowed(state, layer, new)
            if seen is None:
                seen = totals[:, layer : layer + 1] + mx.cumsum(new, axis=1)
            streams.append(scatter(streams[-1] * 0x165667B1 + seen))
            fresh.append(new)
        state.fresh = mx.stack(fresh, axis=2)
        return streams

    def _totals(self, state: TinyState) -> mx.array:
        """[B, layers] sums over what each row holds."""
        return mx.stack([held.sum(axis=0) for held in state.history])

    def _windowed(self, state: TinyState, layer: int, new: mx.array) -> mx.array | None:
        """[B, T] sums of what each new column sees, where there is a window."""
        if self.window is None:
            return None
        rows = []
        for row, held in enumerate(state.history):
            old = held[max(held.shape[0] - self.window, 0) :, layer]
            have, columns = old.shape[0], new.shape[1]
            key, query = np.arange(have + columns), np.arange(have, have + columns)[:, None]
            visible = mx.array((key <= query) & (key > query - self.window))
            both = mx.concatenate([old, new[row]])
            rows.append(mx.where(visible, both, u32(0)).sum(axis=1))
        return mx.stack(rows)


def continuation(
    target: Target, text: Sequence[int], count: int, known: dict[tuple[int, ...], int]
) -> list[int]:
    """The `count` tokens that a target itself puts after `text`, by plain greedy decoding.

    Each by one forward of the whole text on a fresh state: independent of commit and of rounds.

    Args:
        target: any target.
        text: at least one token.
        count: how many tokens.
        known: the token after each text that was asked for before; added to.
    """
    whole = list(text)
    for _ in range(count):
        key = tuple(whole)
        if key not in known:
            logits = target.forward(mx.array([whole]), target.new_state(1), logits="last").logits
            assert logits is not None
            known[key] = ints(mx.argmax(logits, axis=-1))[0][0]
        whole.append(known[key])
    return whole[len(text) :]
