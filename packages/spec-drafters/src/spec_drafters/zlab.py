"""z-lab's DFlash: Qwen3-type layers whatever the target, embedding and head borrowed from it."""

from __future__ import annotations

from spec_drafters.checkpoint import Checkpoint
from spec_drafters.config import Config
from spec_drafters.deepspec import require, rope_theta
from spec_drafters.spec import DrafterSpec, LayerAttention, Rope

NAME = "z-lab DFlash"
ARCHITECTURE = "DFlashDraftModel"


def read_zlab(checkpoint: Checkpoint) -> DrafterSpec:
    """The spec of a z-lab checkpoint: slot 0 is silent, slot j predicts position start + j.

    Fields of `dflash_config` win over the top level.

    Raises:
        CheckpointError: a field is missing or out of range.
        PackagingError: a field asks for something that is not supported.
    """
    config = checkpoint.config
    own = config.section("dflash_config").over(config)
    _refuse(config, own)
    heads, layers = config.integer("num_attention_heads"), config.integer("num_hidden_layers")
    hidden = config.integer("hidden_size")
    return DrafterSpec(
        packaging=NAME,
        mode="dflash",
        backbone="qwen3",
        hidden_size=hidden,
        intermediate_size=config.integer("intermediate_size"),
        num_heads=heads,
        num_kv_heads=config.integer("num_key_value_heads"),
        head_dim=config.integer("head_dim", hidden // heads),
        vocab_size=config.integer("vocab_size"),
        norm_eps=config.number("rms_norm_eps", 1e-6),
        rope=Rope(rope_theta(config), interleaved=not _neox(own)),
        attention=layer_attention(config, layers),
        taps=_taps(own, layers),
        num_target_layers=config.integer("num_target_layers"),
        block_size=own.integer("block_size", least=2),
        mask_token=own.integer("mask_token_id", least=0),
        first_slot=1,
        own_embedding=False,
        own_head=False,
        embed_scale="target",
        softcap=config.number("final_logit_softcapping")
        if "final_logit_softcapping" in config
        else "target",
    )


def _refuse(config: Config, own: Config) -> None:
    require(config.text("hidden_act", "silu") == "silu", NAME, "a hidden_act other than silu")
    require(not config.flag("attention_bias", False), NAME, "attention biases")
    require("rope_scaling" not in config, NAME, "rope_scaling")
    kind = config.section("rope_parameters").text("rope_type", "default")
    require(kind == "default", NAME, f"rope_type {kind!r}")
    projector = own.text("projector_type", "dflash")
    require(projector == "dflash", NAME, f"projector_type {projector!r}")
    require("layer_fusion" not in own, NAME, "layer_fusion (DFly)")
    require(not own.flag("attention_sink_bias", False), NAME, "attention sinks")


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
    require(not unknown and len(kinds) == layers, NAME, f"layer_types {list(kinds)}")
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
