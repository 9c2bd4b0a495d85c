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
    """Whether the device works while the host builds the next graph, so that submitting early pays.
    A CPU shares its cores with the host, and nothing was gained there."""
    return backend() != "cpu"


def start(*arrays: mx.array) -> None:
    """Begin to evaluate arrays without waiting."""
    mx.async_eval(*arrays)  # type: ignore[no-untyped-call]
