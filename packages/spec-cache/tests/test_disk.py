"""Files: what they hold, who may read them, how much they take, and what a restart finds."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import mlx.core as mx
import pytest

from spec_cache import (
    CacheError,
    Namespace,
    PrefixCache,
    Stopped,
    clear_directory,
    files,
    list_directory,
)

from .rows import BLOCK, DENSE, HYBRID, KINDS, NAMESPACE, WINDOW, Kind, check, picture

RAM, DISK = 1 << 22, 1 << 24
TOKENS = [(i * 7) % 50 for i in range(43)]


@pytest.fixture
def complaints() -> list[str]:
    return []


@pytest.fixture
def open_cache(tmp_path: Path, complaints: list[str]) -> Iterator[Callable[..., PrefixCache]]:
    made: list[PrefixCache] = []

    def make(
        ram: int = RAM, disk: int = DISK, directory: Path = tmp_path / "cache", **more: object
    ) -> PrefixCache:
        made.append(
            PrefixCache(ram, disk, directory, BLOCK, report=complaints.append, **more)  # type: ignore[arg-type]
        )
        return made[-1]

    yield make
    for cache in made:
        cache.close()


def cache_files(directory: Path) -> list[Path]:
    return sorted(directory.rglob("*.safetensors"))


def size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def fill(cache: PrefixCache, kind: Kind = DENSE, tokens: Sequence[int] = TOKENS) -> None:
    for end in range(16, len(tokens) + 16, 16):
        part = tokens[:end]
        start = cache.missing(NAMESPACE, part, checkpoint=True)
        assert start is not None
        cache.store(NAMESPACE, part, picture(kind, part, start))
    cache.flush()


Open = Callable[..., PrefixCache]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_restart_finds_everything(open_cache: Open, kind: Kind, complaints: list[str]) -> None:
    first = open_cache()
    fill(first, kind)
    first.close()
    again = open_cache()
    assert again.stats().disk_entries == first.stats().disk_entries > 0
    for at in (43, 42, 32, 30, 16, 5):
        probe = [*TOKENS[:at], 99]
        hit = again.match(NAMESPACE, probe)
        check(kind, probe, hit)
        expected = at if kind in (DENSE, WINDOW) or at in (43, 32, 16) else hit.length
        assert hit.length == expected
    assert again.stats().loaded > 0
    assert not complaints


def test_a_second_look_reads_no_file(open_cache: Open) -> None:
    fill(open_cache())
    cache = open_cache()
    cache.match(NAMESPACE, TOKENS)
    loaded = cache.stats().loaded
    cache.match(NAMESPACE, TOKENS)
    assert cache.stats().loaded == loaded > 0


def test_prefetching_leaves_nothing_to_load(open_cache: Open) -> None:
    fill(open_cache(), HYBRID)
    cache = open_cache()
    assert cache.prefetch(NAMESPACE, [*TOKENS, 1]).result(timeout=60)
    loaded = cache.stats().loaded
    hit = cache.match(NAMESPACE, [*TOKENS, 1])
    check(HYBRID, TOKENS, hit)
    assert (hit.length, cache.stats().loaded) == (43, loaded)


def test_prefetching_what_is_in_memory_waits_for_nothing(open_cache: Open) -> None:
    cache, busy = open_cache(), threading.Event()
    fill(cache, HYBRID)
    cache._tiers.worker.submit(busy.wait)
    assert cache.prefetch(NAMESPACE, [*TOKENS, 1]).done()
    assert cache.prefetch(NAMESPACE, [99] * 40).done()
    busy.set()


def test_prefetching_ends_where_memory_does(open_cache: Open) -> None:
    fill(open_cache())
    cache = open_cache(ram=4000)
    assert not cache.prefetch(NAMESPACE, [*TOKENS, 1]).result(timeout=60)
    assert 0 < cache.stats().loaded < 6
    hit = cache.match(NAMESPACE, [*TOKENS, 1])
    check(DENSE, TOKENS, hit)
    assert hit.length == 43


def test_files_are_plain_safetensors(open_cache: Open, tmp_path: Path) -> None:
    """Read back by MLX's own reader: one stacked tensor a dtype and shape."""
    tokens = TOKENS[:BLOCK]
    cache = open_cache()
    cache.store(NAMESPACE, tokens, picture(DENSE, tokens))
    cache.flush()
    (path,) = cache_files(tmp_path)
    tensors, metadata = mx.load(str(path), return_metadata=True)
    images = picture(DENSE, tokens)
    keys = images["target"].per_token["keys"].array
    stacked = [t for t in tensors.values() if t.dtype == mx.bfloat16]
    assert len(tensors) == 3
    assert len(stacked) == 1
    assert stacked[0].shape == (2, *keys.shape)
    assert mx.array_equal(stacked[0][0].view(mx.uint16), keys.view(mx.uint16))
    assert json.loads(metadata["namespace"])["target"] == NAMESPACE.target
    assert len(metadata["checksum"]) == 64


def test_what_is_stored_is_private(open_cache: Open, tmp_path: Path) -> None:
    modes: set[int] = set()

    def watch(path: Path, temporary: Path, pieces: Sequence[memoryview]) -> None:
        files.write(path, temporary, pieces)
        modes.add(path.stat().st_mode & 0o777)

    old = os.umask(0)
    try:
        (tmp_path / "cache").mkdir()
        fill(open_cache(write_file=watch))
    finally:
        os.umask(old)
    assert modes == {0o600}
    folders = [tmp_path / "cache", *(p for p in (tmp_path / "cache").iterdir() if p.is_dir())]
    assert len(folders) == 2
    assert {p.stat().st_mode & 0o777 for p in folders} == {0o700}
    assert (tmp_path / "cache" / "lock").stat().st_mode & 0o777 == 0o600
    secret = Namespace("t", salt="tenant-secret")
    cache = open_cache()
    cache.store(secret, TOKENS, picture(DENSE, TOKENS))
    cache.flush()
    assert not any(b"tenant-secret" in p.read_bytes() for p in cache_files(tmp_path))


def test_a_folder_with_other_things_keeps_its_permissions(open_cache: Open, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    tmp_path.chmod(0o755)
    fill(open_cache(directory=tmp_path))
    assert tmp_path.stat().st_mode & 0o777 == 0o755
    folders = [p for p in tmp_path.iterdir() if p.is_dir()]
    assert {p.stat().st_mode & 0o777 for p in folders} == {0o700}
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_the_disk_budget_holds_at_every_moment(open_cache: Open, tmp_path: Path) -> None:
    directory, limit = tmp_path / "cache", 40_000
    seen: list[int] = []

    def watch(path: Path, temporary: Path, pieces: Sequence[memoryview]) -> None:
        def while_it_lasts(target: Path, hidden: Path, parts: Sequence[memoryview]) -> None:
            files.write(target.with_name("tmp-other"), hidden, parts)
            seen.append(size(directory))
            target.with_name("tmp-other").rename(target)

        while_it_lasts(path, temporary, pieces)
        seen.append(size(directory))

    cache = open_cache(disk=limit, write_file=watch)
    for seed in range(12):
        tokens = [seed, *TOKENS]
        cache.store(NAMESPACE, tokens, picture(DENSE, tokens))
        cache.flush()
        assert cache.stats().disk_bytes == size(directory)
    assert limit / 2 < max(seen) <= limit
    assert cache.stats().evicted_disk > 0
    tokens = [11, *TOKENS]
    assert open_cache().match(NAMESPACE, [*tokens, 1]).length == len(tokens)


def test_the_budget_counts_foreign_namespaces_and_other_files(
    open_cache: Open, tmp_path: Path, complaints: list[str]
) -> None:
    directory = tmp_path / "cache"
    first = open_cache()
    fill(first)
    first.close()
    (directory / "stray").write_bytes(b"x" * 5000)
    foreign = size(directory)
    cache = open_cache(disk=foreign + 2000)
    other = Namespace("other")
    for seed in range(6):
        tokens = [seed, *TOKENS]
        cache.store(other, tokens, picture(DENSE, tokens))
        cache.flush()
        assert size(directory) <= foreign + 2000
    assert cache.match(NAMESPACE, TOKENS).length == 0
    assert cache.match(other, [*tokens, 1]).length == len(tokens)
    assert (directory / "stray").stat().st_size == 5000
    assert not complaints


def test_a_lower_limit_holds_from_the_start(open_cache: Open, tmp_path: Path) -> None:
    first = open_cache()
    fill(first)
    first.close()
    whole = size(tmp_path)
    cache = open_cache(disk=whole // 2)
    assert size(tmp_path) <= whole // 2
    hit = cache.match(NAMESPACE, TOKENS)
    check(DENSE, TOKENS, hit)
    assert 0 < hit.length < 42


def test_a_limit_that_strangers_use_up_is_reported(
    open_cache: Open, tmp_path: Path, complaints: list[str]
) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "stray").write_bytes(b"x" * 5000)
    cache = open_cache(disk=4000)
    fill(cache)
    assert len(cache_files(tmp_path)) == 0
    assert cache.match(NAMESPACE, TOKENS).length == 42
    assert len(complaints) == 1
    assert "not the cache's" in complaints[0]


def test_memory_too_small_for_a_row_still_fills_the_disk(open_cache: Open) -> None:
    tokens = [(i * 11) % 50 for i in range(30 * BLOCK)]
    cache = open_cache(ram=6000)
    for end in range(BLOCK, len(tokens) + 1, BLOCK):
        start = cache.missing(NAMESPACE, tokens, end)
        cache.store(NAMESPACE, tokens, picture(DENSE, tokens[:end], start or 0))
        cache.flush()
        assert cache.stats().ram_bytes <= 6000
    hit = cache.match(NAMESPACE, [*tokens, 1])
    check(DENSE, tokens, hit)
    assert hit.length == len(tokens)
    assert cache.stats().ram_bytes <= 6000


def test_memory_and_disk_give_the_same_tail_once(open_cache: Open, tmp_path: Path) -> None:
    """A row grows: its older tails leave the disk, too."""
    cache = open_cache()
    for end in (3, 5, 8, 12, 20, 24):
        cache.store(NAMESPACE, TOKENS, picture(DENSE, TOKENS[:end]))
        cache.flush()
    assert len(cache_files(tmp_path)) == 3


def test_a_block_that_is_completed_replaces_its_file(open_cache: Open, tmp_path: Path) -> None:
    tokens = TOKENS[:40]
    cache = open_cache()
    cache.store(NAMESPACE, tokens, picture(WINDOW, tokens))
    cache.flush()
    assert cache.match(NAMESPACE, tokens[:25]).length == 0
    cache.store(NAMESPACE, tokens, picture(WINDOW, tokens[:24]))
    cache.flush()
    assert len(cache_files(tmp_path)) == 5
    assert cache.stats().disk_bytes == size(tmp_path)
    again = open_cache()
    check(WINDOW, tokens, again.match(NAMESPACE, tokens[:25]))
    assert again.match(NAMESPACE, tokens[:25]).length == 24


def test_a_full_disk_ends_the_writing_and_nothing_else(
    open_cache: Open, tmp_path: Path, complaints: list[str]
) -> None:
    calls: list[Path] = []

    def full(path: Path, temporary: Path, pieces: Sequence[memoryview]) -> None:
        calls.append(path)
        if len(calls) > 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        files.write(path, temporary, pieces)

    cache = open_cache(write_file=full)
    fill(cache)
    fill(cache, tokens=[1, *TOKENS])
    assert len(calls) == 3
    assert complaints == [
        f"the cache directory {tmp_path / 'cache'} is not written to any more: "
        "No space left on device"
    ]
    assert cache.stats().disk_off == "No space left on device"
    assert len(cache_files(tmp_path)) == 2
    hit = cache.match(NAMESPACE, TOKENS)
    check(DENSE, TOKENS, hit)
    assert hit.length == 42
    assert open_cache().match(NAMESPACE, TOKENS).length == 16


def test_a_failed_write_leaves_no_file(tmp_path: Path) -> None:
    class Refuses:
        nbytes = 3

    with pytest.raises(TypeError):
        files.write(tmp_path / "a", tmp_path / "b", [memoryview(b"x"), Refuses()])  # type: ignore[list-item]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("where", ["a file", "below a file", "a lock that is a folder"])
def test_an_unusable_directory_leaves_the_memory(
    open_cache: Open, tmp_path: Path, complaints: list[str], where: str
) -> None:
    directory = tmp_path / "cache"
    if where == "a lock that is a folder":
        fill(open_cache())
        (directory / "lock").unlink()
        (directory / "lock").mkdir()
    else:
        (tmp_path / "file").write_text("")
        directory = tmp_path / "file" if where == "a file" else tmp_path / "file" / "cache"
    cache = open_cache(directory=directory)
    if where == "a lock that is a folder":
        assert cache.match(NAMESPACE, TOKENS).length == 42
    else:
        fill(cache)
    fill(cache, tokens=[1, *TOKENS])
    assert cache.match(NAMESPACE, [1, *TOKENS]).length == 43
    assert len(complaints) == 1
    assert "not written to" in complaints[0]
    with pytest.raises(CacheError, match="cannot be cleared"):
        cache.clear()


def test_a_read_only_directory_is_still_read(open_cache: Open, complaints: list[str]) -> None:
    def read_only(path: Path, temporary: Path, pieces: Sequence[memoryview]) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    fill(open_cache())
    cache = open_cache(write_file=read_only)
    cache.store(NAMESPACE, [1, *TOKENS], picture(DENSE, [1, *TOKENS]))
    cache.flush()
    assert cache.match(NAMESPACE, TOKENS).length == 42
    assert cache.stats().disk_off == "Read-only file system"
    assert len(complaints) == 1


def test_clearing_takes_the_files_along(open_cache: Open, tmp_path: Path) -> None:
    cache = open_cache()
    other = Namespace("other")
    fill(cache)
    cache.store(other, TOKENS, picture(DENSE, TOKENS))
    cache.flush()
    both = len(cache_files(tmp_path))
    cache.clear(NAMESPACE)
    assert cache.match(NAMESPACE, TOKENS).length == 0
    assert cache.match(other, TOKENS).length == 42
    assert 0 < len(cache_files(tmp_path)) < both
    cache.clear()
    assert [p.name for p in (tmp_path / "cache").iterdir()] == ["lock"]
    assert cache.stats().disk_bytes == size(tmp_path)
    fill(cache)
    assert cache.match(NAMESPACE, TOKENS).length == 42


def test_a_directory_is_listed_and_cleared_from_outside(
    open_cache: Open, tmp_path: Path, complaints: list[str]
) -> None:
    directory = tmp_path / "cache"
    cache = open_cache()
    fill(cache)
    other = Namespace("other", "", "4bit", 8, salt="s")
    cache.store(other, TOKENS[:BLOCK], picture(DENSE, TOKENS[:BLOCK]))
    cache.flush()
    listed = {one.target: one for one in list_directory(directory)}
    assert set(listed) == {"target", "other"}
    assert (listed["other"].kv_bits, listed["other"].salted, listed["other"].files) == (8, True, 1)
    assert (listed["target"].drafter, listed["target"].tokens) == ("drafter", 43)
    assert sum(one.nbytes for one in listed.values()) + 8 == size(directory)
    freed = clear_directory(directory, listed["other"].root)
    assert freed == listed["other"].nbytes
    assert [one.target for one in list_directory(directory)] == ["target"]
    clear_directory(directory)
    assert list_directory(directory) == ()
    assert cache.match(NAMESPACE, TOKENS).length == 42
    cache.store(NAMESPACE, [1, *TOKENS], picture(DENSE, [1, *TOKENS]))
    cache.flush()
    assert cache.stats().disk_bytes == size(directory)
    assert not complaints
    for foreign in (tmp_path / "none", tmp_path):
        with pytest.raises(CacheError, match="no cache directory"):
            list_directory(foreign)
    with pytest.raises(CacheError, match="no cache directory"):
        clear_directory(tmp_path)


def test_a_model_that_pictures_itself_differently_starts_afresh(
    open_cache: Open, complaints: list[str]
) -> None:
    """The same names, other arrays: a new version of an adapter."""
    fill(open_cache(), DENSE)
    cache = open_cache()
    tokens = TOKENS[:20]
    cache.store(NAMESPACE, tokens, picture(HYBRID, tokens))
    cache.flush()
    assert len(complaints) == 1
    assert "another kind" in complaints[0]
    hit = cache.match(NAMESPACE, [*tokens, 1])
    check(HYBRID, tokens, hit)
    assert hit.length == 20
    assert cache.match(NAMESPACE, TOKENS).length == 20


def test_closing_without_flushing_loses_only_what_waits(open_cache: Open) -> None:
    cache = open_cache()
    fill(cache)
    cache.store(NAMESPACE, [1, *TOKENS], picture(DENSE, [1, *TOKENS]))
    cache.close(flush=False)
    assert open_cache().match(NAMESPACE, TOKENS).length == 42


def test_a_hit_on_damaged_files_says_so(open_cache: Open, tmp_path: Path) -> None:
    fill(open_cache())
    newest = max(cache_files(tmp_path), key=lambda p: int(p.name.split("-")[2]))
    newest.write_bytes(b"")
    hit = open_cache().match(NAMESPACE, [*TOKENS, 1])
    assert (hit.length, hit.stopped) == (40, Stopped.DAMAGED)
