"""DeepSpec's EAGLE3 checkpoints, with Qwen3 or Gemma 4 layers."""

from __future__ import annotations

from spec_drafters.checkpoint import Checkpoint
from spec_drafters.deepspec import read_common, require
from spec_drafters.spec import EagleSpec

NAME = "DeepSpec EAGLE3"
ARCHITECTURES = ("Qwen3Eagle3Model", "Gemma4Eagle3Model")


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
