"""What differs between the devices that MLX computes on."""

from __future__ import annotations

from typing import Literal

import mlx.core as mx

Backend = Literal["cpu", "metal", "cuda"]


def backend() -> Backend:
    """Where MLX computes by default."""
    if mx.default_device().type == mx.DeviceType.cpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def on_cuda() -> bool:
    """Whether MLX computes on an NVIDIA GPU."""
    return backend() == "cuda"


def runs_beside_host() -> bool:
    """Whether the device is another than the host's CPU."""
    return backend() != "cpu"


def layers_ahead() -> int:
    """How many layers the host builds before the device is given them.

    A CPU takes little work at a time, and keeps the host waiting while it has more: there each
    layer is started by itself, and the host builds the next one meanwhile. (A round that writes
    keys while the one before it still reads them would copy the buffer; with so little in the
    queue, that reader is done.)
    """
    return 6 if runs_beside_host() else 1


def start_layer(hidden: mx.array) -> None:
    """Begin with a drafter's layer where layers are started one by one; see `layers_ahead`."""
    if layers_ahead() == 1:
        start(hidden)


def start(*arrays: mx.array) -> None:
    """Begin to evaluate arrays without waiting."""
    mx.async_eval(*arrays)  # type: ignore[no-untyped-call]
