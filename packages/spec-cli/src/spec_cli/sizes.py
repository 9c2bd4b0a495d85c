"""Numbers for a reader."""

from __future__ import annotations

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def in_bytes(nbytes: float) -> str:
    """For instance "512 B" or "1.4 GiB"."""
    for unit in _UNITS[:-1]:
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} {_UNITS[-1]}"


def counted(number: int, name: str) -> str:
    """For instance "1 file" or "2 files"."""
    return f"{number} {name}" if number == 1 else f"{number} {name}s"
