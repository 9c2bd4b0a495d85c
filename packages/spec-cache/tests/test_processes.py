"""Several processes on one directory, and processes that die there."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spec_cache import Namespace, PrefixCache

from .rows import BLOCK, HYBRID, NAMESPACE, check, converse, picture

LIMIT = 60_000
TRAFFIC = Path(__file__).with_name("traffic.py")


def start(directory: Path, namespace: str, seed: int, conversations: int) -> subprocess.Popen[str]:
    command = [sys.executable, str(TRAFFIC), str(directory), str(LIMIT), namespace]
    return subprocess.Popen(
        [*command, str(seed), str(conversations)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


@pytest.mark.parametrize("names", [("same", "same"), ("same", "hybrid")], ids=str)
def test_two_processes_share_a_directory(tmp_path: Path, names: tuple[str, str]) -> None:
    running = [start(tmp_path, name, seed, 25) for seed, name in enumerate(names)]
    for process in running:
        out, error = process.communicate(timeout=300)
        assert process.returncode == 0, error
        assert out.split()[:2] == ["begun", "done"]
        assert int(out.split()[2]) <= LIMIT
    assert size(tmp_path) <= LIMIT
    with PrefixCache(1 << 22, LIMIT, tmp_path, BLOCK) as cache:
        for name in names:
            converse(cache, Namespace(name), random.Random(5))
        assert cache.stats().hit_tokens > 0
        assert cache.stats().damaged == 0


@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=pytest.mark.slow)])
def test_killed_while_writing(tmp_path: Path, kills: int) -> None:
    rng = random.Random(1)
    for seed in range(kills):
        process = start(tmp_path, "hybrid", seed, 1_000_000)
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "begun"
        time.sleep(rng.random() * 0.2)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert size(tmp_path) <= LIMIT
        with PrefixCache(1 << 22, LIMIT, tmp_path, BLOCK) as cache:
            assert not list(tmp_path.rglob("tmp-*"))
            assert cache.stats().disk_bytes == size(tmp_path) <= LIMIT
            assert cache.stats().disk_entries > 0
            converse(cache, Namespace("hybrid"), random.Random(seed))
            assert cache.stats().damaged == 0


def test_what_one_writes_another_finds(tmp_path: Path) -> None:
    """Two caches in one process lock each other out as two processes do."""
    tokens = list(range(40))
    with (
        PrefixCache(1 << 20, 1 << 20, tmp_path, BLOCK) as first,
        PrefixCache(1 << 20, 1 << 20, tmp_path, BLOCK) as second,
    ):
        assert second.match(NAMESPACE, [*tokens, 1]).length == 0
        first.store(NAMESPACE, tokens, picture(HYBRID, tokens))
        first.flush()
        second.match(NAMESPACE, [*tokens, 1])
        second.flush()
        hit = second.match(NAMESPACE, [*tokens, 1])
        check(HYBRID, tokens, hit)
        assert hit.length == 40
        assert second.stats().disk_bytes == size(tmp_path)


def test_two_writers_stay_within_one_limit(tmp_path: Path) -> None:
    with (
        PrefixCache(1 << 20, LIMIT, tmp_path, BLOCK) as first,
        PrefixCache(1 << 20, LIMIT, tmp_path, BLOCK) as second,
    ):
        for seed in range(10):
            for cache, name in ((first, "a"), (second, "b")):
                tokens = [seed, *range(30)]
                cache.store(Namespace(name), tokens, picture(HYBRID, tokens))
            first.flush()
            second.flush()
            assert size(tmp_path) <= LIMIT
        assert first.stats().evicted_disk + second.stats().evicted_disk > 0
        assert not first.stats().disk_off
        assert not second.stats().disk_off
