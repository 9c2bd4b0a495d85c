"""Adapters that let mlx-lm and mlx-vlm models verify drafts and take positions back exactly."""

from spec_targets.build import build_target
from spec_targets.errors import (
    IncompleteTargetError,
    TargetError,
    TargetNotFoundError,
    UnsupportedTargetError,
)
from spec_targets.load import LoadedTarget, load_target, locate
from spec_targets.target import ModelTarget

__all__ = [
    "IncompleteTargetError",
    "LoadedTarget",
    "ModelTarget",
    "TargetError",
    "TargetNotFoundError",
    "UnsupportedTargetError",
    "build_target",
    "load_target",
    "locate",
]
