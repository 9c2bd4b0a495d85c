"""An entry as a file, and back."""

from __future__ import annotations

import base64

import mlx.core as mx
import numpy as np

from spec_cache.entry import Entry, Payload
from spec_cache.errors import DamagedError
from spec_cache.files import Tensor, decode, encode
from spec_cache.keys import FORMAT, TOKEN_BYTES, block_key, checkpoint_key
from spec_cache.layout import CARRIERS, DTYPES, Schema

_CARRIERS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def to_pieces(payload: Payload, schema: Schema, namespace: str) -> list[memoryview]:
    """The file's bytes. Reads the arrays' memory, which nobody writes to any more."""
    entry = payload.entry
    metadata = {
        **_identity(entry),
        "namespace": namespace,
        "schema": schema.to_json(),
        "tokens": base64.b64encode(payload.tokens).decode(),
    }
    tensors = []
    shapes = zip(schema.shapes(entry), payload.arrays, strict=True)
    for number, ((group, shape), array) in enumerate(shapes):
        if array is not None:
            tensors.append(Tensor(str(number), group.dtype, shape, host_bytes(array)))
    return encode(metadata, tensors)


def from_bytes(data: bytes, entry: Entry, schema: Schema) -> Payload:
    """An entry's contents, as arrays that are evaluated and bound to no thread.

    Raises DamagedError where the file is not whole, or is another entry's.
    """
    metadata, tensors = decode(data)
    tokens = entry_tokens(metadata, entry)
    if Schema.from_json(metadata.get("schema", "")) != schema:
        raise DamagedError("its arrays are of another kind than this namespace's")
    found = {tensor.name: tensor for tensor in tensors}
    arrays: list[mx.array | None] = []
    for number, (group, shape) in enumerate(schema.shapes(entry)):
        tensor = found.pop(str(number), None)
        if tensor is None and (entry.is_checkpoint or entry.held[number]):
            raise DamagedError(f"it lacks the tensor {number}")
        if tensor is not None and (tensor.dtype, tensor.shape) != (group.dtype, shape):
            raise DamagedError(
                f"its tensor {number} is {tensor.dtype}{list(tensor.shape)}, "
                f"not {group.dtype}{list(shape)}"
            )
        arrays.append(None if tensor is None else _array(tensor))
    if found:
        raise DamagedError(f"it has unknown tensors {sorted(found)}")
    return Payload(entry, tokens, tuple(arrays))


def entry_tokens(metadata: dict[str, str], entry: Entry) -> bytes:
    """The entry's tokens. Raises DamagedError unless the metadata is that of the entry."""
    for name, value in _identity(entry).items():
        if metadata.get(name) != value:
            raise DamagedError(f"its {name} is {metadata.get(name)!r}, not {value!r}")
    try:
        tokens = base64.b64decode(metadata.get("tokens", ""), validate=True)
    except ValueError:
        raise DamagedError("its tokens cannot be read") from None
    above = entry.parent
    key = checkpoint_key(above) if entry.is_checkpoint else block_key(above, tokens)
    if key != entry.key or len(tokens) != entry.count * TOKEN_BYTES:
        raise DamagedError("its tokens do not belong to its key")
    return tokens


def host_bytes(array: mx.array) -> memoryview:
    """The memory of an evaluated array, as bytes.

    Where the GPU has memory of its own, the first call moves the array to memory that both see:
    make it in the thread that owns MLX.
    """
    if not array.nbytes:
        return memoryview(b"")
    return memoryview(array).cast("B")  # type: ignore[arg-type]  # mlx's stubs lack __buffer__


def _array(tensor: Tensor) -> mx.array:
    size = DTYPES[tensor.dtype].size
    values = np.frombuffer(tensor.data, dtype=_CARRIERS[size]).reshape(tensor.shape)
    return mx.array(values, dtype=CARRIERS[size])


def _identity(entry: Entry) -> dict[str, str]:
    return {
        "format": FORMAT,
        "root": entry.root.hex(),
        "key": entry.key.hex(),
        "parent": entry.parent.hex(),
        "start": str(entry.start),
        "count": str(entry.count),
        "held": ".".join(map(str, entry.held)),
    }
