"""The index against a scan of the whole text."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from spec_drafters.suffix_index import Match, SuffixIndex

TEXTS = st.integers(1, 4).flatmap(lambda size: st.lists(st.integers(0, size), max_size=80))


def scan(text: list[int], depth: int) -> Match | None:
    """Compare the ending with every earlier position; latest first, so ties go to the latest."""
    best: Match | None = None
    last = len(text) - 1
    for end in range(last - 1, -1, -1):
        length = 0
        while length < min(depth, end + 1) and text[end - length] == text[last - length]:
            length += 1
        if length and (best is None or length > best.length):
            best = Match(end, length)
    return best


@given(TEXTS, st.integers(0, 4), st.integers(1, 9))
def test_the_longest_and_latest_occurrence_is_found(
    text: list[int], anchor: int, depth: int
) -> None:
    index = SuffixIndex(depth)
    index.extend(text)
    assert index.find(anchor) == scan([*text, anchor], depth)


@given(TEXTS, st.integers(1, 9), st.integers(0, 80))
def test_every_step_of_a_growing_text_agrees_with_the_scan(
    text: list[int], depth: int, cut: int
) -> None:
    index = SuffixIndex(depth)
    index.extend(text[:cut])
    for at in range(cut, len(text)):
        assert index.find(text[at]) == scan(text[: at + 1], depth)
        index.extend([text[at]])
    assert index.tokens == text


@given(TEXTS, st.integers(0, 4), st.integers(1, 40))
def test_a_copy_reads_on_from_the_occurrence_into_itself(
    text: list[int], anchor: int, count: int
) -> None:
    index = SuffixIndex()
    index.extend(text)
    match = index.find(anchor)
    if match is None:
        assert anchor not in text
        return
    grown = [*text, anchor]
    for at in range(match.end + 1, match.end + 1 + count):
        grown.append(grown[at])
    assert index.after(match, anchor, count) == grown[len(text) + 1 :]


def test_token_ids_of_any_size_stay_apart() -> None:
    index = SuffixIndex()
    index.extend([0, 2**32 - 1, 7, 2**31, 0])
    assert index.find(2**32 - 1) == Match(end=1, length=2)
    assert index.find(1) is None


class _Counting(dict[int, int]):
    """A dictionary that counts how often it is asked or written."""

    touched = 0

    def get(self, key: int, default: int | None = None) -> int | None:  # type: ignore[override]
        self.touched += 1
        return super().get(key, default)

    def __setitem__(self, key: int, value: int) -> None:
        self.touched += 1
        super().__setitem__(key, value)


def _work_per_token(text: list[int]) -> tuple[float, float]:
    """(touches, entries) a token of an index that was asked before each append."""
    index, counting = SuffixIndex(depth=16), _Counting()
    index._children = counting
    for token in text:
        index.find(token)
        index.extend([token])
    return counting.touched / len(text), len(counting) / len(text)


def test_work_and_memory_a_token_do_not_grow_with_the_text() -> None:
    choose = random.Random(1)
    for vocabulary in (2, 1000):
        text = [choose.randrange(vocabulary) for _ in range(16_000)]
        short, long = _work_per_token(text[:500]), _work_per_token(text)
        assert long[0] < 3 * 16 + 3
        assert long[0] < 2.5 * short[0]
        assert long[1] < 2.5


def test_a_repetition_costs_at_most_the_depth() -> None:
    touched, entries = _work_per_token([5] * 4000)
    assert touched < 3 * 16 + 3
    assert entries < 0.1
