"""How each architecture of mlx-lm becomes a target.

`Family` serves every dense, full-attention model. An architecture that needs more has a file in
this package that defines `FAMILY`, an instance of a subclass which names its `model_types`; the
file is all there is to adding a family.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pkgutil import iter_modules
from types import MappingProxyType
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from spec_targets.anatomy import Anatomy, Scales, dissect, text_config
from spec_targets.errors import UnsupportedTargetError
from spec_targets.kinds import LAYER_KINDS
from spec_targets.layers import Frame, LayerCache, LayerMaker, LayerOptions
from spec_targets.mlx_lm_import import mlx_lm_utils
from spec_targets.swap import Swap


class Family:
    """How one architecture is made a target; subclasses override what differs.

    Attributes:
        model_types: the `model_type`s of config.json that a subclass is for.
        aliases: those of them that mlx-lm has under another name, with that name.
        kinds: by class name of mlx-lm's own cache, what stands in for it.
    """

    model_types: Sequence[str] = ()
    aliases: Mapping[str, str] = MappingProxyType({})
    kinds: Mapping[str, LayerMaker] = LAYER_KINDS

    def dissect(self, model: Module) -> Anatomy:
        """Where the model's parts are."""
        return dissect(model)

    def own_caches(self, model: Module, options: LayerOptions) -> list[Any]:
        """Fresh caches of the library's own, one for each layer that has its own."""
        mlx_lm_utils()
        from mlx_lm.models.cache import make_prompt_cache

        made = list(make_prompt_cache(model))
        if options.kv_bits is None:
            return made
        how = {"group_size": options.group_size, "bits": options.kv_bits}
        return [c.to_quantized(**how) if type(c).__name__ == "KVCache" else c for c in made]

    def new_layers(
        self, own: Sequence[Any], frame: Frame, options: LayerOptions
    ) -> list[LayerCache]:
        """Our layer caches in place of mlx-lm's own.

        Raises UnsupportedTargetError for a kind that cannot be taken back exactly.
        """
        return [self._layer(index, cache, frame, options) for index, cache in enumerate(own)]

    def _layer(self, index: int, own: Any, frame: Frame, options: LayerOptions) -> LayerCache:
        kind = type(own).__name__
        if kind not in self.kinds:
            raise UnsupportedTargetError(
                f"cache {index} of the model is mlx-lm's {kind}, which cannot be taken back "
                f"exactly here (known: {', '.join(self.kinds)})"
            )
        return self.kinds[kind](own, frame, options)

    def swaps(self, anatomy: Anatomy, layers: Sequence[LayerCache]) -> Sequence[Swap]:
        """Class swaps for the length of one forward, for instance to record what a recurrence
        was fed. The layers are those of the state being forwarded."""
        return ()

    def replayable(self, anatomy: Anatomy) -> Sequence[int]:
        """Layers whose output alone, apart from positions and caches, decides all that follows;
        the taps of these are proven by running on from them."""
        last = len(anatomy.layers) - 1
        return sorted({last // 2, last})

    def scales(self, config: Mapping[str, Any]) -> Sequence[Scales]:
        """What may surround embedding and head, the likeliest first; the probe finds which."""
        facts = text_config(config)
        softcap = facts.get("final_logit_softcapping")
        factors = [facts.get(n) for n in ("embedding_multiplier", "scale_emb", "embed_scale")]
        hidden = facts.get("hidden_size") or facts.get("n_embd") or 1
        root = float(hidden) ** 0.5
        # Gemma 3 rounds it.
        rounded = float(mx.array(root, dtype=mx.bfloat16).item())  # type: ignore[arg-type]
        embeds = [1.0, *(float(f) for f in factors if isinstance(f, int | float)), root, rounded]
        caps = [float(softcap), None] if isinstance(softcap, int | float) else [None]
        return [Scales(embed, cap) for embed in embeds for cap in caps]


def family_for(model_type: str) -> Family:
    """The family of a `model_type`; the dense one if no file here names it."""
    for module in iter_modules(__path__):
        family = import_module(f"{__name__}.{module.name}").FAMILY
        if model_type in family.model_types:
            return family  # type: ignore[no-any-return]
    return Family()


def known_as(model_type: str) -> str:
    """The name under which mlx-lm has a `model_type`."""
    return family_for(model_type).aliases.get(model_type, model_type)
