"""Long lives of a cache, drawn at random: every hit is right, every limit holds."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_cache import PrefixCache, checkpoint_lengths, chunk_end

from .rows import BLOCK, KINDS, NAMESPACE, Kind, check, picture


def turn(cache: PrefixCache, kind: Kind, tokens: tuple[int, ...], chunk: int) -> None:
    """A prefill in chunks, each stored."""
    hit = cache.match(NAMESPACE, tokens)
    check(kind, tokens, hit)
    assert hit.length <= hit.stopped_at < len(tokens)
    done = hit.length
    stops = checkpoint_lengths(len(tokens), BLOCK, start=done)
    while done < len(tokens):
        end = chunk_end(done, chunk, len(tokens), BLOCK, stops)
        checkpoint = end in stops or end == len(tokens)
        start = cache.missing(NAMESPACE, tokens, end, since=done, checkpoint=checkpoint)
        if start is not None:
            assert done // BLOCK * BLOCK <= start <= end
            parts = picture(kind, tokens[:end], start)
            cache.store(NAMESPACE, tokens, parts, checkpoint=checkpoint)
        done = end


def harm(directory: Path, rng: random.Random) -> None:
    """Damage a file, or take it away."""
    found = sorted(directory.rglob("*.safetensors"))
    if not found:
        return
    path = rng.choice(found)
    data = bytearray(path.read_bytes())
    how = rng.randrange(3)
    if how == 0:
        path.unlink()
    elif how == 1:
        path.write_bytes(data[: rng.randrange(len(data))])
    else:
        data[rng.randrange(len(data))] ^= 0xFF
        path.write_bytes(data)


def live(kind: Kind, seed: int, directory: Path, steps: int) -> None:
    rng = random.Random(seed)
    texts: list[tuple[int, ...]] = [tuple(rng.randrange(3) for _ in range(30))]
    ram, disk = rng.randrange(3_000, 40_000), rng.randrange(10_000, 60_000)

    def fresh() -> PrefixCache:
        return PrefixCache(ram, disk, directory, BLOCK, report=lambda _: None)

    cache = fresh()
    for _ in range(steps):
        action = rng.randrange(12)
        if action == 0:
            cache.close(flush=rng.random() < 0.5)
            cache = fresh()
        elif action == 1:
            harm(directory, rng)
        elif action == 2 and rng.random() < 0.3:
            cache.clear()
        elif action == 3:
            cache.prefetch(NAMESPACE, rng.choice(texts)).result(timeout=60)
        else:
            old = rng.choice(texts)
            kept = old[: rng.randrange(1, len(old) + 1)]
            text = kept + tuple(rng.randrange(3) for _ in range(rng.randrange(1, 25)))
            texts = [*texts[-9:], text]
            turn(cache, kind, text, chunk=rng.choice([5, 8, 13]))
        assert cache.stats().ram_bytes <= ram
        cache.flush()
        used = sum(p.stat().st_size for p in directory.rglob("*") if p.is_file())
        assert used <= disk
        assert not cache.stats().disk_off
    cache.close()


@settings(max_examples=12, deadline=None)
@given(st.sampled_from(KINDS), st.integers(0, 2**32))
def test_a_random_life(kind: Kind, seed: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        live(kind, seed, Path(directory), steps=25)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_long_random_life(kind: Kind, tmp_path: Path) -> None:
    for seed in range(4):
        live(kind, seed, tmp_path / str(seed), steps=150)
