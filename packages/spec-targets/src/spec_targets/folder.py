"""Checks of a checkpoint folder that read headers only, so that they take no time."""

from __future__ import annotations

import ast
import contextlib
import json
import re
import struct
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from spec_targets.errors import IncompleteTargetError, UnsupportedTargetError
from spec_targets.families import known_as
from spec_targets.mlx_lm_import import mlx_lm_utils
from spec_targets.vlm import vlm_installed, vlm_knows

_LARGEST_HEADER = 1 << 28


Library = Literal["lm", "vlm"]
"""Who loads and runs a model: mlx-lm, or mlx-vlm (the extra `vlm`)."""

_WEIGHTS: Mapping[Library, str] = {"lm": "model*.safetensors", "vlm": "*.safetensors"}


def check_folder(
    folder: Path, *, through: Library | None = None, trust_remote_code: bool = False
) -> Library:
    """Who loads the folder, once everything that loading needs is known to be there.

    Args:
        folder: holds config.json and weights.
        through: whom to ask; None: mlx-lm, or mlx-vlm for types that only it has.
        trust_remote_code: allow the checkpoint's own code.

    Raises:
        IncompleteTargetError: config.json or weights are missing, unreadable or truncated.
        UnsupportedTargetError: no such model type, mlx-vlm is asked for and not installed, or the
            checkpoint wants its own code run and that was not allowed.
    """
    config = read_config(folder)
    _check_code(folder, config, trust_remote_code)
    library = _library(folder, config, through)
    for file in _weight_files(folder, _WEIGHTS[library]):
        check_safetensors(file)
    return library


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


def _weight_files(folder: Path, pattern: str) -> list[Path]:
    """The files that are loaded. Raises IncompleteTargetError if one is missing."""
    files = sorted(folder.glob(pattern))
    if not files:
        raise IncompleteTargetError(f"{folder} has no weights: no file there is named {pattern}")
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


def _check_code(folder: Path, config: Mapping[str, Any], trust_remote_code: bool) -> None:
    code = config.get("model_file")
    if code is not None and not trust_remote_code:
        raise UnsupportedTargetError(
            f"{folder} wants to run its own code ({code!r}); it is refused unless "
            "that code is trusted (trust_remote_code)"
        )


def _library(folder: Path, config: Mapping[str, Any], through: Library | None) -> Library:
    """Who loads it. Raises UnsupportedTargetError if nobody does."""
    if through == "vlm" and not vlm_installed():
        raise UnsupportedTargetError(
            f"{folder} is to be loaded through mlx-vlm, which is not installed; install "
            "spec-targets with its extra vlm"
        )
    model_type = config["model_type"]
    if through != "vlm" and (config.get("model_file") is not None or _known(model_type)):
        return "lm"
    if through != "lm" and vlm_knows(config):
        return "vlm"
    asked = {"lm": "mlx-lm", "vlm": "mlx-vlm"}.get(through or "", "mlx-lm")
    if through is None:
        asked += " or mlx-vlm" if vlm_installed() else " (the extra vlm brings more)"
    raise UnsupportedTargetError(
        f"model type {model_type!r} of {folder} is not one that the installed {asked} knows"
    )


def _known(model_type: str) -> bool:
    """Whether mlx-lm has it; found out without importing mlx-lm, which takes seconds."""
    known = known_as(model_type)
    name = _other_names().get(known, known)
    if not re.fullmatch(r"[\w-]+", name):
        return False
    found = _library_folder() / "models" / name
    return found.with_name(f"{name}.py").is_file() or (found / "__init__.py").is_file()


def _library_folder() -> Path:
    spec = find_spec("mlx_lm")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


@cache
def _other_names() -> Mapping[str, str]:
    """mlx-lm's own names for model types that it does not call by theirs, from its source; from
    the module itself if that is not written as expected."""
    source = (_library_folder() / "utils.py").read_text(encoding="utf-8")
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MODEL_REMAPPING":
            with contextlib.suppress(ValueError):
                return dict(ast.literal_eval(node.value))
    return dict(mlx_lm_utils().MODEL_REMAPPING)
