"""Tiny random models of mlx-lm's own classes, and mlx-lm's own caches to compare with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_map_with_path

from spec_targets import ModelTarget, build_target
from spec_targets.mlx_lm_import import mlx_lm_utils

VOCAB = 97

_COMMON = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "head_dim": 32,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}

_GATED_DELTA = {
    "num_hidden_layers": 4,
    "full_attention_interval": 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {
        "type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
    },
}

_NO_EXPERTS = {
    "num_experts": 0,
    "num_experts_per_tok": 0,
    "decoder_sparse_step": 1,
    "shared_expert_intermediate_size": 0,
    "mlp_only_layers": [],
    "moe_intermediate_size": 0,
    "partial_rotary_factor": 0.25,
}

_SLIDING = {
    "num_hidden_layers": 4,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}

_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "norm_topk_prob": True,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": {"model_type": "qwen3", **_COMMON},
    "llama": {"model_type": "llama", **_COMMON, "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", **_COMMON},
    "qwen2": {"model_type": "qwen2", **_COMMON, "num_attention_heads": 2, "head_dim": None},
    "gemma2": {
        "model_type": "gemma2",
        **_COMMON,
        "query_pre_attn_scalar": 32,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "granite": {
        "model_type": "granite",
        **_COMMON,
        "logits_scaling": 4.0,
        "attention_multiplier": 0.2,
        "embedding_multiplier": 6.0,
        "residual_multiplier": 0.5,
        "attention_bias": False,
        "mlp_bias": False,
    },
    "phi3": {"model_type": "phi3", **_COMMON},
    "qwen3_5": {"model_type": "qwen3_5", **_COMMON, **_GATED_DELTA},
    "qwen3_next": {"model_type": "qwen3_next", **_COMMON, **_GATED_DELTA, **_NO_EXPERTS},
    "qwen3_5_moe": {"model_type": "qwen3_5_moe", **_COMMON, **_GATED_DELTA, **_EXPERTS},
    "lfm2_moe": {
        "model_type": "lfm2_moe",
        **_COMMON,
        **_EXPERTS,
        "num_hidden_layers": 4,
        "num_dense_layers": 1,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "use_expert_bias": True,
        "layer_types": ["conv", "full_attention", "conv", "conv"],
    },
    "lfm2": {
        "model_type": "lfm2",
        **_COMMON,
        "num_hidden_layers": 4,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "full_attention", "conv", "conv"],
    },
    "gemma4": {
        "model_type": "gemma4_text",
        **_COMMON,
        **_SLIDING,
        "global_head_dim": 64,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": VOCAB,
        "use_double_wide_mlp": True,
        "final_logit_softcapping": 30.0,
    },
    "gemma4_large": {
        "model_type": "gemma4_text",
        **_COMMON,
        **_SLIDING,
        "global_head_dim": 64,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "final_logit_softcapping": 30.0,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        **_COMMON,
        **_SLIDING,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 32,
    },
    "ministral3": {
        "model_type": "ministral3",
        **_COMMON,
        **_SLIDING,
        "rope_parameters": {
            "type": "default",
            "rope_theta": 10000.0,
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 64,
        },
    },
    "mistral_sliding": {"model_type": "mistral", **_COMMON, **_SLIDING},
    "olmo3": {"model_type": "olmo3", **_COMMON, **_SLIDING},
    "gpt_oss": {
        "model_type": "gpt_oss",
        **_COMMON,
        **_SLIDING,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
}


def make_model(
    name: str,
    dtype: mx.Dtype = mx.float32,
    weight_bits: int | None = None,
    seed: int = 7,
    **changes: Any,
) -> tuple[nn.Module, dict[str, Any]]:
    """A random model of one family with its config; the same one for the same arguments."""
    config = {k: v for k, v in {**CONFIGS[name], **changes}.items() if v is not None}
    model_class, args_class = mlx_lm_utils()._get_classes(dict(config))
    mx.random.seed(seed)
    model = model_class(args_class.from_dict(dict(config)))
    model.update(
        tree_map_with_path(lambda path, p: _random(path, p).astype(dtype), model.parameters())
    )
    if weight_bits is not None:
        nn.quantize(model, group_size=32, bits=weight_bits)
    model.eval()
    mx.eval(model.parameters())
    return model, config


def _random(path: str, parameter: mx.array) -> mx.array:
    """Weights large enough that attention and taps matter, norms near one, decays that leave a
    recurrence something to remember."""
    noise = mx.random.normal(parameter.shape)
    if path.endswith("A_log"):
        return noise - 3
    return 1 + 0.1 * noise if parameter.ndim == 1 else noise * parameter.shape[-1] ** -0.5 * 1.5


@pytest.fixture
def tiny() -> Callable[..., tuple[nn.Module, dict[str, Any]]]:
    return make_model


def make_tiny_target(
    name: str, *, kv_bits: int | None = None, **how: Any
) -> tuple[ModelTarget, nn.Module]:
    model, config = make_model(name, **how)
    return build_target(model, config, kv_bits=kv_bits), model


@pytest.fixture
def tiny_target() -> Callable[..., tuple[ModelTarget, nn.Module]]:
    """Makes (target, the model it adapts) of one family."""
    return make_tiny_target


@pytest.fixture(scope="module")
def make_target() -> Callable[..., tuple[ModelTarget, nn.Module]]:
    """`tiny_target` for what a module's tests share."""
    return make_tiny_target


class Own:
    """A model with mlx-lm's own caches: what every target is compared with.

    Args:
        kv_bits: quantise the caches as mlx-lm does, in groups of 32.
    """

    def __init__(self, model: nn.Module, kv_bits: int | None = None) -> None:
        from mlx_lm.models.cache import make_prompt_cache

        self._model = model
        caches = make_prompt_cache(model)
        quantised = kv_bits is not None
        self._caches = [
            c.to_quantized(group_size=32, bits=kv_bits) if quantised else c for c in caches
        ]

    def feed(self, tokens: list[int]) -> mx.array:
        """Logits [T, V] of further tokens."""
        logits = self._model(mx.array([tokens]), cache=self._caches)[0]
        mx.eval(logits)
        return logits


@pytest.fixture
def own() -> type[Own]:
    return Own


def _plainly(
    queries: mx.array, keys: mx.array, values: mx.array, ends: mx.array, scale: float
) -> mx.array:
    """What spec_core.flash_decode.attend promises, by MLX's attention and a mask."""
    seen = ends[:, None] - mx.arange(queries.shape[2])[::-1]
    mask = (mx.arange(keys.shape[2]) < seen[..., None])[:, None]
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)


@pytest.fixture
def plainly() -> Callable[..., mx.array]:
    return _plainly
