"""Losslessness: whatever the drafter guesses, the output is the target's own."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest

from spec_core import (
    Batch,
    ConfidenceThreshold,
    FixedLength,
    InvalidValueError,
    Request,
    RowOutcome,
    RowStatus,
    SamplingParams,
    Statistics,
    decode,
)
from spec_core.seams import Drafter
from spec_core.testing import NoisyOracle, ScriptedDrafter, TinyDrafter, TinyTarget

BLOCK = 5
PROMPT = (7, 3, 19, 3, 7, 3)


def run(
    target: TinyTarget, drafter: Drafter | None, prompt: Sequence[int] = PROMPT, **options: object
) -> tuple[list[int], list[RowOutcome]]:
    outcomes = list(decode(target, drafter, prompt, **options))
    return [token for outcome in outcomes for token in outcome.tokens], outcomes


TARGETS = {
    "dense": TinyTarget(),
    "bfloat16": TinyTarget(dtype=mx.bfloat16),
    "window": TinyTarget(window=5, seed=2),
    "recurrent": TinyTarget(recurrent=True, seed=3),
    "narrow": TinyTarget(vocab=20, hidden=8, layers=1, seed=4),
}


def drafters(target: TinyTarget) -> dict[str, Drafter]:
    vocab = target.info.vocab_size
    last = target.info.num_layers - 1
    return {
        "always right": NoisyOracle(target, 1.0, max_block=BLOCK),
        "often right": NoisyOracle(target, 0.7, max_block=BLOCK, seed=1),
        "never right": NoisyOracle(target, 0.0, max_block=BLOCK),
        "drawn": NoisyOracle(target, 0.7, max_block=BLOCK, stochastic=True, confident=True),
        "chain": TinyDrafter(target, taps=(last, -1), max_block=BLOCK, confident=True),
        "block": TinyDrafter(target, taps=(0,), max_block=BLOCK, parallel=True),
        "reduced": TinyDrafter(target, (0,), BLOCK, token_ids=range(0, vocab, 2)),
        "copies": ScriptedDrafter(lambda text: text[-3:][: len(text) % 4], max_block=BLOCK),
        "silent": ScriptedDrafter(lambda text: (), max_block=BLOCK),
    }


KINDS = tuple(drafters(TARGETS["dense"]))


# --- greedy ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [None, *KINDS])
@pytest.mark.parametrize("name", TARGETS)
def test_greedy_equals_plain_decoding(name: str, kind: str | None) -> None:
    """Every target kind, drafter and draft length, and the exact number of tokens."""
    target = TARGETS[name]
    wanted = target.greedy(PROMPT, 24)
    drafter = drafters(target)[kind] if kind else None
    for max_draft in (None, 0, 1, 2, 4) if kind else (None,):
        tokens, outcomes = run(target, drafter, max_tokens=24, max_draft=max_draft)
        assert tokens == wanted, max_draft
        assert outcomes[-1].finish == "length"
        assert [o.finish for o in outcomes[:-1]] == [None] * (len(outcomes) - 1)
        assert [o.prefill for o in outcomes] == [True] + [False] * (len(outcomes) - 1)


@pytest.mark.parametrize("max_tokens", range(1, 14))
def test_exactly_max_tokens(max_tokens: int) -> None:
    target = TARGETS["dense"]
    wanted = target.greedy(PROMPT, 13)
    for drafter in (None, *drafters(target).values()):
        tokens, outcomes = run(target, drafter, max_tokens=max_tokens)
        assert tokens == wanted[:max_tokens]
        assert outcomes[-1].finish == "length"
        for outcome in outcomes[1:]:
            assert outcome.drafted <= BLOCK
            assert outcome.accepted <= outcome.drafted


@pytest.mark.parametrize("chunk", [1, 2, 5, 6, 100])
def test_how_the_prompt_is_cut_does_not_matter(chunk: int) -> None:
    for name, target in TARGETS.items():
        wanted = target.greedy(PROMPT, 10)
        for kind in ("chain", "often right"):
            drafter = drafters(target)[kind]
            whole, outcomes = run(target, drafter, max_tokens=10)
            tokens, again = run(target, drafter, max_tokens=10, prefill_chunk=chunk)
            assert tokens == whole == wanted, name
            assert [o.accepted for o in again] == [o.accepted for o in outcomes], name


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_of_one_token(kind: str) -> None:
    target = TARGETS["dense"]
    wanted = target.greedy((9,), 12)
    assert run(target, drafters(target)[kind], (9,), max_tokens=12)[0] == wanted


def test_an_empty_prompt_is_an_error() -> None:
    with pytest.raises(InvalidValueError, match=r"prompt is .*at least one token"):
        list(decode(TARGETS["dense"], None, ()))


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_draft": -1}, "max_draft"),
        ({"prefill_chunk": 0}, "prefill chunk"),
        ({"prompt": (1, 32)}, "prompt"),
        ({"prompt": (1,) * 5000}, "prompt length"),
    ],
)
def test_values_out_of_range_are_named(options: dict, field: str) -> None:
    prompt = options.pop("prompt", PROMPT)
    with pytest.raises(InvalidValueError) as caught:
        list(decode(TARGETS["dense"], None, prompt, **options))
    assert caught.value.field == field


# --- end tokens ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [None, "always right", "often right", "chain", "copies"])
@pytest.mark.parametrize("place", range(12))
def test_nothing_comes_after_an_end_token(place: int, kind: str | None) -> None:
    """Wherever it falls in a block: in output, states and statistics."""
    target = TARGETS["dense"]
    wanted = target.greedy(PROMPT, 12)
    end = wanted[place]
    expected = wanted[: wanted.index(end) + 1]
    batch = Batch(target, drafters(target)[kind] if kind else None)
    prefill = batch.prefill(Request(PROMPT, max_tokens=12, end_tokens=frozenset({end, 31})))
    first = prefill.step(100)
    outcomes = [first]
    if first.finish is None:
        key = batch.join(prefill)
        while batch.rows:
            outcomes += batch.step()
        image = batch.image(key)
        assert image.target.length == len(PROMPT) + len(expected) - 1
        if image.drafter is not None:
            assert image.drafter.length == image.target.length
    assert [t for o in outcomes for t in o.tokens] == expected
    assert outcomes[-1].finish == "stop"
    statistics = Statistics()
    for outcome in outcomes:
        statistics.add(outcome)
    assert statistics.emitted == len(expected) == sum(statistics.by_source.values())
    assert statistics.rounds == len(outcomes) - 1 == len(statistics.round_accepts)


@pytest.mark.parametrize("kind", ["always right", "chain", "copies"])
def test_the_state_after_an_end_is_that_of_the_emitted_text(kind: str) -> None:
    """A row that goes on from its image continues as the target would after the same text."""
    target = TARGETS["dense"]
    drafter = drafters(target)[kind]
    wanted = target.greedy(PROMPT, 20)
    end = wanted[7]
    expected = wanted[: wanted.index(end) + 1]
    batch = Batch(target, drafter)
    prefill = batch.prefill(Request(PROMPT, max_tokens=20, end_tokens=frozenset({end})))
    prefill.step(100)
    key = batch.join(prefill)
    while batch.rows:
        batch.step()
    restored = batch.image(key)
    resumed = Batch(target, drafter)
    text = (*PROMPT, *expected, 5)
    prefill = resumed.prefill(Request(text, max_tokens=8), restored)
    assert prefill.position == len(text) - 2
    tokens = list(prefill.step(100).tokens)
    resumed.join(prefill)
    accepts = []
    while resumed.rows:
        for outcome in resumed.step():
            tokens += outcome.tokens
            accepts.append(outcome.accepted)
    cold_tokens, cold = run(target, drafter, text, max_tokens=8)
    assert tokens == cold_tokens == target.greedy(text, 8)
    assert accepts == [o.accepted for o in cold[1:]]


def test_an_end_token_from_the_prefill_ends_the_row() -> None:
    target = TARGETS["dense"]
    first = target.greedy(PROMPT, 1)
    tokens, outcomes = run(target, None, max_tokens=9, end_tokens=first)
    assert tokens == first
    assert [o.finish for o in outcomes] == ["stop"]


# --- statistics ------------------------------------------------------------------------------


def test_a_perfect_drafter_is_accepted_whole() -> None:
    target = TARGETS["dense"]
    _, outcomes = run(target, NoisyOracle(target, 1.0, max_block=4), max_tokens=21)
    assert [o.accepted for o in outcomes[1:]] == [4, 4, 4, 4]
    assert [len(o.tokens) for o in outcomes] == [1, 5, 5, 5, 5]


def test_accepted_counts_are_the_oracles_errors() -> None:
    """Counts before the cut: the leading right guesses of each round, by the oracle's own hash."""
    target = TARGETS["dense"]
    oracle = NoisyOracle(target, 0.6, seed=5, max_block=4)
    _, outcomes = run(target, oracle, max_tokens=40)
    position = len(PROMPT) + 1
    for outcome in outcomes[1:]:
        right = [oracle.right(position + slot) for slot in range(outcome.drafted)]
        leading = right.index(False) if False in right else len(right)
        assert outcome.accepted == leading
        assert outcome.source == ("oracle" if outcome.drafted else "")
        position += len(outcome.tokens)


def test_statistics_add_up() -> None:
    target = TARGETS["dense"]
    _, outcomes = run(target, NoisyOracle(target, 0.6, seed=5, max_block=4), max_tokens=40)
    statistics = Statistics()
    for outcome in outcomes:
        statistics.add(outcome)
    rounds = outcomes[1:]
    assert statistics.rounds == len(rounds)
    assert statistics.drafted == sum(o.drafted for o in rounds)
    assert statistics.round_accepts == [o.accepted for o in rounds]
    assert statistics.mean_accept_length == 1 + sum(o.accepted for o in rounds) / len(rounds)
    assert statistics.emitted == 40 == sum(statistics.by_source.values())
    for slot, share in enumerate(statistics.accept_by_position):
        reached = [o for o in rounds if o.drafted > slot and o.accepted >= slot]
        assert share == sum(o.accepted > slot for o in reached) / len(reached)


def test_no_round_means_no_help() -> None:
    assert Statistics().mean_accept_length == 1.0
    assert Statistics().accept_by_position == []


# --- policies --------------------------------------------------------------------------------


@pytest.mark.parametrize("threshold", [0.1, 0.5, 0.97, 1.0])
def test_a_cut_by_confidence_is_lossless(threshold: float) -> None:
    target = TARGETS["dense"]
    wanted = target.greedy(PROMPT, 24)
    for drafter in drafters(target).values():
        tokens, outcomes = run(
            target, drafter, max_tokens=24, policy=ConfidenceThreshold(threshold)
        )
        assert tokens == wanted
    confident = NoisyOracle(target, 0.6, seed=5, max_block=4, confident=True)
    tokens, outcomes = run(target, confident, max_tokens=24, policy=ConfidenceThreshold(threshold))
    assert tokens == wanted
    if threshold == 0.5:  # the oracle doubts exactly what is wrong
        assert all(o.accepted == o.drafted for o in outcomes[1:])
        assert any(o.drafted for o in outcomes[1:])
    if threshold == 1.0:
        assert not any(o.drafted for o in outcomes[1:])


def test_a_policy_asks_for_at_most_its_length() -> None:
    target = TARGETS["dense"]
    oracle = NoisyOracle(target, 1.0, max_block=4)
    for length in range(6):
        _, outcomes = run(target, oracle, max_tokens=20, policy=FixedLength(length))
        assert max(o.drafted for o in outcomes) == min(length, 4)


# --- sampling --------------------------------------------------------------------------------


def penalised_greedy(
    target: TinyTarget, prompt: Sequence[int], count: int, params: SamplingParams
) -> list[int]:
    """Greedy decoding with penalties and bias, one whole forward and one Python loop a token."""
    text = list(prompt)
    for _ in range(count):
        logits = target.forward(mx.array([text]), target.new_state(1), logits="last").logits
        x = np.array(logits[0, 0].astype(mx.float32)).astype(np.float64)
        answer = text[len(prompt) :]
        for token in range(x.size):
            if token in text:
                scale = params.repetition_penalty
                x[token] = x[token] / scale if x[token] > 0 else x[token] * scale
            x[token] -= params.presence_penalty * (token in answer)
            x[token] -= params.frequency_penalty * answer.count(token)
            x[token] += params.logit_bias.get(token, 0.0)
        text.append(int(x.argmax()))
    return text[len(prompt) :]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(presence_penalty=1.5),
        SamplingParams(frequency_penalty=0.7),
        SamplingParams(frequency_penalty=-0.9),
        SamplingParams(repetition_penalty=1.7),
        SamplingParams(logit_bias={3: 4.0, 30: -100.0, 0: 1.0}),
        SamplingParams(
            presence_penalty=-0.5,
            frequency_penalty=1.1,
            repetition_penalty=0.8,
            logit_bias={5: 2.5, 6: -1.0},
        ),
    ],
)
def test_penalties_and_bias_equal_plain_decoding(params: SamplingParams) -> None:
    target = TARGETS["dense"]
    wanted = penalised_greedy(target, PROMPT, 24, params)
    assert wanted != target.greedy(PROMPT, 24)
    assert run(target, None, max_tokens=24, sampling=params)[0] == wanted
    for drafter in drafters(target).values():
        for max_draft in (None, 0, 2):
            tokens, _ = run(target, drafter, max_tokens=24, sampling=params, max_draft=max_draft)
            assert tokens == wanted


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", [None, *KINDS])
def test_logprobs_are_the_targets_own(kind: str | None, temperature: float) -> None:
    """Raw log-softmax at every emitted token, with alternatives, before penalties and filters."""
    target = TARGETS["dense"]
    params = SamplingParams(
        temperature, seed=3, logprobs=3, top_k=4, presence_penalty=1.0, logit_bias={2: 3.0}
    )
    drafter = drafters(target)[kind] if kind else None
    tokens, outcomes = run(target, drafter, max_tokens=20, sampling=params)
    text = [*PROMPT, *tokens]
    logits = target.forward(mx.array([text]), target.new_state(1)).logits[0]
    values = np.array(logits).astype(np.float64)
    values -= np.log(np.exp(values).sum(-1, keepdims=True))
    entries = [entry for outcome in outcomes for entry in outcome.logprobs]
    assert [entry.token for entry in entries] == tokens
    for at, entry in enumerate(entries, start=len(PROMPT) - 1):
        assert abs(entry.logprob - values[at, entry.token]) < 1e-4
        order = sorted(range(values.shape[1]), key=lambda t: (-values[at, t], t))[:3]
        assert [token for token, _ in entry.top] == order
        assert all(abs(value - values[at, token]) < 1e-4 for token, value in entry.top)


def test_logprobs_only_on_request() -> None:
    _, outcomes = run(TARGETS["dense"], None, max_tokens=4)
    assert all(outcome.logprobs is None for outcome in outcomes)
    _, outcomes = run(TARGETS["dense"], None, max_tokens=4, sampling=SamplingParams(logprobs=0))
    assert all(entry.top == () for outcome in outcomes for entry in outcome.logprobs)


class EvenThenOdd:
    """A grammar: even and odd tokens alternate; remembers what it was told."""

    def __init__(self, vocab: int) -> None:
        self.vocab, self.told = vocab, []

    def masks(self, drafts: Sequence[int]) -> np.ndarray:
        masks, legal, count = [], True, len(self.told)
        for draft in [None, *drafts]:
            if draft is not None:
                legal = legal and draft % 2 == count % 2
                count += 1
            allowed = np.arange(self.vocab) % 2 == count % 2
            masks.append(allowed if legal else np.ones(self.vocab, dtype=bool))
        return np.array(masks)

    def advance(self, tokens: Sequence[int]) -> None:
        self.told += tokens


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(1.0, seed=8)])
@pytest.mark.parametrize("kind", [None, *KINDS])
def test_a_grammar_holds_in_every_mode(kind: str | None, sampling: SamplingParams) -> None:
    target = TARGETS["dense"]

    def constrained(drafter: Drafter | None) -> tuple[list[int], list[int]]:
        grammar = EvenThenOdd(target.info.vocab_size)
        batch = Batch(target, drafter)
        prefill = batch.prefill(Request(PROMPT, sampling, 17, constraint=grammar))
        tokens = list(prefill.step(100).tokens)
        batch.join(prefill)
        while batch.rows:
            tokens += [t for outcome in batch.step() for t in outcome.tokens]
        return tokens, grammar.told

    tokens, told = constrained(drafters(target)[kind] if kind else None)
    assert tokens == told
    assert [token % 2 for token in tokens] == [n % 2 for n in range(17)]
    assert tokens == constrained(None)[0]


def test_a_slot_at_the_threshold_is_kept() -> None:
    policy, rows = ConfidenceThreshold(0.5), [RowStatus(0, 10, 20)]
    for scores, length, kept in (
        ([0.5, 0.5, 0.5], 3, 3),
        ([0.9, 0.49, 0.9], 3, 1),
        ([0.1, 0.9, 0.9], 3, 0),
        ([0.9, 0.9, 0.1], 2, 2),
        ([0.9], 0, 0),
    ):
        assert list(policy.truncate(rows, [length], [scores])) == [kept]


@pytest.mark.parametrize("threshold", [0.0, -0.5, 1.01])
def test_thresholds_out_of_range_are_named(threshold: float) -> None:
    with pytest.raises(InvalidValueError, match="confidence_threshold"):
        ConfidenceThreshold(threshold)
