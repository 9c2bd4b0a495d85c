"""Python, MLX, memory, disk and folders."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from spec_cli.blas import ADVICE, BUNDLED
from spec_cli.doctor.finding import Finding
from spec_cli.sizes import in_bytes

_SECTION = "machine"
_BACKENDS = ("mlx-cpu", "mlx-cuda-12", "mlx-cuda-13", "mlx-metal")
_INSTALL = "install spec-cli with exactly one of its extras: cpu, cuda12 or cuda13"
_LITTLE_DISK = 10 * 2**30
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def machine(cpu_blas: str) -> Iterator[Finding]:
    """The machine's findings.

    Args:
        cpu_blas: the BLAS that was asked for.
    """
    yield python()
    error = mlx_error()
    yield mlx(error)
    if error is None:
        yield from blas(cpu_blas)
        yield memory()
        yield from caches()
    yield disk()


def python() -> Finding:
    """The interpreter and what it runs on."""
    seen = f"{platform.python_version()} ({platform.python_implementation()}) on {_system()}"
    if sys.platform == "darwin" and platform.machine() != "arm64":
        advice = "MLX runs on Apple silicon only, and needs a Python built for arm64"
        return Finding(_SECTION, "Python", "problem", seen, advice)
    return Finding(_SECTION, "Python", "ok", seen)


def _system() -> str:
    """For instance "macOS 15.1, arm64" or "Linux with glibc 2.36, x86_64"."""
    if sys.platform == "darwin":
        return f"macOS {platform.mac_ver()[0]}, {platform.machine()}"
    library, release = platform.libc_ver()
    shown = f" with {library} {release}" if library else ""
    return f"{platform.system()}{shown}, {platform.machine()}"


def mlx_error() -> str | None:
    """Why MLX cannot be imported, or None if it can."""
    try:
        import mlx.core  # noqa: F401
    except ImportError as error:
        return str(error).splitlines()[0]
    return None


def mlx(error: str | None) -> Finding:
    """MLX and where it computes."""
    installed = [name for name in _BACKENDS if _installed(name)]
    if error is not None:
        seen = f"cannot be imported: {error}"
        return Finding(_SECTION, "MLX", "problem", seen, _INSTALL)
    seen = f"{version('mlx')} on {_device()}"
    if len(installed) > 1:
        seen += f"; {' and '.join(installed)} are both installed"
        advice = f"each brings its own libmlx, and they overwrite each other; {_INSTALL}"
        return Finding(_SECTION, "MLX", "problem", seen, advice)
    return Finding(_SECTION, "MLX", "ok", seen)


def _device() -> str:
    """For instance "CUDA (NVIDIA H200)"."""
    import mlx.core as mx

    from spec_core.device import backend

    name = mx.device_info().get("device_name", "unknown device")
    if backend() == "cpu":
        return f"the CPU ({name}, {os.cpu_count()} cores)"
    shown = "Metal" if backend() == "metal" else "CUDA"
    return f"{shown} ({name})"


def _installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def blas(asked: str) -> Iterator[Finding]:
    """What multiplies float32 matrices; nothing where there is no choice."""
    from spec_server import device

    if device.arithmetic() is None:
        return
    used = device.blas()
    if used is None and asked != BUNDLED:
        yield Finding(_SECTION, "BLAS", "note", device.BUNDLED_BLAS, ADVICE)
    else:
        yield Finding(_SECTION, "BLAS", "ok", used or device.BUNDLED_BLAS)


@dataclass(frozen=True, slots=True)
class Memory:
    """What a process may use, in bytes.

    Attributes:
        physical: what the machine has.
        recommended: what a GPU recommends as the most; None on a CPU.
        container: what a container's limit leaves; None without one.
        limit: what an engine takes unless --memory-limit says otherwise; None: no limit.
    """

    physical: int
    recommended: int | None
    container: int | None
    limit: int | None

    @property
    def usable(self) -> int:
        """The least of them."""
        known = (self.physical, self.recommended, self.container, self.limit)
        return min(amount for amount in known if amount)


def memory_facts() -> Memory:
    """This machine's."""
    import mlx.core as mx

    from spec_server.memory import default_limit

    recommended = mx.device_info().get("max_recommended_working_set_size")
    return Memory(
        physical=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        recommended=recommended if isinstance(recommended, int) and recommended else None,
        container=_container_limit(),
        limit=default_limit(),
    )


def _container_limit() -> int | None:
    try:
        text = _CGROUP_LIMIT.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def memory() -> Finding:
    """Memory, and how much of it an engine takes."""
    facts = memory_facts()
    parts = [f"{in_bytes(facts.physical)} in the machine"]
    if facts.recommended is not None:
        parts.append(f"the GPU's working set should stay below {in_bytes(facts.recommended)}")
    if facts.limit is not None:
        parts.append(f"an engine uses {in_bytes(facts.limit)} at most")
    if facts.container is None or facts.container >= (facts.limit or facts.physical):
        return Finding(_SECTION, "memory", "ok", "; ".join(parts))
    parts.append(f"but this container is ended beyond {in_bytes(facts.container)}")
    advice = f"give `spec serve` --memory-limit {facts.container * 4 // 5 // 2**20}M"
    return Finding(_SECTION, "memory", "note", "; ".join(parts), advice)


def disk() -> Finding:
    """Room for downloads."""
    from spec_cli.hub import cache_folder

    folder = cache_folder()
    free = shutil.disk_usage(_existing(folder)).free
    seen = f"{in_bytes(free)} free for models in {folder}"
    if free < _LITTLE_DISK:
        advice = "`spec rm` frees room; HF_HOME names another place"
        return Finding(_SECTION, "disk", "note", seen, advice)
    return Finding(_SECTION, "disk", "ok", seen)


def caches() -> Iterator[Finding]:
    """Where this program keeps what it may use again."""
    from spec_cli.chat.history import history_file
    from spec_cli.hub import cache_folder
    from spec_core.errors import SpecError
    from spec_server.calibration import curves_directory

    yield folder("hub cache", cache_folder())
    try:
        yield folder("round times", curves_directory())
    except SpecError as error:
        yield Finding(_SECTION, "round times", "problem", str(error), "name another place")
    yield folder("chat history", history_file().parent)
    prefixes = os.environ.get("SPEC_PREFIX_CACHE_DIR")
    if prefixes:
        yield folder("prefix cache", Path(prefixes))


def folder(name: str, named: Path) -> Finding:
    """A folder that is written to."""
    place = named.expanduser()
    if place.exists() and not place.is_dir():
        advice = "remove it, or name another place"
        return Finding(_SECTION, name, "problem", f"{place} is not a folder", advice)
    if not os.access(_existing(place), os.W_OK):
        advice = f"make {_existing(place)} writable, or name another place"
        return Finding(_SECTION, name, "problem", f"{place} cannot be written", advice)
    made = "" if place.is_dir() else " (made when it is needed)"
    return Finding(_SECTION, name, "ok", f"{place}{made}")


def _existing(place: Path) -> Path:
    """The folder itself, or the nearest one above it that exists."""
    return next(one for one in (place, *place.absolute().parents) if one.is_dir())
