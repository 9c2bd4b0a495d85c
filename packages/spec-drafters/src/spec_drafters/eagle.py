"""EAGLE3: an autoregressive drafter of one layer, as a seams.Drafter.

Row i joins the fused taps of position i with the embedding of the token at i + 1, and predicts
the token at i + 2. Drafting goes on with the layer's own output in place of fused taps. With a
single layer a row's keys and values depend on nothing but that row, so text that is merely told
needs no attention. (DeepSpec, modeling/eagle3; vllm-project/speculators, models/eagle3.)

Shapes: B rows, T columns, H hidden, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from spec_core.device import start_layer
from spec_core.errors import SeamError
from spec_core.seams import Chooser, DrafterState, EmbeddingLender, Proposal
from spec_drafters.backbone import (
    KeysValues,
    KeyValueProjector,
    Mlp,
    Queries,
    attention_scale,
)
from spec_drafters.eagle_state import EagleState
from spec_drafters.heads import Head, TokenEmbedding, token_ids
from spec_drafters.linear import Weights
from spec_drafters.picks import Picks
from spec_drafters.rope import Offset
from spec_drafters.spec import EagleSpec


class TapFusion:
    """Taps to one row [B, T, H], normed before `fc` where the drafter was trained so."""

    def __init__(self, spec: EagleSpec, weights: Weights) -> None:
        self._eps, self._dtype = spec.norm_eps, weights.precision.dtype
        self._joint, self._each = None, None
        if spec.tap_norm == "all":
            self._joint = weights.vector("input_norm.weight")
        if spec.tap_norm == "each":
            names = [f"fc_norm.{tap}.weight" for tap in range(spec.tap_count)]
            self._each = [weights.vector(name) for name in names]
        self._fuse = weights.linear("fc")

    def __call__(self, taps: Sequence[mx.array]) -> mx.array:
        taps = [tap.astype(self._dtype) for tap in taps]
        if self._each is not None:
            pairs = zip(taps, self._each, strict=True)
            taps = [mx.fast.rms_norm(tap, weight, self._eps) for tap, weight in pairs]
        rows = mx.concatenate(taps, axis=-1)
        if self._joint is not None:
            rows = mx.fast.rms_norm(rows, self._joint, self._eps)
        return self._fuse(rows)


class EagleLayer:
    """The layer, in the parts that the chain needs one by one."""

    def __init__(self, spec: EagleSpec, weights: Weights) -> None:
        self._eps, self._scale = spec.norm_eps, attention_scale(spec)
        self._heads, self._groups = spec.num_kv_heads, spec.num_heads // spec.num_kv_heads
        self._residual_normed = spec.norm_before_residual
        self._projector = KeyValueProjector(spec, weights)
        weights = weights.under("layers.0.")
        self._queries = Queries(spec, weights.under("self_attn."), self._projector.rotary)
        self._output = weights.under("self_attn.").linear("o_proj", biased=spec.attention_biases)
        self._mlp = Mlp(spec, weights.under("mlp."))
        self._token_norm = weights.vector("input_layernorm.weight")
        self._hidden_norm = weights.vector("hidden_norm.weight")
        self._between = weights.vector("post_attention_layernorm.weight")
        self._sandwich = spec.backbone == "gemma4"
        if self._sandwich:
            self._before_mlp = weights.vector("pre_feedforward_layernorm.weight")
            self._after_mlp = weights.vector("post_feedforward_layernorm.weight")
            self._scalar = weights.vector("layer_scalar")

    def inputs(self, embedded: mx.array, hidden: mx.array) -> tuple[mx.array, mx.array]:
        """Rows [B, T, 2H] for attention, and the residual [B, T, H] that it is added to."""
        normed = self._norm(hidden, self._hidden_norm)
        rows = mx.concatenate([self._norm(embedded, self._token_norm), normed], axis=-1)
        return rows, normed if self._residual_normed else hidden

    def keys_values(self, rows: mx.array, offset: Offset) -> KeysValues:
        """[B, T, 2H] to keys and values [B, heads, T, D]."""
        return self._projector.block(0, rows, offset)

    def attend(
        self,
        rows: mx.array,
        offset: Offset,
        context: KeysValues,
        mask: mx.array | None,
        chain: Sequence[KeysValues],
    ) -> mx.array:
        """One row [B, 1, 2H] over the context's columns and the chain's own rows: [B, 1, H].

        Args:
            rows: what `inputs` gave.
            offset: its position.
            context: keys and values [B, heads, C, D].
            mask: [B, 1, 1, C] which of them are seen, or None: all.
            chain: each row drafted since, [B, heads, 1, D]. They are kept apart: writing them
                behind the context while it is read would copy it.
        """
        query = self._queries(rows, offset)
        if not chain:
            out = mx.fast.scaled_dot_product_attention(
                query, *context, scale=self._scale, mask=mask
            )
        else:
            out = self._attend_apart(query, context, mask, chain)
        return self._output(out.swapaxes(1, 2).flatten(2))

    def _attend_apart(
        self,
        query: mx.array,
        context: KeysValues,
        mask: mx.array | None,
        chain: Sequence[KeysValues],
    ) -> mx.array:
        batch, _, _, dim = query.shape
        query = query.reshape(batch, self._heads, self._groups, dim) * self._scale
        keys, values = (mx.concatenate(list(part), axis=2) for part in zip(*chain, strict=True))
        scores = query @ context[0].swapaxes(-1, -2)
        if mask is not None:
            scores = mx.where(mask, scores, mx.array(-mx.inf, dtype=scores.dtype))
        scores = mx.concatenate([scores, query @ keys.swapaxes(-1, -2)], axis=-1)
        shares = mx.softmax(scores, axis=-1, precise=True)
        columns = context[0].shape[2]
        out = shares[..., :columns] @ context[1] + shares[..., columns:] @ values
        return out.reshape(batch, self._heads * self._groups, 1, dim)

    def finish(self, residual: mx.array, attended: mx.array) -> mx.array:
        """The layer's output [B, 1, H]."""
        if not self._sandwich:
            hidden = residual + attended
            return hidden + self._mlp(self._norm(hidden, self._between))
        hidden = residual + self._norm(attended, self._between)
        inner = self._mlp(self._norm(hidden, self._before_mlp))
        return (hidden + self._norm(inner, self._after_mlp)) * self._scalar

    def _norm(self, x: mx.array, weight: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, weight, self._eps)


class EagleDrafter:
    """Drafts token by token, on the device, from the target's tapped states.

    Args:
        spec: what it is, fitted to its target (see `fit`).
        weights: its tensors.
        lender: the target's embedding and head, where the drafter has none.
    """

    def __init__(
        self, spec: EagleSpec, weights: Weights, lender: EmbeddingLender | None = None
    ) -> None:
        self.spec = spec
        self.fuse: Callable[[Sequence[mx.array]], mx.array] = TapFusion(spec, weights)
        self.embedding = TokenEmbedding(spec, weights, lender)
        self.layer = EagleLayer(spec, weights)
        self.head = Head(spec, weights, lender)
        self._final_norm = weights.vector("norm.weight")
        self._dtype = weights.precision.dtype
        self._token_ids = token_ids(spec, weights)
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

    def new_state(self, rows: int, start: int = 0) -> EagleState:
        return EagleState(self.spec, self._dtype, rows, start)

    def extend(
        self,
        state: DrafterState,
        tokens: mx.array,
        taps: Sequence[mx.array],
        keep: Sequence[int],
    ) -> None:
        """Complete the rows that [B, T] tokens complete, and fuse their own taps. Lazy.

        Raises:
            SeamError: not one array for each tap, or `keep` does not fit them.
        """
        held = _held(state)
        if len(taps) != len(self.taps):
            raise SeamError(f"{self.name} reads {len(self.taps)} taps; it was given {len(taps)}")
        columns = max(keep, default=0)
        if len(keep) != held.rows or min(keep, default=0) < 0 or columns > tokens.shape[1]:
            raise SeamError(f"keep is {list(keep)} of {tokens.shape[1]} forwarded columns")
        if not columns:
            return
        fused = self.fuse([tap[:, :columns] for tap in taps])
        hidden, following = held.pair(fused, tokens[:, :columns])
        rows = None
        if hidden.shape[1]:
            inputs, _ = self.layer.inputs(self.embedding(following), hidden)
            rows = self.layer.keys_values(inputs, held.offset())
        held.extend(rows, fused, keep)

    def propose(
        self, state: DrafterState, anchor: mx.array, count: int, chooser: Chooser
    ) -> Proposal:
        """Draft `count` tokens, one after the other, without a wait in between. Lazy.

        A text of which nothing was told gets no guess.

        Raises:
            SeamError: `count` is not in 1..max_block.
        """
        if not 1 <= count <= self.max_block:
            raise SeamError(f"{self.name} proposes 1 to {self.max_block} tokens, not {count}")
        held = _held(state)
        chain, picks = Chain(self.layer, held), Picks(chooser, anchor, self._token_ids)
        hidden = held.waiting[:, None]
        for _ in range(count):
            hidden = chain.step(self.embedding(picks.last)[:, None], hidden)
            start_layer(hidden)
            normed = mx.fast.rms_norm(hidden, self._final_norm, self.spec.norm_eps)
            picks.pick(self.head(normed)[:, 0])
            if self.spec.norm_output:
                hidden = normed
        return Proposal(
            picks.tokens,
            tuple(count if begun else 0 for begun in held.begun),
            picks.log_q,
            sources=(self.name,) * held.rows,
        )


class Chain:
    """Drafted rows behind each text's own: the first is written behind them once, the others
    live as long as the proposal is made."""

    def __init__(self, layer: EagleLayer, state: EagleState) -> None:
        self._layer = layer
        self._state = state
        self._offset = state.offset()
        self._context: KeysValues | None = None
        self._mask: mx.array | None = None
        self._rows: list[KeysValues] = []

    def step(self, embedded: mx.array, hidden: mx.array) -> mx.array:
        """The layer's output [B, 1, H] for the next row, [B, 1, H] each."""
        rows, residual = self._layer.inputs(embedded, hidden)
        new = self._layer.keys_values(rows, self._offset)
        if self._context is None:
            self._context = self._state.provisional(*new)
            self._mask = self._visible(self._context[0].shape[2])
        else:
            self._rows.append(new)
        attended = self._layer.attend(rows, self._offset, self._context, self._mask, self._rows)
        self._offset = self._offset + 1
        return self._layer.finish(residual, attended)

    def _visible(self, columns: int) -> mx.array | None:
        """[B, 1, 1, columns]: a text's own rows and the first drafted one; None: all."""
        depths = self._state.depths
        if set(depths) == {columns - 1}:
            return None
        last = mx.array(depths, dtype=mx.int32)[:, None, None, None]
        return mx.arange(columns, dtype=mx.int32) <= last


def _held(state: DrafterState) -> EagleState:
    if not isinstance(state, EagleState):
        raise SeamError(f"this drafter needs its own state, not a {type(state).__name__}")
    return state
