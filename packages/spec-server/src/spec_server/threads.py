"""How many threads OpenBLAS is given: as many as proved fastest in a short trial.

More threads are not always faster: on a busy machine with two cores two were up to ten times
slower than one. A count that the user has set is left alone.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Sequence

import mlx.core as mx

from spec_server import device

_CHOSEN_BY_USER = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")
_SWEEPS = 8
_ROWS = (1, 8)
_MOST_WEIGHTS = 2**24
_WORTH = 0.8
"""More threads must take less than this share of the time of fewer."""


def settle(hidden_size: int) -> None:
    """Give OpenBLAS the fastest number of threads; does nothing for another BLAS.

    Args:
        hidden_size: of the target, which says how large its matrices are.
    """
    if device.blas() != "openblas" or any(os.environ.get(name) for name in _CHOSEN_BY_USER):
        return
    library = ctypes.CDLL(None)
    most = min(len(os.sched_getaffinity(0)), library.openblas_get_num_threads())
    count = fastest(_counts(most), library.openblas_set_num_threads, _trial(hidden_size))
    library.openblas_set_num_threads(count)


def fastest(
    counts: Sequence[int], choose: Callable[[int], object], run: Callable[[], float]
) -> int:
    """The count with the least time in all; a larger one only if it is clearly faster.

    Args:
        counts: ascending.
        choose: sets the count.
        run: does the work and gives its seconds.
    """
    seconds = dict.fromkeys(counts, 0.0)
    for sweep in range(_SWEEPS + 1):
        for count in counts:
            choose(count)
            taken = run()
            seconds[count] += taken if sweep else 0.0
    best = counts[0]
    for count in counts[1:]:
        if seconds[count] < _WORTH * seconds[best]:
            best = count
    return best


def _counts(most: int) -> list[int]:
    """1, 2, 4, ... and the most."""
    return sorted({1 << bit for bit in range(most.bit_length())} | {most})


def _trial(hidden_size: int) -> Callable[[], float]:
    """Products such as a forward's, over one row and over several."""
    size = max(hidden_size, 64)
    weights = mx.zeros((min(4 * size, _MOST_WEIGHTS // size), size), dtype=mx.float32)
    inputs = [mx.zeros((rows, size), dtype=mx.float32) for rows in _ROWS]
    mx.eval(weights, *inputs)

    def run() -> float:
        began = time.perf_counter()
        for rows in inputs:
            mx.eval(rows @ weights.T)
        return time.perf_counter() - began

    return run
