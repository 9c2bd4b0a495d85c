"""From a path or a hub id to a proven target with its tokenizer."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from spec_core.errors import InvalidValueError, SpecError
from spec_targets.build import build_target
from spec_targets.errors import (
    IncompleteTargetError,
    TargetError,
    TargetNotFoundError,
    UnsupportedTargetError,
)
from spec_targets.families import known_as
from spec_targets.folder import Library, check_folder
from spec_targets.layout import lay_out
from spec_targets.mlx_lm_import import mlx_lm_utils
from spec_targets.target import ModelTarget
from spec_targets.vlm import load_vlm

_DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
_HUB_SECONDS = 1.5  # the client asks twice
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "*.tiktoken")
"""Patterns of which a folder has at least one."""


@dataclass(frozen=True)
class LoadedTarget:
    """A target and what belongs to it.

    Attributes:
        target: the proven model.
        model: mlx-lm's own module, which the target runs, for code that calls mlx-lm.
        config: its config.json, generation_config.json's end tokens included.
        path: the folder it came from.
    """

    target: ModelTarget
    model: Module
    config: Mapping[str, Any]
    path: Path

    @cached_property
    def tokenizer(self) -> Any:
        """mlx-lm's TokenizerWrapper, loaded when first asked for; no code of the checkpoint is
        run. Raises IncompleteTargetError if the folder has no usable tokenizer."""
        missing = missing_tokenizer(self.path)
        if missing:
            raise IncompleteTargetError(f"{self.path} has no tokenizer: {missing}")
        try:
            return mlx_lm_utils().load_tokenizer(
                self.path, eos_token_ids=self.config.get("eos_token_id")
            )
        except Exception as error:
            raise IncompleteTargetError(
                f"{self.path} has no usable tokenizer: {_sentence(error)}"
            ) from error


def missing_tokenizer(folder: Path) -> str:
    """What a folder without a tokenizer lacks; "" for one that has one."""
    if any(any(folder.glob(name)) for name in _TOKENIZER_FILES):
        return ""
    return f"none of {', '.join(_TOKENIZER_FILES)} is there"


def load_target(
    path_or_id: str | Path,
    *,
    dtype: str | mx.Dtype | None = None,
    kv_bits: int | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    through: Library | None = None,
) -> LoadedTarget:
    """Load a model, check its files, and prove that it is a target.

    Args:
        path_or_id: a folder, or a hub id such as "mlx-community/Qwen3-4B-bf16".
        dtype: cast weights (scales of quantised ones too) to "float32", "bfloat16" or
            "float16"; None keeps what the checkpoint has.
        kv_bits: 4 or 8 to store keys and values of full attention quantised. Sliding windows are
            bounded and stay as they are; a model that has nothing else is refused.
        revision: branch, tag or commit on the hub.
        trust_remote_code: allow a checkpoint to bring its own architecture as Python code.
        through: "lm" for mlx-lm, "vlm" for mlx-vlm's language model (the extra `vlm`); None:
            mlx-lm, or mlx-vlm for types that only it has.

    Raises:
        InvalidValueError: `dtype`, `kv_bits` or `through` is not one of those.
        TargetNotFoundError: no such folder, or the hub does not have it or cannot be reached.
        IncompleteTargetError: files are missing, truncated or unreadable.
        UnsupportedTargetError: unknown architecture, or one that cannot be decoded exactly.
    """
    cast = _dtype(dtype)
    if kv_bits not in (None, 4, 8):
        raise InvalidValueError("kv_bits", kv_bits, "4 or 8, or left out")
    if through not in (None, "lm", "vlm"):
        raise InvalidValueError("through", through, '"lm" or "vlm", or left out')
    folder = locate(path_or_id, revision)
    library = check_folder(folder, through=through, trust_remote_code=trust_remote_code)
    model, config = _load_model(folder, library, trust_remote_code)
    if cast is not None:
        _cast(model, cast)
    mx.eval(_parameters(model))
    lay_out(model)
    try:
        target = build_target(model, config, kv_bits=kv_bits)
    except UnsupportedTargetError as error:
        raise UnsupportedTargetError(f"{folder}: {error}") from error
    return LoadedTarget(target=target, model=model, config=config, path=folder)


def locate(path_or_id: str | Path, revision: str | None = None) -> Path:
    """The folder: the path itself, or the hub's snapshot, downloaded if need be.

    Raises TargetNotFoundError.
    """
    path = Path(os.path.expanduser(path_or_id))
    if path.is_dir():
        return path
    name = str(path_or_id)
    if path.exists():
        raise TargetNotFoundError(f"{name} is a file; give the folder that holds config.json")
    if not _looks_like_id(name):
        raise TargetNotFoundError(f"there is no folder {name}, and it is not a hub id (owner/name)")
    return _snapshot(name, revision)


def _looks_like_id(name: str) -> bool:
    owner, slash, rest = name.partition("/")
    return bool(owner and slash and rest) and "/" not in rest and owner[0] not in ".~"


def _snapshot(name: str, revision: str | None) -> Path:
    """The hub's folder: fetched or updated if the hub answers, else from the local cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    patterns = mlx_lm_utils().DEFAULT_ALLOW_PATTERNS
    how: dict[str, Any] = {"revision": revision, "allow_patterns": patterns}
    reachable = _hub_answers(name, revision)
    try:
        return Path(snapshot_download(name, local_files_only=not reachable, **how))
    except (HfHubHTTPError, OSError, ValueError) as error:
        if reachable:
            raise TargetNotFoundError(f"the hub gave no {name}: {_sentence(error)}") from error
        raise TargetNotFoundError(
            f"{name} is neither a folder nor in the local hub cache, and the hub cannot be "
            "reached; check the name and the network"
        ) from error


def _hub_answers(name: str, revision: str | None) -> bool:
    """Whether the hub can be asked about a repository at all, found out within seconds."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        HfApi().repo_info(name, revision=revision, timeout=_HUB_SECONDS)
    except HfHubHTTPError:
        return True
    except Exception:  # offline mode, no route, no answer: what is raised depends on the client
        return False
    return True


def _load_model(
    folder: Path, library: Library, trust_remote_code: bool
) -> tuple[Module, dict[str, Any]]:
    try:
        return load_vlm(folder) if library == "vlm" else _load_lm(folder, trust_remote_code)
    except SpecError:
        raise
    except MemoryError:
        raise
    except Exception as error:
        reason = _sentence(error, ", without a word; is its config sound?")
        raise TargetError(f"mlx-{library} cannot load {folder}: {reason}") from error


def _load_lm(folder: Path, trust_remote_code: bool) -> tuple[Module, dict[str, Any]]:
    loaded: tuple[Module, dict[str, Any]] = mlx_lm_utils().load_model(
        folder, lazy=True, get_model_classes=_classes, trust_remote_code=trust_remote_code
    )
    return loaded


def _classes(config: Mapping[str, Any]) -> Any:
    """mlx-lm's classes for a config, by the name that mlx-lm has for its model type."""
    return mlx_lm_utils()._get_classes({**config, "model_type": known_as(config["model_type"])})


def _dtype(dtype: str | mx.Dtype | None) -> mx.Dtype | None:
    if dtype is None or dtype in _DTYPES.values():
        return dtype  # type: ignore[return-value]
    if isinstance(dtype, str) and dtype in _DTYPES:
        return _DTYPES[dtype]
    raise InvalidValueError("dtype", dtype, "float32, bfloat16 or float16, or left out")


def _cast(model: Module, dtype: mx.Dtype) -> None:
    """Cast floating weights, those left out that the architecture wants kept."""
    from mlx.utils import tree_map_with_path

    keep = getattr(model, "cast_predicate", None) or (lambda path: True)

    def cast(path: str, array: mx.array) -> mx.array:
        floating = mx.issubdtype(array.dtype, mx.floating)
        return array.astype(dtype) if floating and keep(path) else array

    model.update(tree_map_with_path(cast, _parameters(model)))


def _parameters(model: Module) -> dict[str, Any]:
    found: dict[str, Any] = model.parameters()  # type: ignore[no-untyped-call]
    return found


def _sentence(error: BaseException, of_silence: str = "") -> str:
    """An exception of a library as one line; one without a text by its class and `of_silence`."""
    text = " ".join(str(error).split())
    return text[:300] if text else type(error).__name__ + of_silence
