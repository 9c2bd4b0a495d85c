"""Traces give what the function gives, are few, and are never another's."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import mlx.core as mx
import pytest

from spec_core.traces import TracedClock, Traces, shapes_of


def times(factor: int, calls: list[int]):  # type: ignore[no-untyped-def]
    def product(x: mx.array) -> mx.array:
        calls.append(factor)
        return x * factor

    return product


@pytest.fixture(autouse=True)
def warm() -> None:
    """MLX traces the first function of a process twice."""
    first = mx.compile(times(1, []))
    mx.eval(first(mx.array([5])), first(mx.array([5])))


def asked(traces: Traces[[mx.array], mx.array], factors: Iterable[int]) -> list[int]:
    """The factors whose function was called, when these were asked for one after the other."""
    calls: list[int] = []
    for factor in factors:
        assert traces.replay(factor, times(factor, calls), mx.array([5])).item() == 5 * factor
    return calls


def test_a_function_is_called_until_it_is_traced() -> None:
    """Which is when its key is met again."""
    traces: Traces[[mx.array], mx.array] = Traces()
    assert asked(traces, (2, 3, 2, 2, 3, 3, 2)) == [2, 3, 2, 3]
    assert len(traces) == 2
    traces.clear()
    assert len(traces) == 0
    assert asked(traces, (2, 2)) == [2]


def test_those_used_last_are_kept() -> None:
    traces: Traces[[mx.array], mx.array] = Traces(most=2)
    assert asked(traces, (2, 2, 3, 3, 2, 4, 4)) == [2, 2, 3, 3, 4, 4]
    assert len(traces) == 2
    assert asked(traces, (2, 4, 3)) == [3]


def test_few_keys_are_remembered() -> None:
    traces: Traces[[mx.array], mx.array] = Traces()
    many = range(2, 400)
    assert asked(traces, [*many, *many]) == [*many, *many]
    assert len(traces) == 0


def test_what_failed_is_no_trace() -> None:
    traces: Traces[[mx.array], mx.array] = Traces()

    def broken(x: mx.array) -> mx.array:
        raise ValueError("no")

    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            traces.replay("key", broken, mx.array([1]))
        assert len(traces) == 0
    assert traces.replay("key", times(2, []), mx.array([1])).item() == 2
    assert len(traces) == 1


def test_threads_do_not_get_each_others() -> None:
    """However often one of them forgets and makes anew."""
    traces: Traces[[mx.array], mx.array] = Traces(most=1)
    wrong: list[float] = []

    def run() -> None:
        with mx.stream(mx.cpu):
            for factor in [each // 2 for each in range(4, 80)]:
                got = traces.replay(factor, times(factor, []), mx.array([1.0]))
                if got.item() != factor:
                    wrong.append(got.item())

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
        thread.join()
    run()
    assert not wrong


def test_keys_tell_buffers_apart_by_layers_and_shapes() -> None:
    one, other = mx.zeros((1, 2, 8, 4)), mx.zeros((1, 2, 16, 4))
    assert shapes_of([[one, one]]) == shapes_of([[mx.zeros((1, 2, 8, 4)), one]])
    assert (
        len({shapes_of(each) for each in ([[one, one]], [[other, other]], [[one, one]] * 2)}) == 3
    )


def test_a_traced_clock_leaves_room_and_knows_no_lengths() -> None:
    clock = TracedClock(mx.array([3, 250], dtype=mx.int32), 4, 256)
    assert (clock.rows, clock.uniform, clock.longest, clock.reads(4)) == (2, False, 252, 256)
    assert clock.positions(4).tolist() == [[3, 4, 5, 6], [250, 251, 252, 253]]
    assert clock.ends(4).tolist() == [7, 254]
