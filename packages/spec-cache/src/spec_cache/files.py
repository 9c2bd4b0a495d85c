"""Cache files: valid safetensors, written whole or not at all.

Only bytes are handled here, so that any thread may read and write: nothing is computed by MLX.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from spec_cache.errors import DamagedError

MOST_HEADER = 16 << 20
"""A header beyond this many bytes is nonsense, not a schema."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a file. `data` holds its bytes in row-major order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


def encode(metadata: Mapping[str, str], tensors: Sequence[Tensor]) -> list[memoryview]:
    """The pieces of a safetensors file, whose metadata gains a checksum over all of it."""
    header: dict[str, object] = {}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.data.nbytes
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    checksum = _checksum(metadata, header, [tensor.data for tensor in tensors])
    full = {"__metadata__": {**metadata, "checksum": checksum}, **header}
    text = json.dumps(full).encode()
    text += b" " * (-len(text) % 8)
    return [memoryview(len(text).to_bytes(8, "little") + text), *(t.data for t in tensors)]


def decode(data: bytes) -> tuple[dict[str, str], list[Tensor]]:
    """Metadata and tensors of a file. Raises DamagedError unless every byte is as written."""
    metadata, header, begin = _split(data)
    body = memoryview(data)[begin:]
    tensors = [_tensor(name, header[name], body) for name in header]
    if sum(tensor.data.nbytes for tensor in tensors) != body.nbytes:
        raise DamagedError("it is longer or shorter than its header says")
    claimed = metadata.pop("checksum", "")
    if _checksum(metadata, header, [body]) != claimed:
        raise DamagedError("its checksum is wrong")
    return metadata, tensors


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata in a file's header, unverified. Raises DamagedError or OSError."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > MOST_HEADER:
            raise DamagedError("it is no cache file")
        return _split(size.to_bytes(8, "little") + file.read(size))[0]


def read(path: Path, most: int) -> bytes:
    """A file's bytes. Raises OSError (for a symbolic link, too), or DamagedError beyond `most`."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(handle, "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise DamagedError(f"it is longer than the {most} bytes that it may have")
    return data


def write(path: Path, temporary: Path, pieces: Sequence[memoryview]) -> None:
    """Write a file under a temporary name, flush it to the disk and give it its name.

    Readers see the old file, if any, or the whole new one. Raises OSError, leaving no file.
    """
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _split(data: bytes) -> tuple[dict[str, str], dict[str, object], int]:
    """Metadata, tensor table and where the tensors begin."""
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > MOST_HEADER or len(data) < 8 + size:
        raise DamagedError("it is cut off or no cache file")
    try:
        header = json.loads(data[8 : 8 + size])
        metadata = header.pop("__metadata__")
        if not all(isinstance(value, str) for value in metadata.values()):
            raise TypeError("metadata must be text")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError(f"its header cannot be read ({error})") from None
    return metadata, header, 8 + size


def _tensor(name: str, raw: object, body: memoryview) -> Tensor:
    try:
        if not isinstance(raw, dict):
            raise TypeError("no table")
        begin, end = map(int, raw["data_offsets"])
        shape = tuple(map(int, raw["shape"]))
        dtype = str(raw["dtype"])
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"its tensor {name!r} cannot be read ({error})") from None
    if not 0 <= begin <= end <= body.nbytes:
        raise DamagedError(f"its tensor {name!r} lies outside of it")
    return Tensor(name, dtype, shape, body[begin:end])


def _checksum(
    metadata: Mapping[str, str], header: Mapping[str, object], data: Sequence[memoryview]
) -> str:
    digest = hashlib.sha256(json.dumps([dict(metadata), dict(header)], sort_keys=True).encode())
    for piece in data:
        digest.update(piece)
    return digest.hexdigest()
