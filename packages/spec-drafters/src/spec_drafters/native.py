"""A spec as the config.json of another packaging: DeepSpec's own, or z-lab's nested one, which
can say what DeepSpec's classes cannot (windows, a silent anchor slot, a reduced vocabulary).
"""

from __future__ import annotations

from typing import Any

from spec_drafters import deepspec, dflash, eagle3
from spec_drafters.spec import (
    BlockSpec,
    DrafterSpec,
    EagleSpec,
    Linear,
    Llama3,
    Rope,
    Yarn,
)

Json = dict[str, Any]


def deepspec_config(spec: DrafterSpec) -> Json | None:
    """What DeepSpec would have written for this drafter, as far as it has such drafters."""
    gemma = spec.backbone == "gemma4"
    config = _sizes(spec) | (_gemma4(spec) if gemma else _qwen3(spec))
    if isinstance(spec, EagleSpec):
        architecture = eagle3.ARCHITECTURES[gemma]
        own: Json = {"ttt_length": spec.draft_length, "draft_num_hidden_layers": 1}
    elif isinstance(spec, BlockSpec):
        architecture = deepspec.ARCHITECTURES[gemma]
        own = {"block_size": spec.block_size, "mask_token_id": spec.mask_token, **_heads(spec)}
    else:
        return None
    taps = {"target_layer_ids": list(spec.taps or ())}
    return {"architectures": [architecture], **config, **taps, **own}


def dflash_config(spec: DrafterSpec) -> Json | None:
    """The same in the layout of z-lab and SpecForge, as far as it has such drafters."""
    if not isinstance(spec, BlockSpec) or spec.backbone != "qwen3":
        return None
    own: Json = {"mask_token_id": spec.mask_token, "target_layer_ids": list(spec.taps or ())}
    owns = spec.own_embedding or spec.own_head or spec.draft_vocab_size
    architecture = dflash.ARCHITECTURE
    if spec.selector is not None and spec.convolution is not None:
        architecture = "DFlash2DraftModel"
        own |= {
            "selector_rank": spec.selector.rank,
            "selector_top_k": spec.selector.candidates,
            "conv_kernel_size": spec.convolution.width,
            "conv_group_size": spec.convolution.group,
        }
    elif spec.first_slot == 0 or (spec.first_slot is not None and (spec.markov or owns)):
        architecture = "DSparkDraftModel"
        own["sample_from_anchor"] = spec.first_slot == 0
    if spec.output_multiplier != 1:
        own["output_multiplier"] = spec.output_multiplier
    if spec.embed_scale != ("target" if not spec.own_embedding else 1.0):
        own["input_embedding_scale"] = spec.embed_scale
    if spec.softcap != ("target" if not spec.own_head else None):
        own["final_logit_softcapping"] = spec.softcap or 0
    return {
        "architectures": [architecture],
        **_sizes(spec),
        **_qwen3(spec),
        **_attention(spec),
        "block_size": spec.block_size,
        "dflash_config": own,
        **_heads(spec),
    }


def _sizes(spec: DrafterSpec) -> Json:
    given: Json = {
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_attention_heads": spec.num_heads,
        "num_hidden_layers": spec.num_layers,
        "num_target_layers": spec.num_target_layers,
        "rms_norm_eps": spec.norm_eps,
        "vocab_size": spec.vocab_size,
        "attention_bias": spec.attention_biases,
        "layer_types": ["full_attention"] * spec.num_layers,
        "tie_word_embeddings": False,
    }
    return {key: value for key, value in given.items() if value is not None}


def _qwen3(spec: DrafterSpec) -> Json:
    return {
        "model_type": "qwen3",
        "head_dim": spec.head_dim,
        "num_key_value_heads": spec.num_kv_heads,
        "hidden_act": "silu",
        "rope_parameters": rope_parameters(spec.rope),
        **({"rope_is_neox_style": False} if spec.rope.interleaved else {}),
    }


def _gemma4(spec: DrafterSpec) -> Json:
    heads = "num_global_key_value_heads" if spec.keys_as_values else "num_key_value_heads"
    capped = {} if spec.softcap is None else {"final_logit_softcapping": spec.softcap}
    rope = {
        "rope_theta": spec.rope.theta,
        "rope_type": "proportional",
        "partial_rotary_factor": spec.rope.partial,
    }
    return {
        "model_type": "gemma4_text",
        "attention_k_eq_v": spec.keys_as_values,
        "global_head_dim": spec.head_dim,
        heads: spec.num_kv_heads,
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_parameters": {"full_attention": rope},
        **capped,
    }


def rope_parameters(rope: Rope) -> Json:
    """transformers' spelling."""
    scaling, base = rope.scaling, {"rope_theta": rope.theta}
    if scaling is None:
        return {**base, "rope_type": "default"}
    if isinstance(scaling, Linear):
        return {**base, "rope_type": "linear", "factor": scaling.factor}
    original = {"original_max_position_embeddings": scaling.original_positions}
    if isinstance(scaling, Llama3):
        bounds = {"low_freq_factor": scaling.low, "high_freq_factor": scaling.high}
        return {**base, "rope_type": "llama3", "factor": scaling.factor, **bounds, **original}
    assert isinstance(scaling, Yarn)
    return {
        **base,
        "rope_type": "yarn",
        "factor": scaling.factor,
        **original,
        "beta_fast": scaling.beta_fast,
        "beta_slow": scaling.beta_slow,
        "attention_factor": scaling.attention_factor,
        "truncate": scaling.truncate,
    }


def _heads(spec: BlockSpec) -> Json:
    """Markov head, confidence head and log-SNR conditioning."""
    config: Json = {"markov_rank": 0, "enable_confidence_head": spec.confidence is not None}
    if spec.markov is not None:
        config |= {"markov_rank": spec.markov.rank, "markov_head_type": spec.markov.kind}
    if spec.confidence is not None:
        config["confidence_head_with_markov"] = spec.confidence.with_markov
        if spec.confidence.temperatures:
            config["confidence_temperatures"] = list(spec.confidence.temperatures)
    if spec.log_snr is not None:
        low, high = spec.log_snr.minimum, spec.log_snr.maximum
        config |= {"log_snr_conditioning": True, "min_log_snr": low, "max_log_snr": high}
    return config


def _attention(spec: BlockSpec) -> Json:
    """Windows and causality: one window and, beside sliding layers, one kind of causality."""
    kinds = [
        "full_attention" if kind.window is None else "sliding_attention" for kind in spec.attention
    ]
    config: Json = {"layer_types": kinds}
    windows = [kind.window for kind in spec.attention if kind.window is not None]
    if windows:
        config["sliding_window"] = windows[0]
    usual = [kind.causal == (kind.window is not None) for kind in spec.attention]
    if not all(usual):
        config["is_causal"] = spec.attention[0].causal
    return config
