"""The prefix cache: state images in, the longest resumable prefix out."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType, TracebackType

from spec_cache import files
from spec_cache.disk import DiskTier, Writer
from spec_cache.entry import Entry, Payload
from spec_cache.errors import CacheError
from spec_cache.keys import Chain, Namespace, checkpoint_key, token_bytes
from spec_cache.layout import Schema, assemble, cut, cut_ends, entries_in, extent
from spec_cache.ram import RamTier, cost, size
from spec_cache.record import host_bytes
from spec_cache.reserve import Reservation, Reservations
from spec_cache.results import CacheStats, Hit, Stopped, Stored
from spec_cache.search import Found, needed, search
from spec_cache.tiers import Tiers, superseded
from spec_core.errors import InvalidValueError
from spec_core.seams import StateImage

_log = logging.getLogger("spec_cache")

_CHAINS_KEPT = 16
_ROOTS_KEPT = 4096
_NOTHING = Found(0, (), None, 0, False, 0)


@dataclass(slots=True)
class _Known:
    """What is known of a namespace. `live`: its schema is that of a picture, not of a file."""

    name: str
    schema: Schema | None = None
    live: bool = False


@dataclass(slots=True)
class _Counters:
    lookups: int = 0
    hits: int = 0
    asked_tokens: int = 0
    hit_tokens: int = 0
    stored: int = 0
    refused: int = 0


class PrefixCache:
    """Blocks and checkpoints of prefixes, in memory and on disk.

    `match`, `missing` and `store` belong to the thread that owns MLX; everything else may be
    called from any thread. Files are written, and loaded ahead, by a thread of the cache's own.

    Args:
        ram_bytes: the most that blocks and checkpoints may take in memory.
        disk_bytes: the most that `directory` may hold.
        directory: where to keep them beyond the process's life; None keeps them in memory only.
        block: tokens a block.
        report: told, in a sentence, of each file that cannot be used and of each reason to stop
            writing; if None, the logger "spec_cache" warns. Any thread may call it.
        write_file: puts a file in place, given its path, a temporary path and its pieces.

    Raises:
        InvalidValueError: a number is out of range, or only one of `disk_bytes` and `directory`
            is given.
    """

    def __init__(
        self,
        ram_bytes: int,
        disk_bytes: int = 0,
        directory: Path | str | None = None,
        block: int = 64,
        *,
        report: Callable[[str], None] = _log.warning,
        write_file: Writer = files.write,
    ) -> None:
        _check(ram_bytes, disk_bytes, directory, block)
        self._block = block
        self._roots: OrderedDict[bytes, _Known] = OrderedDict()
        self._chains: OrderedDict[tuple[bytes, int], tuple[Sequence[int], Chain]] = OrderedDict()
        self._counters = _Counters()
        self._closed = False
        self._report = report
        disk = None
        if directory is not None:
            disk = partial(DiskTier, Path(directory), disk_bytes, write=write_file)
        self._tiers = Tiers(RamTier(ram_bytes), disk, report, self._describe, block)
        self._mutex = self._tiers.mutex
        self._reservations = Reservations(self._mutex)

    @property
    def block(self) -> int:
        """Tokens a block."""
        return self._block

    def __enter__(self) -> PrefixCache:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def match(self, namespace: Namespace, tokens: Sequence[int]) -> Hit:
        """The longest prefix of `tokens`, short of the last one, that can be resumed.

        Loads from disk what is not in memory (see `prefetch`). The images are evaluated and belong
        to the caller; they do not count as the cache's memory.
        """
        chain = self._chain(namespace, tokens)
        limit = max(chain.length - 1, 0)
        self._tiers.refresh()
        schema, found, contents, damaged = self._find(chain, limit)
        with self._mutex:
            self._tiers.use(found.entries, found.checkpoint)
            self._counters.lookups += 1
            self._counters.hits += found.length > 0
            self._counters.asked_tokens += chain.length
            self._counters.hit_tokens += found.length
            pending = self._reservations.pending(self._tiers, chain, found.full_blocks, limit)
        parts = _images(schema, found, contents)
        return Hit(
            length=found.length,
            parts=MappingProxyType(parts),
            stopped=_why(schema, found, limit, damaged),
            stopped_at=max(found.known, found.length),
            pending=max(pending, found.length),
        )

    def missing(
        self,
        namespace: Namespace,
        tokens: Sequence[int],
        length: int | None = None,
        *,
        since: int = 0,
        checkpoint: bool = False,
    ) -> int | None:
        """From which position on a row of `length` tokens is not stored: image it from there.

        Args:
            namespace: whose states these are.
            tokens: the row's tokens.
            length: positions that the row has seen; all of `tokens` if None.
            since: the row's length when it was last matched or stored. What is missing before it
                is not asked for again: it had no room, or a sliding layer has forgotten it.
            checkpoint: whether exactly `length` is to be made resumable.

        Returns:
            A multiple of the block, or `length` if only the arrays at the end are missing; None if
            there is nothing to store.
        """
        length = len(tokens) if length is None else length
        chain = self._chain(namespace, tokens)
        blocks = length // self._block
        with self._mutex:
            schema = self._schema(chain.root)
            if schema is None:
                return 0 if blocks or (checkpoint and length) else None
            for number in range(blocks):
                start = number * self._block
                entry = self._tiers.find(chain.key(number + 1))
                if entry is None and start + self._block <= since:
                    return None
                if entry is None or (entry.end > since and not schema.complete(entry)):
                    return start
            if not checkpoint or self._resumable(chain, schema, length):
                return None
        return blocks * self._block

    def store(
        self,
        namespace: Namespace,
        tokens: Sequence[int],
        parts: Mapping[str, StateImage],
        *,
        checkpoint: bool = True,
    ) -> Stored:
        """Keep a row's picture.

        Full blocks from the images' start on are stored where they are not there yet; with
        `checkpoint` also what is needed to resume at exactly the images' length: the positions
        after the last full block, and the arrays at the end.

        Args:
            namespace: whose states these are.
            tokens: the row's tokens; as many as the images have seen count.
            parts: images by name, all with the same start and length. A namespace always has the
                same parts with the same arrays.
            checkpoint: whether exactly the images' length is to be resumable, not only the block
                borders (of targets without recurrent state) up to it.

        Raises:
            CacheError: the images do not fit together, or not to those stored before.
        """
        schema = Schema.of(parts)
        start, length = extent(parts)
        if length > len(tokens):
            raise CacheError(
                f"the images have seen {length} positions, but there are {len(tokens)} tokens"
            )
        chain = self._chain(namespace, tokens)
        self._adopt(chain.root, schema)
        with self._mutex:
            wanted = entries_in(chain, schema, parts, checkpoint)
            accepted, refused = self._accept(chain, schema, start, wanted)
        payloads = self._make(chain, schema, parts, accepted)
        with self._mutex:
            self._keep(chain, schema, length, payloads)
            self._counters.stored += len(payloads)
            self._counters.refused += refused
            resumable = checkpoint and self._resumable(chain, schema, length)
        return Stored(
            blocks=sum(entry.count == self._block for entry in accepted),
            resumable=resumable,
            nbytes=sum(map(cost, payloads)),
            refused=refused,
        )

    def reserve(self, namespace: Namespace, tokens: Sequence[int]) -> Reservation:
        """Announce that the prompt's missing blocks are being computed.

        Until it is released, `Hit.pending` tells other requests with the same prefix about it, so
        that a scheduler can let them wait instead of computing the same again. Release it when the
        prefill has stored its last block, or has ended in any other way.
        """
        return self._reservations.make(self._tiers, self._chain(namespace, tokens))

    def prefetch(self, namespace: Namespace, tokens: Sequence[int]) -> Future[bool]:
        """Load what `match` would need from disk, in the background.

        The future is done at once where nothing is to be loaded. It tells whether memory holds all
        that was found; false where there is no room for it, or a file cannot be used.
        """
        chain = self._chain(namespace, tokens)
        with self._mutex:
            schema, found = self._search(chain, max(chain.length - 1, 0))
            wanted = [] if schema is None else list(needed(schema, found))
            if schema is not None and any(self._tiers.ram.get(e.key) is None for e in wanted):
                return self._tiers.worker.submit(partial(self._load_ahead, schema, wanted))
        done: Future[bool] = Future()
        done.set_result(True)
        return done

    def stats(self) -> CacheStats:
        """Counters and sizes, at this moment."""
        tiers, counted = self._tiers, self._counters
        with self._mutex:
            return CacheStats(
                ram_bytes=tiers.ram.tree.used,
                ram_limit=tiers.ram.tree.limit,
                ram_entries=len(tiers.ram.tree),
                disk_bytes=tiers.disk.used if tiers.disk else 0,
                disk_limit=tiers.disk.limit if tiers.disk else 0,
                disk_entries=tiers.disk.entries if tiers.disk else 0,
                disk_waiting=len(tiers.worker.waiting),
                disk_off=tiers.disk.off if tiers.disk else "",
                lookups=counted.lookups,
                hits=counted.hits,
                asked_tokens=counted.asked_tokens,
                hit_tokens=counted.hit_tokens,
                stored_entries=counted.stored,
                refused_entries=counted.refused,
                evicted_ram=tiers.ram.evicted,
                evicted_disk=tiers.disk.evicted if tiers.disk else 0,
                loaded=tiers.loaded,
                written=tiers.disk.written if tiers.disk else 0,
                damaged=tiers.damaged,
            )

    def clear(self, namespace: Namespace | None = None) -> None:
        """Forget a namespace, or all of them; on disk those of other processes too.

        Raises CacheError where the directory cannot be cleared.
        """
        root = None if namespace is None else namespace.root(self._block)
        cleared = self._tiers.forget(root)
        if cleared is not None and not cleared.result():
            raise CacheError(
                "the cache directory cannot be cleared: it is read-only, or another process keeps "
                "its lock; try again, or remove it by hand"
            )

    def flush(self) -> None:
        """Wait until all that is stored is on disk, as far as it has room."""
        self._tiers.worker.flush()

    def close(self, flush: bool = True) -> None:
        """Write what is waiting (unless told otherwise), end the thread, give the memory back."""
        if not self._closed:
            self._closed = True
            self._tiers.close(flush)

    def _chain(self, namespace: Namespace, tokens: Sequence[int]) -> Chain:
        """The keys of a sequence; those of the last few tuples are remembered."""
        if self._closed:
            raise CacheError("the prefix cache is closed; make a new one")
        root = namespace.root(self._block)
        with self._mutex:
            self._remember(root, namespace)
            known = self._chains.get((root, id(tokens)))
            if known is not None:
                return known[1]
            chain = Chain(root, token_bytes(tokens), self._block)
            if isinstance(tokens, tuple):
                self._chains[root, id(tokens)] = (tokens, chain)
                if len(self._chains) > _CHAINS_KEPT:
                    self._chains.popitem(last=False)
            return chain

    def _remember(self, root: bytes, namespace: Namespace) -> None:
        """Keep the most recent namespaces in mind; what others have in memory is given up."""
        if root not in self._roots:
            self._roots[root] = _Known(namespace.describe())
        self._roots.move_to_end(root)
        if len(self._roots) > _ROOTS_KEPT:
            oldest, _ = self._roots.popitem(last=False)
            self._tiers.ram.clear(oldest)

    def _schema(self, root: bytes) -> Schema | None:
        known = self._roots.get(root)
        if known is not None and known.schema is None:
            known.schema = self._tiers.stored_schema(root)
        return None if known is None else known.schema

    def _describe(self, root: bytes) -> tuple[Schema, str] | None:
        known = self._roots.get(root)
        return None if known is None or known.schema is None else (known.schema, known.name)

    def _adopt(self, root: bytes, schema: Schema) -> None:
        """Make a live picture's schema the namespace's; what a file says of it gives way."""
        with self._mutex:
            before, known = self._schema(root), self._roots[root]
            if known.live and before != schema:
                raise CacheError(
                    f"a picture with the parts and arrays {schema} does not fit to those stored "
                    f"before, {before}; use another namespace for it"
                )
            known.schema, known.live = schema, True
        if before not in (None, schema):
            self._report(
                "stored prefixes are of another kind than this model's states, and are removed"
            )
            cleared = self._tiers.forget(root)
            if cleared is not None:
                cleared.result()

    def _find(self, chain: Chain, limit: int) -> tuple[Schema | None, Found, list[Payload], bool]:
        """The longest resumable prefix with its contents, and whether something was damaged."""
        before = self._tiers.damaged
        while True:
            with self._mutex:
                schema, found = self._search(chain, limit)
            contents = None if schema is None else self._load(schema, found)
            if schema is None or contents is not None:
                return schema, found, contents or [], self._tiers.damaged > before

    def _search(self, chain: Chain, limit: int) -> tuple[Schema | None, Found]:
        """The longest resumable prefix; under the mutex."""
        self._tiers.begin_search()
        schema = self._schema(chain.root)
        return schema, _NOTHING if schema is None else search(self._tiers, chain, schema, limit)

    def _load(self, schema: Schema, found: Found) -> list[Payload] | None:
        """Contents of the entries that resuming takes, in order; None if one is gone."""
        keep = {entry.key for entry in found.entries}
        contents: list[Payload] = []
        for entry in needed(schema, found):
            payload = self._tiers.load(entry, schema, keep)
            if payload is None:
                return None
            contents.append(payload)
        return contents

    def _load_ahead(self, schema: Schema, wanted: Sequence[Entry]) -> bool:
        """Load entries as long as memory keeps them; whether it kept all."""
        keep = {entry.key for entry in wanted}
        for entry in wanted:
            self._tiers.load(entry, schema, keep)
            with self._mutex:
                if self._tiers.ram.get(entry.key) is None:
                    return False
        return True

    def _resumable(self, chain: Chain, schema: Schema, length: int) -> bool:
        self._tiers.begin_search()
        return search(self._tiers, chain, schema, length, least=length).length == length

    def _accept(
        self, chain: Chain, schema: Schema, start: int, wanted: Sequence[Entry]
    ) -> tuple[list[Entry], int]:
        """The wanted entries that are new and have room, which is claimed; how many were refused.

        Entries that continue nothing are refused, and so is a block without all positions of its
        dense layers: neither could ever be used.
        """
        before = range(-(-start // self._block))
        path = {chain.key(number + 1) for number in before}
        if any(self._tiers.find(key) is None for key in path):
            return [], len(wanted)
        accepted: list[Entry] = []
        for number, entry in enumerate(wanted):
            there = self._tiers.find(entry.key)
            if there is None or (entry.covers(there) and not there.covers(entry)):
                if not schema.usable(entry) or not self._tiers.claim(size(schema, entry), path):
                    return accepted, len(wanted) - number
                accepted.append(entry)
            path.add(entry.key)
        return accepted, 0

    def _make(
        self,
        chain: Chain,
        schema: Schema,
        parts: Mapping[str, StateImage],
        entries: Sequence[Entry],
    ) -> list[Payload]:
        """The entries with their contents, for which room is claimed."""
        blocks = [entry for entry in entries if not entry.is_checkpoint]
        try:
            arrays = cut(schema, parts, blocks)
            if len(blocks) < len(entries):
                arrays.append(cut_ends(schema, parts))
            if self._tiers.disk is not None and not self._tiers.disk.off:
                for array in (a for group in arrays for a in group if a is not None):
                    host_bytes(array)
        except BaseException:
            with self._mutex:
                self._tiers.release(sum(size(schema, entry) for entry in entries))
            raise
        return [
            Payload(entry, chain.tokens(entry.start, entry.end), held)
            for entry, held in zip(entries, arrays, strict=True)
        ]

    def _keep(self, chain: Chain, schema: Schema, length: int, payloads: Sequence[Payload]) -> None:
        """Put new payloads into memory, note the use of the row, queue what is to be written."""
        for payload in payloads:
            self._tiers.release(cost(payload))
            self._tiers.ram.add(payload)
            for tail in superseded(schema, payload, self._tiers.ram.tree.children, self._block):
                self._tiers.ram.tree.remove(tail.key)
        blocks, rest = divmod(length, self._block)
        keys = [chain.key(number + 1) for number in range(blocks)]
        if rest:
            keys.append(chain.key_at(length))
        row = [entry for key in keys if (entry := self._tiers.find(key)) is not None]
        last = keys[-1] if keys else chain.root
        self._tiers.use(row, self._tiers.find(checkpoint_key(last)))


def _images(schema: Schema | None, found: Found, contents: list[Payload]) -> dict[str, StateImage]:
    if schema is None or not found.length:
        return {}
    if found.checkpoint is None:
        return assemble(schema, found.length, contents, None)
    return assemble(schema, found.length, contents[:-1], contents[-1])


def _why(schema: Schema | None, found: Found, limit: int, damaged: bool) -> Stopped:
    if found.length >= limit:
        return Stopped.END
    if damaged:
        return Stopped.DAMAGED
    if found.known > found.length:
        return Stopped.CHECKPOINT if schema is not None and schema.ends else Stopped.WINDOW
    return Stopped.DIVERGED if found.diverged else Stopped.UNSEEN


def _check(ram_bytes: int, disk_bytes: int, directory: Path | str | None, block: int) -> None:
    if ram_bytes < 1:
        raise InvalidValueError("ram_bytes", ram_bytes, "at least 1 byte")
    if not 1 <= block <= 4096:
        raise InvalidValueError("block", block, "1..4096 tokens")
    if disk_bytes < 0 or (directory is None) != (disk_bytes == 0):
        raise InvalidValueError(
            "disk_bytes", disk_bytes, "positive with a directory, and 0 without one"
        )
