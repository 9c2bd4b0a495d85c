"""EAGLE3 checkpoints: DeepSpec's, with Qwen3 or Gemma 4 layers, and the original layout of the
EAGLE authors, which SpecForge, SGLang and others use too. (vLLM, models/llama_eagle3.py.)
"""

from __future__ import annotations

from spec_drafters.checkpoint import Checkpoint
from spec_drafters.deepspec import read_common, require
from spec_drafters.rope import read_rope
from spec_drafters.spec import EagleSpec

NAME = "DeepSpec EAGLE3"
ARCHITECTURES = ("Qwen3Eagle3Model", "Gemma4Eagle3Model")
ORIGINAL = "original EAGLE3"
ORIGINAL_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")

ORIGINAL_DRAFTS = 7
"""Tokens proposed where no file says: as many steps as the authors trained."""


def read_eagle3(checkpoint: Checkpoint) -> EagleSpec:
    """The spec of a DeepSpec EAGLE3 checkpoint.

    Raises:
        CheckpointError: a field is missing or out of range.
        PackagingError: a field asks for something that DeepSpec's classes do not have either.
    """
    config = checkpoint.config
    layers = config.integer("num_hidden_layers", 1)
    require(layers == 1, NAME, f"{layers} layers; one is")
    return EagleSpec(
        **read_common(checkpoint, NAME),
        packaging=NAME,
        mode="eagle3",
        draft_length=config.integer("ttt_length"),
    )


def read_original(checkpoint: Checkpoint) -> EagleSpec:
    """The spec of a checkpoint in the authors' layout: a Llama layer, a head over a part of the
    vocabulary, taps that the target's depth decides.

    Raises: as `read_eagle3`.
    """
    config = checkpoint.config
    own = config.section("eagle_config")
    layers, hidden = config.integer("num_hidden_layers", 1), config.integer("hidden_size")
    heads = config.integer("num_attention_heads")
    activation = config.text("hidden_act", "silu")
    require(layers == 1, ORIGINAL, f"{layers} layers; one is")
    require(activation == "silu", ORIGINAL, f"the activation {activation}")
    named = "eagle_aux_hidden_state_layer_ids"
    require(
        named not in own.over(config),
        ORIGINAL,
        f"{named}, which engines number in different ways",
    )
    require(own.flag("use_aux_hidden_state", True), ORIGINAL, "use_aux_hidden_state false")
    other = config.integer("target_hidden_size", hidden)
    require(other == hidden, ORIGINAL, f"a target of another hidden size, {other}")
    whole = config.integer("vocab_size")
    part = config.integer("draft_vocab_size", whole)
    reduced = part < whole or "d2t" in checkpoint.tensors
    return EagleSpec(
        packaging=ORIGINAL,
        mode="eagle3",
        backbone="qwen3",
        hidden_size=hidden,
        intermediate_size=config.integer("intermediate_size"),
        num_heads=heads,
        num_kv_heads=config.integer("num_key_value_heads", heads),
        head_dim=config.integer("head_dim", hidden // heads),
        vocab_size=whole,
        norm_eps=config.number("rms_norm_eps", 1e-6),
        rope=read_rope(config, ORIGINAL),
        taps=None,
        num_target_layers=None,
        own_embedding="embed_tokens.weight" in checkpoint.tensors,
        own_head="lm_head.weight" in checkpoint.tensors or reduced,
        query_key_norms=False,
        attention_biases=config.flag("attention_bias", False),
        draft_vocab_size=part if reduced else None,
        draft_length=ORIGINAL_DRAFTS,
        norm_before_residual=config.flag("norm_before_residual", False),
    )
