"""A drafter with logits of its own."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

import mlx.core as mx
import numpy as np

from spec_core.errors import SeamError
from spec_core.seams import Chooser, PerToken, Proposal, RowState, StateImage
from spec_core.testing._hashes import ODD, scatter, u32, words
from spec_core.testing._rows import check_count, checked, newest
from spec_core.testing.target import TinyLender, TinyTarget


class TinyDrafterState:
    """What a `TinyDrafter` made of the taps: one hash a position and row."""

    def __init__(self, rows: int, start: int) -> None:
        self.bases = [start] * rows
        self.seen = [mx.zeros((0,), dtype=mx.uint32) for _ in range(rows)]

    @property
    def rows(self) -> int:
        return len(self.seen)

    @property
    def lengths(self) -> Sequence[int]:
        return tuple(b + s.shape[0] for b, s in zip(self.bases, self.seen, strict=True))

    def select(self, rows: Sequence[int]) -> None:
        chosen = checked(rows, self.rows)
        self.bases = [self.bases[r] for r in chosen]
        self.seen = [self.seen[r] for r in chosen]

    def join(self, other: RowState) -> None:
        if not isinstance(other, TinyDrafterState):
            raise SeamError(f"join: cannot join a {type(other).__name__} to a TinyDrafterState")
        self.bases = self.bases + other.bases
        self.seen = self.seen + other.seen

    def image(self, row: int, start: int = 0) -> StateImage:
        length = self.lengths[row]
        array = newest(self.seen[row], length, start)
        return StateImage(start, length, per_token=MappingProxyType({"seen": PerToken(array)}))

    def restore(self, row: int, image: StateImage) -> None:
        if self.lengths[row]:
            raise SeamError(f"restore: row {row} holds {self.lengths[row]} positions, not 0")
        array = mx.array(image.per_token["seen"].array)
        self.bases[row], self.seen[row] = image.length - array.shape[0], array

    def pending(self) -> Sequence[mx.array]:
        return list(self.seen)


class TinyDrafter:
    """A drafter with logits of its own, which depend on the taps of every kept position.

    It shares the target's head and the part of the hidden state that depends on the previous token
    alone, so it is right more often than chance.

    Args:
        target: lends its head.
        taps: layers it reads.
        max_block: the most tokens it proposes.
        seed: of its own part of the hidden states.
        parallel: all slots in one `draft_block`, none of which sees the others; otherwise one
            `draft` a slot, each seeing the token before it.
        token_ids: target ids of a reduced vocabulary.
        confident: states a confidence (a hash: legal, and meaningless).
        name: for statistics.
    """

    needs_host_tokens = False

    def __init__(
        self,
        target: TinyTarget,
        taps: Sequence[int] = (0, 1),
        max_block: int = 4,
        seed: int = 1,
        *,
        parallel: bool = False,
        token_ids: Sequence[int] | None = None,
        confident: bool = False,
        name: str = "tiny",
    ) -> None:
        self.target, self.taps, self.max_block, self.seed = target, tuple(taps), max_block, seed
        self.parallel, self.confident, self.name = parallel, confident, name
        self._words = mx.array(words(target.info.vocab_size, 1, seed * 10 + 7)[:, 0])
        self.token_ids = None if token_ids is None else mx.array(list(token_ids), dtype=mx.int32)

    def new_state(self, rows: int, start: int = 0) -> TinyDrafterState:
        return TinyDrafterState(rows, start)

    def extend(
        self, state: RowState, tokens: mx.array, taps: Sequence[mx.array], keep: Sequence[int]
    ) -> None:
        held = _tiny(state)
        if len(taps) != len(self.taps) or any(t.shape[:2] != tokens.shape for t in taps):
            raise SeamError(
                f"extend: {len(taps)} taps of shapes {[t.shape for t in taps]} do not fit "
                f"{len(self.taps)} layers and tokens of shape {tokens.shape}"
            )
        if len(keep) != held.rows or any(not 0 <= k <= tokens.shape[1] for k in keep):
            raise SeamError(f"keep {list(keep)} does not fit tokens of shape {tokens.shape}")
        new = self._digest(held, tokens, taps)
        held.seen = [
            mx.concatenate([old, new[row, : keep[row]]]) for row, old in enumerate(held.seen)
        ]

    def _digest(
        self, state: TinyDrafterState, tokens: mx.array, taps: Sequence[mx.array]
    ) -> mx.array:
        """[B, T] hash of each column's token, position and taps."""
        at = np.array(state.lengths)[:, None] + np.arange(tokens.shape[1])
        digest = self._words[tokens] + mx.array(at.astype(np.uint32)) * 0x27D4EB2F
        for order, tap in enumerate(taps):
            values = (tap.astype(mx.float32) * 64.0 + 128.0).astype(mx.uint32)
            weights = mx.array(words(1, tap.shape[2], order * 31 + 7)[0])
            digest = digest + (values * weights).sum(axis=2)
        return scatter(digest)

    def propose(self, state: RowState, anchor: mx.array, count: int, chooser: Chooser) -> Proposal:
        check_count(count, self.max_block)
        held = _tiny(state)
        context = mx.stack([seen.sum() for seen in held.seen])
        at = mx.array(list(held.lengths), dtype=mx.uint32)
        drawn = self._block if self.parallel else self._chain
        tokens, log_q = drawn(context + at, anchor, count, chooser)
        confidence = self._confidence(context + at, count) if self.confident else None
        return Proposal(tokens, (count,) * held.rows, log_q, confidence, (self.name,) * held.rows)

    def _chain(
        self, context: mx.array, anchor: mx.array, count: int, chooser: Chooser
    ) -> tuple[mx.array, mx.array | None]:
        tokens, scores = [anchor], []
        for slot in range(count):
            prefix = mx.stack(tokens, axis=1)[:, 1:]
            logits = self._logits(tokens[-1], context + u32(slot * ODD))
            choice = chooser.draft(logits, slot, prefix, self.token_ids)
            tokens.append(choice.tokens)
            scores.append(choice.log_q)
        log_q = [s for s in scores if s is not None]
        return mx.stack(tokens[1:], axis=1), mx.stack(log_q, axis=1) if log_q else None

    def _block(
        self, context: mx.array, anchor: mx.array, count: int, chooser: Chooser
    ) -> tuple[mx.array, mx.array | None]:
        slots = mx.arange(self.max_block, dtype=mx.uint32)[None]
        known = (anchor[:, None] + slots.astype(mx.int32) * 7) % self.target.info.vocab_size
        logits = self._logits(known, context[:, None] + slots * ODD)
        choice = chooser.draft_block(logits[:, :count], self.token_ids)
        return choice.tokens, choice.log_q

    def _logits(self, tokens: mx.array, context: mx.array) -> mx.array:
        """[..., V] or reduced logits, from [...] previous tokens and [...] context hashes."""
        hidden = self.target.hidden(tokens, scatter(context + u32(self.seed * 77)))
        logits = TinyLender(self.target).unembed(hidden)
        return logits if self.token_ids is None else logits[..., self.token_ids]

    def _confidence(self, context: mx.array, count: int) -> mx.array:
        slots = mx.arange(count, dtype=mx.uint32)[None]
        bits = scatter(context[:, None] + slots * ODD) & 1023
        return bits.astype(mx.float32) / 1024.0


def _tiny(state: RowState) -> TinyDrafterState:
    if not isinstance(state, TinyDrafterState):
        raise SeamError(f"a TinyDrafterState is needed, not a {type(state).__name__}")
    return state
