"""Checkpoints through mlx-vlm (the extra `vlm`): their language model, as a target needs it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from spec_targets.errors import UnsupportedTargetError


class LanguageOnly(Module):
    """mlx-vlm's language model, called as mlx-lm's models are; pictures and sound stay outside.

    Args:
        whole: the multimodal model.

    Raises:
        UnsupportedTargetError: it has no language model, or one without decoder layers.
    """

    def __init__(self, whole: Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        language = getattr(whole, "language_model", None)
        if not isinstance(language, Module) or not _layers(language):
            raise UnsupportedTargetError(
                f"mlx-vlm's {type(whole).__module__} has no language model that decodes text"
            )
        self.language_model = language
        self.cast_predicate = getattr(whole, "cast_predicate", None)

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        logits: mx.array = self.language_model(tokens, cache=cache).logits
        return logits

    @property
    def layers(self) -> list[Module]:
        return _layers(self.language_model)

    def make_cache(self) -> list[Any]:
        """Fresh caches of mlx-vlm's own."""
        from mlx_vlm.models.cache import make_prompt_cache

        return list(make_prompt_cache(self.language_model))


def _layers(language: Module) -> list[Module]:
    inner = getattr(language, "model", None)
    return list(getattr(language, "layers", None) or getattr(inner, "layers", None) or [])


def vlm_installed() -> bool:
    """Whether the extra `vlm` is there."""
    return find_spec("mlx_vlm") is not None


def vlm_knows(config: Mapping[str, Any]) -> bool:
    """Whether mlx-vlm is there and has this `model_type`."""
    if not vlm_installed():
        return False
    from mlx_vlm.utils import get_model_type

    name = str(get_model_type(dict(config)))
    if not re.fullmatch(r"\w+", name):
        return False
    return find_spec(f"mlx_vlm.models.{name}") is not None


def load_vlm(folder: Path) -> tuple[LanguageOnly, dict[str, Any]]:
    """The language model of a folder, its weights not read yet, and its config."""
    from mlx_vlm.utils import load_config, load_model

    return LanguageOnly(load_model(folder, lazy=True)), dict(load_config(folder))
