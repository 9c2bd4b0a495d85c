"""Block drafters: DSpark and DFlash, whatever their packaging, as one seams.Drafter."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace

import mlx.core as mx

from spec_core.device import on_cuda
from spec_core.errors import SeamError
from spec_core.seams import Chooser, DrafterState, EmbeddingLender, Proposal
from spec_core.traces import Buffers, Traces, shapes_of
from spec_drafters.backbone import BlockBackbone
from spec_drafters.block_state import BlockState, Lent
from spec_drafters.heads import (
    BlockEmbedding,
    CandidateSelector,
    ConfidenceHead,
    Head,
    MarkovHead,
    markov_head,
    token_ids,
)
from spec_drafters.linear import Weights
from spec_drafters.picks import Picks
from spec_drafters.spec import BlockSpec, FirstSlot

BlockTraces = Traces[[mx.array, mx.array, mx.array, Buffers], tuple[mx.array, Buffers]]
"""Of (anchor, starts, offset, buffers) -> hidden states, the same buffers, perhaps written."""


class BlockDrafter:
    """Runs [anchor, mask, ...] through a few layers that also see the target's tapped states.

    Args:
        spec: what it is, fitted to its target (see `fit`).
        weights: its tensors.
        lender: the target's embedding and head, where the drafter has none.
    """

    def __init__(
        self, spec: BlockSpec, weights: Weights, lender: EmbeddingLender | None = None
    ) -> None:
        self.spec = spec
        self.backbone = BlockBackbone(spec, weights)
        self.embedding = BlockEmbedding(spec, weights, lender)
        self.head = Head(spec, weights, lender)
        self.markov: MarkovHead | None = markov_head(spec, weights)
        self.confidence: ConfidenceHead | None = None
        if spec.confidence is not None:
            self.confidence = ConfidenceHead(spec.confidence, weights)
        self.selector: CandidateSelector | None = None
        if spec.selector is not None:
            self.selector = CandidateSelector(spec.selector, weights)
        self._token_ids = token_ids(spec, weights)
        # On CUDA a device waits for a host that builds operation by operation.
        self._traces: BlockTraces | None = Traces() if on_cuda() else None
        assert not weights.left(), f"no part of the model took {weights.left()}"

    @property
    def name(self) -> str:
        return self.spec.mode

    @property
    def taps(self) -> Sequence[int]:
        return self.spec.taps or ()

    @property
    def max_block(self) -> int:
        return self.spec.max_block

    @property
    def needs_host_tokens(self) -> bool:
        return False

    @property
    def _silent(self) -> int:
        """Slots before the first predicting one whose hidden states are read nevertheless."""
        recurrent = self.spec.markov is not None and self.spec.markov.kind == "rnn"
        return 1 if self.spec.first_slot == 1 and recurrent else 0

    def reading(self, first_slot: FirstSlot) -> BlockDrafter:
        """The same weights, read under a slot convention."""
        other = copy(self)
        other.spec = replace(self.spec, first_slot=first_slot)
        return other

    def new_state(self, rows: int, start: int = 0) -> BlockState:
        return BlockState(self.spec.attention, self.backbone.context, rows, start)

    def extend(
        self,
        state: DrafterState,
        tokens: mx.array,
        taps: Sequence[mx.array],
        keep: Sequence[int],
    ) -> None:
        """Project tapped columns [B, T, H] straight to keys and values. Lazy.

        Raises:
            SeamError: not one array for each tap, or `keep` does not fit them.
        """
        held = _held(state)
        if len(taps) != len(self.taps):
            raise SeamError(f"{self.name} reads {len(self.taps)} taps; it was given {len(taps)}")
        columns = max(keep, default=0)
        if columns > taps[0].shape[1]:
            raise SeamError(f"keep is {list(keep)} of {taps[0].shape[1]} forwarded columns")
        if not columns:
            return
        held.extend(taps, keep)

    def propose(
        self, state: DrafterState, anchor: mx.array, count: int, chooser: Chooser
    ) -> Proposal:
        """Run the whole block; `count` slots reach the head. Lazy.

        Raises:
            SeamError: `count` is not in 1..max_block.
        """
        if not 1 <= count <= self.max_block:
            raise SeamError(f"{self.name} proposes 1 to {self.max_block} tokens, not {count}")
        hidden = self.hidden(state, anchor, count)
        return self.guess(hidden, anchor, chooser)

    def hidden(self, state: DrafterState, anchor: mx.array, count: int) -> mx.array:
        """Final-normed hidden states [B, count, H] of the first `count` predicting slots; before
        them the anchor's, where it is silent but read."""
        assert self.spec.first_slot is not None
        first, end = self.spec.first_slot, self.spec.first_slot + count
        held, before = _held(state), first - self._silent
        if self._traces is not None and held.told:
            return self._replay(self._traces, held, anchor)[:, : end - before]
        run = held.block_pass(self.spec.block_size)
        return self.backbone.block(self.embedding(anchor), run, slice(before, end))

    def _replay(self, traces: BlockTraces, held: BlockState, anchor: mx.array) -> mx.array:
        """`hidden` of all predicting slots of a state that was told something, from a trace. (One
        with a lender's old weights costs acceptance, nothing else.)"""
        assert self.spec.first_slot is not None
        first, slots = self.spec.first_slot, self.spec.block_size
        wanted = slice(first - self._silent, first + self.max_block)

        def block(
            anchor: mx.array, starts: mx.array, offset: mx.array, buffers: Buffers
        ) -> tuple[mx.array, Buffers]:
            run = Lent(starts, offset, buffers).block_pass(slots)
            hidden = self.backbone.block(self.embedding(anchor), run, wanted)
            return hidden, [cache.pending() for cache in run.caches]

        lent = held.lend(slots)
        key = (wanted.start, anchor.shape, shapes_of(lent.buffers))
        hidden, buffers = traces.replay(key, block, anchor, lent.starts, lent.offset, lent.buffers)
        held.take(buffers)
        return hidden

    def guess(self, hidden: mx.array, anchor: mx.array, chooser: Chooser) -> Proposal:
        """Tokens from what `hidden` gave for a block that opens with anchor [B]."""
        silent, hidden = hidden[:, : self._silent], hidden[:, self._silent :]
        logits = self.head(hidden)
        picks = Picks(chooser, anchor, self._token_ids)
        embedded: list[mx.array] = []
        if self.selector is not None:
            self._select(self.selector, hidden, logits, picks)
        elif self.markov is not None:
            embedded = self._chain(self.markov, silent, hidden, logits, picks)
        else:
            choice = chooser.draft_block(logits, self._token_ids)
            return self._proposal(choice.tokens, choice.log_q, self._scores(hidden, embedded))
        return self._proposal(picks.tokens, picks.log_q, self._scores(hidden, embedded))

    def _chain(
        self,
        markov: MarkovHead,
        silent: mx.array,
        hidden: mx.array,
        logits: mx.array,
        picks: Picks,
    ) -> list[mx.array]:
        """Choose slot by slot, each corrected by the token before it; gives their Markov rows."""
        carried: mx.array | None = None
        if silent.shape[1]:
            # An rnn head was trained from slot 0 on, whose previous token is the anchor too.
            before = markov.prepare(silent)[:, 0]
            _, carried = markov.step(before, markov.embed(picks.last), carried)
        prepared = markov.prepare(hidden)
        embedded: list[mx.array] = []
        for slot in range(hidden.shape[1]):
            embedded.append(markov.embed(picks.last))
            bias, carried = markov.step(prepared[:, slot], embedded[-1], carried)
            picks.pick(logits[:, slot] + bias)
        return embedded

    def _select(
        self, selector: CandidateSelector, hidden: mx.array, logits: mx.array, picks: Picks
    ) -> None:
        """Choose slot by slot among each slot's candidates."""
        projected, candidates = selector.prepare(hidden, logits)
        for slot in range(hidden.shape[1]):
            picks.pick(
                selector.step(projected[:, slot], candidates[:, slot], logits[:, slot], picks.last)
            )

    def _scores(self, hidden: mx.array, embedded: list[mx.array]) -> mx.array | None:
        return None if self.confidence is None else self.confidence(hidden, embedded)

    def _proposal(
        self, tokens: mx.array, log_q: mx.array | None, confidence: mx.array | None
    ) -> Proposal:
        rows, count = tokens.shape
        return Proposal(tokens, (count,) * rows, log_q, confidence, (self.name,) * rows)


def _held(state: DrafterState) -> BlockState:
    if not isinstance(state, BlockState):
        raise SeamError(f"a block drafter needs its own state, not a {type(state).__name__}")
    return state
