"""What turns a block's hidden states into guesses: logits, Markov correction, confidence.

Shapes: B rows, K slots, H hidden, V columns of the head, r Markov rank. Slot j's previous token
is the anchor for j = 0 and the guess of slot j - 1 otherwise. (DeepSpec, modeling/dspark.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import mlx.core as mx

from spec_core.seams import EmbeddingLender
from spec_drafters.linear import Weights
from spec_drafters.spec import LOG_SNR_FEATURES, BlockSpec, Confidence, DrafterSpec, Selector


class Head:
    """Hidden states to logits; softcapped where the family does so."""

    def __init__(self, spec: DrafterSpec, weights: Weights, lender: EmbeddingLender | None) -> None:
        self._unembed: Callable[[mx.array], mx.array]
        if spec.own_head:
            self._unembed = weights.linear("lm_head")
        else:
            assert lender is not None
            self._unembed = _in_lenders_type(lender)
        # A candidate selector adds scores to its logits, in float32.
        exact = isinstance(spec, BlockSpec) and spec.selector is not None
        self._dtype = mx.float32 if exact else weights.precision.dtype
        assert spec.softcap != "target"
        self._softcap, self._factor = spec.softcap, spec.output_multiplier

    def __call__(self, hidden: mx.array) -> mx.array:
        """[..., H] to [..., V]."""
        logits = self._unembed(hidden).astype(self._dtype)
        if self._factor != 1:
            logits = logits * self._factor
        if self._softcap is None:
            return logits
        return mx.tanh(logits / self._softcap) * self._softcap


def _in_lenders_type(lender: EmbeddingLender) -> Callable[[mx.array], mx.array]:
    """The lender's head on hidden states in its own type: a wider one would cast its matrix."""
    dtype = lender.embed(mx.zeros((1,), dtype=mx.int32)).dtype
    return lambda hidden: lender.unembed(hidden.astype(dtype))


class TokenEmbedding:
    """Rows of the drafter's own embedding, or of the target's, scaled as the drafter wants them."""

    def __init__(self, spec: DrafterSpec, weights: Weights, lender: EmbeddingLender | None) -> None:
        self._lookup: Callable[[mx.array], mx.array]
        if spec.own_embedding:
            self._lookup = weights.table("embed_tokens.weight")
        else:
            assert lender is not None
            self._lookup = lender.embed
        self._dtype = weights.precision.dtype
        assert spec.embed_scale != "target"
        scaled = spec.embed_scale != 1
        self._scale = mx.array(spec.embed_scale, dtype=self._dtype) if scaled else None

    def __call__(self, ids: mx.array) -> mx.array:
        """[...] ids to [..., H]."""
        rows = self._lookup(ids).astype(self._dtype)
        return rows if self._scale is None else rows * self._scale


class BlockEmbedding:
    """[anchor, mask, mask, ...] to input embeddings; only the anchor differs between rounds."""

    def __init__(self, spec: BlockSpec, weights: Weights, lender: EmbeddingLender | None) -> None:
        self._embed = TokenEmbedding(spec, weights, lender)
        addend = None if spec.log_snr is None else _log_snr_addend(spec, weights)
        self._anchor_addend = None if addend is None else addend[:1]
        count = spec.block_size - 1
        if spec.mask_embedding:
            masks = mx.repeat(weights.raw("mask_embedding")[None], count, axis=0)
        else:
            masks = self._embed(mx.full((count,), spec.mask_token, dtype=mx.int32))
        self._masks = masks if addend is None else masks + addend[1:]
        mx.eval(self._masks)

    def __call__(self, anchor: mx.array) -> mx.array:
        """[B] anchors to [B, block, H]."""
        first = self._embed(anchor)[:, None]
        if self._anchor_addend is not None:
            first = first + self._anchor_addend
        rows = anchor.shape[0]
        masks = mx.broadcast_to(self._masks, (rows, *self._masks.shape))
        return mx.concatenate([first, masks], axis=1)


def _log_snr_addend(spec: BlockSpec, weights: Weights) -> mx.array:
    """[block, H] addend of each slot: fc2(silu(fc1(features))) of t = 1000 for the anchor's slot
    and 0 for masks, features [sin(t f_i), cos(t f_i)], f_i = 10000^(-i/64). (PrismML's
    llama.cpp, src/models/dflash.cpp.)"""
    assert spec.log_snr is not None
    low, high = spec.log_snr.minimum, spec.log_snr.maximum
    level = mx.array([high] + [low] * (spec.block_size - 1), dtype=mx.float32)
    time = 1000 * (level - low) / (high - low)
    half = LOG_SNR_FEATURES // 2
    angle = time[:, None] * 10000 ** (-mx.arange(half, dtype=mx.float32) / half)
    features = mx.concatenate([mx.sin(angle), mx.cos(angle)], axis=-1)
    at = weights.under("log_snr.")
    inner = features @ at.raw("fc1.weight", mx.float32).T + at.raw("fc1.bias", mx.float32)
    inner = inner * mx.sigmoid(inner)
    addend = inner @ at.raw("fc2.weight", mx.float32).T + at.raw("fc2.bias", mx.float32)
    return addend.astype(weights.precision.dtype)


class MarkovHead(Protocol):
    """A chain over slots: each step's bias depends on the token before it."""

    def embed(self, previous: mx.array) -> mx.array:
        """[B] tokens to [B, r], the row that the confidence head reads too."""

    def prepare(self, hidden: mx.array) -> mx.array:
        """What depends on [B, K, H] hidden states alone, for all slots at once: [B, K, ...]."""

    def step(
        self, prepared: mx.array, embedded: mx.array, state: mx.array | None
    ) -> tuple[mx.array, mx.array | None]:
        """One slot's bias [B, V] and the state of the next slot (None at the block's start)."""


class VanillaMarkov:
    """bias = W2 e."""

    def __init__(self, weights: Weights) -> None:
        self.embed = weights.table("markov_w1.weight")
        self._bias = weights.linear("markov_w2")

    def prepare(self, hidden: mx.array) -> mx.array:
        return hidden

    def step(
        self, prepared: mx.array, embedded: mx.array, state: mx.array | None
    ) -> tuple[mx.array, None]:
        return self._bias(embedded), None


class GatedMarkov:
    """bias = W2 (g * e), g = sigmoid(Wg [h ; e] + b)."""

    def __init__(self, weights: Weights, hidden_size: int) -> None:
        self.embed = weights.table("markov_w1.weight")
        self._bias = weights.linear("markov_w2")
        gate = weights.vector("gate_proj.weight")
        self._of_hidden, self._of_embedded = gate[:, :hidden_size].T, gate[:, hidden_size:].T
        self._offset = weights.vector("gate_proj.bias")

    def prepare(self, hidden: mx.array) -> mx.array:
        return hidden @ self._of_hidden + self._offset

    def step(
        self, prepared: mx.array, embedded: mx.array, state: mx.array | None
    ) -> tuple[mx.array, None]:
        gate = mx.sigmoid(prepared + embedded @ self._of_embedded)
        return self._bias(gate * embedded), None


class RnnMarkov:
    """(a, c, o) = W [s ; e ; h] + b; s' = sigmoid(a) s + (1 - sigmoid(a)) tanh(c);
    bias = W2 tanh(o). s starts at zero in every block."""

    def __init__(self, weights: Weights, rank: int) -> None:
        self.embed = weights.table("markov_w1.weight")
        self._bias = weights.linear("markov_w2")
        joint = weights.vector("joint_proj.weight")
        self._of_state = joint[:, :rank].T
        self._of_embedded = joint[:, rank : 2 * rank].T
        self._of_hidden = joint[:, 2 * rank :].T
        self._offset = weights.vector("joint_proj.bias")

    def prepare(self, hidden: mx.array) -> mx.array:
        return hidden @ self._of_hidden + self._offset

    def step(
        self, prepared: mx.array, embedded: mx.array, state: mx.array | None
    ) -> tuple[mx.array, mx.array]:
        joint = prepared + embedded @ self._of_embedded
        if state is None:
            state = mx.zeros_like(embedded)
        else:
            joint = joint + state @ self._of_state
        keep, candidate, out = mx.split(joint, 3, axis=-1)
        keep = mx.sigmoid(keep)
        state = keep * state + (1 - keep) * mx.tanh(candidate)
        return self._bias(mx.tanh(out)), state


def markov_head(spec: BlockSpec, weights: Weights) -> MarkovHead | None:
    """The spec's Markov head, if it has one."""
    if spec.markov is None:
        return None
    weights = weights.under("markov_head.")
    if spec.markov.kind == "vanilla":
        return VanillaMarkov(weights)
    if spec.markov.kind == "gated":
        return GatedMarkov(weights, spec.hidden_size)
    return RnnMarkov(weights, spec.markov.rank)


class CandidateSelector:
    """DFlash 2: a slot's score of a candidate is its logit and how well it follows the token
    before: <A[before] * (P h), B[candidate]>. (z-lab, dflash/model.py.)"""

    def __init__(self, selector: Selector, weights: Weights) -> None:
        weights = weights.under("candidate_selector.")
        self._count = selector.candidates
        self._project = weights.linear("hidden_projection")
        self._before = weights.table("predecessor_codebook")
        self._candidate = weights.table("successor_codebook")

    def prepare(self, hidden: mx.array, logits: mx.array) -> tuple[mx.array, mx.array]:
        """What does not depend on the tokens chosen: P h [B, K, r], candidates [B, K, C]."""
        best = mx.argpartition(-logits, self._count - 1, axis=-1)[..., : self._count]
        return self._project(hidden), best

    def step(
        self, projected: mx.array, candidates: mx.array, logits: mx.array, before: mx.array
    ) -> mx.array:
        """Scores [B, V] of one slot, -inf beside its candidates.

        Args:
            projected: [B, r].
            candidates: [B, C].
            logits: [B, V].
            before: [B] the token before.
        """
        query = (self._before(before) * projected)[:, None]
        follows = (query * self._candidate(candidates)).astype(logits.dtype).sum(axis=-1)
        scores = mx.take_along_axis(logits, candidates, axis=-1) + follows
        return mx.put_along_axis(mx.full_like(logits, -mx.inf), candidates, scores, axis=-1)


class ConfidenceHead:
    """sigmoid((w [h ; e] + b) / T), in float32: the probability that a slot's guess is accepted
    given that all before it are. Depends on the anchor and the guesses before the slot only."""

    def __init__(self, confidence: Confidence, weights: Weights) -> None:
        weights = weights.under("confidence_head.")
        self._with_markov = confidence.with_markov
        self._weight = weights.vector("proj.weight", mx.float32)[0]
        self._bias = weights.vector("proj.bias", mx.float32)
        self._temperatures = mx.array(confidence.temperatures, dtype=mx.float32)

    def __call__(self, hidden: mx.array, embedded: list[mx.array]) -> mx.array:
        """[B, K, H] hidden states and K Markov rows [B, r] to [B, K] probabilities."""
        return mx.sigmoid(self.logits(hidden, embedded))

    def logits(self, hidden: mx.array, embedded: list[mx.array]) -> mx.array:
        features = hidden
        if self._with_markov:
            features = mx.concatenate([hidden, mx.stack(embedded, axis=1)], axis=-1)
        logits = features.astype(mx.float32) @ self._weight + self._bias
        if not self._temperatures.size:
            return logits
        return logits / self._temperatures[: logits.shape[1]]


def token_ids(spec: DrafterSpec, weights: Weights) -> mx.array | None:
    """[Vd] target id of each draft id: id + d2t[id]. None for the target's own vocabulary."""
    if spec.draft_vocab_size is None:
        return None
    offsets = weights.vector("d2t", mx.int32)
    ids = mx.arange(spec.draft_vocab_size, dtype=mx.int32) + offsets
    mx.eval(ids)
    return ids
