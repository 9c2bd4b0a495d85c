"""Batches: rows join, leave and end as they like, and each decodes as if it were alone."""

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_core import (
    Batch,
    ConfidenceThreshold,
    Drafter,
    FixedLength,
    InvalidValueError,
    Request,
    RowOutcome,
    RowStatus,
    SamplingParams,
    SeamError,
    UnsupportedError,
    decode,
)
from spec_core.batch import Prefill
from spec_core.testing import NoisyOracle, ScriptedDrafter, TinyDrafter, TinyTarget

VOCAB = 24
TARGETS = {
    "dense": TinyTarget(VOCAB),
    "window": TinyTarget(VOCAB, window=6, seed=1),
    "recurrent": TinyTarget(VOCAB, recurrent=True, seed=2),
}


def drafter(kind: str, target: TinyTarget) -> Drafter | None:
    if kind == "oracle":
        return NoisyOracle(target, 0.7, seed=1, confident=True)
    if kind == "drawn":
        return NoisyOracle(target, 0.7, stochastic=True, confident=True)
    if kind == "chain":
        return TinyDrafter(target, confident=True)
    if kind == "block":
        return TinyDrafter(target, (1,), 3, parallel=True)
    if kind == "reduced":
        return TinyDrafter(target, (-1, 0), token_ids=range(0, target.info.vocab_size, 2))
    if kind == "copies":
        return ScriptedDrafter(lambda text: text[-3:][: sum(text) % 4])
    return None


KINDS = (None, "oracle", "drawn", "chain", "block", "reduced", "copies")


class Alternating:
    """A policy that wants a different length for each row and round: mixed batches."""

    needs_confidence = False

    def __init__(self) -> None:
        self.turn = itertools.count()

    def lengths(self, rows: Sequence[RowStatus]) -> Sequence[int]:
        turn = next(self.turn)
        return [(turn + index * 2) % 4 for index in range(len(rows))]

    def truncate(
        self,
        rows: Sequence[RowStatus],
        lengths: Sequence[int],
        confidence: Sequence[Sequence[float]],
    ) -> Sequence[int]:
        return lengths

    def observe(self, outcomes: Sequence[RowOutcome], seconds: float | None) -> None:
        """Nothing to learn."""


POLICIES = {
    "whole": FixedLength,
    "two": lambda: FixedLength(2),
    "plain": lambda: FixedLength(0),
    "threshold": lambda: ConfidenceThreshold(0.5),
    "alternating": Alternating,
}


# --- schedules -------------------------------------------------------------------------------


@dataclass
class Arrival:
    """A request, after how many steps it comes, in what chunks, and when its client leaves."""

    request: Request
    wait: int
    chunk: int
    leaves_after: int | None


@st.composite
def requests(draw: st.DrawFn) -> Request:
    length = draw(st.one_of(st.integers(1, 8), st.integers(1, 100)))
    seed = draw(st.integers(0, 2**16))
    stream = random.Random(seed)
    sampling = draw(
        st.sampled_from(
            [
                SamplingParams(),
                SamplingParams(logprobs=2),
                SamplingParams(presence_penalty=1.0, frequency_penalty=0.3),
                SamplingParams(repetition_penalty=1.4, logit_bias={1: 2.0, 2: -100.0}),
                SamplingParams(1.0, seed=seed),
                SamplingParams(0.8, top_k=8, top_p=0.9, seed=seed, logprobs=0),
                SamplingParams(1.3, min_p=0.1, frequency_penalty=0.5, seed=seed),
                SamplingParams(1.0),
                SamplingParams(0.9, top_p=0.8, repetition_penalty=1.2, logprobs=1),
            ]
        )
    )
    ends = stream.sample(range(VOCAB), draw(st.integers(0, 2)))
    return Request(
        tuple(stream.randrange(VOCAB) for _ in range(length)),
        sampling,
        draw(st.integers(1, 14)),
        frozenset(ends),
        draw(st.sampled_from([None, None, None, 0, 1, 3])),
    )


arrivals = st.builds(
    Arrival,
    requests(),
    wait=st.integers(0, 3),
    chunk=st.sampled_from([1, 3, 16, 200]),
    leaves_after=st.sampled_from([None, None, None, None, 0, 2, 4]),
)


@dataclass
class Record:
    """What came out for one row."""

    request: Request
    outcomes: list[RowOutcome] = field(default_factory=list)
    cancelled: bool = False

    @property
    def tokens(self) -> list[int]:
        return [token for outcome in self.outcomes for token in outcome.tokens]


def play(batch: Batch, plan: Sequence[Arrival]) -> list[Record]:
    """Run a schedule: prefills advance chunk by chunk between rounds, as a server would."""
    records: dict[int, Record] = {}
    waiting, filling, leaving = list(plan), [], {}
    clock = 0
    while waiting or filling or batch.busy:
        while waiting and waiting[0].wait <= clock:
            arrival = waiting.pop(0)
            prefill = batch.prefill(arrival.request)
            records[prefill.row.key] = Record(arrival.request)
            filling.append((prefill, arrival))
            clock = 0
        filling = [each for each in filling if not advance(batch, *each, records, leaving)]
        for outcome in batch.step():
            records[outcome.key].outcomes.append(outcome)
        for key, left in list(leaving.items()):
            leaving[key] = left - 1
            if left == 0:
                records[key].cancelled = records[key].outcomes[-1].finish is None
                batch.leave(key)
                del leaving[key]
        clock += 1
    return list(records.values())


def advance(
    batch: Batch,
    prefill: Prefill,
    arrival: Arrival,
    records: dict[int, Record],
    leaving: dict[int, int],
) -> bool:
    """One chunk of a prefill; whether it is done, and its row joined."""
    first = prefill.step(arrival.chunk)
    if first is None:
        return False
    records[first.key].outcomes.append(first)
    if first.finish is None:
        assert batch.join(prefill) == first.key
        if arrival.leaves_after is not None:
            leaving[first.key] = arrival.leaves_after
    return True


def check(target: TinyTarget, record: Record) -> None:
    """A row's tokens, end and logprobs are those of plain decoding, alone."""
    request, tokens = record.request, record.tokens
    check_shape(record)
    if request.sampling.rejection:
        check_logprobs(record, plain_logprobs(target, request, tokens))
        return
    solo = list(
        decode(
            target,
            None,
            request.prompt,
            sampling=request.sampling,
            max_tokens=request.max_tokens,
            end_tokens=tuple(request.end_tokens),
        )
    )
    wanted = [token for outcome in solo for token in outcome.tokens]
    if record.cancelled:
        assert tokens == wanted[: len(tokens)]
    else:
        assert tokens == wanted
        assert record.outcomes[-1].finish == solo[-1].finish
    check_logprobs(record, [e for o in solo for e in o.logprobs or ()])


def check_shape(record: Record) -> None:
    """Each row's outcomes, whatever was sampled: one end, exact budget, nothing after an end."""
    request, tokens, outcomes = record.request, record.tokens, record.outcomes
    assert all(outcome.tokens for outcome in outcomes)
    assert [o.prefill for o in outcomes] == [True] + [False] * (len(outcomes) - 1)
    assert len(tokens) <= request.max_tokens
    assert not request.end_tokens.intersection(tokens[:-1])
    assert all(outcome.finish is None for outcome in outcomes[:-1])
    if not record.cancelled:
        stopped = tokens[-1] in request.end_tokens
        assert outcomes[-1].finish == ("stop" if stopped else "length")
        assert stopped or len(tokens) == request.max_tokens
    if request.max_draft is not None:
        assert all(outcome.drafted <= request.max_draft for outcome in outcomes)


def plain_logprobs(target: TinyTarget, request: Request, tokens: list[int]) -> list[object]:
    """What plain decoding reports for a text that is forced on it by a bias."""
    if request.sampling.logprobs is None:
        return []
    text, entries = list(request.prompt), []
    for token in tokens:
        forced = SamplingParams(logit_bias={token: 100.0}, logprobs=request.sampling.logprobs)
        first = next(decode(target, None, text, sampling=forced, max_tokens=1))
        entries += first.logprobs
        text.append(token)
    return entries


def check_logprobs(record: Record, wanted: Sequence[object]) -> None:
    got = [entry for outcome in record.outcomes for entry in outcome.logprobs or ()]
    if record.request.sampling.logprobs is None:
        assert not got
        return
    assert len(got) == len(record.tokens)
    for entry, expected in zip(got, wanted, strict=False):
        assert entry.token == expected.token
        assert abs(entry.logprob - expected.logprob) < 1e-4
        assert [token for token, _ in entry.top] == [token for token, _ in expected.top]
        for (_, value), (_, other) in zip(entry.top, expected.top, strict=True):
            assert abs(value - other) < 1e-4


schedules = given(
    plan=st.lists(arrivals, min_size=1, max_size=6),
    name=st.sampled_from(list(TARGETS)),
    kind=st.sampled_from(KINDS),
    policy=st.sampled_from(list(POLICIES)),
)


def each_row_decodes_as_if_alone(
    plan: Sequence[Arrival], name: str, kind: str | None, policy: str
) -> None:
    target = TARGETS[name]
    records = play(Batch(target, drafter(kind, target), POLICIES[policy]()), plan)
    assert len(records) == len(plan)
    for record in records:
        check(target, record)


@schedules
@settings(max_examples=50, deadline=None, derandomize=True)
def test_each_row_decodes_as_if_alone(
    plan: Sequence[Arrival], name: str, kind: str | None, policy: str
) -> None:
    each_row_decodes_as_if_alone(plan, name, kind, policy)


@pytest.mark.slow
@schedules
@settings(max_examples=500, deadline=None)
def test_each_row_decodes_as_if_alone_in_many_schedules(
    plan: Sequence[Arrival], name: str, kind: str | None, policy: str
) -> None:
    each_row_decodes_as_if_alone(plan, name, kind, policy)


# --- rows ------------------------------------------------------------------------------------


def joined(batch: Batch, requests: Sequence[Request]) -> list[int]:
    keys = []
    for request in requests:
        prefill = batch.prefill(request)
        prefill.step(1000)
        keys.append(batch.join(prefill))
    return keys


def test_a_finished_row_can_be_imaged_until_the_next_step() -> None:
    """Also where it ended in a round that a newcomer's arrival had to settle."""
    target = TARGETS["dense"]
    batch = Batch(target)
    long, short = Request((1, 2), max_tokens=30), Request((3, 4, 5), max_tokens=3)
    keys = joined(batch, [long, short])
    seen: list[RowOutcome] = []
    while not any(outcome.finish for outcome in seen):
        joined(batch, [Request((7,), max_tokens=30)])
        seen = batch.step()
        ended = [outcome.key for outcome in seen if outcome.finish]
    assert ended == [keys[1]]
    assert batch.image(keys[1]).target.length == 3 + 3 - 1
    batch.step()
    with pytest.raises(SeamError, match="before the next step"):
        batch.image(keys[1])


def test_no_outcome_is_lost_when_a_row_leaves() -> None:
    """The round in flight is settled first; what it gave the others comes with the next step."""
    for kind in (None, "chain", "oracle"):
        target = TARGETS["dense"]
        for steps in range(4):
            batch = Batch(target, drafter(kind, target))
            first, second = Request((1, 2), max_tokens=20), Request((3, 4, 5), max_tokens=6)
            keys, tokens = joined(batch, [first, second]), []
            for _ in range(steps):
                tokens += [t for o in batch.step() if o.key == keys[1] for t in o.tokens]
            batch.leave(keys[0])
            while batch.busy:
                outcomes = batch.step()
                assert all(outcome.key == keys[1] for outcome in outcomes)
                tokens += [t for outcome in outcomes for t in outcome.tokens]
            assert tokens == target.greedy((3, 4, 5), 6)[1:]


def test_a_batch_that_is_not_busy_holds_nothing() -> None:
    target = TARGETS["dense"]
    batch = Batch(target, drafter("chain", target))
    assert not batch.busy
    assert batch.step() == []
    joined(batch, [Request((1,), max_tokens=4), Request((2,), max_tokens=7)])
    while batch.busy:
        batch.step()
    assert (batch.rows, batch.keys, batch.step()) == (0, [], [])
    key = joined(batch, [Request((1,), max_tokens=9)])[0]
    batch.leave(key)
    while batch.busy:
        assert all(outcome.key != key for outcome in batch.step())
    assert batch.rows == 0


def test_leaving_twice_or_after_the_end_is_harmless() -> None:
    batch = Batch(TARGETS["dense"])
    keys = joined(batch, [Request((1,), max_tokens=3), Request((2,), max_tokens=9)])
    while keys[0] in batch.keys:
        batch.step()
    batch.leave(keys[0])
    batch.leave(keys[0])
    batch.leave(12345)
    assert batch.keys == [keys[1]]


def test_only_a_prefill_that_goes_on_can_join() -> None:
    batch = Batch(TARGETS["dense"])
    prefill = batch.prefill(Request((1, 2, 3), max_tokens=1))
    with pytest.raises(SeamError, match="join"):
        batch.join(prefill)
    assert prefill.step(2) is None
    assert (prefill.position, prefill.remaining, prefill.finished) == (2, 1, False)
    assert prefill.step(2).finish == "length"
    with pytest.raises(SeamError, match="join"):
        batch.join(prefill)
    with pytest.raises(SeamError, match="finished"):
        prefill.step(1)


def test_a_drafter_that_reads_taps_needs_a_target_that_has_them() -> None:
    bare = TinyTarget(VOCAB, tappable=False)
    with pytest.raises(UnsupportedError, match="made without taps"):
        Batch(bare, TinyDrafter(TARGETS["dense"]))
    oracle = NoisyOracle(bare, 0.8)
    tokens = [t for o in decode(bare, oracle, (1, 2), max_tokens=9) for t in o.tokens]
    assert tokens == bare.greedy((1, 2), 9)


# --- warm prefixes ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TARGETS)
def test_a_restored_prefix_decodes_as_a_cold_one(name: str, kind: str | None) -> None:
    """Tokens and, with the drafter's part, accepted counts; without it, tokens still."""
    target = TARGETS[name]
    prompt = tuple(n * n % VOCAB for n in range(20))
    cold = list(decode(target, drafter(kind, target), prompt, max_tokens=12))
    for length in (1, 7, 19):
        batch = Batch(target, drafter(kind, target))
        start = batch.prefill(Request(prompt, max_tokens=12))
        start.step(length)
        image = start.image()
        for whole in (True, False):
            restored = image if whole else type(image)(image.target, None)
            prefill = batch.prefill(Request(prompt, max_tokens=12), restored)
            assert prefill.position == length
            outcomes = [prefill.step(1000)]
            batch.join(prefill)
            while batch.busy:
                outcomes += batch.step()
            assert [t for o in outcomes for t in o.tokens] == target.greedy(prompt, 12)
            if whole:
                assert [o.accepted for o in outcomes] == [o.accepted for o in cold]


def test_a_prefix_that_is_the_whole_prompt_is_refused() -> None:
    batch = Batch(TARGETS["dense"])
    start = batch.prefill(Request((1, 2, 3)))
    start.step(3)
    with pytest.raises(InvalidValueError, match="restored length is 3"):
        batch.prefill(Request((1, 2, 3)), start.image())


# --- distribution ----------------------------------------------------------------------------


def sampled(rows: int, kind: str | None, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Three tokens of unseeded rows on a target of four tokens, beside greedy and seeded rows."""
    monkeypatch.setattr("spec_core.chooser.secrets.randbits", random.Random(11).getrandbits)
    target = FOUR
    batch = Batch(target, drafter(kind, target) if kind else None)
    others = [SamplingParams(), SamplingParams(1.0, seed=1)]
    plan = [SamplingParams(1.0)] * rows + others
    tokens: dict[int, list[int]] = {}
    for params in plan:
        prefill = batch.prefill(Request((2, 1), params, 3))
        first = prefill.step(10)
        tokens[first.key] = list(first.tokens)
        batch.join(prefill)
    while batch.busy:
        for outcome in batch.step():
            tokens[outcome.key] += outcome.tokens
    return [tuple(t) for t in list(tokens.values())[:rows]]


FOUR = TinyTarget(4, hidden=8, scale=1.0, seed=5)


def exact_distribution() -> dict[tuple[int, ...], float]:
    """The probability of each text of three tokens, by whole forwards."""
    texts: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        grown = {}
        for text, mass in texts.items():
            first = next(decode(FOUR, None, (2, 1, *text), sampling=EVERY, max_tokens=1))
            for token, value in first.logprobs[0].top:
                grown[(*text, token)] = mass * math.exp(value)
        texts = grown
    return texts


EVERY = SamplingParams(logprobs=4)


def check_distribution(rows: int, kind: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = exact_distribution()
    assert abs(sum(exact.values()) - 1.0) < 1e-5
    texts = sampled(rows, kind, monkeypatch)
    likely = [text for text, mass in exact.items() if mass * rows >= 5]
    observed = np.array([texts.count(text) for text in likely], dtype=float)
    expected = np.array([exact[text] for text in likely]) * rows
    observed, expected = (
        np.append(observed, rows - observed.sum()),
        np.append(expected, rows - expected.sum()),
    )
    freedom = len(expected) - 1
    statistic = ((observed - expected) ** 2 / expected).sum()
    assert statistic < freedom + 5 * math.sqrt(2 * freedom) + 25


@pytest.mark.parametrize("kind", [None, "drawn", "chain"])
def test_unseeded_rows_are_distributed_as_the_target(
    kind: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_distribution(400, kind, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_unseeded_rows_are_distributed_as_the_target(
    kind: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_distribution(1500, kind, monkeypatch)


def prefilled(batch: Batch, request: Request) -> Prefill:
    prefill = batch.prefill(request)
    while prefill.step(64) is None:
        pass
    return prefill


class Timed(FixedLength):
    """Plain rounds, and whether each was timed."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.timed: list[bool] = []

    def observe(self, outcomes: Sequence[RowOutcome], seconds: float | None) -> None:
        self.timed.append(seconds is not None)


@pytest.mark.parametrize("length", [0, 2])
def test_a_round_that_waits_for_a_prompt_is_not_timed(length: int) -> None:
    """Plain rounds run ahead, so that a chunk comes between launch and end; others do not."""
    policy = Timed(length)
    target = TinyTarget()
    batch = Batch(target, TinyDrafter(target), policy)
    batch.join(prefilled(batch, Request((1, 2, 3), max_tokens=60)))
    other = batch.prefill(Request(tuple(range(1, 9)), max_tokens=2))
    batch.step()
    batch.step()
    assert other.step(2) is None
    batch.step()
    batch.step()
    assert policy.timed == [True, True, length > 0, True]


def test_a_key_names_one_row_for_good() -> None:
    """A policy may outlive its batch."""
    keys = [
        batch.join(prefilled(batch, Request((1, 2), max_tokens=9)))
        for batch in (Batch(TinyTarget()) for _ in range(3))
    ]
    assert len(set(keys)) == 3
