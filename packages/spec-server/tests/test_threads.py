"""OpenBLAS's threads: the trial, on synthetic times."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest

from spec_server import threads


class Machine:
    """Takes stated seconds with each number of threads."""

    def __init__(self, seconds: Mapping[int, float], noise: float = 0.0) -> None:
        self.seconds, self.noise, self.count = seconds, noise, 0
        self.chosen: list[int] = []
        self.random = random.Random(1)

    def choose(self, count: int) -> None:
        self.count = count
        self.chosen.append(count)

    def run(self) -> float:
        return self.seconds[self.count] * (1 + self.noise * self.random.random())


def fastest(seconds: Mapping[int, float], noise: float = 0.0) -> int:
    machine = Machine(seconds, noise)
    count = threads.fastest(sorted(seconds), machine.choose, machine.run)
    assert set(machine.chosen) == set(seconds)
    return count


@pytest.mark.parametrize(
    ("seconds", "best"),
    [
        ({1: 1.0}, 1),
        ({1: 1.0, 2: 0.55}, 2),
        ({1: 1.0, 2: 10.0}, 1),
        ({1: 1.0, 2: 0.95}, 1),
        ({1: 1.0, 2: 0.6, 4: 0.35, 8: 0.33}, 4),
        ({1: 1.0, 2: 1.1, 4: 0.5}, 4),
    ],
)
def test_the_fastest_count_wins_and_fewer_threads_where_it_is_close(
    seconds: dict[int, float], best: int
) -> None:
    assert fastest(seconds) == best
    assert fastest(seconds, noise=0.1) == best


def test_the_first_run_of_a_count_does_not_count() -> None:
    machine = Machine({1: 1.0, 2: 0.5})
    runs: list[int] = []

    def run() -> float:
        first = machine.count not in runs
        runs.append(machine.count)
        return 100.0 if first and machine.count == 2 else machine.run()

    assert threads.fastest([1, 2], machine.choose, run) == 2


@pytest.mark.parametrize(
    ("most", "counts"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (16, [1, 2, 4, 8, 16])]
)
def test_counts_double_up_to_the_most(most: int, counts: list[int]) -> None:
    assert threads._counts(most) == counts


@pytest.mark.parametrize("hidden", [0, 1, 64, 4096, 10**6])
def test_a_trial_runs_for_any_model(hidden: int) -> None:
    assert threads._trial(hidden)() > 0


def test_a_count_that_the_user_set_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads.device, "blas", lambda: "openblas")
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "3")
    monkeypatch.setattr(threads.ctypes, "CDLL", lambda _: pytest.fail("touched"))
    threads.settle(64)


@pytest.mark.parametrize("library", [None, "mkl_rt", "another BLAS"])
def test_another_blas_is_left_alone(monkeypatch: pytest.MonkeyPatch, library: str | None) -> None:
    monkeypatch.setattr(threads.device, "blas", lambda: library)
    monkeypatch.setattr(threads.ctypes, "CDLL", lambda _: pytest.fail("touched"))
    threads.settle(64)
