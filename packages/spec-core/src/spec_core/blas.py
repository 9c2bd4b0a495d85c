"""Which BLAS multiplies float32 matrices where MLX computes on a Linux CPU."""

from __future__ import annotations

import ctypes
import re
import sys
from functools import cache
from pathlib import Path

from spec_core.device import backend

_LIBRARY = re.compile(r"/lib(openblas|mkl_rt|blis|armpl|atlas)[^/\s]*\.so", re.IGNORECASE)


@cache
def replacement() -> str | None:
    """The BLAS that was loaded before MLX's own and so takes its place: "openblas", or None.

    Linux only, where MLX's CPU wheel brings an unoptimised one. A library that other modules
    brought for themselves does not count: only one in the global scope replaces MLX's.
    """
    if sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "cblas_sgemm"):
        return None
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    found = _LIBRARY.search(maps)
    return "another BLAS" if found is None else found.group(1).lower()


def prefers_columns() -> bool:
    """Whether float32 matrices [out, in] are multiplied faster if they are stored column by column
    (`mx.contiguous(w.T).T`): on a Linux CPU.

    The BLAS of MLX's wheel is twice as fast then, with the same sums. OpenBLAS is as fast or up to
    twice as fast (eight rows by 256 x 1024: 88 us for 162), and 10 % slower for a few shapes.
    """
    return sys.platform == "linux" and backend() == "cpu"
