"""Which layer cache of ours stands in for which of mlx-lm's."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from spec_targets.layers import LayerMaker, full_layer
from spec_targets.sliding import sliding_layer

LAYER_KINDS: Mapping[str, LayerMaker] = MappingProxyType(
    {
        "KVCache": full_layer,
        "QuantizedKVCache": full_layer,
        "RotatingKVCache": sliding_layer,
    }
)
"""By the class name of mlx-lm's own cache: what stands in for it in every family."""
