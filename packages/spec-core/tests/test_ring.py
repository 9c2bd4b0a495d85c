"""Rings against plain lists of columns: whatever happens, a query sees its own window."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_core import InvalidValueError, SeamError
from spec_core.kv import RowClock
from spec_core.ring import SLACK, Ring, RingRows

HEADS, DIM = 2, 4


class Rows:
    """Rows of a ring and the numbers of the columns that each ought to hold."""

    def __init__(self, rows: int, window: int, slack: int | None) -> None:
        self.shape = (window, slack)
        self.clock = RowClock(rows)
        self.ring = Ring(self.clock, window, slack)
        self.store = RingRows(self.ring)
        self.text: list[list[int]] = [[] for _ in range(rows)]
        self.next = 1

    def append(self, keep: list[int], columns: int) -> None:
        fresh = [self._fresh(columns) for _ in keep]
        new = mx.stack([_columns(text) for text in fresh])
        self.clock.begin(columns)
        keys, values = self.store.append(new, -new)
        assert mx.array_equal(keys, -values)
        mask = self.ring.mask(columns)
        for row, (old, text) in enumerate(zip(self.text, fresh, strict=True)):
            self._check(keys[row], _row(mask, row, columns, keys.shape[2]), old + text, columns)
        self.store.commit(keep)
        self.clock.commit(keep)
        self.text = [old + t[:n] for old, t, n in zip(self.text, fresh, keep, strict=True)]

    def _fresh(self, columns: int) -> list[int]:
        self.next += columns
        return list(range(self.next - columns, self.next))

    def _check(self, keys: mx.array, mask: Any, text: list[int], columns: int) -> None:
        """Each query is let see exactly its window, newer laps of the ring first."""
        numbers = np.array(keys)[:, :, 0]
        for column in range(columns):
            position = len(text) - columns + column
            seen = range(max(0, position - self.ring.window + 1), position + 1)
            order = sorted(seen, key=lambda p: (-(p // self.ring.capacity), p))
            for head in range(HEADS):
                expected = [text[p] + head * 0.25 for p in order]
                assert numbers[head][mask[column]].tolist() == expected

    def check(self) -> None:
        """Every row goes on from exactly what it ought to hold."""
        if self.text:
            self.append([0] * len(self.text), 1)

    def select(self, rows: list[int]) -> None:
        self.store.select(rows)
        self.clock.select(rows)
        self.text = [self.text[row] for row in rows]

    def join(self, other: Rows) -> None:
        self.store.join(other.store)
        self.clock.join(other.clock)
        self.text = self.text + other.text
        self.next = max(self.next, other.next)

    def copy(self, row: int, newest: int | None = None) -> Rows:
        """A row of its own, by image and restore; of the image only the newest positions."""
        image = self.store.image(row)
        mx.eval(image)
        if newest is not None:
            image = {name: each[each.shape[0] - newest :] for name, each in image.items()}
        alone = Rows(1, *self.shape)
        alone.store.restore(0, image, len(self.text[row]))
        alone.clock.lengths[0] = len(self.text[row])
        alone.text, alone.next = [list(self.text[row])], self.next
        return alone


def _columns(text: list[int]) -> mx.array:
    """[HEADS, len(text), DIM]: each number stands for a column of its own."""
    numbers = mx.array(text, dtype=mx.float32)[None, :, None]
    return numbers + mx.arange(HEADS)[:, None, None] * 0.25 + mx.zeros((DIM,))


def _row(mask: mx.array | str | None, row: int, columns: int, slots: int) -> Any:
    if mask is None or isinstance(mask, str):
        return np.tri(columns, slots, slots - columns, dtype=bool)
    return np.array(mx.broadcast_to(mask, (mask.shape[0], 1, columns, slots)))[
        row % mask.shape[0], 0
    ]


@pytest.mark.parametrize("slack", [1, 3, None])
@pytest.mark.parametrize("columns", [1, 2, 4, 11, 40, 150])
def test_any_block_keeps_any_number_of_columns(columns: int, slack: int | None) -> None:
    rows = Rows(1, 5, slack)
    for turn in range(40 if columns < 11 else 12):
        rows.append([(turn * 7 + columns) % (columns + 1)], columns)
    rows.check()


def test_every_block_at_every_offset_can_be_taken_back() -> None:
    for columns in range(1, 10):
        rows = Rows(1, 5, 4)
        for _ in range(25):
            rows.append([0], columns)
            rows.append([1], 1)


def test_rows_at_different_laps() -> None:
    rows = Rows(3, 6, 4)
    for keep in ([9, 0, 2], [3, 1, 0], [17, 4, 17], [5, 5, 5], [0, 2, 1], [30, 0, 1]):
        rows.append(keep, max(keep))
    rows.check()


def test_a_full_buffer_grows_for_a_row_that_keeps_nothing() -> None:
    rows = Rows(2, 400, None)
    rows.append([256, 100], 256)
    rows.append([0, 5], 200)
    rows.check()


@settings(max_examples=60)
@given(data=st.data())
def test_schedules(data: st.DataObject) -> None:
    """Commits, joins, leaves, images and restores in any order."""
    window, slack = data.draw(st.integers(1, 9)), data.draw(st.sampled_from([1, 4, 11, None]))
    rows = Rows(data.draw(st.integers(1, 3)), window, slack)
    for _ in range(data.draw(st.integers(1, 9))):
        verb = data.draw(st.sampled_from(["append", "append", "append", "select", "join", "copy"]))
        count = len(rows.text)
        if verb == "append" and count:
            columns = data.draw(st.sampled_from([1, 2, 5, 12, 70]))
            keep = [data.draw(st.integers(0, columns)) for _ in range(count)]
            rows.append(keep, columns)
        elif verb == "select":
            order = data.draw(st.permutations(range(count)))
            rows.select(order[: data.draw(st.integers(0, count))])
        elif verb == "join" and count < 5:
            other = Rows(1, window, slack)
            other.next = rows.next
            other.append([data.draw(st.integers(0, 30))], 30)
            rows.join(other)
        elif verb == "copy" and count:
            row = data.draw(st.integers(0, count - 1))
            least = min(window - 1, len(rows.text[row]))
            rows.join(rows.copy(row, data.draw(st.sampled_from([None, least]))))
    rows.check()


def test_memory_stops_growing_at_the_capacity() -> None:
    rows = Rows(2, 300, None)
    sizes = []
    for _ in range(12):
        rows.append([40, 40], 40)
        sizes.append(rows.store.pending()[0].shape[2])
    assert sizes[0] < rows.ring.capacity
    assert sizes[-1] == max(sizes) == rows.ring.capacity < 300 + SLACK + 64


def test_an_image_holds_what_the_ring_still_has() -> None:
    rows = Rows(1, 20, 12)
    rows.append([100], 100)
    assert rows.store.image(0)["keys"].shape == (32, HEADS, DIM)
    rows.append([1], 9)
    image = rows.store.image(0)["keys"]
    assert [int(n) for n in image[:, 0, 0].tolist()] == rows.text[0][-24:]  # type: ignore[union-attr, arg-type]
    assert rows.store.image(0, 99)["keys"].shape[0] == 2
    assert rows.store.image(0, 101)["keys"].shape[0] == 0


def test_images_that_are_too_short_are_refused() -> None:
    rows = Rows(1, 8, None)
    rows.append([20], 20)
    image = rows.store.image(0)
    short = {name: each[-6:] for name, each in image.items()}
    with pytest.raises(SeamError, match=r"window of 8 resumes at 20 .* 7 positions .* has 6"):
        Rows(1, 8, None).store.restore(0, short, 20)
    with pytest.raises(SeamError, match=r"image has planes \['keys'\]"):
        Rows(1, 8, None).store.restore(0, {"keys": image["keys"]}, 20)


def test_rings_of_different_windows_do_not_join() -> None:
    with pytest.raises(SeamError, match="window of 9"):
        Rows(1, 8, None).join(Rows(1, 9, None))


def test_windows_and_slack_are_checked() -> None:
    with pytest.raises(InvalidValueError, match="window is 0"):
        Ring(RowClock(1), 0)
    with pytest.raises(InvalidValueError, match="slack is 0"):
        Ring(RowClock(1), 4, 0)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_attention_does_not_depend_on_how_columns_came_in(dtype: mx.Dtype) -> None:
    """Sums over keys have one order, so one forward of many columns equals single ones exactly."""
    mx.random.seed(3)
    queries, keys, values = (mx.random.normal((1, HEADS, 200, 32)).astype(dtype) for _ in range(3))
    outs = [_attended(queries, keys, values, chunk) for chunk in (1, 7, 33, 90, 200)]
    assert all(mx.array_equal(outs[0], out) for out in outs[1:])


def _attended(queries: mx.array, keys: mx.array, values: mx.array, chunk: int) -> mx.array:
    clock = RowClock(1)
    ring = Ring(clock, 40)
    store, outs = RingRows(ring), []
    for start in range(0, 200, chunk):
        piece = slice(start, min(start + chunk, 200))
        columns = piece.stop - piece.start
        clock.begin(columns)
        got = store.append(keys[:, :, piece], values[:, :, piece])
        mask = ring.mask(columns)
        outs.append(
            mx.fast.scaled_dot_product_attention(queries[:, :, piece], *got, scale=0.2, mask=mask)
        )
        store.commit([columns])
        clock.commit([columns])
    return mx.concatenate(outs, axis=2)
