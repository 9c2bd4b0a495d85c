"""The memory tier against a model: what stays, what goes, and never a byte too many."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_cache import Namespace, PrefixCache, Stopped
from spec_cache.entry import Entry
from spec_cache.tree import Tree
from spec_core.seams import PerToken, StateImage

from .rows import BLOCK, DENSE, NAMESPACE, picture

Path = tuple[int, ...]


def tokens_of(path: Path) -> list[int]:
    return [symbol for symbol in path for _ in range(BLOCK)]


class Model:
    """Prefixes with the time of their last use; leaves go first, the oldest of them first."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.used: dict[Path, int] = {}
        self.time = 0

    def store(self, path: Path) -> None:
        for end in range(1, len(path) + 1):
            if path[:end] in self.used:
                continue
            if len(self.used) == self.room and not self._evict(path[: end - 1]):
                break
            self.used[path[:end]] = self.time
        self._touch(path)

    def match(self, path: Path) -> int:
        found = 0
        while found < len(path) and path[: found + 1] in self.used:
            found += 1
        self._touch(path[:found])
        return found

    def _evict(self, keep: Path) -> bool:
        leaves = [
            p for p in self.used if p != keep[: len(p)] and not any(q[:-1] == p for q in self.used)
        ]
        if leaves:
            del self.used[min(leaves, key=lambda p: self.used[p])]
        return bool(leaves)

    def _touch(self, path: Path) -> None:
        for end in range(len(path), 0, -1):
            self.time += 1
            if path[:end] in self.used:
                self.used[path[:end]] = self.time


def one_block() -> int:
    """What a block costs, as the cache counts it."""
    with PrefixCache(1 << 20, block=BLOCK) as cache:
        tokens = list(range(BLOCK))
        stored = cache.store(NAMESPACE, tokens, picture(DENSE, tokens), checkpoint=False)
        assert cache.stats().ram_bytes == stored.nbytes
        return stored.nbytes


COST = one_block()
PATHS = st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.lists(st.tuples(st.booleans(), PATHS), max_size=25))
def test_the_cache_keeps_what_the_model_keeps(
    room: int, operations: list[tuple[bool, Path]]
) -> None:
    model = Model(room)
    with PrefixCache(room * COST + COST // 2, block=BLOCK) as cache:
        for is_store, path in operations:
            tokens = tokens_of(path)
            if is_store:
                model.store(path)
                cache.store(NAMESPACE, tokens, picture(DENSE, tokens), checkpoint=False)
            else:
                assert cache.match(NAMESPACE, [*tokens, 99]).length == model.match(path) * BLOCK
            stats = cache.stats()
            assert stats.ram_bytes == len(model.used) * COST <= stats.ram_limit
        for path in list(model.used):
            assert cache.match(NAMESPACE, [*tokens_of(path), 99]).length == len(path) * BLOCK


@given(
    st.integers(0, 30),
    st.lists(st.tuples(st.integers(0, 6), st.integers(1, 9)), min_size=1, max_size=7),
    st.sets(st.integers(0, 6)),
)
def test_victims_are_leaves_and_no_more_than_needed(
    nbytes: int, nodes: list[tuple[int, int]], keep: set[int]
) -> None:
    """Node i continues node min(parent, i); one that continues itself is a root."""
    sizes = {i: size for i, (_, size) in enumerate(nodes)}
    parents = {i: min(parent, i) for i, (parent, _) in enumerate(nodes)}
    tree: Tree[None] = Tree(30)
    for i in sizes:
        parent = b"root" if parents[i] == i else bytes([parents[i]])
        tree.add(Entry(b"root", bytes([i]), parent, 0, 1), sizes[i], None)
    kept = {bytes([i]) for i in keep}
    victims = tree.victims(nbytes, kept)
    assert len(tree) == len(sizes)
    if victims is None:
        return
    gone: set[int] = set()
    for victim in victims:
        number = victim.key[0]
        assert number not in keep
        assert all(c in gone for c in sizes if parents[c] == number != c)
        gone.add(number)
    left = sum(size for i, size in sizes.items() if i not in gone)
    assert left + nbytes <= 30 or not gone
    if victims:
        assert left + sizes[victims[-1].key[0]] + nbytes > 30


def test_a_row_that_exceeds_the_memory_keeps_its_beginning() -> None:
    tokens = list(range(20 * BLOCK))
    with PrefixCache(6 * COST, block=BLOCK) as cache:
        stored = cache.store(NAMESPACE, tokens, picture(DENSE, tokens))
        assert (stored.blocks, stored.refused, stored.resumable) == (6, 14, False)
        hit = cache.match(NAMESPACE, tokens)
        assert (hit.length, hit.stopped) == (6 * BLOCK, Stopped.UNSEEN)


def test_what_found_no_room_is_not_pictured_again_and_again() -> None:
    tokens = list(range(20 * BLOCK))
    with PrefixCache(6 * COST, block=BLOCK) as cache:
        for end in range(4 * BLOCK, len(tokens) + 1, 4 * BLOCK):
            start = cache.missing(NAMESPACE, tokens, end, since=end - 4 * BLOCK)
            if end > 8 * BLOCK:
                assert start is None
                assert cache.missing(NAMESPACE, tokens, end) == 6 * BLOCK
            else:
                assert start == end - 4 * BLOCK
                cache.store(NAMESPACE, tokens, picture(DENSE, tokens[:end], start))


def big_picture(seed: int, tokens: Sequence[int]) -> dict[str, StateImage]:
    """24 arrays of [T, 2, 32] bfloat16, 3 kB a token, cut from one larger buffer."""
    mx.random.seed(seed)
    whole = mx.random.normal((24, len(tokens) + 16, 2, 32)).astype(mx.bfloat16)
    mx.eval(whole)
    arrays = {f"layer{i}": PerToken(whole[i, 16:]) for i in range(24)}
    ends = {"state": whole[:, 0] + 0}
    mx.eval([held.array for held in arrays.values()], list(ends.values()))
    return {"target": StateImage(0, len(tokens), arrays, ends)}


@pytest.mark.parametrize("conversations", [60, pytest.param(500, marks=pytest.mark.slow)])
def test_memory_stays_within_the_budget(conversations: int) -> None:
    """As MLX counts it: no slice pins the buffer that it was cut from."""
    budget, block = 16 << 20, 64
    mx.clear_cache()
    before = mx.get_active_memory()
    with PrefixCache(budget, block=block) as cache:
        for number in range(conversations):
            tokens = [number, *range(3 * block + number % 50)]
            parts = big_picture(number, tokens)
            cache.store(Namespace("big"), tokens, parts)
            del parts
            assert mx.get_active_memory() - before <= budget
            assert cache.stats().ram_bytes <= budget
        assert mx.get_active_memory() - before > budget * 0.9
        assert cache.match(Namespace("big"), [*tokens, 1]).length == len(tokens)
    assert mx.get_active_memory() - before < 1 << 16


def test_a_system_prompt_of_2000_tokens_takes_its_memory_once() -> None:
    system = list(range(2000))
    sizes = []
    mx.clear_cache()
    before = mx.get_active_memory()
    with PrefixCache(1 << 30, block=64) as cache:
        for user in range(3):
            tokens = [*system, *range(5000 + user, 5100 + user)]
            cache.store(Namespace("big"), tokens, big_picture(0, tokens))
            sizes.append(mx.get_active_memory() - before)
    first, second, third = sizes[0], sizes[1] - sizes[0], sizes[2] - sizes[1]
    assert first > 2000 * 24 * 2 * 32 * 2
    assert second < 0.09 * first
    assert third < 0.09 * first


def test_a_failed_store_claims_nothing() -> None:
    tokens = list(range(20))
    parts = picture(DENSE, tokens)
    wrong = StateImage(0, 20, {"context": PerToken(mx.zeros((20, 3), dtype=mx.uint32))})
    with PrefixCache(1 << 20, block=BLOCK) as cache:
        cache.store(NAMESPACE, tokens, parts)
        before = cache.stats().ram_bytes
        with pytest.raises(Exception, match="another namespace"):
            cache.store(NAMESPACE, [*tokens, 1], {**parts, "drafter": wrong})
        assert cache.stats().ram_bytes == before
