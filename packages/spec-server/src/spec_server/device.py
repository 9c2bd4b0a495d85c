"""What this process computes on, in words."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from functools import cache
from pathlib import Path
from typing import Literal

import mlx.core as mx

Backend = Literal["cpu", "metal", "cuda"]

_LIBRARY = re.compile(r"/lib(openblas|mkl_rt|blis|armpl|atlas)[^/\s]*\.so", re.IGNORECASE)


def backend() -> Backend:
    """Where MLX runs by default."""
    if mx.default_device().type == mx.DeviceType.cpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


@cache
def blas() -> str | None:
    """The BLAS that was loaded before MLX's own and so takes its place: "openblas", or None.

    Linux only, where MLX's CPU wheel brings an unoptimised one. A library that other modules
    brought for themselves does not count: only one in the global scope replaces MLX's.
    """
    if sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "cblas_sgemm"):
        return None
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    found = _LIBRARY.search(maps)
    return "another BLAS" if found is None else found.group(1).lower()


def describe() -> str:
    """The device for a reader, for instance "AMD EPYC (cpu, 2 threads, openblas on 2)"."""
    name = mx.device_info().get("device_name", "unknown device")
    if backend() != "cpu":
        return f"{name} ({backend()})"
    library = blas()
    cores = f"{name} (cpu, {os.cpu_count()} threads"
    if sys.platform != "linux":
        return cores + ")"
    if library is None:
        return f"{cores}, the BLAS that MLX brings)"
    threads = os.environ.get("OPENBLAS_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS")
    return f"{cores}, {library} on {threads or 'as many as it likes'})"
