"""Integer hashes on the device and on the host."""

from __future__ import annotations

import mlx.core as mx

ODD = 2654435769
MODULUS = 2**32


def mix(x: mx.array) -> mx.array:
    """A bijection of uint32 that scatters its bits (the finaliser of MurmurHash3)."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


def mix_int(x: int) -> int:
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) % MODULUS
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) % MODULUS
    return x ^ (x >> 16)


def u32(value: int) -> mx.array:
    return mx.array(value % MODULUS, dtype=mx.uint32)


def token_hash(tokens: mx.array, seed: int) -> mx.array:
    return mix(tokens.astype(mx.uint32) * ODD + u32(seed * 7919 + 1))


def half(x: mx.array, width: int) -> mx.array:
    """[..., width] multiples of 1/64 in -1/2..1/2 from [...] hashes."""
    columns = mx.arange(width, dtype=mx.uint32) * u32(0x9E3779B1) + u32(17)
    bits = mix(x[..., None] + columns) & 63
    return (bits.astype(mx.float32) - 32.0) / 64.0


def fraction(x: int) -> float:
    return mix_int(x % MODULUS) / MODULUS
