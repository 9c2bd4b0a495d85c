"""Block drafters: DSpark and DFlash, whatever their packaging, as one seams.Drafter."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from spec_core.errors import SeamError
from spec_core.seams import Chooser, DrafterState, EmbeddingLender, Proposal
from spec_drafters.backbone import BlockBackbone
from spec_drafters.block_state import BlockState
from spec_drafters.heads import (
    BlockEmbedding,
    ConfidenceHead,
    Head,
    MarkovHead,
    markov_head,
    token_ids,
)
from spec_drafters.linear import Weights
from spec_drafters.spec import BlockSpec


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
        self._token_ids = token_ids(spec, weights)
        assert not weights.left(), f"no part of the model took {weights.left()}"

    @property
    def name(self) -> str:
        return self.spec.mode

    @property
    def taps(self) -> Sequence[int]:
        return self.spec.taps

    @property
    def max_block(self) -> int:
        return self.spec.max_block

    @property
    def needs_host_tokens(self) -> bool:
        return False

    def new_state(self, rows: int, start: int = 0) -> BlockState:
        return BlockState(self.spec.attention, rows, start)

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
        if columns < taps[0].shape[1]:
            taps = [tap[:, :columns] for tap in taps]
        held.extend(self.backbone.context(taps, held.offset()), columns, keep)

    def propose(
        self, state: DrafterState, anchor: mx.array, count: int, chooser: Chooser
    ) -> Proposal:
        """Run the whole block; `count` slots reach the head. Lazy.

        Raises:
            SeamError: `count` is not in 1..max_block.
        """
        if not 1 <= count <= self.max_block:
            raise SeamError(f"{self.name} proposes 1 to {self.max_block} tokens, not {count}")
        return self.guess(self.hidden(state, anchor, count), anchor, chooser)

    def hidden(self, state: DrafterState, anchor: mx.array, count: int) -> mx.array:
        """Final-normed hidden states [B, count, H] of the first `count` predicting slots."""
        wanted = slice(self.spec.first_slot, self.spec.first_slot + count)
        run = _held(state).block_pass(self.spec.block_size)
        return self.backbone.block(self.embedding(anchor), run, wanted)

    def guess(self, hidden: mx.array, anchor: mx.array, chooser: Chooser) -> Proposal:
        """Tokens for predicting slots [B, K, H] whose block opens with anchor [B]."""
        logits = self.head(hidden)
        if self.markov is not None:
            return self._chain(self.markov, hidden, logits, anchor, chooser)
        choice = chooser.draft_block(logits, self._token_ids)
        confidence = None if self.confidence is None else self.confidence(hidden, [])
        return self._proposal(choice.tokens, choice.log_q, confidence)

    def _chain(
        self,
        markov: MarkovHead,
        hidden: mx.array,
        logits: mx.array,
        anchor: mx.array,
        chooser: Chooser,
    ) -> Proposal:
        """Choose slot by slot, each corrected by the token before it; no wait in between."""
        prepared = markov.prepare(hidden)
        previous = anchor
        carried: mx.array | None = None
        tokens: list[mx.array] = []
        log_q: list[mx.array] = []
        embedded: list[mx.array] = []
        for slot in range(hidden.shape[1]):
            embedded.append(markov.embed(previous))
            bias, carried = markov.step(prepared[:, slot], embedded[-1], carried)
            prefix = mx.stack(tokens, axis=1) if tokens else anchor[:, None][:, :0]
            choice = chooser.draft(logits[:, slot] + bias, slot, prefix, self._token_ids)
            previous = choice.tokens
            tokens.append(previous)
            if choice.log_q is not None:
                log_q.append(choice.log_q)
        confidence = None if self.confidence is None else self.confidence(hidden, embedded)
        stacked = mx.stack(log_q, axis=1) if log_q else None
        return self._proposal(mx.stack(tokens, axis=1), stacked, confidence)

    def _proposal(
        self, tokens: mx.array, log_q: mx.array | None, confidence: mx.array | None
    ) -> Proposal:
        rows, count = tokens.shape
        return Proposal(tokens, (count,) * rows, log_q, confidence, (self.name,) * rows)


def _held(state: DrafterState) -> BlockState:
    if not isinstance(state, BlockState):
        raise SeamError(f"a block drafter needs its own state, not a {type(state).__name__}")
    return state
