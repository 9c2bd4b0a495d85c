"""Checks of a checkpoint folder that read headers only, so that they take no time."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from spec_targets.errors import IncompleteTargetError, UnsupportedTargetError
from spec_targets.families import known_as
from spec_targets.mlx_lm_import import mlx_lm_utils

_LARGEST_HEADER = 1 << 28


def check_folder(folder: Path, *, trust_remote_code: bool = False) -> dict[str, Any]:
    """The folder's config, once everything that loading needs is known to be there.

    Raises:
        IncompleteTargetError: config.json or weights are missing, unreadable or truncated.
        UnsupportedTargetError: mlx-lm has no such model type, or the checkpoint wants its own
            code run and that was not allowed.
    """
    config = read_config(folder)
    _check_type(folder, config, trust_remote_code)
    for file in _weight_files(folder):
        check_safetensors(file)
    return config


def read_config(folder: Path) -> dict[str, Any]:
    """config.json as a dict. Raises IncompleteTargetError."""
    file = folder / "config.json"
    if not file.is_file():
        raise IncompleteTargetError(f"{folder} has no config.json, so it is not a model folder")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise IncompleteTargetError(f"{file} is not readable JSON: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise IncompleteTargetError(f"{file} names no model_type, so the architecture is unknown")
    return config


def check_safetensors(file: Path) -> None:
    """Compare a safetensors file's size with its header. Raises IncompleteTargetError."""
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > min(size, _LARGEST_HEADER):
                raise ValueError("its header is longer than the file")
            header = json.loads(stream.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name[:2] != "__"]
    except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError) as error:
        raise IncompleteTargetError(f"{file} is not a safetensors file: {error}") from error
    expected = 8 + length + max(ends, default=0)
    if size < expected:
        raise IncompleteTargetError(
            f"{file} is truncated: it has {size} bytes, its header describes {expected}; "
            "download it again"
        )


def _weight_files(folder: Path) -> list[Path]:
    """The files that mlx-lm loads. Raises IncompleteTargetError if one is missing."""
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise IncompleteTargetError(
            f"{folder} has no weights: no file there is named model*.safetensors"
        )
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        missing = sorted(_indexed(index) - {file.name for file in files})
        if missing:
            raise IncompleteTargetError(
                f"{folder} lacks {', '.join(missing)}, named in {index.name}; download it again"
            )
    return files


def _indexed(index: Path) -> set[str]:
    try:
        return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise IncompleteTargetError(f"{index} is not a readable index: {error}") from error


def _check_type(folder: Path, config: Mapping[str, Any], trust_remote_code: bool) -> None:
    code = config.get("model_file")
    if code is not None and not trust_remote_code:
        raise UnsupportedTargetError(
            f"{folder} wants to run its own code ({code!r}); it is refused unless "
            "trust_remote_code is set"
        )
    model_type = config["model_type"]
    if code is None and not _known(model_type):
        raise UnsupportedTargetError(
            f"model type {model_type!r} of {folder} is not one that the installed mlx-lm knows"
        )


def _known(model_type: str) -> bool:
    known = known_as(model_type)
    name = mlx_lm_utils().MODEL_REMAPPING.get(known, known)
    if not re.fullmatch(r"[\w-]+", name):
        return False
    return find_spec(f"mlx_lm.models.{name}") is not None
