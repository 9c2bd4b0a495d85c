"""Another BLAS for MLX's CPU backend on Linux, whose wheel brings an unoptimised one.

MLX's library looks its BLAS up in the global scope first. So a library that is loaded there before
MLX takes the place of MLX's own, in this process and nowhere else.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import click

Loader = Callable[..., Any]
"""`ctypes.CDLL`."""

AUTO, BUNDLED = "auto", "bundled"
_NAMES = ("libopenblas.so.0", "libopenblasp.so.0", "libopenblas.so")

ADVICE = (
    "MLX's CPU backend uses an unoptimised BLAS here. OpenBLAS makes plain decoding about twice as "
    "fast and guesses nearly free to check; it is used as soon as it is installed: package "
    "libopenblas0-pthread (Debian, Ubuntu), openblas (Fedora, Arch, conda)"
)


class UnfitError(Exception):
    """A library is no BLAS that MLX can use; says why."""


def use(choice: str, load: Loader = ctypes.CDLL) -> str | None:
    """Take another BLAS; to be called before MLX is imported.

    Args:
        choice: "auto" takes an OpenBLAS that is installed, "bundled" MLX's own, anything else is
            the path of a library.
        load: opens a library.

    Returns:
        The library's name or path; None: MLX's own.

    Raises:
        click.BadParameter: the path is not that of a usable BLAS, or no BLAS can be chosen here.
    """
    if choice == BUNDLED:
        return None
    if not replaceable():
        if choice == AUTO:
            return None
        raise click.BadParameter("a BLAS can only be chosen for MLX's CPU backend on Linux")
    names = _installed() if choice == AUTO else [choice]
    for name in names:
        try:
            _take(name, load)
        except UnfitError as error:
            if choice != AUTO:
                raise click.BadParameter(f"{name} cannot be used: {error}") from error
        else:
            return name
    return None


def replaceable() -> bool:
    """Whether MLX computes on a CPU here, with a BLAS of its own that is not loaded yet."""
    if sys.platform != "linux" or "mlx.core" in sys.modules:
        return False
    try:
        version("mlx-cpu")
    except PackageNotFoundError:
        return False
    return True


def option(context: click.Context, parameter: click.Parameter, value: str) -> str:
    """Callback of --cpu-blas: from here on it is the one that was chosen.

    With --kv-bits (which is read before) auto is MLX's own: another BLAS adds up in an order that
    depends on the number of columns, and what that changes in a last bit, rounding keys and values
    to a few bits may make large.
    """
    if value == AUTO and context.params.get("kv_bits") is not None:
        value = BUNDLED
    if not context.resilient_parsing:
        use(value)
    return value


def _installed() -> list[str]:
    """What may be there: where the loader finds it, or in this Python's own tree (conda)."""
    return [*_NAMES, *(str(Path(sys.prefix, "lib", name)) for name in _NAMES)]


def _take(name: str, load: Loader) -> None:
    """Load a library into the global scope once it has proven fit."""
    try:
        library = load(name)
    except OSError as error:
        raise UnfitError(str(error)) from error
    if not hasattr(library, "cblas_sgemm"):
        raise UnfitError("it is no BLAS (it has no cblas_sgemm)")
    if "USE64BITINT" in _configuration(library):
        raise UnfitError("it counts in 64 bits, MLX in 32")
    load(name, mode=ctypes.RTLD_GLOBAL)


def _configuration(library: Any) -> str:
    """How an OpenBLAS was built; "" for another library."""
    if not hasattr(library, "openblas_get_config"):
        return ""
    library.openblas_get_config.restype = ctypes.c_char_p
    return str(library.openblas_get_config().decode())
