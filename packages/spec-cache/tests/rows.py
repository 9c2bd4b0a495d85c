"""Rows whose state is a function of their tokens, so that any picture can be checked.

Entry p of each array is made from a hash of tokens[: p + 1]: a picture that mixes two prefixes, or
is shifted by a position, cannot be right by chance.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import mlx.core as mx
import numpy as np

from spec_cache import Hit, Namespace, PrefixCache
from spec_core.seams import PerToken, StateImage

BLOCK = 8
NAMESPACE = Namespace("target", "drafter", "bf16")


@dataclass(frozen=True)
class Kind:
    """What a row consists of.

    Attributes:
        dense: width of the arrays of full attention; 0 for none.
        window: reach of the sliding layers; 0 for none.
        ring: positions that the ring holds.
        recurrent: width of the recurrent state; 0 for none.
        drafter: reach of the drafter's context; 0 for all of it.
    """

    dense: int = 3
    window: int = 0
    ring: int = 0
    recurrent: int = 0
    drafter: int = 0


DENSE = Kind()
WINDOW = Kind(window=20, ring=28)
SHORT_WINDOW = Kind(window=5, ring=20)
ONLY_WINDOW = Kind(dense=0, window=20, ring=28, drafter=12)
HYBRID = Kind(recurrent=4)
RECURRENT = Kind(dense=0, recurrent=4, drafter=1)
KINDS = (DENSE, WINDOW, SHORT_WINDOW, ONLY_WINDOW, HYBRID, RECURRENT)


def hashes(tokens: Sequence[int]) -> np.ndarray:
    """uint32 hash of each prefix but the empty one."""
    out, state = np.zeros(len(tokens), dtype=np.uint32), 17
    for position, token in enumerate(tokens):
        state = (state * 2654435769 + token + 1) % 2**32
        state ^= state >> 15
        out[position] = state
    return out


def picture(
    kind: Kind, tokens: Sequence[int], start: int = 0, ring: int | None = None
) -> dict[str, StateImage]:
    """The image of a row that has seen all of `tokens`, from `start` on."""
    seen, length = hashes(tokens), len(tokens)
    ring = kind.ring if ring is None else ring
    target: dict[str, PerToken] = {}
    if kind.dense:
        target["keys"] = PerToken(_floats(seen[start:], 2, kind.dense))
        target["values"] = PerToken(_floats(seen[start:] ^ 0xABCD, 2, kind.dense))
        target["scales"] = PerToken(mx.array(seen[start:]))
    if kind.window:
        newest = seen[max(start, length - ring) :]
        target["ring"] = PerToken(_floats(newest, 1, 4), kind.window)
    ends: dict[str, mx.array] = {}
    if kind.recurrent:
        last = seen[-1:] if length else np.zeros(1, dtype=np.uint32)
        ends["state"] = _floats(last ^ 0x77, kind.recurrent, 2)[0].view(mx.int16)
        ends["count"] = mx.array(length, dtype=mx.int32)
    drafter = PerToken(mx.array(seen[start:] ^ 0x1234), kind.drafter or None)
    images = {
        "target": StateImage(start, length, MappingProxyType(target), MappingProxyType(ends)),
        "drafter": StateImage(start, length, MappingProxyType({"context": drafter})),
    }
    mx.eval([h.array for image in images.values() for h in image.per_token.values()])
    mx.eval(list(ends.values()))
    return images


def check(kind: Kind, tokens: Sequence[int], hit: Hit) -> None:
    """Assert that a hit's images are those of a row that has seen exactly that prefix."""
    if not hit.length:
        assert not hit.parts
        return
    expected = picture(kind, tokens[: hit.length], ring=hit.length)
    assert set(hit.parts) == set(expected)
    for name, image in expected.items():
        found = hit.parts[name]
        assert (found.start, found.length) == (0, hit.length)
        assert set(found.per_token) == set(image.per_token)
        assert set(found.at_end) == set(image.at_end)
        for key, held in image.per_token.items():
            assert found.per_token[key].reach == held.reach
            reach = hit.length if held.reach is None else min(held.reach, hit.length)
            same(found.per_token[key].array, held.array[hit.length - reach :])
        for key, array in image.at_end.items():
            same(found.at_end[key], array)


KIND_OF = {"same": WINDOW, "hybrid": HYBRID}


def converse(cache: PrefixCache, namespace: Namespace, rng: random.Random) -> None:
    """A few turns that share one of three beginnings with other conversations."""
    kind = KIND_OF.get(namespace.target, KINDS[0])
    start = random.Random(rng.randrange(3))
    tokens = [start.randrange(50) for _ in range(40)]
    for _ in range(3):
        tokens += [rng.randrange(4) for _ in range(rng.randrange(1, 20))]
        hit = cache.match(namespace, tokens)
        check(kind, tokens, hit)
        done = hit.length
        while done < len(tokens):
            end = min(done + 16, len(tokens))
            begin = cache.missing(namespace, tokens, end, since=done, checkpoint=True)
            if begin is not None:
                cache.store(namespace, tokens, picture(kind, tokens[:end], begin))
            done = end


def same(left: mx.array, right: mx.array) -> None:
    assert left.dtype == right.dtype
    assert left.shape == right.shape
    assert bits(left) == bits(right)


def bits(array: mx.array) -> bytes:
    whole = mx.contiguous(array.reshape(-1).view(mx.uint8))
    mx.eval(whole)
    return bytes(memoryview(whole))


def images_bits(parts: Mapping[str, StateImage]) -> list[bytes]:
    return [bits(h.array) for image in parts.values() for h in image.per_token.values()]


def _floats(values: np.ndarray, heads: int, width: int) -> mx.array:
    """[T, heads, width] bfloat16 of arbitrary bits, NaNs included."""
    spread = values[:, None].astype(np.uint64) * np.arange(1, heads * width + 1, dtype=np.uint64)
    halves = (spread >> np.uint64(3)).astype(np.uint16).reshape(len(values), heads, width)
    return mx.array(halves).view(mx.bfloat16)
