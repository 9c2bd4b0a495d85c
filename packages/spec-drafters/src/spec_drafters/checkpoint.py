"""A drafter's files, opened without reading weights: config and tensor headers.

Reading headers is all that recognition needs, so a wrong checkpoint is refused at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import mlx.core as mx

from spec_drafters.config import Config
from spec_drafters.errors import CheckpointError

_INDEX = "model.safetensors.index.json"
_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """One tensor as its file declares it."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Config and tensor headers of one drafter.

    Attributes:
        path: the folder or file.
        config: config.json, or what a GGUF file's metadata says.
        tensors: headers by DeepSpec name.
        read: the named tensors as arrays, lazy where the format allows.
    """

    path: Path
    config: Config
    tensors: Mapping[str, TensorHeader]
    read: Callable[[Iterable[str]], dict[str, mx.array]]


def open_safetensors(folder: Path) -> Checkpoint:
    """Open a folder with config.json and *.safetensors.

    Raises:
        CheckpointError: a file is missing, truncated or malformed.
    """
    config = Config.read(folder / "config.json")
    tensors: dict[str, TensorHeader] = {}
    files: dict[str, Path] = {}
    names: dict[str, str] = {}
    for file in _weight_files(folder):
        for stored, header in read_header(file).items():
            name = _renamed(stored)
            if name in tensors:
                raise CheckpointError(
                    f"{folder}: tensor {name} is both in {files[name].name} and in {file.name}"
                )
            tensors[name], files[name], names[name] = header, file, stored

    def read(asked: Iterable[str]) -> dict[str, mx.array]:
        wanted = list(asked)
        arrays: dict[str, mx.array] = {}
        for file in sorted({files[name] for name in wanted}):
            loaded = mx.load(str(file))
            assert isinstance(loaded, dict)
            arrays |= {name: loaded[names[name]] for name in wanted if files[name] == file}
        return arrays

    return Checkpoint(folder, config, MappingProxyType(tensors), read)


def _renamed(name: str) -> str:
    """DeepSpec's name of a tensor; the original EAGLE3 calls its one layer `midlayer`."""
    first, _, rest = name.partition(".")
    return f"layers.0.{rest}" if first == "midlayer" else name


def _weight_files(folder: Path) -> list[Path]:
    index, single = folder / _INDEX, folder / "model.safetensors"
    if index.exists():
        shards = Config.read(index).section("weight_map")
        names = {Path(shards.text(key)).name for key in shards.names()}
        files = [folder / name for name in sorted(names)]
    elif single.exists():
        files = [single]
    else:
        files = sorted(folder.glob("*.safetensors"))
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise CheckpointError(f"{folder} lacks {', '.join(missing)}, which {_INDEX} names")
    if not files:
        raise CheckpointError(
            f"{folder} has no *.safetensors file; other weight formats are not read"
        )
    return files


def read_header(file: Path) -> dict[str, TensorHeader]:
    """Names, shapes and types of a safetensors file, checked against its size.

    The format: a 64-bit little-endian length, that many bytes of JSON, then the data.

    Raises:
        CheckpointError: it is truncated or malformed.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(_LENGTH_BYTES)
        length = int.from_bytes(start, "little")
        if len(start) < _LENGTH_BYTES or length > size - _LENGTH_BYTES:
            raise CheckpointError(f"{file} is truncated: {size} bytes do not hold its header")
        text = stream.read(length)
    try:
        entries: dict[str, dict[str, Any]] = json.loads(text)
        entries.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        headers = {
            name: TensorHeader(tuple(map(int, entry["shape"])), str(entry["dtype"]))
            for name, entry in entries.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(
            f"{file} has a malformed header ({error!r}); fetch it again"
        ) from None
    expected = _LENGTH_BYTES + length + end
    if size < expected:
        raise CheckpointError(
            f"{file} is truncated: {size} of {expected} bytes are there; fetch it again"
        )
    return headers
