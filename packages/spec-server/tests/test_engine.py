"""The engine: what comes out equals plain decoding, from any thread and in any company."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import pytest

from spec_core import FixedLength, InvalidValueError, SamplingParams
from spec_core.testing import NoisyOracle, TinyTarget, continuation
from spec_server import (
    Chunk,
    Completion,
    ContextLengthError,
    Engine,
    EngineClosedError,
    EngineError,
    Facts,
    Limits,
    Prompt,
    Tokeniser,
)
from spec_server.engine import Ask
from spec_server.job import Labels, Sink
from spec_server.worker import Models, Worker

VOCAB, WINDOW = 31, 256


class Letters:
    """A tokenizer whose tokens are letters."""

    byte_tokens: frozenset[int] = frozenset()
    markers = None
    end_tokens = frozenset({0})

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(64 + i) for i in ids)


def tiny_engine(
    *, max_batch: int = 4, prefill_chunk: int = 16, drafts: bool = True, start: bool = True
) -> Engine:
    def load() -> Models:
        target = TinyTarget(vocab=VOCAB)
        drafter = NoisyOracle(target, probability=0.7, max_block=5) if drafts else None
        return Models(target, drafter, FixedLength())

    return engine_of(Worker(load, Limits(max_batch=max_batch, prefill_chunk=prefill_chunk)), start)


def engine_of(worker: Worker, start: bool = True) -> Engine:
    if start:
        worker.start()
    facts = Facts("tiny", Labels("oracle"), WINDOW, "float32", 5)
    return Engine(worker, cast(Tokeniser, Letters()), facts)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with tiny_engine() as made:
        yield made


@pytest.fixture(scope="module")
def plain() -> Iterator[Engine]:
    with tiny_engine(drafts=False) as made:
        yield made


def prompt(seed: int, length: int = 5) -> Prompt:
    return Prompt(tuple(1 + (seed * 7 + i * i) % (VOCAB - 1) for i in range(length)))


def greedy(ids: Sequence[int], count: int) -> list[int]:
    """What the target alone writes, up to an end token."""
    written = continuation(TinyTarget(vocab=VOCAB), ids, count, {})
    ends = [i for i, token in enumerate(written) if token in Letters.end_tokens]
    return written[: ends[0] + 1] if ends else written


@pytest.mark.parametrize("seed", range(6))
def test_greedy_output_is_the_target_s_own(engine: Engine, seed: int) -> None:
    answer = engine.generate(prompt(seed), max_tokens=40)
    assert list(answer.token_ids) == greedy(prompt(seed).ids, 40)
    assert answer.statistics.accepted > 0
    assert answer.statistics.rounds == len(answer.statistics.round_accepts) < 40


@pytest.mark.parametrize("budget", range(1, 12))
def test_the_budget_is_exact(engine: Engine, budget: int) -> None:
    answer = engine.generate(prompt(3), max_tokens=budget)
    assert list(answer.token_ids) == greedy(prompt(3).ids, budget)
    assert answer.completion_tokens == budget
    assert answer.finish_reason == "length"


def test_chunks_join_to_the_completion(engine: Engine) -> None:
    chunks = list(engine.stream(prompt(1), max_tokens=30, sampling=SamplingParams(logprobs=2)))
    answer = chunks[-1].completion
    assert answer is not None
    assert all(chunk.completion is None for chunk in chunks[:-1])
    assert "".join(chunk.text for chunk in chunks) == answer.text
    assert [i for chunk in chunks for i in chunk.token_ids] == list(answer.token_ids)
    entries = [entry for chunk in chunks for entry in chunk.logprobs or ()]
    assert [entry.token for entry in entries] == list(answer.token_ids)
    assert tuple(entries) == answer.logprobs
    assert all(len(entry.top) == 2 for entry in entries)


SAMPLERS = [
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.8, seed=2, top_p=0.9),
    SamplingParams(frequency_penalty=0.5),
    SamplingParams(temperature=1.0, top_k=1),
    SamplingParams(presence_penalty=1.0, logit_bias={3: -100.0}),
]


def test_requests_that_run_together_are_answered_as_if_alone(engine: Engine, plain: Engine) -> None:
    asked = [
        (prompt(i, 3 + 9 * (i % 5)), SAMPLERS[i % len(SAMPLERS)], 5 + 7 * (i % 6))
        for i in range(24)
    ]

    def ask(one: Engine, request: tuple[Prompt, SamplingParams, int]) -> Completion:
        ids, sampling, budget = request
        return one.generate(ids, sampling=sampling, max_tokens=budget)

    alone = [ask(plain, request) for request in asked]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda request: ask(engine, request), asked))
    assert [a.token_ids for a in together] == [a.token_ids for a in alone]


def test_a_short_request_is_not_stuck_behind_a_long_prompt() -> None:
    ended: queue.SimpleQueue[str] = queue.SimpleQueue()

    def sink(name: str) -> Sink:
        return lambda event: ended.put(name) if isinstance(event, Chunk) else None

    one = tiny_engine(prefill_chunk=4, start=False)
    one.submit(Ask(prompt(2, 200), max_tokens=1), sink("long"))
    endless = SamplingParams(logit_bias={0: -100})
    one.submit(Ask(prompt(1, 2), max_tokens=8, sampling=endless), sink("short"))
    with one:
        one._worker.start()
        order = [ended.get(timeout=60)]
        while order[-1] != "long":
            order.append(ended.get(timeout=60))
    assert order.count("short") >= 2


def test_more_requests_than_rows_wait_their_turn() -> None:
    with tiny_engine(max_batch=2) as one:
        answers = [one.stream(prompt(i), max_tokens=9) for i in range(7)]
        results = [answer.result() for answer in answers]
    assert [list(r.token_ids) for r in results] == [greedy(prompt(i).ids, 9) for i in range(7)]


def test_a_cancelled_answer_ends_with_what_there_is(engine: Engine) -> None:
    answer = engine.stream(prompt(4), max_tokens=200, sampling=SamplingParams(logit_bias={0: -100}))
    seen = [next(answer), next(answer)]
    answer.cancel()
    seen += list(answer)
    ended = answer.result()
    assert ended.finish_reason == "cancelled"
    assert [i for chunk in seen for i in chunk.token_ids] == list(ended.token_ids)
    assert 0 < ended.completion_tokens < 200


def test_leaving_early_frees_the_row() -> None:
    endless = SamplingParams(logit_bias={0: -100})
    with tiny_engine(max_batch=1) as one:
        for seed in range(3):
            with one.stream(prompt(seed), max_tokens=200, sampling=endless) as answer:
                next(answer)
        assert list(one.generate(prompt(5), max_tokens=8).token_ids) == greedy(prompt(5).ids, 8)


def test_a_bad_request_fails_alone(engine: Engine) -> None:
    running = engine.stream(prompt(2), max_tokens=30)
    with pytest.raises(InvalidValueError, match="token id"):
        engine.generate(Prompt((1, VOCAB + 5)), max_tokens=4)
    assert list(running.result().token_ids) == greedy(prompt(2).ids, 30)


def test_a_fault_in_a_step_ends_its_requests_and_not_the_engine() -> None:
    class Faulty(TinyTarget):
        broken = False

        def forward(self, *args: object, **kwargs: object) -> object:  # type: ignore[override]
            if Faulty.broken:
                Faulty.broken = False
                raise RuntimeError("out of memory")
            return super().forward(*args, **kwargs)  # type: ignore[arg-type]

    worker = Worker(lambda: Models(Faulty(vocab=VOCAB), None, FixedLength()), Limits())
    with engine_of(worker) as one:
        answer = one.stream(prompt(1), max_tokens=200, sampling=SamplingParams(logit_bias={0: -9}))
        next(answer)
        Faulty.broken = True
        with pytest.raises(EngineError, match="out of memory"):
            answer.result()
        assert list(one.generate(prompt(2), max_tokens=5).token_ids) == greedy(prompt(2).ids, 5)


@pytest.mark.parametrize(("length", "budget", "expected"), [(250, 100, 6), (255, None, 1)])
def test_an_answer_ends_with_the_context(
    engine: Engine, length: int, budget: int | None, expected: int
) -> None:
    answer = engine.generate(
        prompt(1, length), max_tokens=budget, sampling=SamplingParams(logit_bias={0: -100})
    )
    assert answer.completion_tokens == expected
    assert answer.finish_reason == "length"


@pytest.mark.parametrize("length", [256, 400])
def test_a_prompt_without_room_is_refused(engine: Engine, length: int) -> None:
    with pytest.raises(ContextLengthError, match=rf"{length} tokens and 7 more.* 256 positions"):
        engine.generate(prompt(1, length), max_tokens=7)


def test_a_closed_engine_says_so() -> None:
    one = tiny_engine()
    endless = SamplingParams(logit_bias={0: -100})
    running = one.stream(prompt(1), max_tokens=200, sampling=endless)
    next(running)
    one.close()
    one.close()
    with pytest.raises(EngineClosedError):
        running.result()
    with pytest.raises(EngineClosedError):
        one.generate(prompt(1), max_tokens=3)


def test_what_loading_raises_is_raised_here() -> None:
    def load() -> Models:
        raise InvalidValueError("model", "nothing", "something")

    with pytest.raises(InvalidValueError, match="nothing"):
        Worker(load, Limits()).start()
