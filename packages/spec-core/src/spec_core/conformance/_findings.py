"""Named findings, and the comparisons that make them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

import mlx.core as mx
import numpy as np

from spec_core.errors import SeamError, SpecError
from spec_core.seams import PerToken, RowState, StateImage


@dataclass(frozen=True, slots=True)
class Finding:
    """One check that did not hold.

    Attributes:
        check: the check's name, as in the table of its module.
        message: what was seen.
    """

    check: str
    message: str

    def __str__(self) -> str:
        return f"{self.check}: {self.message}"


class ConformanceError(SpecError):
    """A part does not keep the contract of its Protocol.

    Attributes:
        findings: the checks that failed.
    """

    def __init__(self, subject: str, findings: Sequence[Finding]) -> None:
        lines = "".join(f"\n- {finding}" for finding in findings)
        super().__init__(f"{subject} breaks its contract in {len(findings)} checks:{lines}")
        self.findings = tuple(findings)


class CheckFailed(Exception):
    """Raised inside a check; becomes a Finding."""


KitT = TypeVar("KitT")


def run(kit: KitT, checks: Mapping[str, Callable[[KitT], None]]) -> tuple[Finding, ...]:
    """Run every check; an exception that a check did not expect is a finding too."""
    findings = []
    for name, check in checks.items():
        try:
            check(kit)
        except CheckFailed as failure:
            findings.append(Finding(name, str(failure)))
        except Exception as error:  # whatever the subject raised is what we came to report
            findings.append(Finding(name, f"raised {type(error).__name__}: {error}"))
    return tuple(findings)


def require(condition: bool, message: str) -> None:
    """Fail the check with `message` unless `condition` holds."""
    if not condition:
        raise CheckFailed(message)


def refused(what: str, call: Callable[[], object]) -> None:
    """Fail the check unless `call` raises SeamError."""
    try:
        call()
    except SeamError:
        return
    except Exception as error:
        raise CheckFailed(
            f"{what} raised {type(error).__name__} ({error}) instead of SeamError"
        ) from error
    raise CheckFailed(f"{what} was not refused with SeamError")


def require_close(what: str, got: mx.array, wanted: mx.array, tolerance: float) -> None:
    """Fail the check unless shapes agree and no entry differs by more than `tolerance`."""
    require(got.shape == wanted.shape, f"{what}: shape {got.shape}, expected {wanted.shape}")
    one, other = _numbers(mx.stack([got, wanted]))
    same = (one == other) | (np.isnan(one) & np.isnan(other))
    with np.errstate(invalid="ignore"):
        gap = np.where(same, 0.0, np.abs(one - other))
    worst = float(np.max(gap, initial=0.0))
    require(worst <= tolerance, f"{what}: differs by up to {worst:.3g} (allowed {tolerance:.3g})")


def require_finite(what: str, array: mx.array) -> None:
    """Fail the check where an entry is NaN or infinite."""
    require(bool(np.isfinite(_numbers(array)).all()), f"{what}: has entries that are not finite")


def require_lengths(what: str, state: RowState, wanted: Sequence[int]) -> None:
    """Fail the check unless a state's lengths are these host integers."""
    got = list(state.lengths)
    require(all(type(n) is int for n in got), f"{what}: lengths {got} are not host integers")
    require(got == list(wanted), f"{what}: lengths are {got}, expected {list(wanted)}")
    require(state.rows == len(got), f"{what}: rows is {state.rows} with {len(got)} lengths")


def _numbers(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32))


def raw_bytes(array: mx.array) -> bytes:
    """The array's contents, copied to the host."""
    flat = mx.contiguous(array).reshape(-1)
    return np.array(mx.view(flat, mx.uint8)).tobytes() if flat.size else b""


def image_bytes(image: StateImage) -> dict[str, bytes]:
    """Host copies of everything an image holds."""
    tokens = {f"per_token/{n}": raw_bytes(p.array) for n, p in image.per_token.items()}
    return tokens | {f"at_end/{n}": raw_bytes(a) for n, a in image.at_end.items()}


def check_image(image: StateImage, start: int, length: int) -> None:
    """Fail the check unless an image has the extent that it should have."""
    require(
        (image.start, image.length) == (start, length),
        f"image says {image.start}..{image.length}, expected {start}..{length}",
    )
    for name, part in image.per_token.items():
        held, wanted = part.array.shape[0], length - start
        least = wanted if part.reach is None else min(wanted, part.reach)
        require(
            least <= held <= wanted,
            f"per_token {name!r} (reach {part.reach}) holds {held} of {wanted} positions",
        )


def assemble(first: StateImage, second: StateImage) -> StateImage:
    """One image from an image of 0..n and one of n..length of the same row, as a cache would."""
    parts = {}
    for name, newer in second.per_token.items():
        older = first.per_token[name].array
        whole = newer.array.shape[0] == second.length - second.start
        array = mx.concatenate([older, newer.array]) if whole else newer.array
        parts[name] = PerToken(array, newer.reach)
    return StateImage(first.start, second.length, MappingProxyType(parts), second.at_end)


def trimmed(image: StateImage) -> StateImage:
    """The image with no more positions than each array's reach asks for."""
    parts = {
        name: PerToken(part.array[max(part.array.shape[0] - part.reach, 0) :], part.reach)
        if part.reach is not None
        else part
        for name, part in image.per_token.items()
    }
    return StateImage(image.start, image.length, MappingProxyType(parts), image.at_end)


def draw_tokens(seed: int, count: int, vocab_size: int) -> list[int]:
    """Token ids from a fixed stream."""
    stream = random.Random(seed)
    return [stream.randrange(vocab_size) for _ in range(count)]


def chunks(tokens: Sequence[int], sizes: Iterable[int]) -> list[list[int]]:
    """Cut `tokens` into chunks of these sizes, the rest last."""
    pieces, at = [], 0
    for size in sizes:
        pieces.append(list(tokens[at : at + size]))
        at += size
    return [p for p in [*pieces, list(tokens[at:])] if p]
