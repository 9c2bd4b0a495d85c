"""How far a prompt can be resumed: pure bookkeeping over entries, without their contents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from spec_cache.entry import Entry
from spec_cache.keys import Chain, checkpoint_key, common_tokens
from spec_cache.layout import Schema


class Index(Protocol):
    """Where entries are found, in whatever tier."""

    def find(self, key: bytes) -> Entry | None: ...

    def children(self, key: bytes) -> Sequence[Entry]:
        """Entries that continue `key`, most recently used first."""

    def tokens_of(self, entry: Entry) -> bytes | None:
        """An entry's tokens, or None where finding out would cost too much."""


@dataclass(frozen=True, slots=True)
class Found:
    """The longest prefix that can be resumed.

    Attributes:
        length: in tokens; 0 if there is none.
        entries: blocks (and at last a tail or part of a block) that cover `length`, from 0 on.
        checkpoint: what holds the arrays that are valid at `length` only, if there are any.
        known: leading tokens that are stored, resumable or not.
        diverged: something else than the prompt is stored after `known`.
        full_blocks: how many of the prompt's full blocks are stored in a row.
    """

    length: int
    entries: tuple[Entry, ...]
    checkpoint: Entry | None
    known: int
    diverged: bool
    full_blocks: int


@dataclass(frozen=True, slots=True)
class _Continuation:
    """An entry after a full block that shares its first `common` tokens with the prompt."""

    entry: Entry
    common: int

    @property
    def length(self) -> int:
        return self.entry.start + self.common


def full_blocks(index: Index, chain: Chain, limit: int) -> list[Entry]:
    """The stored blocks of the prompt's first `limit` tokens, as far as there is no gap."""
    path: list[Entry] = []
    for block in range(limit // chain.block):
        entry = index.find(chain.key(block + 1))
        if entry is None:
            break
        path.append(entry)
    return path


def search(index: Index, chain: Chain, schema: Schema, limit: int, least: int = 1) -> Found:
    """The longest length in least..limit at which every part can be resumed."""
    path = full_blocks(index, chain, limit)
    deepest = list(_continuations(index, chain, len(path), limit))
    known = max((c.length for c in deepest), default=len(path) * chain.block)
    diverged = any(c.length == known and c.common < c.entry.count for c in deepest)
    for entries, length in _options(index, chain, schema, path, deepest, limit):
        if length < least:
            break
        checkpoint = index.find(checkpoint_key(chain.key_at(length))) if schema.ends else None
        if schema.ends and checkpoint is None:
            continue
        if covered(schema, entries, length):
            return Found(length, tuple(entries), checkpoint, known, diverged, len(path))
    return Found(0, (), None, known, diverged, len(path))


def needed(schema: Schema, found: Found) -> Iterator[Entry]:
    """The entries whose contents resuming takes: all, unless windows alone are to be filled."""
    if schema.tokens:
        begin = min(group.begin(found.length) for group in schema.tokens)
        yield from (entry for entry in found.entries if entry.end > begin)
    if found.checkpoint is not None:
        yield found.checkpoint


def covered(schema: Schema, entries: Sequence[Entry], length: int) -> bool:
    """Whether entries that lie end to end hold all that resuming at `length` needs."""
    numbered = sorted(enumerate(schema.tokens), key=lambda pair: pair[1].reach is None)
    return all(_reaches(n, g.begin(length), length, entries) for n, g in numbered)


def _reaches(group: int, begin: int, length: int, entries: Sequence[Entry]) -> bool:
    """Whether a group's positions begin..length-1 are held without a gap."""
    low = length
    for entry in reversed(entries):
        if low <= begin or entry.end < low:
            break
        low = min(low, entry.end - entry.held[group])
    return low <= begin


def _options(
    index: Index,
    chain: Chain,
    schema: Schema,
    path: Sequence[Entry],
    deepest: Sequence[_Continuation],
    limit: int,
) -> Iterator[tuple[list[Entry], int]]:
    """Lengths that might do, longest first, with the entries up to them.

    Inside a block only those count that a tail ends at, unless any position will do.
    """
    for blocks in range(len(path), -1, -1):
        before = list(path[:blocks])
        inside = deepest
        if blocks < len(path):
            inside = _tails(index, chain, schema, path[blocks], limit)
        for one in sorted(inside, key=lambda c: -c.length):
            if one.common and (not schema.ends or one.common == one.entry.count):
                yield [*before, one.entry], one.length
        if blocks:
            yield before, blocks * chain.block


def _tails(
    index: Index, chain: Chain, schema: Schema, block: Entry, limit: int
) -> list[_Continuation]:
    """Tails beside a stored block of the prompt, unless the block itself can be resumed inside."""
    if schema.resumes_anywhere(chain.block) and schema.complete(block):
        return []
    beside = _continuations(index, chain, block.start // chain.block, limit)
    return [c for c in beside if c.entry.count < chain.block]


def _continuations(index: Index, chain: Chain, blocks: int, limit: int) -> Iterator[_Continuation]:
    """Blocks and tails after the prompt's first full blocks.

    Those that the prompt contains whole are known by their key; of others the tokens are compared.
    """
    start = blocks * chain.block
    most = min(chain.block, limit - start)
    for entry in index.children(chain.key(blocks)) if most > 0 else ():
        if entry.is_checkpoint:
            continue
        if entry.count <= most and chain.key_at(start + entry.count) == entry.key:
            yield _Continuation(entry, entry.count)
            continue
        tokens = index.tokens_of(entry)
        if tokens is not None:
            yield _Continuation(entry, common_tokens(chain.tokens(start, start + most), tokens))
