"""vLLM's "speculators": DSpark, DFlash and EAGLE3 under one schema.

The layers' config is nested, tapped layers are counted from 1 (0 is the embedding), the head may
be reduced to a part of the vocabulary, and what a full target already has may be left out.
(vllm-project/speculators, models; vLLM, transformers_utils/configs/speculators.)
"""

from __future__ import annotations

from typing import Literal

from spec_drafters.checkpoint import Checkpoint
from spec_drafters.config import Config
from spec_drafters.deepspec import read_confidence, read_markov, require
from spec_drafters.errors import CheckpointError, PackagingError
from spec_drafters.rope import read_rope
from spec_drafters.spec import (
    BlockSpec,
    Common,
    DrafterSpec,
    EagleSpec,
    LayerAttention,
    Rope,
    TapNorm,
)

NAME = "speculators"
ALGORITHMS = ("dspark", "dflash", "eagle3")

EAGLE_DRAFTS = 3
"""Tokens an EAGLE3 drafter proposes where the file does not say: what its training defaults to."""


def read_speculators(checkpoint: Checkpoint) -> DrafterSpec:
    """The spec of a speculators checkpoint.

    Raises:
        CheckpointError: a field is missing or out of range.
        PackagingError: the algorithm, or a feature of it, is not supported.
    """
    algorithm = algorithm_of(checkpoint.config)
    if algorithm == "eagle3":
        return _eagle(checkpoint)
    if algorithm in ALGORITHMS:
        return _block(checkpoint)
    raise PackagingError(
        NAME, f"the algorithm {algorithm!r} is not supported; {', '.join(ALGORITHMS)} are"
    )


def algorithm_of(config: Config) -> str:
    """What the file calls its algorithm; "" if it does not say."""
    named = config.section("speculators_config").text("algorithm")
    return named or config.text("speculators_model_type")


def _block(checkpoint: Checkpoint) -> BlockSpec:
    config = checkpoint.config
    projector = config.text("projector_type", "dflash")
    require(projector == "dflash", NAME, f"projector_type {projector!r}")
    require(not config.flag("shift_label", False), NAME, "shift_label")
    layers = config.section("transformer_layer_config")
    block = config.integer("block_size", 8, least=2)
    markov = read_markov(config)
    return BlockSpec(
        **_common(checkpoint, "aux_hidden_state_layer_ids", normed=True),
        packaging=NAME,
        mode="dspark" if markov else "dflash",
        attention=_attention(config, layers),
        draft_vocab_size=_draft_vocabulary(checkpoint),
        block_size=block,
        mask_token=config.integer("mask_token_id", least=0),
        first_slot=first_slot(config, block),
        markov=markov,
        confidence=read_confidence(config, markov, block),
    )


def _eagle(checkpoint: Checkpoint) -> EagleSpec:
    config = checkpoint.config
    layers = config.section("transformer_layer_config")
    depth = layers.integer("num_hidden_layers", 1)
    kind = layers.text("model_type", "llama")
    require(depth == 1, NAME, f"EAGLE3 of {depth} layers; one is")
    require(kind in ("llama", "qwen3"), NAME, f"EAGLE3 layers of type {kind!r}")
    require(not layers.flag("mlp_bias", False), NAME, "biases in the MLP")
    require("sliding_attention" not in layers.texts("layer_types"), NAME, "EAGLE3 with a window")
    return EagleSpec(
        **_common(checkpoint, "eagle_aux_hidden_state_layer_ids", normed=kind == "qwen3"),
        packaging=NAME,
        mode="eagle3",
        draft_vocab_size=_draft_vocabulary(checkpoint),
        draft_length=_drafted(config) or EAGLE_DRAFTS,
        tap_norm=_tap_norm(config),
        norm_before_residual=config.flag("norm_before_residual", True),
        norm_output=config.flag("norm_output", False),
    )


def _tap_norm(config: Config) -> TapNorm | None:
    jointly, each = config.flag("norm_before_fc", False), config.flag("fc_norm", False)
    require(not (jointly and each), NAME, "both norm_before_fc and fc_norm")
    if jointly:
        return "all"
    return "each" if each else None


def _common(checkpoint: Checkpoint, taps: str, *, normed: bool) -> Common:
    """What the algorithms share. Embedding rows are used as they are and logits are not capped,
    whatever the target does: the training code does neither."""
    config = checkpoint.config
    layers = config.section("transformer_layer_config")
    hidden = layers.integer("hidden_size")
    heads = layers.integer("num_attention_heads")
    activation = layers.text("hidden_act", "silu")
    require(activation == "silu", NAME, f"the activation {activation}")
    for key in ("target_logit_scale", "target_logit_softcap"):
        require(key not in config, NAME, key)
    other = config.integer("target_hidden_size", hidden)
    require(other == hidden, NAME, f"a target of another hidden size, {other}")
    return Common(
        backbone="qwen3",
        hidden_size=hidden,
        intermediate_size=layers.integer("intermediate_size"),
        num_heads=heads,
        num_kv_heads=layers.integer("num_key_value_heads", heads),
        head_dim=layers.integer("head_dim", hidden // heads),
        vocab_size=layers.integer("vocab_size"),
        norm_eps=layers.number("rms_norm_eps", 1e-6),
        rope=_rope(layers),
        taps=_taps(checkpoint, taps, hidden),
        num_target_layers=None,
        own_embedding="embed_tokens.weight" in checkpoint.tensors,
        own_head="lm_head.weight" in checkpoint.tensors or _reduced(checkpoint),
        attention_biases=layers.flag("attention_bias", False),
        query_key_norms=normed,
        keys_as_values=False,
        embed_scale=1.0,
        softcap=None,
    )


def _rope(layers: Config) -> Rope:
    """Where each type of layer has an entry of its own, all layers use the sliding one's."""
    nested = layers.section("rope_parameters")
    if "sliding_attention" in nested:
        entry = nested.section("sliding_attention").plain()
        layers = Config({**layers.plain(), "rope_parameters": entry}, "transformer_layer_config")
    return read_rope(layers, NAME)


def _taps(checkpoint: Checkpoint, key: str, hidden: int) -> tuple[int, ...] | None:
    """Layer ids, each one less than in the file; none where the target's depth decides.

    A list may end with the target's last layer, which only training reads.
    """
    if key not in checkpoint.config:
        return None
    ids = checkpoint.config.integers(key)
    fuse = checkpoint.tensors.get("fc.weight")
    if fuse is not None and fuse.shape[-1] == (len(ids) - 1) * hidden:
        ids = ids[:-1]
    return tuple(layer - 1 for layer in ids)


def _vocabulary(config: Config) -> tuple[int, int]:
    """(V, columns of the head)."""
    whole = config.section("transformer_layer_config").integer("vocab_size")
    part = config.integer("draft_vocab_size", whole)
    if part > whole:
        raise CheckpointError(f"draft_vocab_size is {part}; the target's vocabulary has {whole}")
    return whole, part


def _reduced(checkpoint: Checkpoint) -> bool:
    whole, part = _vocabulary(checkpoint.config)
    return part < whole or "d2t" in checkpoint.tensors


def _draft_vocabulary(checkpoint: Checkpoint) -> int | None:
    return _vocabulary(checkpoint.config)[1] if _reduced(checkpoint) else None


def _drafted(config: Config) -> int | None:
    """`speculative_tokens` of the proposal method that the file prefers."""
    own = config.section("speculators_config")
    wanted = own.text("default_proposal_method")
    methods = own.sections("proposal_methods")
    chosen = next((m for m in methods if m.text("proposal_type") == wanted), None)
    chosen = chosen or next(iter(methods), None)
    return None if chosen is None else chosen.integer_or_none("speculative_tokens")


def first_slot(config: Config, block: int) -> Literal[0, 1]:
    """Which slot predicts the token after the anchor: the one that makes as many tokens as are
    proposed, else the one that is named; files that say neither are older than the choice."""
    drafted = _drafted(config)
    if drafted == block:
        return 0
    if drafted != block - 1 and config.flag("sample_from_anchor", False):
        return 0
    return 1


def _attention(config: Config, layers: Config) -> tuple[LayerAttention, ...]:
    """Sliding layers are causal unless told otherwise, full ones see all."""
    count = layers.integer("num_hidden_layers")
    kinds = layers.texts("layer_types") or ("full_attention",) * count
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    require(not unknown and len(kinds) == count, NAME, f"layer_types {list(kinds)}")
    causal = not config.flag("sliding_window_non_causal", False)
    return tuple(
        LayerAttention(causal=causal, window=layers.integer("sliding_window"))
        if kind == "sliding_attention"
        else LayerAttention()
        for kind in kinds
    )
