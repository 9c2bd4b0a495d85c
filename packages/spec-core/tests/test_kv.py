"""Row storage against plain lists of columns."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_core import InvalidValueError, SeamError
from spec_core.kv import (
    KVRows,
    QuantizedKVRows,
    RowClock,
    boolean_mask,
    causal_mask,
)

HEADS, DIM = 2, 32
Store = KVRows | QuantizedKVRows
Make = Callable[[RowClock], Store]


def _columns(text: list[int]) -> mx.array:
    """[HEADS, len(text), DIM]: each number stands for a column of its own."""
    index = mx.array(text, dtype=mx.int32)[None, :, None] * 64
    return (index + mx.arange(HEADS)[:, None, None] * 32 + mx.arange(DIM)).astype(mx.float32)


class Rows:
    """A store and what each of its rows ought to hold, as numbers of columns of the world."""

    def __init__(self, make: Make, rows: int) -> None:
        self.make = make
        self.clock = RowClock(rows)
        self.store = make(self.clock)
        self.text: list[list[int]] = [[] for _ in range(rows)]
        self.next = 0

    def append(self, keep: list[int], columns: int) -> None:
        fresh = [list(range(self.next + r * 50, self.next + r * 50 + columns)) for r in self._each]
        self.next += 50 * len(keep)
        new = mx.stack([_columns(text) for text in fresh])
        self.clock.begin(columns)
        keys, values = self.store.append(new, -new)
        self._check(keys, values, [old + text for old, text in zip(self.text, fresh, strict=True)])
        self.clock.commit(keep)
        self.text = [old + t[:n] for old, t, n in zip(self.text, fresh, keep, strict=True)]

    @property
    def _each(self) -> range:
        return range(len(self.text))

    def _check(self, keys: object, values: object, texts: list[list[int]]) -> None:
        """What `append` gave begins with each row's columns."""
        for stored, sign in ((keys, 1), (values, -1)):
            for row, text in enumerate(texts):
                got = _row(self.store, stored, row, len(text))
                assert mx.array_equal(got, _rounded(self.store, sign * _columns(text)))

    def check(self) -> None:
        """Every row goes on from exactly what it ought to hold."""
        if self.text:
            self.append([0] * len(self.text), 1)

    def select(self, rows: list[int]) -> None:
        self.store.select(rows)
        self.clock.select(rows)
        self.text = [self.text[row] for row in rows]

    def join(self, other: Rows) -> None:
        self.store.join(other.store)  # type: ignore[arg-type]
        self.clock.join(other.clock)
        self.text = self.text + other.text
        self.next = max(self.next, other.next)

    def copy(self, row: int) -> Rows:
        """A row of its own, by image and restore."""
        image = self.store.image(row)
        mx.eval(image)
        alone = Rows(self.make, 1)
        alone.store.restore(0, image)
        alone.clock.lengths[0] = len(self.text[row])
        alone.text, alone.next = [list(self.text[row])], self.next
        return alone


def _row(store: Store, stored: object, row: int, length: int) -> mx.array:
    if isinstance(store, QuantizedKVRows):
        assert isinstance(stored, tuple)
        packed, scales, biases = (part[row, :, :length] for part in stored)
        return mx.dequantize(packed, scales, biases, store.group_size, store.bits)
    assert isinstance(stored, mx.array)
    return stored[row, :, :length]


def _rounded(store: Store, array: mx.array) -> mx.array:
    if isinstance(store, QuantizedKVRows):
        parts = mx.quantize(array, group_size=store.group_size, bits=store.bits)
        return mx.dequantize(*parts, group_size=store.group_size, bits=store.bits)
    return array


def _quantised(bits: int) -> Make:
    return lambda clock: QuantizedKVRows(clock, bits, 32)


MAKES: list[Make] = [KVRows, _quantised(8), _quantised(4)]


@pytest.mark.parametrize("make", MAKES, ids=["plain", "8 bits", "4 bits"])
def test_rows_keep_what_was_committed(make: Make) -> None:
    rows = Rows(make, 3)
    for keep in ([4, 4, 4], [1, 0, 3], [0, 0, 0], [4, 2, 1]):
        rows.append(keep, 4)
    rows.check()


@pytest.mark.parametrize("make", MAKES, ids=["plain", "8 bits", "4 bits"])
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_schedule_of_joins_and_leaves(make: Make, data: st.DataObject) -> None:
    rows = Rows(make, 2)
    for _ in range(data.draw(st.integers(2, 6))):
        count = len(rows.text)
        verb = data.draw(st.sampled_from(["append", "select", "join", "copy"]))
        if verb == "append" and count:
            keep = data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
            rows.append(keep, 3)
        elif verb == "select":
            order = data.draw(st.permutations(range(count)))
            rows.select(order[: data.draw(st.integers(0, count))])
        elif verb == "copy" and count:
            rows.join(rows.copy(data.draw(st.integers(0, count - 1))))
        else:
            other = Rows(make, data.draw(st.integers(1, 3)))
            other.next = rows.next
            other.append([data.draw(st.integers(0, 5)) for _ in other.text], 5)
            rows.join(other)
    rows.check()


@pytest.mark.parametrize("make", MAKES, ids=["plain", "8 bits", "4 bits"])
def test_rows_that_were_never_written_join_and_move(make: Make) -> None:
    rows = Rows(make, 2)
    rows.append([3, 1], 3)
    rows.join(Rows(make, 2))
    rows.select([3, 0, 1])
    rows.check()


def test_growth_past_every_step_keeps_the_past() -> None:
    rows = Rows(KVRows, 2)
    for _ in range(20):
        rows.append([40, 33], 40)
    rows.check()


def test_a_leaving_row_moves_one_row_at_most() -> None:
    rows = Rows(KVRows, 4)
    rows.append([5, 6, 7, 8], 8)
    before = mx.array(rows.store.pending()[0])
    mx.eval(before)
    rows.select([0, 3, 2])
    after = rows.store.pending()[0]
    assert [bool(mx.array_equal(before[r], after[r]).item()) for r in range(4)] == [
        True,
        False,
        True,
        True,
    ]
    rows.check()


def test_memory_returns_when_half_the_rows_have_left() -> None:
    rows = Rows(KVRows, 8)
    rows.append([3] * 8, 3)
    full = rows.store.pending()[0].nbytes
    rows.select([0, 1, 2, 3, 4])
    assert rows.store.pending()[0].nbytes == full
    rows.select([0, 1, 2, 3])
    assert rows.store.pending()[0].nbytes == full // 2
    rows.select([])
    assert rows.store.pending() == []


def test_memory_returns_when_a_long_row_has_left() -> None:
    rows = Rows(KVRows, 2)
    for _ in range(24):
        rows.append([45, 1], 45)
    wide = rows.store.pending()[0].shape[2]
    rows.select([1])
    assert rows.store.pending()[0].shape[2] <= wide // 2
    rows.check()


def _peak_of_writes(positions: int, rows: int, ragged: bool) -> int:
    """Most memory above what is held, while columns are written behind `positions`."""
    clock = RowClock(rows)
    store = KVRows(clock)
    clock.lengths = [positions - (7 * row if ragged else 0) for row in range(rows)]
    new = mx.ones((rows, 8, 4, 64))
    mx.eval(new, store.append(new, new))
    clock.begin(4)
    clock.commit([4] * rows)
    mx.synchronize()
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in range(3):
        clock.begin(4)
        store.append(new, new)
        mx.eval(store.pending())
        clock.commit([1] * rows)
    return mx.get_peak_memory() - held


@pytest.mark.parametrize("ragged", [False, True])
def test_a_write_needs_no_memory_that_grows_with_the_context(ragged: bool) -> None:
    short, long = (_peak_of_writes(n, 3, ragged) for n in (300, 16000))
    assert long <= short + 4096
    assert long < 16000 * 8 * 64 * 4 // 10


def test_an_image_is_owned_and_pins_no_buffer() -> None:
    rows = Rows(KVRows, 1)
    rows.append([200], 200)
    image = rows.store.image(0, 150)
    mx.eval(image)
    before = {name: array.tolist() for name, array in image.items()}
    rows.append([1], 3)
    assert {name: array.tolist() for name, array in image.items()} == before
    assert image["keys"].shape == (50, HEADS, DIM)


def test_different_kinds_do_not_join() -> None:
    plain, small, wide = Rows(KVRows, 1), Rows(_quantised(8), 1), KVRows(RowClock(1))
    plain.append([2], 2)
    small.append([2], 2)
    with pytest.raises(SeamError, match="cannot join"):
        plain.store.join(small.store)  # type: ignore[arg-type]
    wide.append(mx.zeros((1, HEADS, 1, 2 * DIM)), mx.zeros((1, HEADS, 1, 2 * DIM)))
    with pytest.raises(SeamError, match="do not fit"):
        plain.store.join(wide)  # type: ignore[arg-type]
    with pytest.raises(SeamError, match="planes"):
        small.store.restore(0, plain.store.image(0))


def test_quantised_storage_checks_its_parameters() -> None:
    with pytest.raises(InvalidValueError, match="kv_bits is 5"):
        QuantizedKVRows(RowClock(1), 5)
    with pytest.raises(InvalidValueError, match="group_size is 48"):
        QuantizedKVRows(RowClock(1), 8, 48)


def _seen(length: int, column: int, window: int | None) -> list[int]:
    """Positions that a column sees, by definition."""
    last = length + column
    return [p for p in range(last + 1) if window is None or last - p < window]


@pytest.mark.parametrize("window", [None, 3])
def test_masks_are_causal_within_the_window(window: int | None) -> None:
    clock = RowClock(2)
    clock.lengths = [5, 2]
    mask = boolean_mask(clock, 3, 8, window)
    assert mask.shape == (2, 1, 3, 8)
    visible = [[[p for p in range(8) if row[p]] for row in rows[0]] for rows in mask.tolist()]
    assert visible == [[_seen(n, t, window) for t in range(3)] for n in (5, 2)]


def test_rows_alike_take_the_short_masks() -> None:
    clock = RowClock(3, start=4)
    assert causal_mask(clock, 1, 5) is None
    assert causal_mask(clock, 2, 6) == "causal"
    assert causal_mask(clock, 2, 6, window=6) == "causal"
    windowed = causal_mask(clock, 2, 6, window=2)
    assert isinstance(windowed, mx.array)
    clock.lengths[1] = 3
    ragged = causal_mask(clock, 1, 5)
    assert isinstance(ragged, mx.array)


def test_clock_refuses_what_does_not_fit() -> None:
    clock = RowClock(2)
    with pytest.raises(SeamError, match="valid"):
        clock.begin(2, [3, 1])
    clock.begin(3, [3, 1])
    with pytest.raises(SeamError, match="still provisional"):
        clock.begin(1)
    for keep in ([3, 2], [-1, 0], [1]):
        with pytest.raises(SeamError, match="does not fit"):
            clock.commit(keep)
    with pytest.raises(SeamError, match="cannot move"):
        clock.select([0])
    clock.commit([2, 0])
    assert clock.lengths == [2, 0]
    for rows in ([0, 0], [2], [-1]):
        with pytest.raises(SeamError, match="distinct rows"):
            clock.select(rows)
    clock.select([1, 0])
    assert clock.lengths == [0, 2]
    assert clock.offset().tolist() == [0, 2]  # type: ignore[union-attr]


@pytest.mark.parametrize("lengths", [[5], [300], [5, 300, 270]])
@pytest.mark.parametrize("columns", [1, 2, 8])
def test_lengths_read_in_steps_attend_to_the_same(lengths: list[int], columns: int) -> None:
    """What CUDA reads: more slots, hidden by a mask, and few different numbers of them."""
    outputs = []
    for stepped in (False, True):
        mx.random.seed(1)
        clock = RowClock(len(lengths))
        clock.stepped = stepped
        rows = KVRows(clock)
        context = max(lengths)
        clock.begin(context, lengths)
        rows.append(*(mx.random.normal((len(lengths), 2, context, 8)) for _ in range(2)))
        clock.commit(lengths)
        queries, keys, values = (mx.random.normal((len(lengths), 2, columns, 8)) for _ in range(3))
        seen = rows.append(keys, values)
        end = clock.reads(columns)
        assert seen[0].shape[2] == end
        assert not stepped or columns == 1 or end % 256 == 0
        mask = causal_mask(clock, columns, end)
        outputs.append(mx.fast.scaled_dot_product_attention(queries, *seen, scale=1.0, mask=mask))
    assert mx.allclose(*outputs, atol=1e-6)


@pytest.mark.parametrize("quantised", [False, True])
def test_buffers_can_be_lent_and_given_back(quantised: bool) -> None:
    """Somebody else writes what `append` would have written, over the buffers' end too."""
    clock = RowClock(2)
    store: Store = QuantizedKVRows(clock, group_size=32) if quantised else KVRows(clock)
    assert not store.written
    store.make_room(4)
    assert store.pending() == []
    clock.begin(250)
    keys = mx.random.normal((2, HEADS, 250, DIM))
    store.append(keys, -keys)
    clock.commit([250, 3])
    assert store.written
    before = store.image(1)
    store.make_room(10)
    lent = store.pending()
    assert {buffer.shape[2] for buffer in lent} == {512}
    assert clock.ends(10).tolist() == [260, 13]
    store.take([mx.where(mx.arange(512)[:, None] >= 250, 0, buffer) for buffer in lent])
    after = store.image(1)
    assert all(mx.array_equal(after[name], each) for name, each in before.items())
    assert not any(buffer[:, :, 250:].any() for buffer in store.pending())
    with pytest.raises(ValueError, match="shorter"):
        store.take(lent[:1])


def held(positions: int, rows: int, heads: int = 1) -> KVRows:
    """Rows of so many positions, evaluated."""
    clock = RowClock(rows)
    store = KVRows(clock)
    new = mx.random.normal((rows, heads, positions, 64))
    clock.begin(positions)
    store.append(new, 2 * new)
    clock.commit([positions] * rows)
    mx.eval(store.pending())
    return store


def test_rows_that_leave_give_their_memory_back() -> None:
    before, store = mx.get_active_memory(), held(2000, 4)
    store.select([0])
    store.clock.select([0])
    mx.eval(store.pending())
    room = sum(each.nbytes for each in store.pending())
    assert mx.get_active_memory() - before < 1.1 * room
