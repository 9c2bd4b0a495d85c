"""The GGUF container, read by ourselves: `mx.load` turns bfloat16 into float16 (1e5 becomes
infinity) and drops tensors of types that it does not know.

Layout (little endian): "GGUF", version, tensor count, key count; keys with typed values; tensor
names with dimensions (fastest first), type and offset; padding; data. (ggml's docs/gguf.md.)
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import mlx.core as mx
import numpy as np

from spec_drafters.errors import CheckpointError, PackagingError

MAGIC = b"GGUF"
NAME = "GGUF"

_STRING, _ARRAY = 8, 9
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_LARGEST = 1 << 31
_MOST_AXES = 8


@dataclass(frozen=True, slots=True)
class TensorType:
    """How numbers are stored: `block` of them in `size` bytes, made into arrays by `decode`.

    `decode` takes the raw bytes as [blocks, size] uint8 and gives [blocks, block].
    """

    name: str
    block: int
    size: int
    decode: Callable[[mx.array], mx.array]


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor lies: `shape` is row-major, `offset` counts from the file's start."""

    shape: tuple[int, ...]
    type: TensorType
    offset: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A parsed header. Arrays of strings in `metadata` (vocabularies) are kept as lists."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    def read(self, name: str) -> mx.array:
        """One tensor, [shape]; quantised types become float32, the others stay what they are."""
        tensor = self.tensors[name]
        kind, blocks = tensor.type, prod(tensor.shape) // tensor.type.block
        raw = np.memmap(self.path, np.uint8, "r", offset=tensor.offset, shape=(blocks, kind.size))
        return kind.decode(mx.array(np.asarray(raw))).reshape(tensor.shape)


def is_gguf(path: Path) -> bool:
    """Whether a file starts with GGUF's magic."""
    with path.open("rb") as stream:
        return stream.read(len(MAGIC)) == MAGIC


def parse_gguf(path: Path) -> GgufFile:
    """Read a file's header and check that it holds every tensor it names.

    Raises:
        CheckpointError: it is truncated or malformed.
        PackagingError: its version, byte order or a tensor's type is not supported.
    """
    size = path.stat().st_size
    with path.open("rb") as stream:
        reader = _Reader(stream, path)
        if reader.take(4) != MAGIC:
            raise CheckpointError(f"{path} is no GGUF file")
        version = reader.scalar("I")
        if version not in (2, 3):
            raise PackagingError(NAME, f"version {version} or its byte order is not supported")
        tensor_count, key_count = reader.scalar("Q"), reader.scalar("Q")
        metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = reader.text()
            metadata[key] = reader.value(reader.scalar("I"))
        entries = [_entry(reader) for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise CheckpointError(f"{path}: general.alignment is {alignment!r}")
        start = -(-stream.tell() // alignment) * alignment
    tensors = {
        name: _placed(name, shape, kind, start + offset) for name, shape, kind, offset in entries
    }
    if len(tensors) != tensor_count:
        raise CheckpointError(f"{path} names a tensor twice")
    end = max((_end(tensor) for tensor in tensors.values()), default=start)
    if size < end:
        raise CheckpointError(
            f"{path} is truncated: {size} of {end} bytes are there; fetch it again"
        )
    return GgufFile(path, metadata, tensors)


class _Reader:
    """Typed reads from a stream; an early end is an error."""

    def __init__(self, stream: BinaryIO, path: Path) -> None:
        self._stream = stream
        self._path = path

    def take(self, count: int) -> bytes:
        data = self._stream.read(count) if count < _LARGEST else b""
        if len(data) < count:
            raise CheckpointError(f"{self._path} is truncated or malformed; fetch it again")
        return data

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def text(self) -> str:
        return self.take(self.scalar("Q")).decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            raise CheckpointError(f"{self._path} has a value of unknown type {kind}")
        kind, count = self.scalar("I"), self.scalar("Q")
        if kind in _SCALARS:
            width = struct.calcsize("<" + _SCALARS[kind])
            return list(struct.unpack(f"<{count}{_SCALARS[kind]}", self.take(count * width)))
        return [self.value(kind) for _ in range(count)]


def _entry(reader: _Reader) -> tuple[str, tuple[int, ...], int, int]:
    """Name, row-major shape, type id and offset within the data."""
    name = reader.text()
    dimensions = [int(reader.scalar("Q")) for _ in range(min(reader.scalar("I"), _MOST_AXES))]
    return name, tuple(reversed(dimensions)), reader.scalar("I"), reader.scalar("Q")


def _placed(name: str, shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
    if kind not in TYPES:
        named = _OTHER_TYPES.get(kind, f"type {kind}")
        raise PackagingError(
            NAME,
            f"tensor {name} is stored as {named}, which is not read here; "
            f"{', '.join(t.name for t in TYPES.values())} are",
        )
    if not prod(shape) or (shape and shape[-1] % TYPES[kind].block):
        raise CheckpointError(f"tensor {name} has shape {list(shape)}, which is not whole blocks")
    return GgufTensor(shape, TYPES[kind], offset)


def _end(tensor: GgufTensor) -> int:
    return tensor.offset + prod(tensor.shape) // tensor.type.block * tensor.type.size


def _plain(dtype: mx.Dtype) -> Callable[[mx.array], mx.array]:
    return lambda raw: raw.view(dtype)


def _half(raw: mx.array, at: int) -> mx.array:
    """[blocks, 1] the float16 at byte `at` of each block, as float32."""
    return mx.contiguous(raw[:, at : at + 2]).view(mx.float16).astype(mx.float32)


def _nibbles(raw: mx.array, at: int) -> mx.array:
    """[blocks, 32] four-bit numbers: the low halves of 16 bytes, then their high halves."""
    packed = raw[:, at:]
    return mx.concatenate([packed & 15, packed >> 4], axis=1).astype(mx.float32)


def _q4_0(raw: mx.array) -> mx.array:
    return _half(raw, 0) * (_nibbles(raw, 2) - 8)


def _q4_1(raw: mx.array) -> mx.array:
    return _half(raw, 0) * _nibbles(raw, 4) + _half(raw, 2)


def _q8_0(raw: mx.array) -> mx.array:
    return _half(raw, 0) * mx.contiguous(raw[:, 2:]).view(mx.int8).astype(mx.float32)


TYPES: Mapping[int, TensorType] = {
    0: TensorType("F32", 1, 4, _plain(mx.float32)),
    1: TensorType("F16", 1, 2, _plain(mx.float16)),
    30: TensorType("BF16", 1, 2, _plain(mx.bfloat16)),
    8: TensorType("Q8_0", 32, 34, _q8_0),
    2: TensorType("Q4_0", 32, 18, _q4_0),
    3: TensorType("Q4_1", 32, 20, _q4_1),
    26: TensorType("I32", 1, 4, _plain(mx.int32)),
    27: TensorType("I64", 1, 8, _plain(mx.int64)),
}
"""The types that are read, by ggml's number."""

_OTHER_TYPES = {
    6: "Q5_0",
    7: "Q5_1",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}
