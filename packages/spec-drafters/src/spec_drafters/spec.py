"""What a drafter is, in one dataclass that every packaging fills and one core builds from.

Sizes: H hidden, V vocabulary, D head_dim, r Markov rank, m taps, L layers. Tensor names are
DeepSpec's (`layers.0.self_attn.q_proj.weight`); other packagings translate theirs. Linear
weights are [out, in].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypedDict

from spec_drafters.errors import CheckpointError

Backbone = Literal["qwen3", "gemma4"]
MarkovKind = Literal["vanilla", "gated", "rnn"]
OfTarget = Literal["target"]
FirstSlot = Literal[0, 1]
TapNorm = Literal["all", "each"]

Shape = tuple[int, ...]

LARGEST_BLOCK = 256
"""Tokens of a block, at most: far more than any known drafter guesses, and little enough for
buffers of every target."""


@dataclass(frozen=True, slots=True)
class Linear:
    """Rotary positions divided by a factor."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3:
    """Low frequencies divided by a factor.

    Attributes:
        factor: the divisor.
        low, high: pairs that turn fewer times than `low` over the original context are divided,
            those that turn more often than `high` are kept.
        original_positions: the original context.
    """

    factor: float
    low: float
    high: float
    original_positions: int


@dataclass(frozen=True, slots=True)
class Yarn:
    """Low frequencies divided by a factor, and queries and keys made larger.

    Attributes:
        factor: the divisor.
        original_positions: the original context.
        beta_fast, beta_slow: as Llama 3's `high` and `low`, in turns.
        attention_factor: what queries and keys are multiplied with.
        truncate: the range of blended pairs begins and ends at whole numbers.
    """

    factor: float
    original_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


RopeScaling = Linear | Llama3 | Yarn


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions, half-split pairs unless `interleaved`.

    Attributes:
        theta: the base.
        partial: share of the head that rotates; frequencies stay theta^(-2i/D) of the full
            head ("proportional" in Gemma 4's config), so below 1 the pairs (i, i + D/2) with
            i >= partial * D / 2 do not move.
        interleaved: pairs are (2i, 2i + 1).
        scaling: for contexts beyond the one that was trained, or None.
    """

    theta: float
    partial: float = 1.0
    interleaved: bool = False
    scaling: RopeScaling | None = None


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


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterSpec:
    """What every drafter with weights has in common.

    Attributes:
        packaging: the name of the row of the recognition table that read it.
        mode: what statistics call it.
        taps: target layers, in the order their outputs are concatenated; -1 = embedding. None
            where the file names none and the target's depth decides; see `fit`.
        num_target_layers: the target's decoder layers, or None where the file does not say.
        own_embedding, own_head: in the file; otherwise borrowed from the target.
        keys_as_values: values are the raw keys; there is no v_proj.
        query_key_norms: queries and keys are normed per head.
        attention_biases: q_proj, k_proj, v_proj and o_proj have a bias.
        embed_scale: factor on embedding rows, or the target's own.
        output_multiplier: factor on the logits, before the softcap.
        softcap: cap of `cap * tanh(x / cap)` on the logits, None, or the target's own.
        draft_vocab_size: columns of the head; below vocab_size there is a tensor `d2t`.
        confidence: the score of each slot, or None.
    """

    packaging: str
    mode: str
    backbone: Backbone
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    rope: Rope
    taps: tuple[int, ...] | None
    num_target_layers: int | None
    own_embedding: bool
    own_head: bool
    keys_as_values: bool = False
    query_key_norms: bool = True
    attention_biases: bool = False
    embed_scale: float | OfTarget = 1.0
    output_multiplier: float = 1.0
    softcap: float | OfTarget | None = None
    draft_vocab_size: int | None = None
    confidence: Confidence | None = None

    @property
    def num_layers(self) -> int:
        raise NotImplementedError

    @property
    def max_block(self) -> int:
        """The most tokens it proposes in a round."""
        raise NotImplementedError

    @property
    def tap_count(self) -> int:
        return DEFAULT_TAPS if self.taps is None else len(self.taps)

    @property
    def head_rows(self) -> int:
        """Columns of the logits."""
        return self.draft_vocab_size or self.vocab_size

    def tensors(self) -> dict[str, Shape]:
        """Name and shape of every tensor that a file of this spec holds, and no other."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Selector:
    """DFlash 2's choice among each slot's best candidates, which depends on the token before.

    Attributes:
        rank: width of its codebooks.
        candidates: how many of a slot's most likely tokens it chooses from.
    """

    rank: int
    candidates: int


@dataclass(frozen=True, slots=True)
class Convolution:
    """DFlash 2's causal convolutions over a block's slots, around each sublayer.

    Attributes:
        width: slots that one output sees, its own included.
        group: neighbouring features that share a correction of the kernel.
    """

    width: int
    group: int


class Alike(TypedDict):
    """Fields of DrafterSpec that all readers of a config find in the same place."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    vocab_size: int
    norm_eps: float
    taps: tuple[int, ...] | None
    num_target_layers: int | None
    own_embedding: bool
    own_head: bool
    attention_biases: bool


class Common(Alike):
    """Fields of DrafterSpec that a family's readers share, on their way into a spec."""

    backbone: Backbone
    num_kv_heads: int
    head_dim: int
    rope: Rope
    keys_as_values: bool
    query_key_norms: bool
    embed_scale: float | OfTarget
    softcap: float | OfTarget | None


def _check_length(name: str, length: int) -> None:
    if length > LARGEST_BLOCK:
        raise CheckpointError(
            f"the drafter's configuration is refused: {name} is {length}; it must be at most "
            f"{LARGEST_BLOCK} (known drafters have up to 32)"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSpec(DrafterSpec):
    """One block drafter.

    Attributes:
        block_size: slots of a block, the anchor's included.
        first_slot: 0 if the anchor's slot predicts the token after it (DSpark), 1 if it is
            silent and slot j predicts the token at start + j (DFlash); None where the file does
            not say.
        mask_embedding: a tensor of its own stands in for the mask token's embedding.

    Raises:
        CheckpointError: `block_size` is above LARGEST_BLOCK.
    """

    attention: tuple[LayerAttention, ...]
    block_size: int
    mask_token: int
    first_slot: FirstSlot | None
    markov: Markov | None = None
    log_snr: LogSnr | None = None
    selector: Selector | None = None
    convolution: Convolution | None = None
    mask_embedding: bool = False

    def __post_init__(self) -> None:
        _check_length("block_size", self.block_size)

    @property
    def num_layers(self) -> int:
        return len(self.attention)

    @property
    def max_block(self) -> int:
        return self.block_size - (self.first_slot or 0)

    def tensors(self) -> dict[str, Shape]:
        hidden = self.hidden_size
        tensors = _ends(self) | {"hidden_norm.weight": (hidden,)}
        if self.mask_embedding:
            tensors["mask_embedding"] = (hidden,)
        for layer in range(self.num_layers):
            named = _layer(self, hidden) | _convolutions(self)
            tensors |= {f"layers.{layer}.{name}": shape for name, shape in named.items()}
        return tensors | _markov(self) | _confidence(self) | _log_snr(self) | _selector(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleSpec(DrafterSpec):
    """One autoregressive drafter of a single layer (EAGLE3).

    Attributes:
        draft_length: the most tokens it proposes in a round.
        tap_norm: how taps are normed before `fc`: "all" their concatenation as one row, "each"
            every tap by itself, or None.
        norm_before_residual: the layer's residual starts from the normed hidden state.
        norm_output: the next step is fed the final-normed hidden state.

    Raises:
        CheckpointError: `draft_length` is above LARGEST_BLOCK.
    """

    draft_length: int
    tap_norm: TapNorm | None = None
    norm_before_residual: bool = False
    norm_output: bool = False

    def __post_init__(self) -> None:
        _check_length("its drafts' length", self.draft_length)

    @property
    def num_layers(self) -> int:
        return 1

    @property
    def max_block(self) -> int:
        return self.draft_length

    def tensors(self) -> dict[str, Shape]:
        hidden, taps = self.hidden_size, self.tap_count
        tensors = _ends(self) | {"layers.0.hidden_norm.weight": (hidden,)}
        named = _layer(self, 2 * hidden)
        tensors |= {f"layers.0.{name}": shape for name, shape in named.items()}
        if self.tap_norm == "all":
            tensors["input_norm.weight"] = (taps * hidden,)
        if self.tap_norm == "each":
            tensors |= {f"fc_norm.{tap}.weight": (hidden,) for tap in range(taps)}
        return tensors


DEFAULT_TAPS = 3
"""Taps of a drafter whose file names none."""

LOG_SNR_FEATURES = 128


def _ends(spec: DrafterSpec) -> dict[str, Shape]:
    """What lies before and behind the layers."""
    hidden, vocab = spec.hidden_size, spec.vocab_size
    tensors: dict[str, Shape] = {
        "fc.weight": (hidden, spec.tap_count * hidden),
        "norm.weight": (hidden,),
    }
    if spec.own_embedding:
        tensors["embed_tokens.weight"] = (vocab, hidden)
    if spec.own_head:
        tensors["lm_head.weight"] = (spec.head_rows, hidden)
    if spec.draft_vocab_size is not None:
        tensors["d2t"] = (spec.draft_vocab_size,)
    return tensors


def _layer(spec: DrafterSpec, width: int) -> dict[str, Shape]:
    """A layer whose queries, keys and values are made from rows of this width."""
    hidden, inner, dim = spec.hidden_size, spec.intermediate_size, spec.head_dim
    tensors: dict[str, Shape] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    outputs = {"q_proj": spec.num_heads * dim, "k_proj": spec.num_kv_heads * dim, "o_proj": hidden}
    if not spec.keys_as_values:
        outputs["v_proj"] = spec.num_kv_heads * dim
    for name, rows in outputs.items():
        columns = spec.num_heads * dim if name == "o_proj" else width
        tensors[f"self_attn.{name}.weight"] = (rows, columns)
        if spec.attention_biases:
            tensors[f"self_attn.{name}.bias"] = (rows,)
    if spec.query_key_norms:
        tensors |= {f"self_attn.{name}_norm.weight": (dim,) for name in ("q", "k")}
    if spec.backbone == "gemma4":
        tensors["pre_feedforward_layernorm.weight"] = (hidden,)
        tensors["post_feedforward_layernorm.weight"] = (hidden,)
        tensors["layer_scalar"] = (1,)
    return tensors


def _markov(spec: BlockSpec) -> dict[str, Shape]:
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


def _confidence(spec: BlockSpec) -> dict[str, Shape]:
    if spec.confidence is None:
        return {}
    rank = spec.markov.rank if spec.markov and spec.confidence.with_markov else 0
    return {
        "confidence_head.proj.weight": (1, spec.hidden_size + rank),
        "confidence_head.proj.bias": (1,),
    }


def _log_snr(spec: BlockSpec) -> dict[str, Shape]:
    if spec.log_snr is None:
        return {}
    hidden = spec.hidden_size
    return {
        "log_snr.fc1.weight": (hidden, LOG_SNR_FEATURES),
        "log_snr.fc1.bias": (hidden,),
        "log_snr.fc2.weight": (hidden, hidden),
        "log_snr.fc2.bias": (hidden,),
    }


def _convolutions(spec: BlockSpec) -> dict[str, Shape]:
    if spec.convolution is None:
        return {}
    width, hidden = spec.convolution.width, spec.hidden_size
    rows = 2 * width * (hidden // spec.convolution.group)
    return {
        f"{name}_conv.{tensor}": shape
        for name in ("attention", "mlp")
        for tensor, shape in (
            ("base_kernel", (2, width, hidden)),
            ("kernel_projection.weight", (rows, hidden)),
        )
    }


def _selector(spec: BlockSpec) -> dict[str, Shape]:
    if spec.selector is None:
        return {}
    rank = spec.selector.rank
    return {
        "candidate_selector.hidden_projection.weight": (rank, spec.hidden_size),
        "candidate_selector.predecessor_codebook": (spec.vocab_size, rank),
        "candidate_selector.successor_codebook": (spec.vocab_size, rank),
    }
