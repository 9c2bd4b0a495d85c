"""What a drafter is, in one dataclass that every packaging fills and one core builds from.

Sizes: H hidden, V vocabulary, D head_dim, r Markov rank, m taps, L layers. Tensor names are
DeepSpec's (`layers.0.self_attn.q_proj.weight`); other packagings translate theirs. Linear
weights are [out, in].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Mode = Literal["dspark", "dflash"]
Backbone = Literal["qwen3", "gemma4"]
MarkovKind = Literal["vanilla", "gated", "rnn"]
OfTarget = Literal["target"]

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions, half-split pairs unless `interleaved`.

    Attributes:
        theta: the base.
        partial: share of the head that rotates; frequencies stay theta^(-2i/D) of the full
            head ("proportional" in Gemma 4's config), so below 1 the pairs (i, i + D/2) with
            i >= partial * D / 2 do not move.
        interleaved: pairs are (2i, 2i + 1).
    """

    theta: float
    partial: float = 1.0
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """Who a block slot sees: every context row and slot, unless limited.

    Attributes:
        causal: no slot after itself.
        window: only positions k with q - window < k, or all.
    """

    causal: bool = False
    window: int | None = None


@dataclass(frozen=True, slots=True)
class Markov:
    """A correction of a slot's logits that depends on the token drafted before it."""

    kind: MarkovKind
    rank: int


@dataclass(frozen=True, slots=True)
class Confidence:
    """A score for each slot.

    Attributes:
        with_markov: it reads the Markov embedding of the previous token too.
        temperatures: what each slot's logit is divided by; empty: nothing.
    """

    with_markov: bool
    temperatures: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class LogSnr:
    """Conditioning of the block embeddings: slot 0 at `maximum`, masks at `minimum`."""

    minimum: float
    maximum: float


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """One block drafter.

    Attributes:
        packaging: the name of the row of the recognition table that read it.
        mode: what statistics call it.
        taps: target layers, in the order their outputs are concatenated; -1 = embedding.
        num_target_layers: the target's decoder layers, or None where the file does not say.
        block_size: slots of a block, the anchor's included.
        first_slot: 0 if the anchor's slot predicts the token after it (DSpark), 1 if it is
            silent and slot j predicts the token at start + j (DFlash).
        keys_as_values: values are the raw keys; there is no v_proj.
        own_embedding, own_head: in the file; otherwise borrowed from the target.
        embed_scale: factor on embedding rows, or the target's own.
        softcap: cap of `cap * tanh(x / cap)` on the logits, None, or the target's own.
        draft_vocab_size: columns of the head; below vocab_size there is a tensor `d2t`.
    """

    packaging: str
    mode: Mode
    backbone: Backbone
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    rope: Rope
    attention: tuple[LayerAttention, ...]
    taps: tuple[int, ...]
    num_target_layers: int | None
    block_size: int
    mask_token: int
    first_slot: Literal[0, 1]
    own_embedding: bool
    own_head: bool
    keys_as_values: bool = False
    embed_scale: float | OfTarget = 1.0
    softcap: float | OfTarget | None = None
    markov: Markov | None = None
    confidence: Confidence | None = None
    log_snr: LogSnr | None = None
    draft_vocab_size: int | None = None

    @property
    def num_layers(self) -> int:
        return len(self.attention)

    @property
    def max_block(self) -> int:
        """The most tokens it proposes in a round."""
        return self.block_size - self.first_slot

    @property
    def head_rows(self) -> int:
        """Columns of the logits."""
        return self.draft_vocab_size or self.vocab_size


LOG_SNR_FEATURES = 128


def expected_tensors(spec: DrafterSpec) -> dict[str, Shape]:
    """Name and shape of every tensor that a file of this spec holds, and no other."""
    hidden, vocab = spec.hidden_size, spec.vocab_size
    tensors: dict[str, Shape] = {
        "fc.weight": (hidden, len(spec.taps) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    if spec.own_embedding:
        tensors["embed_tokens.weight"] = (vocab, hidden)
    if spec.own_head:
        tensors["lm_head.weight"] = (spec.head_rows, hidden)
    if spec.draft_vocab_size is not None:
        tensors["d2t"] = (spec.draft_vocab_size,)
    for layer in range(spec.num_layers):
        tensors |= {f"layers.{layer}.{name}": shape for name, shape in _layer(spec).items()}
    return tensors | _markov(spec) | _confidence(spec) | _log_snr(spec)


def _layer(spec: DrafterSpec) -> dict[str, Shape]:
    hidden, inner, dim = spec.hidden_size, spec.intermediate_size, spec.head_dim
    tensors: dict[str, Shape] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (spec.num_heads * dim, hidden),
        "self_attn.k_proj.weight": (spec.num_kv_heads * dim, hidden),
        "self_attn.o_proj.weight": (hidden, spec.num_heads * dim),
        "self_attn.q_norm.weight": (dim,),
        "self_attn.k_norm.weight": (dim,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if not spec.keys_as_values:
        tensors["self_attn.v_proj.weight"] = (spec.num_kv_heads * dim, hidden)
    if spec.backbone == "gemma4":
        tensors["pre_feedforward_layernorm.weight"] = (hidden,)
        tensors["post_feedforward_layernorm.weight"] = (hidden,)
        tensors["layer_scalar"] = (1,)
    return tensors


def _markov(spec: DrafterSpec) -> dict[str, Shape]:
    if spec.markov is None:
        return {}
    rank, hidden = spec.markov.rank, spec.hidden_size
    tensors: dict[str, Shape] = {
        "markov_head.markov_w1.weight": (spec.vocab_size, rank),
        "markov_head.markov_w2.weight": (spec.head_rows, rank),
    }
    if spec.markov.kind == "gated":
        tensors["markov_head.gate_proj.weight"] = (rank, hidden + rank)
        tensors["markov_head.gate_proj.bias"] = (rank,)
    if spec.markov.kind == "rnn":
        tensors["markov_head.joint_proj.weight"] = (3 * rank, 2 * rank + hidden)
        tensors["markov_head.joint_proj.bias"] = (3 * rank,)
    return tensors


def _confidence(spec: DrafterSpec) -> dict[str, Shape]:
    if spec.confidence is None:
        return {}
    rank = spec.markov.rank if spec.markov and spec.confidence.with_markov else 0
    return {
        "confidence_head.proj.weight": (1, spec.hidden_size + rank),
        "confidence_head.proj.bias": (1,),
    }


def _log_snr(spec: DrafterSpec) -> dict[str, Shape]:
    if spec.log_snr is None:
        return {}
    hidden = spec.hidden_size
    return {
        "log_snr.fc1.weight": (hidden, LOG_SNR_FEATURES),
        "log_snr.fc1.bias": (hidden,),
        "log_snr.fc2.weight": (hidden, hidden),
        "log_snr.fc2.bias": (hidden,),
    }
