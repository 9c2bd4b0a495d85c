"""Sampling: the shape of logits, and the distributions that come out."""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from spec_core import InvalidValueError, Proposal, Request, SamplingParams
from spec_core.chooser import Sampler
from spec_core.sampling import Columns, History, gumbel, noise_key, shape

VOCAB = 6


@pytest.fixture
def fixed_entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unseeded rows draw their entropy from a fixed stream, so that a failure can be repeated."""
    monkeypatch.setattr("spec_core.chooser.secrets.randbits", random.Random(7).getrandbits)


# --- bounds ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "1"),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_k", True),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", -0.5),
        ("min_p", -0.01),
        ("min_p", 1.5),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("seed", 1.0),
        ("seed", 2**64),
        ("logprobs", 21),
        ("logprobs", -1),
    ],
)
def test_values_out_of_range_are_named(field: str, value: object) -> None:
    with pytest.raises(InvalidValueError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field
    assert caught.value.value is value
    assert caught.value.allowed
    for part in (field, repr(value), caught.value.allowed):
        assert part in str(caught.value)


@pytest.mark.parametrize("bias", [{1: 101.0}, {1: math.nan}, {-1: 1.0}, {"1": 1.0}])
def test_a_bias_out_of_range_is_named(bias: dict) -> None:
    with pytest.raises(InvalidValueError, match="logit_bias"):
        SamplingParams(logit_bias=bias)


def test_edges_of_the_ranges_are_allowed() -> None:
    SamplingParams(
        temperature=0, top_k=0, top_p=1, min_p=1, presence_penalty=-2, frequency_penalty=2
    )
    SamplingParams(top_p=1e-9, repetition_penalty=1e-3, logit_bias={0: -100, 5: 100}, logprobs=20)
    SamplingParams(seed=-(2**63))
    SamplingParams(seed=2**64 - 1)


@pytest.mark.parametrize("token", [VOCAB, VOCAB + 100])
def test_token_ids_outside_the_vocabulary_are_refused(token: int) -> None:
    with pytest.raises(InvalidValueError, match="logit_bias"):
        Sampler(VOCAB, [Request((1,), SamplingParams(logit_bias={token: 1.0}))])
    with pytest.raises(InvalidValueError, match="prompt"):
        Sampler(VOCAB, [Request((1, token))])


# --- the shape of logits ---------------------------------------------------------------------


def reference_shape(
    logits: np.ndarray,
    params: SamplingParams,
    generated: np.ndarray,
    prompt: np.ndarray,
    mask: np.ndarray,
) -> tuple[np.ndarray, float]:
    """Penalties, bias, mask, temperature, top-k, top-p, min-p on one [V] row, one at a time.

    Returns the shaped row (dropped = -inf), and how close a decision came to its border, as a
    share: ties aside, a decision that rounding could turn is not compared.
    """
    x = logits.astype(np.float64).copy()
    for token in range(x.size):
        if generated[token] or prompt[token]:
            x[token] = (
                x[token] / params.repetition_penalty
                if x[token] > 0
                else x[token] * params.repetition_penalty
            )
        x[token] -= params.presence_penalty * (generated[token] > 0)
        x[token] -= params.frequency_penalty * generated[token]
        x[token] += params.logit_bias.get(token, 0.0)
        if not mask[token]:
            x[token] = -np.inf
    x /= 1.0 if params.greedy else params.temperature
    if params.greedy:
        return x, 1.0
    order = sorted(range(x.size), key=lambda token: (-x[token], token))
    kept = [token for token in order if x[token] > -np.inf]
    kept = kept[: params.top_k] if params.top_k else kept
    kept, closest = reference_top_p(x, kept, params.top_p)
    survivors = []
    for token in kept:
        ratio = math.exp(x[token] - x[kept[0]])
        closest = min(closest, abs(ratio - params.min_p) if params.min_p else 1.0)
        if ratio >= params.min_p:
            survivors.append(token)
    dropped = [token for token in range(x.size) if token not in survivors]
    x[dropped] = -np.inf
    return x, closest


def reference_top_p(x: np.ndarray, kept: list[int], top_p: float) -> tuple[list[int], float]:
    if top_p == 1.0:
        return kept, 1.0
    weights = [math.exp(x[token] - x[kept[0]]) for token in kept]
    nucleus, mass, closest = [], 0.0, 1.0
    for token, weight in zip(kept, weights, strict=True):
        if nucleus and mass >= top_p:
            break
        nucleus.append(token)
        mass += weight / sum(weights)
        closest = min(closest, abs(mass - top_p))
    return nucleus, closest


def random_params(stream: np.random.Generator) -> SamplingParams:
    def some(neutral: float, *values: float) -> float:
        return float(stream.choice(values)) if stream.random() < 0.5 else neutral

    return SamplingParams(
        temperature=float(stream.choice([0.0, 0.3, 0.7, 1.0, 2.5])),
        top_k=int(some(0, *range(1, VOCAB + 3))),
        top_p=some(1.0, *stream.uniform(0.05, 1.0, 3)),
        min_p=some(0.0, *stream.uniform(0.0, 1.0, 3)),
        presence_penalty=some(0.0, 0.5, -1.25, 2.0),
        frequency_penalty=some(0.0, 0.25, -0.5, 2.0),
        repetition_penalty=some(1.0, 1.3, 0.7),
        logit_bias={int(t): some(0.5, -100.0, -1.0, 3.0) for t in stream.integers(0, VOCAB, 2)},
    )


def random_logits(stream: np.random.Generator, rows: int) -> np.ndarray:
    """[rows, V]: half of the rows full of ties, and here and there a token that is impossible."""
    smooth, coarse = stream.normal(0, 2, (rows, VOCAB)), stream.integers(-2, 3, (rows, VOCAB))
    logits = np.where(stream.random((rows, 1)) < 0.5, smooth, coarse).astype(np.float32)
    impossible = stream.random((rows, VOCAB)) < 0.05
    impossible[:, 0] = False
    return np.where(impossible, -np.inf, logits).astype(np.float32)


def test_shaping_equals_the_reference() -> None:
    """1500 rows in one batch, each with its own parameters, history and mask."""
    rows, stream = 1500, np.random.default_rng(5)
    params = [random_params(stream) for _ in range(rows)]
    logits = random_logits(stream, rows)
    generated = (stream.integers(0, 3, (rows, VOCAB)) * stream.integers(0, 2, (rows, 1))).astype(
        np.float32
    )
    prompt = stream.random((rows, VOCAB)) < 0.3
    mask = stream.random((rows, VOCAB)) < 0.9
    mask[:, 0] = True
    history = History(mx.array(generated)[:, None], mx.array(prompt)[:, None])
    columns = Columns.of(params, VOCAB)
    shaped = np.array(shape(mx.array(logits)[:, None], columns, history, mx.array(mask)[:, None]))
    compared = 0
    for row in range(rows):
        wanted, closest = reference_shape(
            logits[row], params[row], generated[row], prompt[row], mask[row]
        )
        if closest < 1e-5:
            continue
        compared += 1
        got = shaped[row, 0]
        if params[row].greedy:
            assert wanted[got.argmax()] >= wanted.max() - 1e-5, params[row]
        else:
            np.testing.assert_allclose(got, wanted, atol=1e-4, err_msg=str(params[row]))
    assert compared > 0.9 * rows


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 1}, {1}),
        ({"top_k": 2}, {1, 3}),
        ({"top_k": 3}, {1, 3, 4}),
        ({"top_k": 4}, {0, 1, 3, 4}),
        ({"top_p": 0.01}, {1}),
        ({"top_p": 0.26}, {1, 3}),
        ({"min_p": 1.0}, {1, 3, 4}),
        ({"top_k": 5, "min_p": 0.9}, {1, 3, 4}),
    ],
)
def test_ties_go_to_the_lowest_ids(params: dict, kept: set[int]) -> None:
    logits = mx.array([[[1.0, 2.0, 1.0, 2.0, 2.0, 1.0]]])
    shaped = shape(logits, Columns.of([SamplingParams(1.0, **params)], VOCAB), None)
    assert {int(t) for t in np.flatnonzero(np.array(shaped[0, 0]) > -np.inf)} == kept


def test_a_tiny_top_p_is_greedy_not_uniform() -> None:
    logits = mx.random.normal((1, 1, 50), key=mx.random.key(3))
    shaped = shape(logits, Columns.of([SamplingParams(1.0, top_p=1e-9)], 50), None)
    assert mx.sum(shaped > -mx.inf).item() == 1
    assert mx.argmax(shaped).item() == mx.argmax(logits).item()


def test_neutral_values_drop_nothing_beside_a_row_that_filters() -> None:
    """top_p = 1 is off, even where the other tokens' mass rounds to 1."""
    params = [SamplingParams(1.0), SamplingParams(1.0, top_k=1)]
    logits = mx.broadcast_to(mx.array([0.0, -30.0, -40.0]), (2, 1, 3))
    shaped = np.array(shape(logits, Columns.of(params, 3), None))
    assert shaped[0, 0].tolist() == [0.0, -30.0, -40.0]
    assert shaped[1, 0].tolist() == [0.0, -math.inf, -math.inf]


# --- noise -----------------------------------------------------------------------------------


def test_noise_is_a_function_of_key_and_token_alone() -> None:
    keys = mx.array([noise_key(s, 1, 0, p) for s in range(3) for p in range(4)], dtype=mx.uint32)
    whole = np.array(gumbel(keys, mx.arange(1000, dtype=mx.uint32)))
    some = np.array(gumbel(keys[5:7], mx.array([7, 999, 0], dtype=mx.uint32)))
    assert (some == whole[5:7][:, [7, 999, 0]]).all()
    assert np.isfinite(whole).all()
    assert len(np.unique(whole)) > 0.98 * whole.size


def test_noise_is_gumbel_distributed() -> None:
    """The empirical distribution function is within the 1e-6 band of Kolmogorov and Smirnov."""
    keys = mx.array([noise_key(9, 2, 1, p) for p in range(64)], dtype=mx.uint32)
    values = np.sort(np.array(gumbel(keys, mx.arange(1024, dtype=mx.uint32))).reshape(-1))
    expected = np.exp(-np.exp(-values.astype(np.float64)))
    gap = np.abs(expected - (np.arange(values.size) + 0.5) / values.size).max()
    assert gap < 2.7 / math.sqrt(values.size)


# --- distributions ---------------------------------------------------------------------------


def chi_square_excess(observed: np.ndarray, probabilities: np.ndarray) -> float:
    """Pearson's statistic as a standard normal deviate (Wilson-Hilferty); cells of p = 0 must be
    empty. Above 5 is a chance of 3e-7."""
    total = observed.sum()
    impossible = probabilities <= 0
    if observed[impossible].any():
        return math.inf
    seen, p = observed[~impossible], probabilities[~impossible]
    freedom = p.size - 1
    if freedom == 0:
        return 0.0
    statistic = float(((seen - total * p) ** 2 / (total * p)).sum())
    spread = 2.0 / (9.0 * freedom)
    return ((statistic / freedom) ** (1.0 / 3.0) - (1.0 - spread)) / math.sqrt(spread)


def test_the_chi_square_helper_notices_a_small_bias() -> None:
    p = np.array([0.4, 0.3, 0.2, 0.1])
    stream = np.random.default_rng(1)
    right = np.bincount(stream.choice(4, 40_000, p=p), minlength=4)
    wrong = np.bincount(stream.choice(4, 40_000, p=[0.38, 0.32, 0.2, 0.1]), minlength=4)
    assert chi_square_excess(right, p) < 5 < chi_square_excess(wrong, p)


FILTERS = {
    "none": {},
    "cool": {"temperature": 0.6},
    "top-k": {"top_k": 3},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.15},
    "all": {"temperature": 1.3, "top_k": 5, "top_p": 0.9, "min_p": 0.05},
    "penalties": {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    "bias": {"logit_bias": {0: 1.5, 3: -2.0, 5: -100.0}, "top_p": 0.95},
}
KINDS = ("block", "chain", "certain", "reduced", "ragged")
PROMPT = (1, 2, 2)
TARGET_LOGITS = np.array(
    [
        [1.2, 0.3, -0.5, 0.9, -1.0, 0.1],
        [-0.2, 1.1, 0.4, 0.4, -0.6, 0.0],
        [0.5, -0.3, 0.8, -1.2, 1.0, 0.2],
        [0.0, 0.6, -0.9, 1.3, 0.3, -0.4],
    ],
    dtype=np.float32,
)
DRAFT_LOGITS = np.array(
    [
        [0.2, 0.9, -0.1, 0.3, 0.5, -0.8],
        [0.7, 0.2, 0.9, -0.4, 0.0, 0.1],
        [-0.6, 0.4, 0.3, 0.2, 1.1, 0.8],
    ],
    dtype=np.float32,
)


def exact(params: SamplingParams, drawn: Sequence[int]) -> np.ndarray:
    """[V] plain sampling's distribution of the token after `drawn`, from the reference alone."""
    generated = np.bincount(np.array(drawn, dtype=np.int64), minlength=VOCAB)
    prompt = np.isin(np.arange(VOCAB), PROMPT)
    everything = np.ones(VOCAB, dtype=bool)
    x, _ = reference_shape(TARGET_LOGITS[len(drawn)], params, generated, prompt, everything)
    weights = np.exp(x - x.max())
    return weights / weights.sum()


def texts(depth: int) -> Iterator[tuple[int, ...]]:
    yield from np.ndindex(*[VOCAB] * depth)


def propose(chooser: object, kind: str, rows: int) -> Proposal:
    logits = mx.broadcast_to(mx.array(DRAFT_LOGITS)[None], (rows, 3, VOCAB))
    lengths = tuple(row % 4 for row in range(rows)) if kind == "ragged" else (3,) * rows
    if kind == "certain":
        return Proposal(mx.broadcast_to(mx.array([[0, 3, 4]]), (rows, 3)), lengths)
    if kind == "reduced":
        ids = mx.array([0, 2, 4, 5], dtype=mx.int32)
        choice = chooser.draft_block(logits[..., ids], ids)
        return Proposal(choice.tokens, lengths, choice.log_q)
    if kind != "chain":
        choice = chooser.draft_block(logits)
        return Proposal(choice.tokens, lengths, choice.log_q)
    prefix, log_q = mx.zeros((rows, 0), dtype=mx.int32), []
    for slot in range(3):
        choice = chooser.draft(logits[:, slot], slot, prefix)
        prefix = mx.concatenate([prefix, choice.tokens[:, None]], axis=1)
        log_q.append(choice.log_q)
    return Proposal(prefix, lengths, mx.stack(log_q, axis=1))


def rejection_draws(params: SamplingParams, kind: str, rows: int, turns: int) -> list[list[int]]:
    """What `rows` rows emit in one round, `turns` times."""
    emitted: list[list[int]] = []
    for turn in range(turns):
        sampler = Sampler(VOCAB, [Request(PROMPT, params)] * rows)
        chooser = sampler.round([3 + turn] * rows)
        proposal = propose(chooser, kind, rows)
        logits = mx.broadcast_to(mx.array(TARGET_LOGITS)[None], (rows, 4, VOCAB))
        emitted += [tokens for _, tokens in chooser.accept(logits, proposal).read()]
    return emitted


PAIRS = [(filters, kind) for filters in FILTERS for kind in KINDS]
QUICK = [p for p in PAIRS if p[1] == "block" or p[0] in ("none", "all", "penalties")]


@pytest.mark.usefixtures("fixed_entropy")
@pytest.mark.parametrize(
    ("filters", "kind"),
    [p if p in QUICK else pytest.param(*p, marks=pytest.mark.slow) for p in PAIRS],
)
def test_the_rejection_rule_draws_what_plain_sampling_draws(filters: str, kind: str) -> None:
    """The first emitted token, and each later one given those before it, is an exact sample."""
    params = SamplingParams(**{"temperature": 1.0, **FILTERS[filters]})
    emitted = rejection_draws(params, kind, rows=4000, turns=2)
    assert {len(tokens) for tokens in emitted} >= {1, 2}
    first = np.bincount([tokens[0] for tokens in emitted], minlength=VOCAB)
    assert chi_square_excess(first, exact(params, ())) < 5
    for depth in (1, 2, 3):
        for prefix in texts(depth):
            later = [t[depth] for t in emitted if len(t) > depth and tuple(t[:depth]) == prefix]
            if len(later) < 200:
                continue
            observed = np.bincount(later, minlength=VOCAB)
            assert chi_square_excess(observed, exact(params, prefix)) < 5, (prefix, observed)


@pytest.mark.usefixtures("fixed_entropy")
def test_accepting_every_draft_would_be_noticed() -> None:
    """The same test on a wrong rule fails: the drafts themselves are not the target's samples."""
    params = SamplingParams(1.0)
    sampler = Sampler(VOCAB, [Request(PROMPT, params)] * 4000)
    drafts = propose(sampler.round([3] * 4000), "block", 4000)
    first = np.bincount(np.array(drafts.tokens[:, 0]), minlength=VOCAB)
    assert chi_square_excess(first, exact(params, ())) > 20


@pytest.mark.usefixtures("fixed_entropy")
def test_plain_sampling_draws_its_own_distribution() -> None:
    for filters in FILTERS.values():
        params = SamplingParams(**{"temperature": 1.0, **filters})
        sampler = Sampler(VOCAB, [Request(PROMPT, params)] * 8000)
        logits = mx.broadcast_to(mx.array(TARGET_LOGITS[:1])[None], (8000, 1, VOCAB))
        emitted = sampler.round([3] * 8000).accept(logits, None).read()
        first = np.bincount([tokens[0] for _, tokens in emitted], minlength=VOCAB)
        assert chi_square_excess(first, exact(params, ())) < 5


def test_seeds_draw_the_exact_distribution() -> None:
    """Over seeds, and over positions of one seed, the coupled rule's tokens are exact samples."""
    for filters in ({}, FILTERS["all"]):
        params = SamplingParams(**{"temperature": 1.0, **filters})
        requests = [Request(PROMPT, replace(params, seed=seed)) for seed in range(6000)]
        logits = mx.broadcast_to(mx.array(TARGET_LOGITS[:1])[None], (6000, 1, VOCAB))
        for rows, positions in (
            (requests, [3] * 6000),
            (requests[5:6] * 6000, list(range(6000))),
        ):
            verdict = Sampler(VOCAB, rows).round(positions).accept(logits, None)
            first = np.bincount(np.array(verdict.tokens[:, 0]), minlength=VOCAB)
            assert chi_square_excess(first, exact(params, ())) < 5


@pytest.mark.usefixtures("fixed_entropy")
def test_drafts_are_drawn_from_the_stated_distribution() -> None:
    """log_q is what the tokens were drawn from; otherwise the accept test would be wrong."""
    params = SamplingParams(1.0, **{k: v for k, v in FILTERS["all"].items() if k != "temperature"})
    rows = 8000
    for kind in ("block", "chain", "reduced"):
        proposal = propose(
            Sampler(VOCAB, [Request(PROMPT, params)] * rows).round([3] * rows), kind, rows
        )
        for slot in range(3):
            stated = np.exp(np.array(proposal.log_q[0, slot]))
            drawn = np.bincount(np.array(proposal.tokens[:, slot]), minlength=VOCAB)
            assert chi_square_excess(drawn, stated / stated.sum()) < 5


@pytest.mark.usefixtures("fixed_entropy")
def test_rows_with_different_rules_share_a_round() -> None:
    """Greedy rows emit argmax and seeded rows their seed's tokens, beside unseeded rows."""
    kinds = [SamplingParams(), SamplingParams(1.0), SamplingParams(1.0, seed=4, top_k=3)]
    rows = [kinds[row % 3] for row in range(3000)]
    sampler = Sampler(VOCAB, [Request(PROMPT, p) for p in rows])
    logits = mx.broadcast_to(mx.array(TARGET_LOGITS)[None], (3000, 4, VOCAB))
    chooser = sampler.round([3] * 3000)
    emitted = [t for _, t in chooser.accept(logits, propose(chooser, "block", 3000)).read()]
    best = TARGET_LOGITS.argmax(-1).tolist()
    assert all(tokens == best[: len(tokens)] for tokens in emitted[::3])
    alone = Sampler(VOCAB, [Request(PROMPT, kinds[2])]).round([3])
    seeded = alone.accept(logits[:1], propose(alone, "block", 1)).read()[0][1]
    assert all(tokens == seeded for tokens in emitted[2::3])
    first = np.bincount([tokens[0] for tokens in emitted[1::3]], minlength=VOCAB)
    assert chi_square_excess(first, exact(kinds[1], ())) < 5


def test_each_unseeded_row_draws_its_own_noise() -> None:
    sampler = Sampler(VOCAB, [Request(PROMPT, SamplingParams(1.0))] * 2)
    logits = mx.broadcast_to(mx.array(TARGET_LOGITS[:1])[None], (2, 1, VOCAB))
    rounds = [sampler.round([3 + n] * 2).accept(logits, None).read() for n in range(40)]
    assert any(a != b for (_, a), (_, b) in rounds)
    assert len({tuple(a) for (_, a), _ in rounds}) > 1
