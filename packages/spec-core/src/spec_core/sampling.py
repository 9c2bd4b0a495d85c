"""How one row samples: its parameters, the shaping of logits, and the noise.

The order is fixed: penalties, bias, mask, temperature, top-k, top-p, min-p; ties go to the lowest
token id. Everything here is a pure function of arrays, so that drafting, verification and plain
decoding share it.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from types import MappingProxyType

import mlx.core as mx

from spec_core.errors import InvalidValueError

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy (the reference implementation's threshold)."""

_NO_BIAS: Mapping[int, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a row samples. The defaults are greedy and neutral.

    Attributes:
        temperature: 0 or more; below 1e-5 greedy.
        top_k: keep the k most likely tokens; 0 = all.
        top_p: keep the smallest set of most likely tokens with at least this mass, in (0, 1].
        min_p: drop tokens less likely than this fraction of the most likely one, in [0, 1].
        presence_penalty: subtracted from the logit of every generated token, in [-2, 2].
        frequency_penalty: subtracted once for each time a token was generated, in [-2, 2].
        repetition_penalty: divides positive and multiplies negative logits of every token of
            the prompt and the answer; more than 0, 1 = neutral.
        logit_bias: added to the logits of the given token ids, each in [-100, 100].
        seed: makes the row's tokens a function of the seed alone (the coupled rule); None
            draws fresh entropy and uses the rejection rule.
        logprobs: report log-probabilities with this many alternatives (0..20); None = not at all.

    Raises:
        InvalidValueError: a value is out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: _NO_BIAS)
    seed: int | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0.0, math.inf, "a finite number of at least 0")
        _integer("top_k", self.top_k, 0, None, "a whole number of at least 0 (0 = off)")
        _number("top_p", self.top_p, 0.0, 1.0, "more than 0 and at most 1 (1 = off)", open_low=True)
        _number("min_p", self.min_p, 0.0, 1.0, "from 0 (off) to 1")
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0, "from -2 to 2 (0 = off)")
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0, "from -2 to 2 (0 = off)")
        _number(
            "repetition_penalty",
            self.repetition_penalty,
            0.0,
            math.inf,
            "more than 0 (1 = off)",
            open_low=True,
        )
        for token, bias in self.logit_bias.items():
            _integer("logit_bias key", token, 0, None, "a token id (a whole number of at least 0)")
            _number(f"logit_bias[{token}]", bias, -100.0, 100.0, "from -100 to 100")
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**64 - 1, "a 64-bit whole number")
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, 20, "a whole number from 0 to 20")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def coupled(self) -> bool:
        """Seeded sampling: noise is a pure function of seed, position and token."""
        return not self.greedy and self.seed is not None

    @property
    def rejection(self) -> bool:
        """Unseeded sampling: speculative sampling's accept test."""
        return not self.greedy and self.seed is None

    @property
    def counts_tokens(self) -> bool:
        """A penalty is on, so that the history has to be counted."""
        return bool(
            self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        )

    @property
    def filters(self) -> bool:
        return not self.greedy and bool(self.top_k or self.top_p < 1.0 or self.min_p)


def _number(
    name: str, value: object, low: float, high: float, allowed: str, *, open_low: bool = False
) -> None:
    ok = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not ok or not low <= value <= high or (open_low and value == low):  # type: ignore[operator]
        raise InvalidValueError(name, value, allowed)


def _integer(name: str, value: object, low: int, high: int | None, allowed: str) -> None:
    ok = isinstance(value, int) and not isinstance(value, bool)
    if not ok or value < low or (high is not None and value > high):  # type: ignore[operator]
        raise InvalidValueError(name, value, allowed)


@dataclass(frozen=True, slots=True)
class History:
    """What penalties look at, one table a row.

    Attributes:
        generated: [B, V] float32, how often each token was generated (the anchor included).
        prompt: [B, V] bool, whether the token occurs in the prompt.
    """

    generated: mx.array
    prompt: mx.array


@dataclass(frozen=True, slots=True)
class Columns:
    """The rows' parameters as device columns, [B, 1] each, and tables, [B, V]."""

    temperature: mx.array
    top_k: mx.array
    top_p: mx.array
    log_min_p: mx.array
    presence: mx.array
    frequency: mx.array
    repetition: mx.array
    bias: mx.array | None
    filters: bool

    @classmethod
    def of(cls, rows: Sequence[SamplingParams], vocab_size: int) -> Columns:
        def column(values: Sequence[float]) -> mx.array:
            return mx.array(list(values), dtype=mx.float32)[:, None]

        return cls(
            temperature=column([1.0 if r.greedy else r.temperature for r in rows]),
            top_k=mx.array([[r.top_k or vocab_size] for r in rows], dtype=mx.int32),
            top_p=column([r.top_p if r.top_p < 1.0 else math.inf for r in rows]),
            log_min_p=column([math.log(r.min_p) if r.min_p else -math.inf for r in rows]),
            presence=column([r.presence_penalty for r in rows]),
            frequency=column([r.frequency_penalty for r in rows]),
            repetition=column([r.repetition_penalty for r in rows]),
            bias=_bias_table(rows, vocab_size),
            filters=any(r.filters for r in rows),
        )


def _bias_table(rows: Sequence[SamplingParams], vocab_size: int) -> mx.array | None:
    if not any(r.logit_bias for r in rows):
        return None
    table = mx.zeros((len(rows), vocab_size))
    for index, row in enumerate(rows):
        if row.logit_bias:
            ids = mx.array(list(row.logit_bias), dtype=mx.int32)
            table[index, ids] = mx.array(list(row.logit_bias.values()), dtype=mx.float32)
    return table


def shape(
    logits: mx.array,
    columns: Columns,
    history: History | None,
    mask: mx.array | None = None,
) -> mx.array:
    """Logits after penalties, bias, mask, temperature and filters, float32; dropped = -inf.

    Args:
        logits: [B, T, V].
        columns: the rows' parameters.
        history: tables of [B, T, V] or [B, 1, V], or None where no row has a penalty.
        mask: [B, T, V] allowed tokens, or None.
    """
    x = logits.astype(mx.float32)
    if history is not None:
        x = _penalise(x, columns, history)
    if columns.bias is not None:
        x = x + columns.bias[:, None, :]
    if mask is not None:
        x = mx.where(mask, x, -mx.inf)
    x = x / columns.temperature[:, :, None]
    return _filter(x, columns) if columns.filters else x


def _penalise(x: mx.array, columns: Columns, history: History) -> mx.array:
    repetition = columns.repetition[:, :, None]
    generated = history.generated > 0
    scaled = mx.where(x > 0, x / repetition, x * repetition)
    x = mx.where(generated | history.prompt, scaled, x)
    x = x - columns.presence[:, :, None] * generated
    return x - columns.frequency[:, :, None] * history.generated


def _filter(x: mx.array, columns: Columns) -> mx.array:
    """Top-k, then top-p of what is left, then min-p.

    Top-k and top-p both keep the n largest entries, so one sort serves both; among equal
    entries at the border the lowest token ids stay.
    """
    vocab = x.shape[-1]
    ordered = -mx.sort(-x, axis=-1)
    top_k = columns.top_k[:, :, None]
    within = mx.where(mx.arange(vocab) < top_k, ordered, -mx.inf)
    probabilities = mx.softmax(within, axis=-1, precise=True)
    before = mx.cumsum(probabilities, axis=-1) - probabilities
    wanted = (before < columns.top_p[:, :, None]) & (within > -mx.inf)
    keep = mx.maximum(wanted.sum(axis=-1, keepdims=True), 1)
    threshold = mx.take_along_axis(ordered, keep - 1, axis=-1)
    above = x > threshold
    level = x == threshold
    room = keep - above.sum(axis=-1, keepdims=True)
    x = mx.where(above | (level & (mx.cumsum(level, axis=-1) <= room)), x, -mx.inf)
    return mx.where(x >= ordered[..., :1] + columns.log_min_p[:, :, None], x, -mx.inf)


class Stream(IntEnum):
    """Independent noise streams of one row."""

    SHARED = 0
    """Seeded rows: drafter and target use the same noise at a position (the coupled rule)."""
    DRAFT = 1
    ACCEPT = 2
    TARGET = 3


def noise_key(seed: int, round_index: int, stream: Stream, position: int) -> tuple[int, int]:
    """Two 32-bit words that name the noise of one row at one absolute position."""
    packed = struct.pack("<QQBQ", seed & (2**64 - 1), round_index, stream, position)
    first, second = struct.unpack("<II", hashlib.blake2b(packed, digest_size=8).digest())
    return first, second


def uniform(seed: int, round_index: int, position: int) -> float:
    """A uniform number in [0, 1) for the accept test at one position."""
    first, second = noise_key(seed, round_index, Stream.ACCEPT, position)
    return ((first << 32 | second) >> 11) * 2.0**-53


def gumbel(keys: mx.array, token_ids: mx.array) -> mx.array:
    """Standard Gumbel noise as a pure function of (key, token id), float32.

    Args:
        keys: [..., 2] uint32 from `noise_key`.
        token_ids: [V] uint32.

    Returns:
        [..., V]. The same value for the same key and id, whatever else is asked with it.
    """
    first, second = keys[..., :1], keys[..., 1:]
    bits = _mix(_mix(first ^ (token_ids * _GOLDEN)) + second)
    upper = mx.minimum((bits.astype(mx.float32) + 0.5) * 2.0**-32, 1.0 - 2.0**-24)
    return -mx.log(-mx.log1p(-upper))


_GOLDEN = mx.array(0x9E3779B9, dtype=mx.uint32)
_MULTIPLIERS = (mx.array(0x7FEB352D, dtype=mx.uint32), mx.array(0x846CA68B, dtype=mx.uint32))


def _mix(h: mx.array) -> mx.array:
    """A bijective 32-bit mixer (xor-shift-multiply with the "lowbias32" constants)."""
    h = (h ^ (h >> 16)) * _MULTIPLIERS[0]
    h = (h ^ (h >> 15)) * _MULTIPLIERS[1]
    return h ^ (h >> 16)
