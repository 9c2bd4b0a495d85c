"""A cache directory: names, permissions, the lock that processes share, and what is there.

    DIRECTORY/lock                                   eight bytes: how often files were written
    DIRECTORY/<root>/<key>-<parent>-<start>-<count>-<held>.safetensors
    DIRECTORY/<root>/tmp-<process>-<number>          being written, by whoever holds the lock

Names alone say how entries hang together and files' times when they were last used, so opening a
directory reads no file.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from spec_cache.entry import Entry
from spec_cache.errors import CacheError, DamagedError
from spec_cache.files import read_metadata

LOCK = "lock"
TEMPORARY = "tmp-"

_HEX = "[0-9a-f]{40}"
_ROOT = re.compile(_HEX)
_FILE = re.compile(rf"({_HEX})-({_HEX})-(\d+)-(\d+)-((?:\d+(?:\.\d+)*)?)\.safetensors")
_POLL_SECONDS = 0.01
_COUNT_BYTES = 8


@dataclass(frozen=True, slots=True)
class Found:
    """A cache file as its name describes it. `used` is the time of its last use in ns."""

    entry: Entry
    nbytes: int
    used: int


@dataclass(slots=True)
class Scan:
    """What a directory holds: cache files, unfinished files with their sizes, and the bytes of
    everything that is not a cache file."""

    files: list[Found] = field(default_factory=list)
    temporary: dict[Path, int] = field(default_factory=dict)
    other_bytes: int = 0


@dataclass(frozen=True, slots=True)
class StoredNamespace:
    """One namespace's share of a cache directory, for people.

    Attributes:
        root: its key in hexadecimal, the name of its folder.
        target, drafter, quantisation, kv_bits: as in `Namespace`; empty if unreadable.
        salted: whether it belongs to a tenant with a salt.
        files: how many blocks and checkpoints.
        nbytes: their size.
        tokens: positions covered by full and partial blocks.
        last_used: seconds since the epoch.
    """

    root: str
    target: str
    drafter: str
    quantisation: str
    kv_bits: int | None
    salted: bool
    files: int
    nbytes: int
    tokens: int
    last_used: float


def file_name(entry: Entry) -> str:
    """An entry's file, within its namespace's folder."""
    held = ".".join(map(str, entry.held))
    names = f"{entry.key.hex()}-{entry.parent.hex()}"
    return f"{names}-{entry.start}-{entry.count}-{held}.safetensors"


def file_path(directory: Path, entry: Entry) -> Path:
    """An entry's file."""
    return directory / entry.root.hex() / file_name(entry)


def prepare(directory: Path) -> None:
    """Make the directory, private to its owner. Raises OSError.

    A directory that is shared with other things keeps its permissions; its namespaces' folders are
    private in any case.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    ours = (directory / LOCK).exists() or not any(directory.iterdir())
    if ours and directory.stat().st_mode & 0o077:
        directory.chmod(0o700)


def scan(directory: Path) -> Scan:
    """Look through a directory. Files that vanish meanwhile are left out. Raises OSError."""
    result = Scan()
    with os.scandir(directory) as items:
        for item in items:
            if item.is_dir(follow_symlinks=False) and _ROOT.fullmatch(item.name):
                _scan_namespace(Path(item.path), result)
            elif item.is_file(follow_symlinks=False):
                result.other_bytes += _size(item)
    return result


def by_use(files: list[Found]) -> list[Found]:
    """Files from the least to the most recently used; what continues a file counts as its use."""
    used = {found.entry.key: found.used for found in files}
    deepest_first = sorted(files, key=_depth, reverse=True)
    for found in deepest_first:
        parent = found.entry.parent
        if parent in used:
            used[parent] = max(used[parent], used[found.entry.key])
    return sorted(deepest_first, key=lambda found: used[found.entry.key])


class DirectoryLock:
    """The lock that writers of a directory hold, and a count of writers that ever changed it.

    The count goes up before a writer's first change, so that whoever sees the count it remembers
    knows the directory as it remembers it, even if a writer was killed half-way.
    """

    def __init__(self, directory: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._handle = os.open(directory / LOCK, flags, 0o600)
        os.ftruncate(self._handle, _COUNT_BYTES)

    def count(self) -> int:
        return int.from_bytes(os.pread(self._handle, _COUNT_BYTES, 0), "little")

    def advance(self) -> int:
        """Only while the lock is held."""
        count: int = (self.count() + 1) % 256**_COUNT_BYTES
        os.pwrite(self._handle, count.to_bytes(_COUNT_BYTES, "little"), 0)
        return count

    @contextlib.contextmanager
    def held(self, patience: float) -> Iterator[bool]:
        """Hold the lock; false after `patience` seconds in which another process kept it."""
        deadline = time.monotonic() + patience
        while not (got := self._try()) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        try:
            yield got
        finally:
            if got:
                fcntl.flock(self._handle, fcntl.LOCK_UN)

    def close(self) -> None:
        os.close(self._handle)

    def _try(self) -> bool:
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def _check_marked(directory: Path) -> None:
    """Raises CacheError where no cache has ever used a directory, or it cannot be read."""
    try:
        marked = (directory / LOCK).exists()
    except OSError as error:
        raise CacheError(_unreadable(directory, error)) from error
    if not marked:
        raise CacheError(f"{directory} is no cache directory (it has no file {LOCK!r})")


def list_directory(directory: Path) -> tuple[StoredNamespace, ...]:
    """What a cache directory holds, most recently used namespace first.

    Raises CacheError where it is no cache directory or cannot be read.
    """
    _check_marked(directory)
    try:
        files = scan(directory).files
    except OSError as error:
        raise CacheError(_unreadable(directory, error)) from error
    namespaces: dict[bytes, list[Found]] = {}
    for found in files:
        namespaces.setdefault(found.entry.root, []).append(found)
    stored = [_summary(directory, found) for found in namespaces.values()]
    return tuple(sorted(stored, key=lambda one: -one.last_used))


def clear_directory(directory: Path, root: str | None = None) -> int:
    """Remove a namespace's files (all namespaces', without `root`); returns the bytes freed.

    Other files stay. Servers that use the directory go on and find misses. Raises CacheError.
    """
    _check_marked(directory)
    freed = 0
    try:
        lock = DirectoryLock(directory)
        try:
            with lock.held(patience=10.0) as got:
                if not got:
                    raise CacheError(f"{directory} is locked by another process; try again later")
                lock.advance()
                freed = remove_files(directory, None if root is None else bytes.fromhex(root))
        finally:
            lock.close()
    except OSError as error:
        raise CacheError(_unreadable(directory, error)) from error
    return freed


def remove_files(directory: Path, root: bytes | None) -> int:
    """Remove one namespace or all, unfinished files included; the lock is held."""
    freed = 0
    found = scan(directory)
    for file in found.files:
        if root in (None, file.entry.root):
            file_path(directory, file.entry).unlink(missing_ok=True)
            freed += file.nbytes
    for path in found.temporary:
        path.unlink(missing_ok=True)
    for folder in directory.iterdir():
        if _ROOT.fullmatch(folder.name):
            with contextlib.suppress(OSError):
                folder.rmdir()
    return freed


def _scan_namespace(folder: Path, result: Scan) -> None:
    root = bytes.fromhex(folder.name)
    with os.scandir(folder) as items:
        for item in items:
            if not item.is_file(follow_symlinks=False):
                continue
            try:
                status = item.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            entry = _parse(root, item.name)
            if entry is not None:
                result.files.append(Found(entry, status.st_size, status.st_mtime_ns))
                continue
            result.other_bytes += status.st_size
            if item.name.startswith(TEMPORARY):
                result.temporary[Path(item.path)] = status.st_size


def _parse(root: bytes, name: str) -> Entry | None:
    match = _FILE.fullmatch(name)
    if match is None:
        return None
    key, parent, start, count, held = match.groups()
    return Entry(
        root,
        bytes.fromhex(key),
        bytes.fromhex(parent),
        int(start),
        int(count),
        tuple(map(int, held.split("."))) if held else (),
    )


def _depth(found: Found) -> tuple[int, bool]:
    return found.entry.end, found.entry.is_checkpoint


def _size(item: os.DirEntry[str]) -> int:
    try:
        return item.stat(follow_symlinks=False).st_size
    except FileNotFoundError:
        return 0


def _summary(directory: Path, files: list[Found]) -> StoredNamespace:
    newest = max(files, key=lambda found: found.used)
    raw: dict[str, object] = {}
    with contextlib.suppress(OSError, DamagedError, ValueError, KeyError):
        raw = json.loads(read_metadata(file_path(directory, newest.entry))["namespace"])
    kv_bits = raw.get("kv_bits")
    return StoredNamespace(
        root=newest.entry.root.hex(),
        target=str(raw.get("target", "")),
        drafter=str(raw.get("drafter", "")),
        quantisation=str(raw.get("quantisation", "")),
        kv_bits=kv_bits if isinstance(kv_bits, int) else None,
        salted=bool(raw.get("salted", False)),
        files=len(files),
        nbytes=sum(found.nbytes for found in files),
        tokens=sum(found.entry.count for found in files),
        last_used=newest.used / 1e9,
    )


def _unreadable(directory: Path, error: OSError) -> str:
    return f"the cache directory {directory} cannot be used ({error.strerror}); check its path"
