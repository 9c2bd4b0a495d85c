"""DeepSpec's own checkpoints: DSpark with Qwen3 or Gemma 4 layers, and its "DFlash".

config.json is a deep copy of the target's with a few fields changed, so most of what it says
(partial rotary factors, sliding windows, head_dim of Gemma's sliding layers) describes the
target. What is not read here is not used by DeepSpec's classes either.
"""

from __future__ import annotations

from spec_drafters.checkpoint import Checkpoint
from spec_drafters.config import Config
from spec_drafters.errors import CheckpointError, PackagingError
from spec_drafters.rope import rope_theta
from spec_drafters.spec import (
    Alike,
    BlockSpec,
    Common,
    Confidence,
    LayerAttention,
    LogSnr,
    Markov,
    MarkovKind,
    Rope,
)

NAME = "DeepSpec"
ARCHITECTURES = ("Qwen3DSparkModel", "Gemma4DSparkModel")

_MARKOV_KINDS: tuple[MarkovKind, ...] = ("vanilla", "gated", "rnn")


def read_deepspec(checkpoint: Checkpoint) -> BlockSpec:
    """The spec of a DeepSpec checkpoint. Its "DFlash" has DSpark's slots and no Markov head.

    Raises:
        CheckpointError: a field is missing or out of range.
        PackagingError: a field asks for something that DeepSpec's classes do not have either.
    """
    config = checkpoint.config
    block = config.integer("block_size", least=2)
    markov = read_markov(config)
    return BlockSpec(
        **read_common(checkpoint, NAME),
        packaging=NAME,
        mode="dspark" if markov else "dflash",
        attention=(LayerAttention(),) * config.integer("num_hidden_layers"),
        block_size=block,
        mask_token=config.integer("mask_token_id", least=0),
        first_slot=0,
        markov=markov,
        confidence=read_confidence(config, markov, block),
        log_snr=read_log_snr(config),
    )


def read_common(checkpoint: Checkpoint, packaging: str) -> Common:
    """What all of DeepSpec's classes read alike; Gemma 4's are told by the architecture's name.

    Raises: as `read_deepspec`.
    """
    config = checkpoint.config
    tied = config.flag("tie_word_embeddings", False)
    require(not tied, packaging, "a head tied to its own embedding")
    if any(name.startswith("Gemma4") for name in config.texts("architectures")):
        return _gemma4(checkpoint, packaging)
    activation = config.text("hidden_act", "silu")
    require(activation == "silu", packaging, f"the activation {activation}")
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    return Common(
        **_alike(checkpoint),
        backbone="qwen3",
        num_kv_heads=config.integer("num_key_value_heads"),
        head_dim=config.integer("head_dim", hidden // heads),
        rope=Rope(rope_theta(config)),
        keys_as_values=False,
        query_key_norms=True,
        embed_scale=1.0,
        softcap=None,
    )


def _gemma4(checkpoint: Checkpoint, packaging: str) -> Common:
    config = checkpoint.config
    experts = config.flag("enable_moe_block", False)
    per_layer = config.integer("hidden_size_per_layer_input", 0, least=0)
    activation = config.text("hidden_activation", "gelu_pytorch_tanh")
    require(not experts, packaging, "mixture-of-experts layers")
    require(per_layer == 0, packaging, "per-layer inputs")
    require(activation == "gelu_pytorch_tanh", packaging, f"the activation {activation}")
    shared = config.flag("attention_k_eq_v", False)
    rope = config.section("rope_parameters").section("full_attention")
    return Common(
        **_alike(checkpoint),
        backbone="gemma4",
        num_kv_heads=config.integer(
            "num_global_key_value_heads" if shared else "num_key_value_heads"
        ),
        head_dim=config.integer("global_head_dim"),
        rope=Rope(rope.number("rope_theta"), partial=rope.number("partial_rotary_factor", 1.0)),
        keys_as_values=shared,
        query_key_norms=True,
        embed_scale=config.integer("hidden_size") ** 0.5,
        softcap=config.number_or_none("final_logit_softcapping"),
    )


def _alike(checkpoint: Checkpoint) -> Alike:
    config = checkpoint.config
    return Alike(
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("intermediate_size"),
        num_heads=config.integer("num_attention_heads"),
        vocab_size=config.integer("vocab_size"),
        norm_eps=config.number("rms_norm_eps", 1e-6),
        taps=config.integers("target_layer_ids"),
        num_target_layers=config.integer_or_none("num_target_layers"),
        own_embedding="embed_tokens.weight" in checkpoint.tensors,
        own_head="lm_head.weight" in checkpoint.tensors,
        attention_biases=config.flag("attention_bias", False),
    )


def read_markov(config: Config) -> Markov | None:
    """The Markov head that `markov_rank` and `markov_head_type` describe; rank 0: none."""
    rank = config.integer("markov_rank", 0, least=0)
    if rank == 0:
        return None
    wanted = config.text("markov_head_type", "vanilla")
    kind = next((kind for kind in _MARKOV_KINDS if kind == wanted), None)
    if kind is None:
        raise CheckpointError(
            f"markov_head_type is {wanted!r}; it must be one of {', '.join(_MARKOV_KINDS)}"
        )
    return Markov(kind, rank)


def read_confidence(config: Config, markov: Markov | None, block_size: int) -> Confidence | None:
    """The confidence head, if `enable_confidence_head`."""
    if not config.flag("enable_confidence_head", False):
        return None
    with_markov = config.flag("confidence_head_with_markov", False)
    if with_markov and markov is None:
        raise CheckpointError("confidence_head_with_markov is true, but markov_rank is 0")
    temperatures = config.numbers("confidence_temperatures")
    if temperatures and len(temperatures) != block_size:
        raise CheckpointError(
            f"confidence_temperatures has {len(temperatures)} values; block_size is {block_size}"
        )
    return Confidence(with_markov, temperatures)


def read_log_snr(config: Config) -> LogSnr | None:
    """PrismML's extension, which only drafters converted from its GGUF files have."""
    if not config.flag("log_snr_conditioning", False):
        return None
    low, high = config.real("min_log_snr"), config.real("max_log_snr")
    if not low < high:
        raise CheckpointError(f"min_log_snr is {low} and max_log_snr {high}; it must be above")
    return LogSnr(low, high)


def require(supported: bool, packaging: str, what: str) -> None:
    """Raise PackagingError unless `supported`."""
    if not supported:
        raise PackagingError(packaging, f"not supported with {what}")
