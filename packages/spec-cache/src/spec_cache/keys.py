"""What identifies a stretch of tokens: a chain of sha256 digests over namespace and blocks.

    key(0)     = H(format, block size, namespace)
    key(k + 1) = H(key(k), tokens of block k)
    tail       = H(key(k), the tokens after the last full block)
    checkpoint = H("checkpoint", key of the block or tail it ends with)

Keys are cut to 160 bits, so that two of them fit into a file's name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from spec_core.errors import InvalidValueError

FORMAT = "spec-cache 1"
"""Changes when files of an older version must not be read any more."""

KEY_BYTES = 20
TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class Namespace:
    """Whose states these are. Equal tokens in different namespaces never meet.

    Attributes:
        target: identity of the target's weights (and revision).
        drafter: identity of the drafter's weights; empty without one.
        quantisation: dtype and quantisation of the weights, in any fixed spelling.
        kv_bits: bits of quantised keys and values, or None.
        salt: a tenant's secret; tenants with different salts share nothing. It is never written
            to disk nor shown.
    """

    target: str
    drafter: str = ""
    quantisation: str = ""
    kv_bits: int | None = None
    salt: str = field(default="", repr=False)

    def root(self, block: int) -> bytes:
        """Key of the empty prefix for blocks of `block` tokens."""
        parts = [FORMAT, block, self.target, self.drafter, self.quantisation, self.kv_bits]
        return _digest(json.dumps([*parts, self.salt]).encode())

    def describe(self) -> str:
        """The namespace as JSON, the salt reduced to whether there is one."""
        names = ("target", "drafter", "quantisation", "kv_bits")
        seen = {name: getattr(self, name) for name in names}
        return json.dumps({**seen, "salted": bool(self.salt)})


class Chain:
    """The keys of a token sequence's prefixes, computed as far as they are asked for.

    Not for two threads at a time: ask for keys under the cache's mutex.

    Args:
        root: key of the empty prefix.
        data: the tokens as little-endian int32.
        block: tokens a block.
    """

    __slots__ = ("_keys", "block", "data", "length")

    def __init__(self, root: bytes, data: bytes, block: int) -> None:
        self.data = data
        self.block = block
        self.length = len(data) // TOKEN_BYTES
        self._keys = [root]

    @property
    def root(self) -> bytes:
        return self._keys[0]

    def key(self, blocks: int) -> bytes:
        """Key of the prefix of that many full blocks."""
        while len(self._keys) <= blocks:
            start = (len(self._keys) - 1) * self.block
            self._keys.append(block_key(self._keys[-1], self.tokens(start, start + self.block)))
        return self._keys[blocks]

    def key_at(self, length: int) -> bytes:
        """Key of the prefix of `length` tokens, a tail's where it is no multiple of the block."""
        blocks, rest = divmod(length, self.block)
        parent = self.key(blocks)
        return parent if not rest else block_key(parent, self.tokens(length - rest, length))

    def tokens(self, start: int, stop: int) -> bytes:
        return self.data[start * TOKEN_BYTES : stop * TOKEN_BYTES]


def block_key(parent: bytes, tokens: bytes) -> bytes:
    """Key of a block or tail."""
    return _digest(parent + tokens)


def checkpoint_key(owner: bytes) -> bytes:
    """Key of the checkpoint at the end of a block or tail."""
    return _digest(b"checkpoint" + owner)


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Token ids as little-endian int32. Raises InvalidValueError where one does not fit."""
    try:
        array = np.asarray(tokens, dtype="<i4")
    except OverflowError:
        worst = max(tokens, key=abs)
        raise InvalidValueError("token id", worst, "a 32-bit integer") from None
    return array.tobytes()


def common_tokens(left: bytes, right: bytes) -> int:
    """How many leading tokens two encoded sequences share."""
    size = min(len(left), len(right))
    if left[:size] == right[:size]:
        return size // TOKEN_BYTES
    a = np.frombuffer(left[:size], dtype="<i4")
    b = np.frombuffer(right[:size], dtype="<i4")
    return int(np.argmax(a != b))


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:KEY_BYTES]
