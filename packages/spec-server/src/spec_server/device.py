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

BUNDLED_BLAS = "the BLAS that MLX brings"

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


def blas_threads() -> int | None:
    """On how many threads OpenBLAS runs; None for another BLAS."""
    return ctypes.CDLL(None).openblas_get_num_threads() if blas() == "openblas" else None


def arithmetic() -> str | None:
    """The BLAS for a reader, for instance "openblas on 1 thread"; None where there is no choice."""
    if backend() != "cpu" or sys.platform != "linux":
        return None
    library, threads = blas(), blas_threads()
    if library is None:
        return BUNDLED_BLAS
    if threads is None:
        return library
    return f"{library} on {threads} thread{'' if threads == 1 else 's'}"


def describe() -> str:
    """The device for a reader, for instance "AMD EPYC (cpu, 2 cores, openblas on 1 thread)"."""
    name = mx.device_info().get("device_name", "unknown device")
    if backend() != "cpu":
        return f"{name} ({backend()})"
    cores = f"{name} (cpu, {os.cpu_count()} cores"
    library = arithmetic()
    return f"{cores})" if library is None else f"{cores}, {library})"
