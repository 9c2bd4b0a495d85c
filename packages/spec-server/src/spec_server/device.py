"""What this process computes on, in words."""

from __future__ import annotations

import ctypes
import os
import sys

import mlx.core as mx

from spec_core.blas import replacement
from spec_core.device import backend

BUNDLED_BLAS = "the BLAS that MLX brings"


def blas() -> str | None:
    """The BLAS that takes the place of MLX's own on a Linux CPU: "openblas", or None."""
    return replacement()


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
