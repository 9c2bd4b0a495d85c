"""The acceptance rules, as pure functions of arrays.

Greedy and coupled decoding accept while the draft equals the token the target itself chooses
(its argmax; with a seed, its argmax under shared Gumbel noise). The rejection rule is
speculative sampling (Leviathan et al. 2023, algorithm 1; Chen et al. 2023, algorithm 2).
"""

from __future__ import annotations

import mlx.core as mx

MIN_MASS = 1e-8
"""Below this, q counts as this much, and a residual as empty (the reference's constants)."""


def leading(passes: mx.array, lengths: mx.array) -> mx.array:
    """Length of the passing prefix of each row, [B] int32.

    Args:
        passes: [B, K] bool.
        lengths: [B] int32, how many columns of each row count.
    """
    inside = mx.arange(passes.shape[1], dtype=mx.int32) < lengths[:, None]
    return mx.cumprod((passes & inside).astype(mx.int32), axis=1).sum(axis=1)


def match(drafts: mx.array, lengths: mx.array, chosen: mx.array) -> mx.array:
    """Greedy and coupled rule: accepted drafts of each row, [B].

    Args:
        drafts: [B, K] drafted tokens.
        lengths: [B] how many of them are real.
        chosen: [B, K + 1] the target's own choice after the text and the first i drafts.
    """
    return leading(drafts == chosen[:, :-1], lengths)


def rejection(
    log_p: mx.array,
    log_q: mx.array | None,
    drafts: mx.array,
    lengths: mx.array,
    uniforms: mx.array,
) -> tuple[mx.array, mx.array]:
    """Rejection rule: accepted drafts [B], and the log-distribution [B, V] of the next token.

    Draft i passes if u_i < min(1, p_i(x_i) / q_i(x_i)). The next token follows
    normalise(max(p_a - q_a, 0)) after a rejection at a, p at column lengths[b] otherwise.

    Args:
        log_p: [B, K + 1, V] normalised log-probabilities of the target.
        log_q: [B, K, V] those of the drafter, or None for one-hot drafts.
        drafts: [B, K].
        lengths: [B] how many drafts are real.
        uniforms: [B, K] in [0, 1).
    """
    picked = drafts[..., None]
    p = mx.exp(mx.take_along_axis(log_p[:, :-1], picked, axis=-1))[..., 0]
    if log_q is None:
        q = mx.ones_like(p)
    else:
        q = mx.exp(mx.take_along_axis(log_q, picked, axis=-1))[..., 0]
    accepted = leading(uniforms < p / mx.maximum(q, MIN_MASS), lengths)
    return accepted, _next_distribution(log_p, log_q, drafts, lengths, accepted)


def _next_distribution(
    log_p: mx.array,
    log_q: mx.array | None,
    drafts: mx.array,
    lengths: mx.array,
    accepted: mx.array,
) -> mx.array:
    log_p_next = _column(log_p, accepted)
    rejected_at = mx.minimum(accepted, drafts.shape[1] - 1)
    if log_q is None:
        rejected = mx.take_along_axis(drafts, rejected_at[:, None], axis=1)
        q = (mx.arange(log_p.shape[-1]) == rejected).astype(mx.float32)
    else:
        q = mx.exp(_column(log_q, rejected_at))
    residual = mx.maximum(mx.exp(log_p_next) - q, 0.0)
    mass = residual.sum(axis=-1, keepdims=True)
    use_residual = (accepted < lengths)[:, None] & (mass > MIN_MASS)
    return mx.where(use_residual, mx.log(residual) - mx.log(mass), log_p_next)


def _column(x: mx.array, index: mx.array) -> mx.array:
    """x[b, index[b]] of [B, T, V]."""
    return mx.take_along_axis(x, index[:, None, None], axis=1)[:, 0]
