"""The memory tier."""

from __future__ import annotations

import mmap
from collections.abc import Container, Sequence

from spec_cache.entry import Entry, Payload
from spec_cache.keys import TOKEN_BYTES
from spec_cache.layout import Schema
from spec_cache.tree import Tree
from spec_core.device import backend

ENTRY_BYTES = 512
"""What an entry costs beside its arrays and tokens: keys, tuples, places in the trees."""

_GPU_PAGE = 16 << 10


class RamTier:
    """Payloads under a byte budget. All calls are made under the cache's mutex."""

    def __init__(self, limit: int) -> None:
        self.tree: Tree[Payload] = Tree(limit)
        self.evicted = 0

    def get(self, key: bytes) -> Payload | None:
        node = self.tree.get(key)
        return None if node is None else node.value

    def add(self, payload: Payload) -> None:
        """Add a payload for which there is room, or put it in its predecessor's place."""
        self.tree.add(payload.entry, cost(payload), payload)

    def make_room(self, nbytes: int, *keeps: Container[bytes]) -> bool:
        """Evict until `nbytes` more fit, sparing what is in any of `keeps`; or evict nothing."""
        victims = self.tree.victims(nbytes, _Union(keeps))
        for entry in victims or ():
            self.tree.remove(entry.key)
            self.evicted += 1
        return victims is not None

    def clear(self, root: bytes | None) -> None:
        for node in list(self.tree):
            if root in (None, node.entry.root):
                self.tree.remove(node.entry.key)


def cost(payload: Payload) -> int:
    """Bytes that a payload takes in memory, at most."""
    sizes = [array.nbytes for array in payload.arrays if array is not None]
    return _cost(sizes, payload.entry)


def size(schema: Schema, entry: Entry) -> int:
    """Bytes that an entry's payload will take in memory, at most."""
    return _cost(schema.sizes(entry), entry)


def _cost(sizes: Sequence[int], entry: Entry) -> int:
    return sum(map(_buffer, sizes)) + entry.count * TOKEN_BYTES + ENTRY_BYTES


def _buffer(nbytes: int) -> int:
    """The largest buffer that MLX may take for an array.

    A buffer that is used again may be less than two pages, and less than the array's own size,
    too large; GPU backends also round up, to a page or to a power of two.
    """
    if backend() == "cpu":
        return nbytes + min(nbytes, 2 * mmap.PAGESIZE)
    return nbytes + min(3 * nbytes, 3 * _GPU_PAGE)


class _Union:
    """Membership in any of some containers."""

    def __init__(self, containers: Sequence[Container[bytes]]) -> None:
        self._containers = containers

    def __contains__(self, key: object) -> bool:
        return any(key in container for container in self._containers)
