"""Where a prefill pauses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_cache import checkpoint_lengths, chunk_end
from spec_core import InvalidValueError


def test_checkpoints_of_a_long_prompt() -> None:
    assert checkpoint_lengths(1000, 64) == (64, 128, 256, 512, 999)
    assert checkpoint_lengths(1000, 64, marks=(300, 2000, 130)) == (64, 130, 300, 512, 999)
    assert checkpoint_lengths(1000, 64, start=512) == (999,)
    assert checkpoint_lengths(1, 64) == ()
    with pytest.raises(InvalidValueError, match="block"):
        checkpoint_lengths(10, 0)


@given(st.integers(2, 5000), st.integers(1, 300), st.data())
def test_an_edit_keeps_half_of_what_it_shares(prompt: int, block: int, data: st.DataObject) -> None:
    """Whatever is shared beyond two blocks, a checkpoint lies in its second half, or nearly."""
    lengths = checkpoint_lengths(prompt, block)
    assert list(lengths) == sorted(set(lengths))
    assert all(0 < n < prompt for n in lengths)
    assert lengths[-1] == prompt - 1
    shared = data.draw(st.integers(1, prompt - 1))
    best = max((n for n in lengths if n <= shared), default=0)
    assert best + block > shared / 2 - block


@given(
    st.integers(1, 400),
    st.integers(1, 100),
    st.integers(1, 40),
    st.sets(st.integers(1, 400), max_size=5),
)
def test_chunks_cover_the_prompt_and_end_at_every_stop(
    prompt: int, chunk: int, block: int, stops: set[int]
) -> None:
    position, ends = 0, []
    while position < prompt:
        end = chunk_end(position, chunk, prompt, block, sorted(stops))
        assert position < end <= min(position + chunk, prompt)
        position = end
        ends.append(end)
    assert {s for s in stops if s < prompt} <= set(ends)
    if chunk >= 2 * block:
        assert all(e % block == 0 or e in stops or e == prompt for e in ends)


def test_a_chunk_has_a_token() -> None:
    with pytest.raises(InvalidValueError, match="chunk"):
        chunk_end(0, 0, 10, 8)
