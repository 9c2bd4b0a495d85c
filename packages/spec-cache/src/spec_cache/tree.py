"""Entries under a byte budget, evicted leaf-first, least recently used."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from spec_cache.entry import Entry

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Node(Generic[T]):
    """An entry in a tree, with its size and whatever the tier keeps beside it."""

    entry: Entry
    nbytes: int
    value: T


class Tree(Generic[T]):
    """A tier's entries, least recently used first.

    An entry whose children are in the tree is never a victim. Uses are noted deepest first, so a
    parent is always more recent than its children and the oldest entry is, as a rule, a leaf.

    Args:
        limit: bytes that `used` may reach.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._nodes: OrderedDict[bytes, Node[T]] = OrderedDict()
        self._children: dict[bytes, dict[bytes, None]] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, key: bytes) -> bool:
        return key in self._nodes

    def __iter__(self) -> Iterator[Node[T]]:
        return iter(self._nodes.values())

    def get(self, key: bytes) -> Node[T] | None:
        return self._nodes.get(key)

    def children(self, key: bytes) -> list[Entry]:
        """Entries that continue `key`, which need not be in the tree itself; newest first."""
        return [self._nodes[child].entry for child in reversed(self._children.get(key, {}))]

    def add(self, entry: Entry, nbytes: int, value: T) -> None:
        """Add an entry as the most recent one, or replace the one with its key."""
        self.remove(entry.key)
        self._nodes[entry.key] = Node(entry, nbytes, value)
        self._children.setdefault(entry.parent, {})[entry.key] = None
        self.used += nbytes

    def remove(self, key: bytes) -> Node[T] | None:
        node = self._nodes.pop(key, None)
        if node is None:
            return None
        siblings = self._children[node.entry.parent]
        del siblings[key]
        if not siblings:
            del self._children[node.entry.parent]
        self.used -= node.nbytes
        return node

    def touch(self, key: bytes) -> None:
        """Note a use. Call it for the deepest entry of a path first."""
        if key in self._nodes:
            self._nodes.move_to_end(key)

    def victims(self, nbytes: int, keep: Container[bytes] = ()) -> list[Entry] | None:
        """What must go so that `nbytes` more fit: leaves first, least recently used.

        Nothing is taken out. Returns None if entries outside `keep` do not suffice.
        """
        excess = self.used + nbytes - self.limit
        if nbytes > self.limit:
            return None
        gone: dict[bytes, Entry] = {}
        while excess > 0:
            before = len(gone)
            for key, node in self._nodes.items():
                if excess <= 0:
                    break
                if key in keep or key in gone or not self._is_leaf(key, gone):
                    continue
                gone[key] = node.entry
                excess -= node.nbytes
            if len(gone) == before:
                return None
        return list(gone.values())

    def _is_leaf(self, key: bytes, gone: Container[bytes]) -> bool:
        return all(child in gone for child in self._children.get(key, ()))
