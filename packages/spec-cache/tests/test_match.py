"""What is stored comes back bit by bit, at the longest length that can be resumed."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from spec_cache import CacheError, Hit, Namespace, PrefixCache, Stopped
from spec_core import InvalidValueError
from spec_core.seams import StateImage

from .rows import (
    BLOCK,
    DENSE,
    HYBRID,
    KINDS,
    NAMESPACE,
    ONLY_WINDOW,
    RECURRENT,
    SHORT_WINDOW,
    WINDOW,
    Kind,
    check,
    images_bits,
    picture,
)


@pytest.fixture
def cache() -> Iterator[PrefixCache]:
    with PrefixCache(1 << 24, block=BLOCK) as made:
        yield made


def prefill(
    cache: PrefixCache,
    kind: Kind,
    tokens: list[int],
    stops: tuple[int, ...] = (),
    chunk: int = 13,
    namespace: Namespace = NAMESPACE,
) -> Hit:
    """What an engine does with a prompt: resume, then image and store chunk by chunk."""
    hit = cache.match(namespace, tokens)
    check(kind, tokens, hit)
    done = hit.length
    while done < len(tokens):
        end = min([s for s in (*stops, len(tokens), done + chunk) if s > done])
        checkpoint = end in (*stops, len(tokens))
        start = cache.missing(namespace, tokens, end, since=done, checkpoint=checkpoint)
        if start is not None:
            parts = picture(kind, tokens[:end], start)
            stored = cache.store(namespace, tokens[:end], parts, checkpoint=checkpoint)
            assert not stored.refused
            assert cache.missing(namespace, tokens, end, since=done, checkpoint=checkpoint) is None
        done = end
    return hit


def text(seed: int, length: int) -> list[int]:
    return [random.Random(seed * 1000 + i).randrange(50) for i in range(length)]


def test_an_empty_cache_finds_nothing(cache: PrefixCache) -> None:
    hit = cache.match(NAMESPACE, [1, 2, 3])
    assert (hit.length, hit.stopped, hit.stopped_at, hit.pending) == (0, Stopped.UNSEEN, 0, 0)
    assert cache.missing(NAMESPACE, [1, 2, 3]) is None
    assert cache.missing(NAMESPACE, [1, 2, 3], checkpoint=True) == 0


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("length", [BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 75])
def test_the_same_prompt_again_leaves_one_token(
    cache: PrefixCache, kind: Kind, length: int
) -> None:
    tokens = text(1, length)
    prefill(cache, kind, tokens, stops=(length - 1,))
    hit = cache.match(NAMESPACE, tokens)
    check(kind, tokens, hit)
    assert (hit.length, hit.stopped) == (length - 1, Stopped.END)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_next_turn_resumes_where_the_last_one_ended(cache: PrefixCache, kind: Kind) -> None:
    first = text(2, 37)
    prefill(cache, kind, first)
    hit = cache.match(NAMESPACE, first + text(3, 20))
    check(kind, first, hit)
    assert (hit.length, hit.stopped, hit.stopped_at) == (37, Stopped.UNSEEN, 37)


@pytest.mark.parametrize("at", [0, 1, 5, 8, 21, 24, 39])
def test_a_dense_row_is_reused_up_to_the_first_different_token(cache: PrefixCache, at: int) -> None:
    tokens = text(4, 40)
    prefill(cache, DENSE, tokens)
    edited = [*tokens[:at], 99, *tokens[at + 1 :]]
    hit = cache.match(NAMESPACE, edited)
    check(DENSE, edited, hit)
    assert (hit.length, hit.stopped_at) == (at, at)
    assert hit.stopped is (Stopped.END if at == 39 else Stopped.DIVERGED)


@pytest.mark.parametrize("kind", [WINDOW, ONLY_WINDOW], ids=str)
@pytest.mark.parametrize("at", [3, 21, 24, 40, 79])
def test_a_window_recorded_chunk_by_chunk_resumes_anywhere(
    cache: PrefixCache, kind: Kind, at: int
) -> None:
    tokens = text(5, 80)
    prefill(cache, kind, tokens)
    edited = [*tokens[:at], 99]
    hit = cache.match(NAMESPACE, [*edited, 98])
    check(kind, edited, hit)
    assert hit.length == at


def test_a_short_window_resumes_at_borders_and_ends(cache: PrefixCache) -> None:
    tokens = text(6, 43)
    prefill(cache, SHORT_WINDOW, tokens)
    assert cache.match(NAMESPACE, [*tokens, 1]).length == 43
    assert cache.match(NAMESPACE, [*tokens[:40], 99, 98]).length == 40
    hit = cache.match(NAMESPACE, [*tokens[:37], 99, 98])
    check(SHORT_WINDOW, tokens, hit)
    assert (hit.length, hit.stopped, hit.stopped_at) == (32, Stopped.WINDOW, 37)


def test_what_the_ring_forgot_is_not_resumed_in(cache: PrefixCache) -> None:
    """One picture at the end: the ring holds 28 positions, a window takes 20."""
    tokens = text(7, 80)
    cache.store(NAMESPACE, tokens, picture(WINDOW, tokens))
    for at, expected in [(80, 80), (75, 75), (72, 72), (71, 0), (40, 0)]:
        probe = [*tokens[:at], 99]
        hit = cache.match(NAMESPACE, probe)
        check(WINDOW, probe, hit)
        assert hit.length == expected
        assert hit.stopped_at == at


def test_a_hole_is_filled_when_its_positions_are_computed_again(cache: PrefixCache) -> None:
    tokens = text(8, 80)
    cache.store(NAMESPACE, tokens, picture(WINDOW, tokens))
    assert cache.missing(NAMESPACE, tokens, 80) == 0
    assert cache.missing(NAMESPACE, tokens, 80, since=80) is None
    probe = tokens[:50]
    assert cache.match(NAMESPACE, probe).length == 0
    prefill(cache, WINDOW, probe)
    assert cache.match(NAMESPACE, probe).length == 49
    hit = cache.match(NAMESPACE, [*tokens[:33], 99])
    check(WINDOW, tokens[:33], hit)
    assert hit.length == 33


@pytest.mark.parametrize("kind", [HYBRID, RECURRENT], ids=str)
def test_recurrent_rows_resume_at_checkpoints_only(cache: PrefixCache, kind: Kind) -> None:
    tokens = text(9, 70)
    prefill(cache, kind, tokens, stops=(8, 21, 32))
    for at, expected in [(70, 70), (69, 32), (40, 32), (32, 32), (31, 21), (20, 8), (7, 0)]:
        probe = [*tokens[:at], 99]
        hit = cache.match(NAMESPACE, probe)
        check(kind, probe, hit)
        assert hit.length == expected
        if expected < at:
            assert hit.stopped is Stopped.CHECKPOINT
            assert hit.stopped_at == at


def test_a_checkpoint_at_a_border_needs_no_block(cache: PrefixCache) -> None:
    tokens = text(10, 32)
    cache.store(NAMESPACE, tokens, picture(HYBRID, tokens), checkpoint=False)
    assert cache.match(NAMESPACE, [*tokens, 1]).length == 0
    start = cache.missing(NAMESPACE, tokens, 32, checkpoint=True)
    assert start == 32
    stored = cache.store(NAMESPACE, tokens, picture(HYBRID, tokens, start))
    assert (stored.blocks, stored.resumable, stored.refused) == (0, True, 0)
    check(HYBRID, tokens, cache.match(NAMESPACE, [*tokens, 1]))
    assert cache.match(NAMESPACE, [*tokens, 1]).length == 32


def test_namespaces_never_meet(cache: PrefixCache) -> None:
    tokens = text(11, 40)
    prefill(cache, DENSE, tokens)
    others = [
        Namespace("other", "drafter", "bf16"),
        Namespace("target", "other", "bf16"),
        Namespace("target", "drafter", "4bit"),
        Namespace("target", "drafter", "bf16", kv_bits=8),
        Namespace("target", "drafter", "bf16", salt="tenant"),
    ]
    for other in others:
        assert cache.match(other, tokens).length == 0
        prefill(cache, DENSE, tokens, namespace=other)
    assert len({n.root(BLOCK) for n in (NAMESPACE, *others)}) == len(others) + 1
    assert NAMESPACE.root(BLOCK) != NAMESPACE.root(BLOCK + 1)
    cache.clear(others[4])
    assert cache.match(others[4], tokens).length == 0
    assert cache.match(others[3], tokens).length == 39
    assert "tenant" not in repr(others[4]) + others[4].describe()


def test_any_number_of_tenants(cache: PrefixCache) -> None:
    """The cache remembers the most recent few thousand namespaces."""
    tokens = text(27, 20)
    first = Namespace("target", salt="first")
    prefill(cache, DENSE, tokens, namespace=first)
    before = cache.stats().ram_entries
    for number in range(4096):
        cache.match(Namespace("target", salt=str(number)), [1, 2])
    assert (before, cache.stats().ram_entries) == (3, 0)
    assert prefill(cache, HYBRID, tokens, namespace=first).length == 0
    assert cache.match(first, [*tokens, 1]).length == 20


def test_a_shared_prefix_is_stored_once(cache: PrefixCache) -> None:
    system = text(12, 20 * BLOCK)
    prefill(cache, DENSE, [*system, *text(13, 5)])
    alone = cache.stats()
    assert prefill(cache, DENSE, [*system, *text(14, 5)]).length == len(system)
    both = cache.stats()
    assert both.ram_entries == alone.ram_entries + 1
    assert both.ram_bytes - alone.ram_bytes < alone.ram_bytes / 20


def test_a_tail_gives_way_to_the_block_that_contains_it(cache: PrefixCache) -> None:
    tokens = text(15, 30)
    for end in (3, 5, 8, 12, 20, 24):
        cache.store(NAMESPACE, tokens, picture(DENSE, tokens[:end]))
    assert cache.stats().ram_entries == 3
    assert cache.match(NAMESPACE, [*tokens[:12], 99]).length == 12


def test_checkpoints_keep_their_tails(cache: PrefixCache) -> None:
    tokens = text(16, 30)
    for end in (3, 5, 8, 12, 20, 24):
        cache.store(NAMESPACE, tokens, picture(HYBRID, tokens[:end]))
    for end in (3, 5, 8, 12, 20, 24):
        assert cache.match(NAMESPACE, [*tokens[:end], 99]).length == end


def test_a_hit_outlives_what_it_was_made_from(cache: PrefixCache) -> None:
    tokens = text(17, 40)
    prefill(cache, WINDOW, tokens)
    hit = cache.match(NAMESPACE, tokens)
    before = images_bits(hit.parts)
    cache.clear()
    assert cache.match(NAMESPACE, tokens).length == 0
    assert images_bits(hit.parts) == before
    check(WINDOW, tokens, hit)


def test_a_part_without_arrays_comes_back(cache: PrefixCache) -> None:
    """A drafter that only searches text has nothing to picture."""
    tokens = text(18, 20)
    parts = {**picture(DENSE, tokens), "lookup": StateImage(0, 20)}
    cache.store(NAMESPACE, tokens, parts)
    assert cache.match(NAMESPACE, tokens).parts["lookup"] == StateImage(0, 19)


def test_pictures_that_do_not_fit_are_refused(cache: PrefixCache) -> None:
    tokens = text(19, 20)
    whole = picture(DENSE, tokens)
    with pytest.raises(CacheError, match="share one start and one length"):
        cache.store(NAMESPACE, tokens, {**whole, "drafter": picture(DENSE, tokens, 8)["drafter"]})
    with pytest.raises(CacheError, match="20 positions"):
        cache.store(NAMESPACE, tokens[:19], whole)
    cache.store(NAMESPACE, tokens, whole)
    with pytest.raises(CacheError, match="another namespace"):
        cache.store(NAMESPACE, tokens, {"target": whole["target"]})
    with pytest.raises(InvalidValueError, match="token id"):
        cache.match(NAMESPACE, [2**31])
    assert cache.match(NAMESPACE, tokens).length == 19


def test_what_continues_nothing_is_refused(cache: PrefixCache) -> None:
    tokens = text(20, 40)
    stored = cache.store(NAMESPACE, tokens, picture(DENSE, tokens, 16))
    assert (stored.blocks, stored.refused, stored.nbytes) == (0, 3, 0)
    assert cache.stats().ram_entries == 0


def test_a_drafter_that_missed_the_beginning_is_not_stored(cache: PrefixCache) -> None:
    """Its context begins later than the target's: nothing could be restored to the same length."""
    tokens = text(21, 40)
    parts = {**picture(DENSE, tokens), "drafter": picture(DENSE, tokens, 30)["drafter"]}
    parts["drafter"] = StateImage(0, 40, parts["drafter"].per_token)
    assert cache.store(NAMESPACE, tokens, parts).refused == 5
    assert cache.match(NAMESPACE, tokens).length == 0


def test_reservations_tell_who_computes_what(cache: PrefixCache) -> None:
    system = text(22, 5 * BLOCK)
    first, second = [*system, *text(23, 9)], [*system, *text(24, 9)]
    with cache.reserve(NAMESPACE, first):
        assert cache.match(NAMESPACE, second).pending == len(system)
        assert cache.match(NAMESPACE, text(25, 60)).pending == 0
        with cache.reserve(NAMESPACE, second):
            pass
        assert cache.match(NAMESPACE, second).pending == len(system)
        cache.store(NAMESPACE, first[: 3 * BLOCK], picture(DENSE, first[: 3 * BLOCK]))
        hit = cache.match(NAMESPACE, second)
        assert (hit.length, hit.pending) == (3 * BLOCK, len(system))
    hit = cache.match(NAMESPACE, second)
    assert (hit.length, hit.pending) == (3 * BLOCK, 3 * BLOCK)


def test_counters_add_up(cache: PrefixCache) -> None:
    tokens = text(26, 40)
    prefill(cache, DENSE, tokens)
    cache.match(NAMESPACE, tokens)
    cache.match(NAMESPACE, [*tokens[:10], 99])
    stats = cache.stats()
    assert (stats.lookups, stats.hits) == (3, 2)
    assert (stats.asked_tokens, stats.hit_tokens) == (40 + 40 + 11, 0 + 39 + 10)
    assert stats.stored_entries == 5


def test_a_closed_cache_says_so() -> None:
    cache = PrefixCache(1 << 20)
    cache.close()
    cache.close()
    with pytest.raises(CacheError, match="closed"):
        cache.match(NAMESPACE, [1, 2])


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"ram_bytes": 0}, "ram_bytes"),
        ({"ram_bytes": 1, "block": 0}, "block"),
        ({"ram_bytes": 1, "disk_bytes": 5}, "disk_bytes"),
        ({"ram_bytes": 1, "directory": "somewhere"}, "disk_bytes"),
    ],
)
def test_nonsense_limits_are_named(values: dict[str, object], name: str) -> None:
    with pytest.raises(InvalidValueError, match=name):
        PrefixCache(**values)  # type: ignore[arg-type]
