"""The layers of a block drafter: context rows to keys and values, a block to hidden states.

Shapes: B rows, n context columns, T block slots, L layers, H hidden, D head_dim. Context never
runs through the layers: C = rms(fc(taps); hidden_norm) is projected by every layer's own key
and value matrices, and the result is all that a state keeps. A block slot attends to the
context rows and to the other slots of its block. (DeepSpec, modeling/dspark; z-lab, dflash.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from spec_core import flash_decode
from spec_core.device import runs_beside_host, start_layer
from spec_core.flash_decode import Columns
from spec_core.kv import KVRows, RowClock
from spec_drafters.linear import Weights
from spec_drafters.rope import Offset, Rotary
from spec_drafters.spec import BlockSpec, Convolution, DrafterSpec, LayerAttention

KeysValues = tuple[mx.array, mx.array]


class Sight:
    """Who sees whom in one block pass over T slots, in columns of the key/value buffers.

    Column c of row b holds one of its `lengths[b]` context rows, or a block slot from column
    lengths[b] on; what lies beyond is stale and must not be seen.
    """

    def __init__(self, clock: RowClock, slots: int) -> None:
        self._clock = clock
        self._lengths = clock.lengths
        self._slots = slots
        self._uniform = clock.uniform
        self._end = clock.reads(slots)
        self._bare = self._end == clock.longest + slots
        self._stepped = clock.stepped
        self._ends: mx.array | None = None
        self._masks: dict[tuple[LayerAttention, int, int], mx.array | None] = {}

    def first(self, attention: LayerAttention) -> int:
        """The first column that any slot of any row sees."""
        if attention.window is None or self._stepped:
            return 0
        return max(0, min(self._lengths) - attention.window + 1)

    def ends(self, attention: LayerAttention) -> mx.array | None:
        """[B] columns that every slot sees, on CUDA and where all see the same; None elsewhere."""
        if not self._stepped or attention.causal or attention.window is not None:
            return None
        if self._ends is None:
            self._ends = self._clock.ends(self._slots)
        return self._ends

    def mask(self, attention: LayerAttention, queries: slice) -> mx.array | None:
        """[B or 1, 1, queries or 1, columns from `first` on], or None: all see all. Made once."""
        key = (attention, queries.start, queries.stop)
        if key not in self._masks:
            self._masks[key] = self._mask(attention, queries)
        return self._masks[key]

    def _mask(self, attention: LayerAttention, queries: slice) -> mx.array | None:
        limited = attention.causal or attention.window is not None
        if self._uniform and self._bare and not limited:
            return None
        start = self._clock.offset()
        row = (start if isinstance(start, mx.array) else mx.array([start]))[:, None, None, None]
        column = mx.arange(self.first(attention), self._end, dtype=mx.int32)
        if not limited:
            return column < row + self._slots
        query = row + mx.arange(queries.start, queries.stop, dtype=mx.int32)[:, None]
        seen = column <= query if attention.causal else column < row + self._slots
        if attention.window is not None:
            seen = mx.logical_and(seen, column > query - attention.window)
        return seen


@dataclass(frozen=True, slots=True)
class Pass:
    """What the layers of one block pass share."""

    sight: Sight
    offset: Offset
    caches: Sequence[KVRows]


class KeyValueProjector:
    """Every layer's key and value matrices as one stack [L, rows, H].

    Context rows go through all of them at once, a block's slots through one at a time. Keys are
    normed and rotated; values are raw in the Qwen3 backbone and normed without weight in
    Gemma 4's, where they may be the raw keys.
    """

    def __init__(self, spec: DrafterSpec, weights: Weights) -> None:
        names = ("k_proj",) if spec.keys_as_values else ("k_proj", "v_proj")
        layers = [f"layers.{i}.self_attn." for i in range(spec.num_layers)]
        self._all = weights.stack(layers, names, biased=spec.attention_biases)
        self._each = [self._all[i] for i in range(spec.num_layers)]
        self._norms: mx.array | None = None
        if spec.query_key_norms:
            self._norms = mx.stack([weights.vector(f"{at}k_norm.weight") for at in layers])
        self._heads, self._dim, self._eps = spec.num_kv_heads, spec.head_dim, spec.norm_eps
        self._shared = spec.keys_as_values
        self._norm_values = spec.backbone == "gemma4"
        self.rotary = Rotary(spec.rope, spec.head_dim)

    def context(self, x: mx.array, offset: Offset) -> list[KeysValues]:
        """[B, n, H] context rows to each layer's keys and values [B, heads, n, D]."""
        rows, columns, width = x.shape
        layers = len(self._each)
        raw = self._all(x.reshape(1, rows * columns, width))
        norms = self._norms
        if norms is not None:
            norms = mx.repeat(norms, rows, axis=0)[:, None, None]
        offset = mx.tile(offset, layers) if isinstance(offset, mx.array) else offset
        keys, values = self._shape(raw.reshape(layers * rows, columns, -1), norms, offset)
        each = (layers, rows, *keys.shape[1:])
        return list(zip(keys.reshape(each), values.reshape(each), strict=True))

    def block(self, layer: int, x: mx.array, offset: Offset) -> KeysValues:
        """[B, T, H] normed slots to one layer's keys and values [B, heads, T, D]."""
        norm = None if self._norms is None else self._norms[layer]
        return self._shape(self._each[layer](x), norm, offset)

    def _shape(self, raw: mx.array, norm: mx.array | None, offset: Offset) -> KeysValues:
        rows, columns, _ = raw.shape
        raw = raw.reshape(rows, columns, -1, self._heads, self._dim)
        keys, values = raw[:, :, 0], raw[:, :, 0 if self._shared else 1]
        if norm is not None:
            keys = mx.fast.rms_norm(keys, None, self._eps) * norm
        if self._norm_values:
            values = mx.fast.rms_norm(values, None, self._eps)
        return self.rotary(keys.swapaxes(1, 2), offset), values.swapaxes(1, 2)


class Queries:
    """One layer's queries: projected, normed per head and rotated."""

    def __init__(self, spec: DrafterSpec, weights: Weights, rotary: Rotary) -> None:
        self._heads, self._dim, self._eps = spec.num_heads, spec.head_dim, spec.norm_eps
        self._project = weights.linear("q_proj", biased=spec.attention_biases)
        self._norm = weights.vector("q_norm.weight") if spec.query_key_norms else None
        self._rotary = rotary

    def __call__(self, x: mx.array, offset: Offset) -> mx.array:
        """[B, T, width] to [B, heads, T, D]."""
        query = self._project(x).reshape(*x.shape[:2], self._heads, self._dim)
        if self._norm is not None:
            query = mx.fast.rms_norm(query, self._norm, self._eps)
        return self._rotary(query.swapaxes(1, 2), offset)


def attention_scale(spec: DrafterSpec) -> float:
    """What scores are multiplied with."""
    return float(spec.head_dim**-0.5) if spec.backbone == "qwen3" else 1.0


class Attention:
    """One layer's attention of block slots to context rows and to each other."""

    def __init__(
        self, spec: BlockSpec, layer: int, weights: Weights, projector: KeyValueProjector
    ) -> None:
        self._layer = layer
        self._kind = spec.attention[layer]
        self._scale = attention_scale(spec)
        self._queries = Queries(spec, weights, projector.rotary)
        self._output = weights.linear("o_proj", biased=spec.attention_biases)
        self._projector = projector

    def __call__(self, x: mx.array, run: Pass, queries: slice) -> mx.array:
        """[B, T, H] normed slots to [B, queries, H]."""
        query = self._queries(x[:, queries], run.offset + queries.start)
        slots = Columns(*self._projector.block(self._layer, x, run.offset))
        out = self._attend(query, slots, run.caches[self._layer], run.sight, queries)
        return self._output(out.swapaxes(1, 2).flatten(2))

    def _attend(
        self, query: mx.array, slots: Columns, context: KVRows, sight: Sight, queries: slice
    ) -> mx.array:
        ends = sight.ends(self._kind)
        if (
            ends is not None
            and context.written
            and flash_decode.serves(query, slots.keys, slots.values)
        ):
            keys, values = context.pending()
            return flash_decode.attend(
                query, keys, values, ends, self._scale, causal=False, newest=slots
            )
        keys, values = context.append(slots.keys, slots.values)
        first = sight.first(self._kind)
        if first:
            keys, values = keys[:, :, first:], values[:, :, first:]
        return mx.fast.scaled_dot_product_attention(
            query, keys, values, scale=self._scale, mask=sight.mask(self._kind, queries)
        )


class Mlp:
    """down(act(gate) * up), the first two as one matrix."""

    def __init__(self, spec: DrafterSpec, weights: Weights) -> None:
        self._in = weights.linear("gate_proj", "up_proj")
        self._out = weights.linear("down_proj")
        self._gated = _swiglu if spec.backbone == "qwen3" else _geglu
        # One kernel instead of several; on a CPU it would cost a run of the C++ compiler.
        if runs_beside_host():
            self._gated = mx.compile(self._gated, shapeless=True)

    def __call__(self, x: mx.array) -> mx.array:
        gate, up = mx.split(self._in(x), 2, axis=-1)
        return self._out(self._gated(gate, up))


def _swiglu(gate: mx.array, up: mx.array) -> mx.array:
    return gate * mx.sigmoid(gate) * up


def _geglu(gate: mx.array, up: mx.array) -> mx.array:
    """GELU by its tanh approximation."""
    inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
    return 0.5 * gate * (1 + mx.tanh(inner)) * up


class GroupedConvolution:
    """DFlash 2: a causal convolution over slots, before and behind a sublayer; the kernel of a
    slot is a base and a correction for each group of features, read off the sublayer's input."""

    def __init__(self, convolution: Convolution, weights: Weights) -> None:
        self._group = convolution.group
        self._base = weights.vector("base_kernel")
        self._correct = weights.linear("kernel_projection")

    def kernels(self, x: mx.array) -> mx.array:
        """[B, T, H] to [B, T, 2, width, groups, group]: before the sublayer, and behind it."""
        sides, width, hidden = self._base.shape
        groups = hidden // self._group
        moved = self._correct(x).reshape(*x.shape[:2], sides, width, groups, 1)
        return moved + self._base.reshape(sides, width, groups, self._group)

    def __call__(self, x: mx.array, kernels: mx.array) -> mx.array:
        """[B, T, H] with the kernels [B, T, width, groups, group] of their slots."""
        rows, slots, hidden = x.shape
        values = x.reshape(rows, slots, hidden // self._group, self._group)
        out = values * kernels[:, :, 0]
        for back in range(1, kernels.shape[2]):
            shifted = mx.pad(values[:, :-back], [(0, 0), (back, 0), (0, 0), (0, 0)])
            out = out + shifted * kernels[:, :, back]
        return out.reshape(x.shape)


class ConvolvedLayer:
    """DFlash 2's: Qwen3's layer with a convolution around each sublayer."""

    def __init__(
        self, spec: BlockSpec, layer: int, weights: Weights, projector: KeyValueProjector
    ) -> None:
        assert spec.convolution is not None
        self._eps = spec.norm_eps
        self._attention = Attention(spec, layer, weights.under("self_attn."), projector)
        self._mlp = Mlp(spec, weights.under("mlp."))
        self._around_attention = GroupedConvolution(
            spec.convolution, weights.under("attention_conv.")
        )
        self._around_mlp = GroupedConvolution(spec.convolution, weights.under("mlp_conv."))
        self._before = weights.vector("input_layernorm.weight")
        self._between = weights.vector("post_attention_layernorm.weight")

    def __call__(self, hidden: mx.array, run: Pass, queries: slice) -> mx.array:
        """[B, T, H] to [B, queries, H]. A slot's output depends on the slots before it."""
        upto = slice(0, queries.stop)
        normed = mx.fast.rms_norm(hidden, self._before, self._eps)
        convolve = self._around_attention
        kernels = convolve.kernels(normed)
        attended = self._attention(convolve(normed, kernels[:, :, 0]), run, upto)
        hidden = hidden[:, upto] + convolve(attended, kernels[:, upto, 1])
        normed = mx.fast.rms_norm(hidden, self._between, self._eps)
        convolve = self._around_mlp
        kernels = convolve.kernels(normed)
        inner = self._mlp(convolve(normed, kernels[:, :, 0]))
        return (hidden + convolve(inner, kernels[:, :, 1]))[:, queries]


class Qwen3Layer:
    """Norm, attention, norm, MLP, each added to the residual."""

    def __init__(
        self, spec: BlockSpec, layer: int, weights: Weights, projector: KeyValueProjector
    ) -> None:
        self._eps = spec.norm_eps
        self._attention = Attention(spec, layer, weights.under("self_attn."), projector)
        self._mlp = Mlp(spec, weights.under("mlp."))
        self._before = weights.vector("input_layernorm.weight")
        self._between = weights.vector("post_attention_layernorm.weight")

    def __call__(self, hidden: mx.array, run: Pass, queries: slice) -> mx.array:
        """[B, T, H] to [B, queries, H]."""
        normed = mx.fast.rms_norm(hidden, self._before, self._eps)
        hidden = hidden[:, queries] + self._attention(normed, run, queries)
        return hidden + self._mlp(mx.fast.rms_norm(hidden, self._between, self._eps))


class Gemma4Layer:
    """As Qwen3's, with each sublayer's output normed too, and the sum scaled."""

    def __init__(
        self, spec: BlockSpec, layer: int, weights: Weights, projector: KeyValueProjector
    ) -> None:
        self._eps = spec.norm_eps
        self._attention = Attention(spec, layer, weights.under("self_attn."), projector)
        self._mlp = Mlp(spec, weights.under("mlp."))
        self._before_attention = weights.vector("input_layernorm.weight")
        self._after_attention = weights.vector("post_attention_layernorm.weight")
        self._before_mlp = weights.vector("pre_feedforward_layernorm.weight")
        self._after_mlp = weights.vector("post_feedforward_layernorm.weight")
        self._scalar = weights.vector("layer_scalar")

    def __call__(self, hidden: mx.array, run: Pass, queries: slice) -> mx.array:
        """[B, T, H] to [B, queries, H]."""
        attended = self._attention(self._norm(hidden, self._before_attention), run, queries)
        hidden = hidden[:, queries] + self._norm(attended, self._after_attention)
        inner = self._mlp(self._norm(hidden, self._before_mlp))
        return (hidden + self._norm(inner, self._after_mlp)) * self._scalar

    def _norm(self, x: mx.array, weight: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, weight, self._eps)


def _layer_kind(
    spec: BlockSpec,
) -> type[Qwen3Layer] | type[Gemma4Layer] | type[ConvolvedLayer]:
    if spec.convolution is not None:
        return ConvolvedLayer
    return Qwen3Layer if spec.backbone == "qwen3" else Gemma4Layer


class BlockBackbone:
    """Context projection and block forward of one drafter."""

    def __init__(self, spec: BlockSpec, weights: Weights) -> None:
        kind = _layer_kind(spec)
        self._eps = spec.norm_eps
        self._dtype = weights.precision.dtype
        self._fuse = weights.linear("fc")
        self._context_norm = weights.vector("hidden_norm.weight")
        self._final_norm = weights.vector("norm.weight")
        self._projector = KeyValueProjector(spec, weights)
        self._layers = [
            kind(spec, i, weights.under(f"layers.{i}."), self._projector)
            for i in range(spec.num_layers)
        ]

    def fuse(self, taps: Sequence[mx.array]) -> mx.array:
        """[B, n, H] tap rows, one array a tapped layer or all side by side, to context rows
        [B, n, H]."""
        rows = mx.concatenate(list(taps), axis=-1).astype(self._dtype)
        return mx.fast.rms_norm(self._fuse(rows), self._context_norm, self._eps)

    def context(self, taps: Sequence[mx.array], offset: Offset) -> list[KeysValues]:
        """Tap rows to each layer's keys and values [B, heads, n, D]."""
        return self._projector.context(self.fuse(taps), offset)

    def block(self, embedded: mx.array, run: Pass, wanted: slice) -> mx.array:
        """Final-normed hidden states [B, wanted, H] of embedded slots [B, T, H].

        The slots' keys and values may be written behind the context, provisionally.
        """
        hidden, every = embedded, slice(0, embedded.shape[1])
        for layer in self._layers[:-1]:
            hidden = layer(hidden, run, every)
            start_layer(hidden)
        hidden = self._layers[-1](hidden, run, wanted)
        start_layer(hidden)
        return mx.fast.rms_norm(hidden, self._final_norm, self._eps)
