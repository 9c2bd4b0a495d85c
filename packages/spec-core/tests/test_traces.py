"""Traces give what the function gives, are few, and are never another's."""

from __future__ import annotations

import threading

import mlx.core as mx
import pytest

from spec_core.traces import TracedClock, Traces


def times(factor: int, calls: list[int]):  # type: ignore[no-untyped-def]
    def product(x: mx.array) -> mx.array:
        calls.append(factor)
        return x * factor

    return product


def test_a_function_is_called_once_for_each_key() -> None:
    first = mx.compile(times(1, []))  # MLX traces the first one of a process twice
    mx.eval(first(mx.array([5])), first(mx.array([5])))
    traces: Traces[[mx.array], mx.array] = Traces(most=2)
    calls: list[int] = []
    for factor in (2, 3, 2, 4, 2, 3):
        assert traces.replay(factor, times(factor, calls), mx.array([5])).item() == 5 * factor
        assert len(traces) <= 2
    assert calls == [2, 3, 4, 3]
    traces.clear()
    assert len(traces) == 0


def test_what_failed_is_no_trace() -> None:
    traces: Traces[[mx.array], mx.array] = Traces()

    def broken(x: mx.array) -> mx.array:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        traces.replay("key", broken, mx.array([1]))
    assert len(traces) == 0
    assert traces.replay("key", times(2, []), mx.array([1])).item() == 2


def test_threads_do_not_get_each_others() -> None:
    """However often one of them forgets and makes anew."""
    traces: Traces[[mx.array], mx.array] = Traces(most=1)
    wrong: list[float] = []

    def run() -> None:
        with mx.stream(mx.cpu):
            for factor in range(2, 40):
                got = traces.replay(factor, times(factor, []), mx.array([1.0]))
                if got.item() != factor:
                    wrong.append(got.item())

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
        thread.join()
    run()
    assert not wrong


def test_a_traced_clock_leaves_room_and_knows_no_lengths() -> None:
    clock = TracedClock(mx.array([3, 250], dtype=mx.int32), 4, 256)
    assert (clock.rows, clock.uniform, clock.longest, clock.reads(4)) == (2, False, 252, 256)
    assert clock.positions(4).tolist() == [[3, 4, 5, 6], [250, 251, 252, 253]]
    assert clock.ends(4).tolist() == [7, 254]
