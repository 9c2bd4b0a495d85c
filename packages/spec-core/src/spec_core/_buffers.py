"""Arrays [R, heads, S, dim] of rows and positions: growing, shrinking, writing in place."""

from __future__ import annotations

import mlx.core as mx

from spec_core.errors import SeamError

_STEP = 256


def room(
    buffer: mx.array | None, new: mx.array, rows: int, end: int, limit: int | None = None
) -> mx.array:
    """The buffer, grown geometrically where rows or positions (never more than `limit`) do not
    fit."""
    if buffer is not None and fits(buffer, rows, end):
        return buffer
    have_rows, have = (0, 0) if buffer is None else (buffer.shape[0], buffer.shape[2])
    capacity = have if have >= end else stepped(max(end, have + have // 2))
    capacity = capacity if limit is None else min(capacity, limit)
    slots = have_rows if have_rows >= rows else max(rows, have_rows + have_rows // 2)
    grown = mx.zeros((slots, new.shape[1], capacity, new.shape[3]), dtype=new.dtype)
    if buffer is not None:
        grown[:have_rows, :, :have] = buffer
    return grown


def fits(buffer: mx.array, rows: int, end: int) -> bool:
    """Whether there is room for so many rows and positions."""
    return buffer.shape[0] >= rows and buffer.shape[2] >= end


def lengthened(new: mx.array, end: int) -> mx.array:
    """A buffer that begins with [R, heads, T, dim] and has room for `end` positions and a few
    more, made in one pass over it."""
    rows, heads, columns, dim = new.shape
    rest = stepped(end + _STEP) - columns
    # What free slots hold is never seen but must be finite: a copy will do, and is a kernel less.
    free = new[:, :, :rest] if rest <= columns else mx.zeros((rows, heads, rest, dim), new.dtype)
    return mx.concatenate([new, free], axis=2)


def shrunk(buffer: mx.array, rows: int, longest: int) -> mx.array | None:
    """The buffer, or a smaller copy of its first rows where half of it would be free."""
    slots, _, capacity, _ = buffer.shape
    if not rows:
        return None
    fewer = rows if 2 * rows <= slots else slots
    shorter = stepped(longest) if 2 * stepped(longest) <= capacity else capacity
    if (fewer, shorter) == (slots, capacity):
        return buffer
    # A copy: what is assigned to all of an array takes its place, and would hold the larger buffer.
    return mx.contiguous(buffer[:fewer, :, :shorter])


def stepped(positions: int) -> int:
    """Room for at least so many positions, and for one: one of few sizes, so that what is made for
    a size serves often, and at most a quarter more than asked for beyond a few steps."""
    step = max(_STEP, (1 << max(positions - 1, 0).bit_length()) >> 3)
    return max(1, -(-positions // step)) * step


def scatter(buffer: mx.array, new: mx.array, positions: mx.array) -> mx.array:
    """Write [B, heads, T, dim] at positions [B, T], in one operation; free slots get a copy."""
    free = buffer.shape[0] - new.shape[0]
    if free:
        spare = [row % new.shape[0] for row in range(free)]
        new = mx.concatenate([new, *(new[row : row + 1] for row in spare)])
        positions = mx.concatenate([positions, *(positions[row : row + 1] for row in spare)])
    at = mx.broadcast_to(positions[:, None, :, None], new.shape)
    return mx.put_along_axis(buffer, at, new, axis=2)


def same_kind(ours: mx.array | None, theirs: mx.array) -> None:
    """Raise SeamError unless rows of both fit one buffer."""
    if ours is None:
        return
    mine, other = (ours.shape[1], ours.shape[3]), (theirs.shape[1], theirs.shape[3])
    if mine != other or ours.dtype != theirs.dtype:
        raise SeamError(
            f"rows of {other[0]} heads of size {other[1]} in {theirs.dtype} do not fit rows of "
            f"{mine[0]} heads of size {mine[1]} in {ours.dtype}"
        )
