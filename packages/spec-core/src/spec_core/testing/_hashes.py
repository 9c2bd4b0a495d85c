"""Integer hashes on the device and on the host, and the tables made from them."""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx
import numpy as np
import numpy.typing as npt

ODD = 2654435769
MODULUS = 2**32


def scatter(x: mx.array) -> mx.array:
    """A bijection of uint32 that spreads low bits upwards and some of them back."""
    x = (x ^ (x >> 15)) * 0x2C1B3C6D
    return x ^ (x >> 13)


def mix_int(x: int) -> int:
    """A bijection of the integers below 2**32 that scatters bits (MurmurHash3's finaliser)."""
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) % MODULUS
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) % MODULUS
    return x ^ (x >> 16)


def u32(value: int) -> mx.array:
    """A uint32 scalar."""
    return mx.array(value % MODULUS, dtype=mx.uint32)


def fraction(x: int) -> float:
    """A number in 0..1 that looks random, for each integer."""
    return mix_int(x % MODULUS) / MODULUS


@lru_cache(maxsize=64)
def words(rows: int, columns: int, seed: int) -> npt.NDArray[np.uint32]:
    """[rows, columns] hashes."""
    x = np.arange(rows * columns, dtype=np.uint32) + np.uint32(seed * 7919 % MODULUS)
    for factor in (0x85EBCA6B, 0xC2B2AE35, 0x27D4EB2F):
        x = (x ^ (x >> np.uint32(15))) * np.uint32(factor)
    return (x ^ (x >> np.uint32(16))).reshape(rows, columns)


def halves(rows: int, columns: int, seed: int) -> mx.array:
    """[rows, columns] multiples of 1/64 in -1/2..1/2, float32."""
    bits = (words(rows, columns, seed) >> np.uint32(11)) & np.uint32(63)
    return mx.array((bits.astype(np.float32) - 32.0) / 64.0)
