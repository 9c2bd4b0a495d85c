"""What differs between the devices that MLX computes on."""

from __future__ import annotations

import mlx.core as mx


def on_cuda() -> bool:
    """Whether MLX computes on an NVIDIA GPU."""
    return mx.default_device().type == mx.DeviceType.gpu and not mx.metal.is_available()


def runs_beside_host() -> bool:
    """Whether the device works while the host builds the next graph, so that submitting early pays.
    A CPU shares its cores with the host, and nothing was gained there."""
    return mx.default_device().type != mx.DeviceType.cpu


def start(*arrays: mx.array) -> None:
    """Begin to evaluate arrays without waiting."""
    mx.async_eval(*arrays)  # type: ignore[no-untyped-call]
