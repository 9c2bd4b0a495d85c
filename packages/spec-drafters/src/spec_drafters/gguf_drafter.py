"""Drafters in GGUF files, translated into DeepSpec's and z-lab's terms.

Two dialects: PrismML's architecture "dspark" (taps numbered as DeepSpec does), and llama.cpp's
"dflash" for DFlash and DSpark alike (taps one higher). Their loaders are the source:
src/models/dspark.cpp in PrismML-Eng/llama.cpp, src/models/dflash.cpp in ggml-org/llama.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import mlx.core as mx

from spec_drafters.checkpoint import Checkpoint, TensorHeader
from spec_drafters.config import Config
from spec_drafters.errors import CheckpointError, PackagingError
from spec_drafters.gguf import NAME, GgufFile, parse_gguf

_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SHARED = {
    "token_embd": "embed_tokens",
    "output": "lm_head",
    "output_norm": "norm",
    "log_snr_fc1": "log_snr.fc1",
    "log_snr_fc2": "log_snr.fc2",
}
_DSPARK = _SHARED | {
    "dspark.fc": "fc",
    "dspark.hidden_norm": "hidden_norm",
    "dspark.markov_head_a": "markov_head.markov_w1",
    "dspark.markov_head_b": "markov_head.markov_w2",
    "dspark.confidence_head": "confidence_head.proj",
    "dspark.log_snr_fc1": "log_snr.fc1",
    "dspark.log_snr_fc2": "log_snr.fc2",
}
_DFLASH = _SHARED | {
    "fc": "fc",
    "enc.output_norm": "hidden_norm",
    "markov_w1": "markov_head.markov_w1",
    "markov_w2": "markov_head.markov_w2",
    "conf_proj": "confidence_head.proj",
}
_CONFIDENCE = "confidence_head.proj"


def open_gguf(path: Path) -> Checkpoint:
    """Open a drafter's GGUF file without reading its weights.

    Raises:
        CheckpointError: it is damaged, or lacks a key.
        PackagingError: it holds no drafter, or one with features that are not supported.
    """
    file = parse_gguf(path)
    architecture = str(file.metadata.get("general.architecture", ""))
    if architecture == "dspark":
        names, config = _DSPARK, _dspark_config(file)
    elif architecture == "dflash":
        names, config = _DFLASH, _dflash_config(file)
    else:
        raise PackagingError(
            NAME, f"the architecture {architecture!r} is no drafter's; dspark and dflash are"
        )
    sources = {_translated(name, names): name for name in file.tensors}
    tensors = {
        ours: TensorHeader(_shape(ours, file.tensors[theirs].shape), file.tensors[theirs].type.name)
        for ours, theirs in sources.items()
    }
    if _CONFIDENCE + ".weight" in tensors:
        tensors.setdefault(_CONFIDENCE + ".bias", TensorHeader((1,), "F32"))

    def read(wanted: Iterable[str]) -> dict[str, mx.array]:
        return {name: _read(file, name, sources, tensors[name].shape) for name in wanted}

    return Checkpoint(path, Config(config, path.name), MappingProxyType(tensors), read)


def _translated(name: str, names: Mapping[str, str]) -> str:
    """DeepSpec's name of a tensor; an unknown one keeps its own, and is refused by it later."""
    stem, _, kind = name.rpartition(".")
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if layer and layer[2] in _LAYER:
        return f"layers.{layer[1]}.{_LAYER[layer[2]]}.{kind}"
    return f"{names[stem]}.{kind}" if stem in names else name


def _shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A matrix of one row may be stored as a vector."""
    return (1, *shape) if name == _CONFIDENCE + ".weight" and len(shape) == 1 else shape


def _read(
    file: GgufFile, name: str, sources: Mapping[str, str], shape: tuple[int, ...]
) -> mx.array:
    if name not in sources:
        return mx.zeros(shape)
    array = file.read(sources[name])
    if name == "d2t":
        # GGUF lists target ids, DeepSpec's relatives their distance from the draft id.
        return array.astype(mx.int32) - mx.arange(array.size, dtype=mx.int32)
    return array.reshape(shape)


def _dspark_config(file: GgufFile) -> dict[str, Any]:
    """DeepSpec's config.json, with PrismML's log-SNR keys."""
    keys = _Keys(file, "dspark.")
    own = _Keys(file, "dspark.dspark.")
    if own.get("hidden_correction"):
        raise PackagingError(NAME, "not supported with hidden_correction")
    return {
        **_sizes(file, keys),
        "architectures": ["Qwen3DSparkModel"],
        "block_size": own.need("block_size"),
        "mask_token_id": own.need("mask_token_id"),
        "target_layer_ids": own.need("target_layers"),
        "markov_rank": own.get("markov_rank", 0),
        "enable_confidence_head": own.get("confidence_head", False),
        "confidence_head_with_markov": own.get("confidence_head_with_markov", False),
        **_log_snr(own),
    }


def _dflash_config(file: GgufFile) -> dict[str, Any]:
    """The config of SpecForge's DSpark (with a Markov head) or of z-lab's DFlash."""
    keys = _Keys(file, "dflash.")
    _refuse(file, keys)
    windows = keys.get("attention.sliding_window_pattern") or []
    config = {
        **_sizes(file, keys),
        "architectures": ["DFlashDraftModel"],
        "block_size": keys.need("block_size"),
        "mask_token_id": _Keys(file, "tokenizer.ggml.").need("mask_token_id"),
        "target_layer_ids": _one_lower(keys.need("target_layers")),
        "final_logit_softcapping": keys.get("final_logit_softcapping"),
        "is_causal": keys.get("attention.causal"),
        **_log_snr(keys),
    }
    if any(windows):
        kinds = ["sliding_attention" if slides else "full_attention" for slides in windows]
        config |= {"layer_types": kinds, "sliding_window": keys.need("attention.sliding_window")}
    markov = file.tensors.get("markov_w1.weight")
    if markov is None:
        return config
    confident = "conf_proj.weight" in file.tensors
    return config | {
        "architectures": ["DSparkDraftModel"],
        "markov_rank": markov.shape[-1],
        "enable_confidence_head": confident,
        "confidence_head_with_markov": confident,
        "sample_from_anchor": keys.get("sample_from_anchor", True),
    }


def _one_lower(layers: Any) -> Any:
    """llama.cpp numbers a layer's input, DeepSpec its output."""
    return [layer - 1 for layer in layers] if isinstance(layers, list) else layers


def _refuse(file: GgufFile, keys: _Keys) -> None:
    reasons = {
        "DFlash 2's selector and convolutions": keys.get("selector_rank"),
        "DeepSeek-V4 layers": keys.get("hyper_connection.count"),
        "attention sinks": any("attn_sinks" in name for name in file.tensors),
        "scaled logits": keys.get("logit_scale", 1.0) != 1.0,
    }
    for reason, present in reasons.items():
        if present:
            raise PackagingError(NAME, f"not supported with {reason}")


def _sizes(file: GgufFile, keys: _Keys) -> dict[str, Any]:
    hidden, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    dim = keys.get("attention.key_length", hidden // heads)
    if keys.get("rope.scaling.type", "none") != "none":
        raise PackagingError(NAME, "not supported with scaled rotary positions")
    if keys.get("rope.dimension_count", dim) != dim:
        raise PackagingError(NAME, "not supported with rotary positions on a part of each head")
    return {
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": keys.need("feed_forward_length"),
        "num_hidden_layers": keys.need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.get("attention.head_count_kv", heads),
        "head_dim": dim,
        "rms_norm_eps": keys.need("attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_theta": keys.need("rope.freq_base"), "rope_type": "default"},
        "vocab_size": _vocabulary(file, keys),
        "tie_word_embeddings": False,
    }


def _vocabulary(file: GgufFile, keys: _Keys) -> int | None:
    """From its key, a tensor that has it, or the tokenizer's list."""
    if keys.get("vocab_size") is not None:
        return keys.integer("vocab_size")
    for name in ("token_embd.weight", "markov_w1.weight"):
        if name in file.tensors:
            return file.tensors[name].shape[0]
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    return len(tokens) if isinstance(tokens, list) else None


def _log_snr(keys: _Keys) -> dict[str, Any]:
    if not keys.get("log_snr_conditioning"):
        return {}
    return {
        "log_snr_conditioning": True,
        "min_log_snr": keys.need("min_log_snr"),
        "max_log_snr": keys.need("max_log_snr"),
    }


class _Keys:
    """A GGUF file's metadata under a prefix."""

    def __init__(self, file: GgufFile, prefix: str) -> None:
        self._file = file
        self._prefix = prefix

    def get(self, key: str, default: Any = None) -> Any:
        return self._file.metadata.get(self._prefix + key, default)

    def integer(self, key: str) -> int:
        """Raises CheckpointError unless the key holds a positive integer."""
        value = self.need(key)
        if not isinstance(value, int) or value < 1:
            raise CheckpointError(
                f"{self._file.path.name}: {self._prefix}{key} is {value!r}; "
                "it must be a positive integer"
            )
        return value

    def need(self, key: str) -> Any:
        """Raises CheckpointError if the key is missing."""
        value = self.get(key)
        if value is None:
            raise CheckpointError(f"{self._file.path.name} lacks the key {self._prefix}{key}")
        return value
