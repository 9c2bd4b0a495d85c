"""What the cache holds: blocks, tails and checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True, slots=True)
class Entry:
    """A block (`block` tokens), a tail (fewer, after the last full block) or a checkpoint.

    Attributes:
        root: key of its namespace.
        key: its own key.
        parent: key of what it continues: the block before it; for a checkpoint, the block or
            tail at whose end it hangs.
        start: first position it covers; for a checkpoint, the length at which it is valid.
        count: positions it covers; 0 marks a checkpoint.
        held: for each token group of the schema, how many of those positions are there (the
            newest ones; a ring forgets the others). Empty for a checkpoint.
    """

    root: bytes
    key: bytes
    parent: bytes
    start: int
    count: int
    held: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def is_checkpoint(self) -> bool:
        return self.count == 0

    def covers(self, other: Entry) -> bool:
        """Whether it holds all that `other`, of the same key, holds."""
        return all(mine >= its for mine, its in zip(self.held, other.held, strict=True))


@dataclass(frozen=True, slots=True)
class Payload:
    """An entry with its contents.

    Attributes:
        tokens: the entry's tokens as little-endian int32; empty for a checkpoint.
        arrays: one owned, evaluated array for each group of the schema: [names, held positions,
            ...] (token groups) or [names, ...] (groups of a checkpoint), as unsigned integers of
            the item's size. None where nothing is held.
    """

    entry: Entry
    tokens: bytes
    arrays: tuple[mx.array | None, ...]
