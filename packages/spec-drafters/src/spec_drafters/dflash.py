"""Checkpoints built around z-lab's DFlash: Qwen3-type layers whatever the target.

z-lab's own (embedding and head borrowed, slot 0 silent), its successor DFlash 2, the same with a
Markov head, and SpecForge's DSpark, which keeps DFlash's nested config. Fields of `dflash_config`
win over the top level.
"""

from __future__ import annotations

from dataclasses import replace

from spec_drafters.checkpoint import Checkpoint
from spec_drafters.config import Config
from spec_drafters.deepspec import (
    read_confidence,
    read_log_snr,
    read_markov,
    require,
)
from spec_drafters.errors import CheckpointError
from spec_drafters.rope import read_rope
from spec_drafters.spec import (
    BlockSpec,
    Convolution,
    FirstSlot,
    LayerAttention,
    OfTarget,
    Selector,
)

ARCHITECTURE = "DFlashDraftModel"
ZLAB = "z-lab DFlash"
DFLASH2 = "DFlash 2"
HYBRID = "DFlash with a Markov head"
SPECFORGE = "SpecForge DSpark"


def read_zlab(checkpoint: Checkpoint) -> BlockSpec:
    """z-lab's DFlash: slot j predicts position start + j, slot 0 nothing.

    Raises:
        CheckpointError: a field is missing or out of range.
        PackagingError: a field asks for something that is not supported.
    """
    return _spec(checkpoint, ZLAB, 1)


def read_dflash2(checkpoint: Checkpoint) -> BlockSpec:
    """DFlash 2: z-lab's slots, convolutions around each sublayer, and a candidate selector.

    Raises: as `read_zlab`.
    """
    own, hidden = _own(checkpoint), checkpoint.config.integer("hidden_size")
    selector = Selector(own.integer("selector_rank"), own.integer("selector_top_k"))
    convolution = Convolution(own.integer("conv_kernel_size"), own.integer("conv_group_size"))
    if hidden % convolution.group:
        raise CheckpointError(
            f"conv_group_size is {convolution.group}; it must divide hidden_size, {hidden}"
        )
    if selector.candidates > checkpoint.config.integer("vocab_size"):
        raise CheckpointError(f"selector_top_k is {selector.candidates}, above the vocabulary")
    spec = _spec(checkpoint, DFLASH2, 1)
    return replace(spec, mode="dflash", selector=selector, convolution=convolution)


def read_hybrid(checkpoint: Checkpoint) -> BlockSpec:
    """DFlash's layers under a Markov head. Which slot predicts first is known only if the file
    tells, except that a block of 7 or a confidence head marks a DSpark drafter under DFlash's name.

    Raises: as `read_zlab`.
    """
    own = _own(checkpoint)
    first = _stated_slot(own)
    if first is None and (own.integer("block_size") == 7 or own.flag(_CONFIDENCE, False)):
        first = 0
    return _spec(checkpoint, HYBRID, first)


def read_specforge(checkpoint: Checkpoint) -> BlockSpec:
    """SpecForge's DSpark: the anchor's slot predicts too, unless the file says otherwise.

    Raises: as `read_zlab`.
    """
    first = _stated_slot(_own(checkpoint))
    return _spec(checkpoint, SPECFORGE, 0 if first is None else first)


_CONFIDENCE = "enable_confidence_head"
_MASK = "mask_embedding"


def _own(checkpoint: Checkpoint) -> Config:
    return checkpoint.config.section("dflash_config").over(checkpoint.config)


def _stated_slot(own: Config) -> FirstSlot | None:
    if "logits_start" in own:
        return 0 if own.integer("logits_start", least=0) == 0 else 1
    if "sample_from_anchor" in own:
        return 0 if own.flag("sample_from_anchor", True) else 1
    return None


def _spec(checkpoint: Checkpoint, packaging: str, first_slot: FirstSlot | None) -> BlockSpec:
    config, own = checkpoint.config, _own(checkpoint)
    _refuse(config, own, packaging)
    heads, layers = config.integer("num_attention_heads"), config.integer("num_hidden_layers")
    hidden, block = config.integer("hidden_size"), own.integer("block_size", least=2)
    markov = read_markov(own)
    lends = packaging in (ZLAB, DFLASH2)
    own_embedding = not lends and "embed_tokens.weight" in checkpoint.tensors
    own_head = not lends and "lm_head.weight" in checkpoint.tensors
    return BlockSpec(
        packaging=packaging,
        mode="dspark" if markov else "dflash",
        backbone="qwen3",
        hidden_size=hidden,
        intermediate_size=config.integer("intermediate_size"),
        num_heads=heads,
        num_kv_heads=config.integer("num_key_value_heads"),
        head_dim=config.integer("head_dim", hidden // heads),
        vocab_size=config.integer("vocab_size"),
        norm_eps=config.number("rms_norm_eps", 1e-6),
        rope=read_rope(config, packaging, interleaved=not _neox(own)),
        attention=layer_attention(config, layers),
        taps=_taps(own, layers),
        num_target_layers=config.integer_or_none("num_target_layers"),
        block_size=block,
        mask_token=own.integer("mask_token_id", least=0),
        first_slot=first_slot,
        own_embedding=own_embedding,
        own_head=own_head,
        attention_biases=config.flag("attention_bias", False),
        embed_scale=_embed_scale(own, own_embedding),
        output_multiplier=own.number("output_multiplier", 1.0),
        mask_embedding=_MASK in checkpoint.tensors,
        softcap=_softcap(own, own_head),
        markov=markov,
        confidence=read_confidence(own, markov, block),
        log_snr=read_log_snr(own),
        draft_vocab_size=_draft_vocabulary(checkpoint, own_head),
    )


def _embed_scale(own: Config, own_embedding: bool) -> float | OfTarget:
    """On raw embedding rows: what the file says, nothing for its own, the target's for its."""
    if "input_embedding_scale" in own:
        return own.number("input_embedding_scale")
    return 1.0 if own_embedding else "target"


def _softcap(own: Config, own_head: bool) -> float | OfTarget | None:
    """What the file says, 0 for none; else none for its own head, the target's for its."""
    if "final_logit_softcapping" in own:
        value = own.real("final_logit_softcapping")
        return own.number("final_logit_softcapping") if value else None
    return None if own_head else "target"


def _draft_vocabulary(checkpoint: Checkpoint, own_head: bool) -> int | None:
    """The length of `d2t`, if there is one; only a head of its own has as many rows."""
    table = checkpoint.tensors.get("d2t")
    if table is None or not table.shape:
        return None
    if not own_head:
        raise CheckpointError("there is a d2t table, but no lm_head of the reduced vocabulary")
    return table.shape[0]


def _refuse(config: Config, own: Config, packaging: str) -> None:
    projector = own.text("projector_type", "dflash")
    activation = config.text("hidden_act", "silu")
    require(activation == "silu", packaging, f"the activation {activation}")
    require(projector in ("dflash", "dspark"), packaging, f"projector_type {projector!r}")


def _neox(own: Config) -> bool:
    return own.flag("is_neox_style", True) and own.flag("rope_is_neox_style", True)


def layer_attention(config: Config, layers: int) -> tuple[LayerAttention, ...]:
    """Who sees whom in each layer, as vLLM reads these files.

    Sliding layers are causal and windowed, full ones neither; `is_causal`, then
    `dflash_config.causal`, decide causality for all layers. `use_swa` without sliding layers
    gives every layer a window.
    """
    own = config.section("dflash_config")
    kinds = config.texts("layer_types") or ("full_attention",) * layers
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    require(not unknown and len(kinds) == layers, "DFlash", f"layer_types {list(kinds)}")
    sliding = [kind == "sliding_attention" for kind in kinds]
    forced = own.flag("use_swa", False) and not any(sliding)
    window = None
    if any(sliding) or forced:
        key = "swa_window_size" if "swa_window_size" in own else "sliding_window"
        window = own.over(config).integer(key)
    causal: bool | None = None
    if "is_causal" in config:
        causal = config.flag("is_causal", False)
    elif "causal" in own:
        causal = own.flag("causal", False)
    return tuple(
        LayerAttention(
            causal=slides if causal is None else causal,
            window=window if slides or forced else None,
        )
        for slides in sliding
    )


def _taps(own: Config, layers: int) -> tuple[int, ...]:
    """`target_layer_ids`, or z-lab's default: spread evenly from layer 1 to the fourth last."""
    if "target_layer_ids" in own:
        return own.integers("target_layer_ids")
    depth = own.integer("num_target_layers")
    if layers == 1:
        return (depth // 2,)
    return tuple(round(1 + i * (depth - 4) / (layers - 1)) for i in range(layers))
