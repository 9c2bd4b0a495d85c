"""Tiny random targets of three cache kinds, and random drafters that fit them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

BYTES, END = 256, 257
"""Token ids below 256 are bytes; 257 ends an answer."""

_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "vocab_size": 258,
    "max_position_embeddings": 2048,
    "head_dim": 32,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": END,
    "torch_dtype": "float32",
}
CONFIGS: dict[str, dict[str, Any]] = {
    "dense": {"model_type": "qwen3", **_COMMON},
    "window": {
        "model_type": "gemma3_text",
        **_COMMON,
        "num_hidden_layers": 4,
        "sliding_window": 16,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 32,
    },
    "wide": {
        "model_type": "gemma3_text",
        **_COMMON,
        "num_hidden_layers": 4,
        "sliding_window": 96,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 32,
    },
    "hybrid": {
        "model_type": "qwen3_5",
        **_COMMON,
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
    },
}


def build_target(folder: Path, kind: str) -> Path:
    """A random target with a tokenizer of bytes."""
    from mlx_lm.utils import _get_classes

    folder.mkdir(parents=True)
    config = CONFIGS[kind]
    model_class, arguments = _get_classes(dict(config))
    mx.random.seed(7)
    weights = tree_flatten(model_class(arguments.from_dict(dict(config))).parameters())
    made = {name: _spread(name, value) for name, value in weights}
    mx.save_safetensors(str(folder / "model.safetensors"), made, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    _tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": "<|end|>",
                "chat_template": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n"
                "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}",
                "clean_up_tokenization_spaces": False,
            }
        )
    )
    return folder


def _spread(name: str, value: mx.array) -> mx.array:
    """Weights large enough that the context matters; norms and decays as they were."""
    if value.ndim != 2 or "norm" in name:
        return value.astype(mx.float32)
    return mx.random.normal(value.shape) * (2.0 / value.shape[1] ** 0.5)


def _tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in ("<|pad|>", "<|end|>")]
    )
    return tokenizer


def build_drafter(folder: Path, target: Path, mode: str, **changes: int) -> Path:
    """A random drafter of DeepSpec's layout; its guesses are almost never right.

    Args:
        mode: "dspark" (Markov and confidence heads), "dflash" (neither) or "eagle3".
        changes: sizes that differ from what fits the target.
    """
    folder.mkdir(parents=True)
    eagle = mode == "eagle3"
    facts = json.loads((target / "config.json").read_text())
    hidden = changes.get("hidden_size", facts["hidden_size"])
    vocab = changes.get("vocab_size", facts["vocab_size"])
    rank = 8 if mode == "dspark" else 0
    config = {
        "architectures": ["Qwen3Eagle3Model" if eagle else "Qwen3DSparkModel"],
        "model_type": "qwen3",
        **({"ttt_length": 4} if eagle else {"block_size": 6, "mask_token_id": 1}),
        "target_layer_ids": [0],
        "num_target_layers": facts["num_hidden_layers"],
        "hidden_size": hidden,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "markov_rank": rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": bool(rank),
        "confidence_head_with_markov": bool(rank),
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes = _eagle_shapes(hidden, vocab) if eagle else _shapes(hidden, vocab, rank)
    keys = mx.random.split(mx.random.key(3), len(shapes))
    weights = {
        name: mx.random.normal(shape, key=key)
        for (name, shape), key in zip(shapes.items(), keys, strict=True)
    }
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


def _layer_shapes(hidden: int, inputs: int) -> dict[str, tuple[int, ...]]:
    """A layer whose queries, keys and values read `inputs` numbers."""
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (64, inputs),
        "self_attn.k_proj": (32, inputs),
        "self_attn.v_proj": (32, inputs),
        "self_attn.o_proj": (hidden, 64),
        "self_attn.q_norm": (32,),
        "self_attn.k_norm": (32,),
        "mlp.gate_proj": (32, hidden),
        "mlp.up_proj": (32, hidden),
        "mlp.down_proj": (hidden, 32),
    }
    return {f"layers.0.{name}.weight": shape for name, shape in layer.items()}


def _eagle_shapes(hidden: int, vocab: int) -> dict[str, tuple[int, ...]]:
    return _layer_shapes(hidden, 2 * hidden) | {
        "layers.0.hidden_norm.weight": (hidden,),
        "fc.weight": (hidden, hidden),
        "norm.weight": (hidden,),
        "embed_tokens.weight": (vocab, hidden),
        "lm_head.weight": (vocab, hidden),
    }


def _shapes(hidden: int, vocab: int, rank: int) -> dict[str, tuple[int, ...]]:
    shapes = _layer_shapes(hidden, hidden) | {
        "fc.weight": (hidden, hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
        "embed_tokens.weight": (vocab, hidden),
        "lm_head.weight": (vocab, hidden),
    }
    if rank:
        shapes |= {
            "markov_head.markov_w1.weight": (vocab, rank),
            "markov_head.markov_w2.weight": (vocab, rank),
            "confidence_head.proj.weight": (1, hidden + rank),
            "confidence_head.proj.bias": (1,),
        }
    return shapes
