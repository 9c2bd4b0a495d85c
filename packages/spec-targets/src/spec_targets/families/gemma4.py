"""Gemma 4 (text): later layers may attend to keys and values of earlier ones, and every layer may
have embeddings of the tokens of its own. mlx-lm's code passes both on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlx.nn.layers.base import Module

from spec_targets.anatomy import Anatomy, Scales, dissect, text_config
from spec_targets.errors import UnsupportedTargetError
from spec_targets.families import Family
from spec_targets.layers import LayerOptions

_SOFTCAP = 30.0  # where config.json does not say


class Gemma4Family(Family):
    """See the module."""

    model_types = ("gemma4", "gemma4_text", "gemma4_unified")

    def own_caches(self, model: Module, options: LayerOptions) -> list[Any]:
        if options.kv_bits is not None and _shares(dissect(model)):
            raise UnsupportedTargetError(
                "keys and values that several layers of a Gemma 4 share cannot be quantised; "
                "leave them as they are"
            )
        return super().own_caches(model, options)

    def replayable(self, anatomy: Anatomy) -> Sequence[int]:
        """Only the last, where a later layer is given more than hidden states."""
        facts = _facts(anatomy)
        if _shares(anatomy) or facts.hidden_size_per_layer_input:
            return (len(anatomy.layers) - 1,)
        return super().replayable(anatomy)

    def scales(self, config: Mapping[str, Any]) -> Sequence[Scales]:
        facts = text_config(config)
        return super().scales({"final_logit_softcapping": _SOFTCAP, **facts})


def _facts(anatomy: Anatomy) -> Any:
    assert anatomy.inner is not None, "mlx-lm's Gemma 4 has an inner model"
    return anatomy.inner.config


def _shares(anatomy: Anatomy) -> bool:
    return bool(_facts(anatomy).num_kv_shared_layers)


FAMILY = Gemma4Family()
