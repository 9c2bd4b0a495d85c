"""Where a prefill should pause: checkpoints and chunk borders."""

from __future__ import annotations

from collections.abc import Sequence

from spec_core.errors import InvalidValueError


def checkpoint_lengths(
    prompt: int, block: int, marks: Sequence[int] = (), start: int = 0
) -> tuple[int, ...]:
    """Lengths at which a prefill should store a checkpoint, ascending.

    They are: powers of two blocks (1, 2, 4, ... blocks), so that an edited prompt resumes after at
    least half of what it shares; the caller's marks (the end of the system prompt, the end of each
    earlier turn); and one token before the prompt's end, where the same prompt can be resumed.
    A power of two that lies within a block of a mark is left out.

    Args:
        prompt: tokens of the prompt.
        block: tokens a block of the cache.
        marks: lengths at which other prompts are likely to branch off.
        start: tokens that are there already (a hit's length).

    Raises:
        InvalidValueError: `block` is below 1.
    """
    if block < 1:
        raise InvalidValueError("block", block, "at least 1 token")
    wanted = {mark for mark in (*marks, prompt - 1) if start < mark < prompt}
    power = block
    while power < prompt:
        if power > start and all(abs(power - mark) >= block for mark in wanted):
            wanted.add(power)
        power *= 2
    return tuple(sorted(wanted))


def chunk_end(position: int, chunk: int, prompt: int, block: int, stops: Sequence[int] = ()) -> int:
    """Where the prefill chunk that begins at `position` should end.

    At the next stop or the prompt's end if `chunk` tokens reach it; otherwise at the last block
    border within `chunk` tokens, so that each chunk can be stored whole; where not even one lies
    within, after `chunk` tokens.

    Raises:
        InvalidValueError: `chunk` is below 1.
    """
    if chunk < 1:
        raise InvalidValueError("chunk", chunk, "at least 1 token")
    reach = position + chunk
    ends = [stop for stop in (*stops, prompt) if position < stop <= reach]
    if ends:
        return min(ends)
    border = reach // block * block
    return border if border > position else reach
