"""The disk tier: files under a byte budget that several processes share."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from spec_cache import files
from spec_cache.directory import (
    TEMPORARY,
    DirectoryLock,
    by_use,
    file_name,
    file_path,
    prepare,
    remove_files,
    scan,
)
from spec_cache.entry import Entry, Payload
from spec_cache.errors import DamagedError
from spec_cache.layout import Schema
from spec_cache.record import entry_tokens, from_bytes, to_pieces
from spec_cache.tree import Tree

Writer = Callable[[Path, Path, Sequence[memoryview]], None]
Report = Callable[[str], None]


class DiskTier:
    """What lies in a directory, as far as this process knows.

    `find`, `children` and `forget` are used under the cache's mutex; files are read and written
    outside of it. Only one thread, the worker, may call what needs `exclusive`.

    Args:
        directory: made if it is not there.
        limit: bytes that the directory may hold, files of other origin included.
        mutex: guards the index.
        report: told once of each thing that went wrong.
        write: puts a file in place.

    Attributes:
        off: why nothing is written any more; empty while writing is on.
    """

    def __init__(
        self,
        directory: Path,
        limit: int,
        mutex: threading.RLock,
        report: Report,
        write: Writer = files.write,
    ) -> None:
        self.directory = directory
        self.off = ""
        self.written = 0
        self.evicted = 0
        self._limit = limit
        self._mutex = mutex
        self._report = report
        self._write_file = write
        self._tree: Tree[None] = Tree(limit)
        self._lock: DirectoryLock | None = None
        self._known = -1
        self._numbers = itertools.count()
        self._open()

    @property
    def used(self) -> int:
        """Bytes in the directory, as far as known."""
        return self._tree.used + self._limit - self._tree.limit

    @property
    def entries(self) -> int:
        return len(self._tree)

    @property
    def limit(self) -> int:
        return self._limit

    @property
    def changed_elsewhere(self) -> bool:
        """Whether the directory may hold something else than this process knows."""
        return self._lock is not None and self._lock.count() != self._known

    def find(self, key: bytes) -> Entry | None:
        node = self._tree.get(key)
        return None if node is None else node.entry

    def children(self, key: bytes) -> list[Entry]:
        return self._tree.children(key)

    def use(self, keys: Sequence[bytes]) -> None:
        """Note a use in memory, deepest entry first; `stamp` tells other processes."""
        for key in keys:
            self._tree.touch(key)

    def stamp(self, key: bytes) -> None:
        """Tell other processes of a use of a path, by the time of its deepest file."""
        entry = self.find(key)
        if entry is not None:
            with contextlib.suppress(OSError):
                os.utime(file_path(self.directory, entry), follow_symlinks=False)

    def read(self, entry: Entry, schema: Schema) -> Payload:
        """Load and verify an entry. Raises DamagedError or OSError; see `drop`."""
        most = sum(schema.sizes(entry)) + files.MOST_HEADER
        return from_bytes(files.read(file_path(self.directory, entry), most), entry, schema)

    def read_schema(self, entry: Entry) -> Schema:
        """The schema in an entry's header. Raises DamagedError or OSError."""
        metadata = files.read_metadata(file_path(self.directory, entry))
        return Schema.from_json(metadata.get("schema", ""))

    def read_tokens(self, entry: Entry) -> bytes:
        """The tokens in an entry's header. Raises DamagedError or OSError."""
        return entry_tokens(files.read_metadata(file_path(self.directory, entry)), entry)

    def drop(self, entry: Entry, error: DamagedError | OSError) -> bool:
        """Forget an entry that could not be used, remove its file if it is at fault, say so.

        Returns false where the entry was not known any more: it was evicted meanwhile. Where a
        file has vanished others may have, too: the directory is looked through again.
        """
        with self._mutex:
            if self._tree.remove(entry.key) is None:
                return False
            self._known = -1
        with contextlib.suppress(OSError):
            if isinstance(error, DamagedError):
                file_path(self.directory, entry).unlink(missing_ok=True)
            elif isinstance(error, FileNotFoundError):
                self._rescan(exact=False)
        self._report(f"cache file {file_name(entry)} is a miss: {_reason(error)}")
        return True

    @contextlib.contextmanager
    def exclusive(self, patience: float) -> Iterator[bool]:
        """Hold the directory, knowing exactly what is in it; false after `patience` seconds in
        which another process held it, or where it cannot be written to at all."""
        if self._lock is None:
            yield False
            return
        with self._lock.held(patience) as got:
            if got and self._lock.count() != self._known:
                self._rescan(exact=True)
            yield got

    def write(self, payload: Payload, schema: Schema, namespace: str) -> bool:
        """Write an entry if it fits; inside `exclusive`. Raises OSError.

        Returns false where it would be of no use (its parent is not there) or has no room.
        """
        entry = payload.entry
        present = self.find(entry.key)
        if present is not None and present.covers(entry):
            return True
        if entry.parent != entry.root and self.find(entry.parent) is None:
            return False
        pieces = to_pieces(payload, schema, namespace)
        nbytes = sum(piece.nbytes for piece in pieces)
        if not self._make_room(nbytes, keep={entry.parent}):
            return False
        self._announce()
        path = file_path(self.directory, entry)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        name = f"{TEMPORARY}{os.getpid()}-{next(self._numbers)}"
        self._write_file(path, path.parent / name, pieces)
        if present is not None and (old := file_path(self.directory, present)) != path:
            old.unlink(missing_ok=True)
        with self._mutex:
            self._tree.add(entry, nbytes, None)
        self.written += 1
        return True

    def remove(self, entries: Sequence[Entry]) -> None:
        """Remove files on purpose. Raises OSError."""
        for entry in entries:
            with self._mutex:
                self._tree.remove(entry.key)
            file_path(self.directory, entry).unlink(missing_ok=True)

    def clear(self, root: bytes | None) -> None:
        """Remove one namespace's files or all; inside `exclusive`. Raises OSError."""
        self._announce()
        remove_files(self.directory, root)
        self._rescan(exact=True)

    def turn_off(self, error: Exception) -> None:
        """Write nothing any more, and say so once. What is there can still be read."""
        if not self.off:
            strerror = error.strerror if isinstance(error, OSError) else None
            self.off = strerror or f"{type(error).__name__}: {error}"
            self._report(
                f"the cache directory {self.directory} is not written to any more: {self.off}"
            )

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _open(self) -> None:
        try:
            prepare(self.directory)
            self._lock = DirectoryLock(self.directory)
        except OSError as error:
            self.turn_off(error)
        try:
            with self.exclusive(patience=10.0) as got:
                if not got:
                    self._rescan(exact=False)
                elif not self._make_room(0, keep=()):
                    self._report(
                        f"the cache directory {self.directory} holds more than its limit of "
                        f"{self._limit} bytes that are not the cache's; nothing fits in it"
                    )
        except OSError as error:
            self.turn_off(error)

    def _rescan(self, exact: bool) -> None:
        """Take stock. Whoever holds the lock gets it exactly, and removes unfinished files."""
        found = scan(self.directory)
        if exact:
            for path, nbytes in found.temporary.items():
                path.unlink(missing_ok=True)
                found.other_bytes -= nbytes
        tree: Tree[None] = Tree(self._limit - found.other_bytes)
        for file in by_use(found.files):
            tree.add(file.entry, file.nbytes, None)
        with self._mutex:
            self._tree = tree
            self._known = self._lock.count() if exact and self._lock is not None else -1

    def _make_room(self, nbytes: int, keep: set[bytes] | tuple[()]) -> bool:
        with self._mutex:
            victims = self._tree.victims(nbytes, keep)
        if victims:
            self._announce()
            self.remove(victims)
            self.evicted += len(victims)
        return victims is not None

    def _announce(self) -> None:
        """Let other processes know that the directory is about to change."""
        assert self._lock is not None
        self._known = self._lock.advance()


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "it has vanished"
    if isinstance(error, OSError):
        return f"it cannot be read ({error.strerror})"
    return f"{error}; it is removed"
