"""Memory and disk as one: finding, loading, keeping and writing entries."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Container, Sequence
from concurrent.futures import Future

from spec_cache.disk import DiskTier, Report
from spec_cache.entry import Entry, Payload
from spec_cache.errors import DamagedError
from spec_cache.keys import TOKEN_BYTES, block_key
from spec_cache.layout import Schema
from spec_cache.ram import RamTier, cost
from spec_cache.worker import Worker

_LOCK_SECONDS = 5.0
"""How long to wait for a directory that another process holds; then the work is left for later."""

_HEADERS_A_SEARCH = 16
_HEADERS_KEPT = 4096


class Tiers:
    """Both tiers, and the thread that moves entries between them.

    Args:
        ram: the memory tier.
        disk: makes the disk tier, given the mutex and where to report; None for memory only.
        report: told of each damaged file.
        describe: schema and description of a namespace, given its root.
        block: tokens a block.

    Attributes:
        mutex: guards the indexes of both tiers; files are read and written outside of it.
    """

    def __init__(
        self,
        ram: RamTier,
        disk: Callable[[threading.RLock, Report], DiskTier] | None,
        report: Report,
        describe: Callable[[bytes], tuple[Schema, str] | None],
        block: int,
    ) -> None:
        self.mutex = threading.RLock()
        self.ram = ram
        self.disk = None if disk is None else disk(self.mutex, report)
        self.loaded = 0
        self.damaged = 0
        self._describe = describe
        self._block = block
        self._headers: OrderedDict[bytes, bytes] = OrderedDict()
        self._reads_left = _HEADERS_A_SEARCH
        self._writing: set[bytes] = set()
        self._refreshing = False
        self.worker = Worker(self._write_files)

    # Index of `search`; used under the mutex.

    def find(self, key: bytes) -> Entry | None:
        payload = self.ram.get(key)
        if payload is not None:
            return payload.entry
        return None if self.disk is None else self.disk.find(key)

    def children(self, key: bytes) -> Sequence[Entry]:
        near = self.ram.tree.children(key)
        if self.disk is None:
            return near
        here = {entry.key for entry in near}
        return near + [entry for entry in self.disk.children(key) if entry.key not in here]

    def tokens_of(self, entry: Entry) -> bytes | None:
        payload = self.ram.get(entry.key)
        if payload is not None:
            return payload.tokens
        known = self._headers.get(entry.key)
        if known is not None or self.disk is None or not self._reads_left:
            return known
        self._reads_left -= 1
        try:
            tokens = self.disk.read_tokens(entry)
        except (DamagedError, OSError) as error:
            self._drop(entry, error)
            return None
        self._headers[entry.key] = tokens
        if len(self._headers) > _HEADERS_KEPT:
            self._headers.popitem(last=False)
        return tokens

    def begin_search(self) -> None:
        """Allow one search to read a few headers of files."""
        self._reads_left = _HEADERS_A_SEARCH

    def stored_schema(self, root: bytes) -> Schema | None:
        """A namespace's schema as some file of it has it; under the mutex."""
        for entry in self.disk.children(root) if self.disk is not None else ():
            assert self.disk is not None
            try:
                return self.disk.read_schema(entry)
            except (DamagedError, OSError) as error:
                self._drop(entry, error)
        return None

    # Contents.

    def load(self, entry: Entry, schema: Schema, keep: Container[bytes]) -> Payload | None:
        """An entry's contents; None if it is gone: search again. A file that cannot be used is
        dropped.

        What comes from disk stays in memory if leaves outside `keep` can make room for it.
        """
        with self.mutex:
            payload = self.ram.get(entry.key)
            there = None if self.disk is None else self.disk.find(entry.key)
        if payload is not None or self.disk is None or there is None or not there.covers(entry):
            return payload
        try:
            payload = self.disk.read(there, schema)
        except (DamagedError, OSError) as error:
            with self.mutex:
                self._drop(entry, error)
            return None
        with self.mutex:
            self.loaded += 1
            if self.ram.get(entry.key) is None and self.ram.make_room(cost(payload), keep):
                self.ram.add(payload)
        return payload

    def claim(self, nbytes: int, path: Container[bytes]) -> bool:
        """Make room for a new entry and count its bytes as used; under the mutex.

        What the entry continues (`path`) is spared unless it is on disk; so is, as long as other
        leaves will do, what waits to be written.
        """
        keep = (_Unwritten(path, self.disk), self._writing)
        waiting = self.worker.waiting
        made = self.ram.make_room(nbytes, *keep, waiting) or self.ram.make_room(nbytes, *keep)
        if made:
            self.ram.tree.used += nbytes
        return made

    def release(self, nbytes: int) -> None:
        """Take a claim back; under the mutex."""
        self.ram.tree.used -= nbytes

    def use(self, entries: Sequence[Entry], checkpoint: Entry | None) -> None:
        """Note the use of a path, and write what of it is not on disk; under the mutex."""
        keys = [entry.key for entry in reversed(entries)]
        if checkpoint is not None:
            keys.insert(0, checkpoint.key)
        for key in keys:
            self.ram.tree.touch(key)
        if self.disk is None or not keys:
            return
        self.disk.use(keys)
        disk, deepest = self.disk, keys[0]
        self.worker.submit(lambda: disk.stamp(deepest))
        if not disk.off:
            self.worker.write_later(k for k in reversed(keys) if self._to_be_written(k))

    def refresh(self) -> None:
        """Have the directory looked through again if another process wrote to it."""
        disk = self.disk
        if disk is None or self._refreshing or not disk.changed_elsewhere:
            return
        self._refreshing = True

        def look() -> None:
            try:
                with contextlib.suppress(OSError), disk.exclusive(_LOCK_SECONDS):
                    pass
            finally:
                self._refreshing = False

        self.worker.submit(look)

    def forget(self, root: bytes | None) -> Future[bool] | None:
        """Forget a namespace or all; the future tells whether the directory could be cleared."""
        with self.mutex:
            self.ram.clear(root)
            self._headers.clear()
        disk = self.disk
        if disk is None:
            return None

        def clear() -> bool:
            try:
                with disk.exclusive(_LOCK_SECONDS) as got:
                    if got:
                        disk.clear(root)
                    return got
            except OSError as error:
                disk.turn_off(error)
                return False

        return self.worker.submit(clear)

    def close(self, flush: bool) -> None:
        self.worker.close(flush)
        with self.mutex:
            self.ram.clear(None)
            if self.disk is not None:
                self.disk.close()

    # The worker's side.

    def _write_files(self, keys: Sequence[bytes]) -> None:
        disk = self.disk
        if disk is None or disk.off:
            return
        try:
            with disk.exclusive(_LOCK_SECONDS) as got:
                for key in keys if got else ():
                    self._write_file(disk, key)
        except Exception as error:  # whatever it is, only the writing ends
            disk.turn_off(error)

    def _write_file(self, disk: DiskTier, key: bytes) -> None:
        with self.mutex:
            payload = self.ram.get(key)
            described = None if payload is None else self._describe(payload.entry.root)
            if payload is None or described is None:
                return
            self._writing.add(key)
        try:
            disk.write(payload, *described)
            disk.remove(superseded(described[0], payload, disk.children, self._block))
        finally:
            with self.mutex:
                self._writing.discard(key)

    def _to_be_written(self, key: bytes) -> bool:
        assert self.disk is not None
        here, there = self.ram.get(key), self.disk.find(key)
        return here is not None and (there is None or not there.covers(here.entry))

    def _drop(self, entry: Entry, error: DamagedError | OSError) -> None:
        assert self.disk is not None
        self.damaged += self.disk.drop(entry, error)


def superseded(
    schema: Schema, payload: Payload, children: Callable[[bytes], Sequence[Entry]], block: int
) -> list[Entry]:
    """Tails that a block or longer tail makes useless, where any position of it can be resumed."""
    entry = payload.entry
    if not (schema.resumes_anywhere(block) and schema.complete(entry)):
        return []
    shorter = [child for child in children(entry.parent) if child.count < entry.count]
    return [
        child
        for child in shorter
        if child.key == block_key(entry.parent, payload.tokens[: child.count * TOKEN_BYTES])
    ]


class _Unwritten:
    """The keys of a path that are not on disk."""

    def __init__(self, path: Container[bytes], disk: DiskTier | None) -> None:
        self._path = path
        self._disk = disk

    def __contains__(self, key: object) -> bool:
        if key not in self._path or not isinstance(key, bytes):
            return False
        return self._disk is None or self._disk.find(key) is None
