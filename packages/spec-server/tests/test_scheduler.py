"""The scheduler: who runs when, what fits, what is reused."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import mlx.core as mx
import pytest

from spec_cache import Namespace, PrefixCache
from spec_core import Batch, Drafter, FixedLength, InvalidValueError, SamplingParams
from spec_core.batch import Prefill
from spec_core.testing import NoisyOracle, TinyDrafter, TinyTarget, continuation
from spec_server import (
    Ask,
    Chunk,
    Completion,
    Engine,
    EngineBusyError,
    Facts,
    Limits,
    MemoryLimitError,
    Prompt,
)
from spec_server.activity import Activity
from spec_server.job import Event, Labels
from spec_server.memory import MemoryBudget, RowCost, measure
from spec_server.scheduler import Models
from spec_server.worker import Worker

from .gated import VOCAB, Gate, GatedTarget, Letters, gated_engine
from .live import eventually

ENDLESS = SamplingParams(logit_bias={0: -100})


def prompt(seed: int, length: int) -> Prompt:
    return Prompt(tuple(1 + (seed * 7 + i * i) % (VOCAB - 1) for i in range(length)))


class Log:
    """What the engine sent, in order, from all requests."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[tuple[str, Event]] = queue.SimpleQueue()

    def submit(self, engine: Engine, name: str, ask: Ask) -> None:
        engine.submit(ask, lambda event: self.events.put((name, event)))

    def saw(self, name: str) -> bool:
        """Whether an event of `name` is among those that have come."""
        while not self.events.empty():
            if self.events.get()[0] == name:
                return True
        return False

    def until(self, name: str) -> list[str]:
        """Names of the events up to the last one of `name`."""
        names: list[str] = []
        while True:
            who, event = self.events.get(timeout=60)
            assert isinstance(event, Chunk), event
            names.append(who)
            if who == name and event.completion is not None:
                return names


def begin(engine: Engine, gate: Gate, log: Log, name: str, ask: Ask) -> None:
    """Submit a request whose answer has begun and is held: the gate is shut afterwards."""
    gate.shut()
    log.submit(engine, name, ask)
    while not log.saw(name):
        if gate.blocked:
            gate.let()
    eventually(lambda: gate.blocked)


# ------------------------------------------------------------------ who runs when


def test_a_running_answer_does_not_delay_a_short_one_by_more_than_two_rounds() -> None:
    engine, gate = gated_engine()
    log = Log()
    with engine:
        begin(engine, gate, log, "long", Ask(prompt(1, 4), ENDLESS, 400))
        before = gate.passed
        log.submit(engine, "short", Ask(prompt(2, 4), ENDLESS, 8))
        while not log.saw("short"):
            if gate.blocked:
                gate.let()
        gate.open()
        assert gate.passed - before <= 2 + 1


def test_a_long_prompt_does_not_stall_a_running_answer() -> None:
    engine, gate = gated_engine(Limits(prefill_chunk=16))
    log = Log()
    with engine:
        begin(engine, gate, log, "running", Ask(prompt(1, 4), ENDLESS, 60))
        log.submit(engine, "long", Ask(prompt(2, 400), ENDLESS, 1))
        gate.open()
        order = log.until("long")
        assert order.count("running") >= 400 // 16 - 2


def test_chunks_shrink_to_the_time_budget_while_others_decode() -> None:
    shapes: list[tuple[int, ...]] = []
    targets: list[GatedTarget] = []
    engine, gate = gated_engine(Limits(prefill_chunk=200, step_seconds=1e-9), targets.append)
    log = Log()
    with engine:
        begin(engine, gate, log, "running", Ask(prompt(1, 4), ENDLESS, 200))
        log.submit(engine, "long", Ask(prompt(2, 300), ENDLESS, 1))
        gate.open()
        log.until("long")
        shapes = [shape for shape in targets[0].shapes if shape[1] > 1]
        assert max(shape[1] for shape in shapes[2:]) == 16
        log.until("running")
        targets[0].shapes.clear()
        log.submit(engine, "alone", Ask(prompt(3, 300), ENDLESS, 1))
        log.until("alone")
        assert [shape[1] for shape in targets[0].shapes] == [200, 100]


def test_as_many_rows_as_allowed() -> None:
    targets: list[GatedTarget] = []
    engine, _ = gated_engine(Limits(max_batch=3), targets.append)
    with engine:
        answers = [engine.stream(prompt(i, 3), sampling=ENDLESS, max_tokens=6) for i in range(9)]
        assert all(a.result().completion_tokens == 6 for a in answers)
        assert max(shape[0] for shape in targets[0].shapes) == 3


def test_the_queue_is_bounded_and_a_group_is_taken_whole_or_not_at_all() -> None:
    engine, gate = gated_engine(Limits(max_batch=1, max_queue=2))
    with engine:
        gate.shut()
        ask, ends = Ask(prompt(1, 3), max_tokens=1), queue.SimpleQueue[Event]()
        with pytest.raises(EngineBusyError):
            engine.submit_all([(ask, ends.put)] * 4)
        engine.submit_all([(ask, ends.put)] * 2)
        engine.submit(ask, ends.put)
        with pytest.raises(EngineBusyError, match="as many as this engine takes"):
            engine.submit(ask, ends.put)
        gate.open()
        assert all(isinstance(ends.get(timeout=60), Chunk) for _ in range(3))
        assert engine.generate(prompt(1, 3), max_tokens=2).completion_tokens
    assert engine.activity.waiting == 0


def test_cancelled_requests_are_gone_by_the_next_step() -> None:
    engine, gate = gated_engine(Limits(max_batch=2, prefill_chunk=16))
    with engine:
        gate.shut()
        gate.let(2)
        running = engine.stream(prompt(1, 3), sampling=ENDLESS, max_tokens=400)
        next(running)
        eventually(lambda: gate.blocked)
        prefilling = engine.stream(prompt(2, 300), sampling=ENDLESS, max_tokens=5)
        queued = engine.stream(prompt(3, 3), sampling=ENDLESS, max_tokens=5)
        for answer in (running, prefilling, queued):
            answer.cancel()
        before = gate.passed
        gate.let(2)
        ends = [answer.result() for answer in (running, prefilling, queued)]
        gate.open()
        assert {end.finish_reason for end in ends} == {"cancelled"}
        assert gate.passed - before <= 2
        assert ends[2].statistics.queue_seconds == 0


def test_submit_and_cancel() -> None:
    engine, gate = gated_engine()
    with engine:
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        gate.shut()
        gate.let(2)
        job = engine.submit(Ask(prompt(1, 3), ENDLESS, 400), events.put)
        chunks = [events.get(timeout=60)]
        engine.cancel(job)
        gate.open()
        while isinstance(chunks[-1], Chunk) and chunks[-1].completion is None:
            chunks.append(events.get(timeout=60))
        assert isinstance(chunks[-1], Chunk)
        end = chunks[-1].completion
        assert end is not None
        assert (end.finish_reason, end.completion_tokens < 400) == ("cancelled", True)
        engine.cancel(job)
        eventually(lambda: not engine.activity.running)
        assert events.empty()


def test_limits_out_of_range() -> None:
    for name, value in {
        "max_batch": 0,
        "max_queue": -1,
        "context_window": 1,
        "prefill_chunk": 0,
        "step_seconds": 0.0,
        "memory_bytes": 0,
    }.items():
        with pytest.raises(InvalidValueError, match=name):
            Limits(**{name: value})  # type: ignore[arg-type]


# ------------------------------------------------------------------ memory


def test_a_row_s_cost_is_measured() -> None:
    target = TinyTarget(vocab=VOCAB, layers=3)
    budget = measure(target, None, 2**40)
    assert budget.cost == RowCost(per_token=3 * 4.0)
    windowed = measure(TinyTarget(vocab=VOCAB, layers=2, window=16), None, 2**40).cost
    assert (windowed.per_token, windowed.per_recent_token, windowed.reach) == (0, 8.0, 16)
    recurrent = measure(TinyTarget(vocab=VOCAB, layers=2, recurrent=True), None, 2**40).cost
    assert recurrent == RowCost(fixed=8.0)
    with_drafter = measure(target, TinyDrafter(target), 2**40).cost
    assert with_drafter.per_token > 12.0
    assert measure(target, None, None).room


def test_the_budget_counts_rows_at_the_longest() -> None:
    budget = MemoryBudget(room=9_300.0, cost=RowCost(per_token=1.0), layers=1)
    assert budget.fits(3, 1000)
    assert not budget.fits(4, 1000)
    assert budget.need(2, 100) == budget.need(1, 256) * 2
    assert budget.longest(2000) == 2000
    assert budget.longest(10_000) == 3072
    assert 1.0 > budget.share(3, 1000) > 0.9 > budget.share(1, 10) > budget.share(0, 0) == 0
    assert MemoryBudget(None, RowCost(1.0), 1).fits(10**6, 10**6)


def limited(room: float, **limits: int) -> Engine:
    """An engine whose rows cost a byte a position, with so much room."""
    engine, _ = gated_engine(Limits(**limits))  # type: ignore[arg-type]
    budget = MemoryBudget(room, RowCost(per_token=1.0), 1)
    engine._worker.memory = budget
    return engine


def test_a_prompt_that_can_never_fit_is_refused_before_any_work() -> None:
    with limited(800.0) as engine:
        refusal = r"300 tokens needs about .* MiB.*raise that limit"
        with pytest.raises(MemoryLimitError, match=refusal):
            engine.generate(prompt(1, 300), max_tokens=2)
        assert engine.generate(prompt(1, 250), sampling=ENDLESS).completion_tokens == 256 - 250


def test_rows_wait_for_memory() -> None:
    gate, targets = Gate(), list[GatedTarget]()

    def load() -> Models:
        targets.append(GatedTarget(gate))
        return Models(targets[0], None, FixedLength())

    class Small(Worker):
        def _prepare(self) -> object:  # type: ignore[override]
            scheduler = super()._prepare()
            scheduler._memory = MemoryBudget(2.0 * 256 * 3, RowCost(per_token=1.0), 1)
            return scheduler

    worker = Small(load, Limits(max_batch=8))
    worker.start()
    facts = Facts("tiny", Labels("baseline"), 4096, "float32", 0, VOCAB)
    with Engine(worker, Letters(), facts) as engine:  # type: ignore[arg-type]
        gate.shut()
        answers = [engine.stream(prompt(i, 9), sampling=ENDLESS, max_tokens=20) for i in range(6)]
        gate.open()
        assert [a.result().completion_tokens for a in answers] == [20] * 6
        assert max(shape[0] for shape in targets[0].shapes) == 2


def test_a_row_without_room_to_grow_ends_with_length_and_says_why() -> None:
    class Small(Worker):
        def _prepare(self) -> object:  # type: ignore[override]
            scheduler = super()._prepare()
            scheduler._memory = MemoryBudget(2.0 * 1280 * 3, RowCost(per_token=1.0), 1)
            return scheduler

    worker = Small(lambda: Models(TinyTarget(vocab=VOCAB), None, FixedLength()), Limits())
    worker.start()
    facts = Facts("tiny", Labels("baseline"), 4096, "float32", 0, VOCAB)
    with Engine(worker, Letters(), facts) as engine:  # type: ignore[arg-type]
        pair = [engine.stream(prompt(i, 9), sampling=ENDLESS, max_tokens=1300) for i in range(2)]
        ends = [answer.result() for answer in pair]
    assert {end.finish_reason for end in ends} == {"length"}
    short, full = sorted(ends, key=lambda end: end.completion_tokens)
    assert full.completion_tokens == 1300
    assert short.completion_tokens >= 1020
    assert "memory limit" in short.statistics.fallbacks[0]
    mx.clear_cache()


@pytest.mark.parametrize("stop", [(), ("Z", "Y")], ids=["budget", "stop"])
def test_an_idle_engine_holds_no_rows(stop: tuple[str, ...]) -> None:
    targets: list[GatedTarget] = []
    engine, _ = gated_engine(on_target=targets.append)
    with engine:
        before = mx.get_active_memory()
        for number in range(3):
            ask = prompt(number, 200)
            answer = engine.generate(ask, sampling=ENDLESS, max_tokens=200, stop=stop)
            assert answer.completion_tokens
        eventually(lambda: mx.get_active_memory() <= before)
        assert engine.activity.running == engine.activity.waiting == 0


# ------------------------------------------------------------------ reuse

KINDS: dict[str, Callable[[], TinyTarget]] = {
    "dense": lambda: TinyTarget(vocab=VOCAB),
    "window": lambda: TinyTarget(vocab=VOCAB, window=24),
    "recurrent": lambda: TinyTarget(vocab=VOCAB, recurrent=True),
}


def drafter_of(target: TinyTarget, kind: str) -> Drafter | None:
    return {
        "plain": None,
        "tiny": TinyDrafter(target),
        "oracle": NoisyOracle(target, 0.8, max_block=5),
    }[kind]


def caching(
    make: Callable[[], TinyTarget],
    drafter: str,
    cache: PrefixCache,
    limits: Limits = Limits(prefill_chunk=40),  # noqa: B008
) -> Engine:
    def load() -> Models:
        target = make()
        return Models(target, drafter_of(target, drafter), FixedLength())

    worker = Worker(
        load,
        limits,
        lambda memory: (cache, Namespace("tiny", drafter)),
    )
    worker.start()
    facts = Facts("tiny", Labels(drafter), 4096, "float32", 5, VOCAB)
    return Engine(worker, Letters(), facts, cache)  # type: ignore[arg-type]


def greedy(target: TinyTarget, ids: Sequence[int], count: int) -> list[int]:
    written = continuation(target, ids, count, {})
    ends = [i for i, token in enumerate(written) if token in Letters.end_tokens]
    return written[: ends[0] + 1] if ends else written


@pytest.mark.parametrize("drafter", ["plain", "tiny", "oracle"])
@pytest.mark.parametrize("kind", KINDS)
def test_warm_answers_equal_cold_ones(kind: str, drafter: str) -> None:
    target = KINDS[kind]()
    with caching(KINDS[kind], drafter, PrefixCache(1 << 24, block=16)) as engine:
        ask = prompt(5, 150)
        first = engine.generate(ask, max_tokens=20)
        assert list(first.token_ids) == greedy(target, ask.ids, 20)
        assert first.statistics.cached_tokens == 0
        again = engine.generate(ask, max_tokens=20)
        assert again.token_ids == first.token_ids
        assert again.statistics.cached_tokens >= (135 if kind != "recurrent" else 128)
        assert again.statistics.cache_stopped == "end"
        assert again.statistics.round_accepts == first.statistics.round_accepts
        turn = Prompt((*ask.ids, *first.token_ids, *prompt(8, 30).ids))
        third = engine.generate(turn, max_tokens=20)
        assert list(third.token_ids) == greedy(target, turn.ids, 20)
        assert third.statistics.cached_tokens >= (150 if kind != "recurrent" else 149)
        other = Prompt((*ask.ids[:100], *prompt(9, 60).ids))
        fourth = engine.generate(other, max_tokens=20)
        assert list(fourth.token_ids) == greedy(target, other.ids, 20)
        assert fourth.statistics.cached_tokens >= (64 if kind == "recurrent" else 80)
        assert fourth.statistics.cache_stopped_at <= 112
        seen = engine.activity
    assert (seen.cache_queries, seen.cache_hits) == (4, 3)


def test_requests_that_arrive_together_share_one_prefill() -> None:
    gate, shapes = Gate(), list[tuple[int, ...]]()

    class Counting(GatedTarget):
        def forward(self, tokens: object, *args: object, **kwargs: object) -> object:
            shapes.append(tuple(tokens.shape))  # type: ignore[attr-defined]
            return super().forward(tokens, *args, **kwargs)

    with caching(lambda: Counting(gate), "plain", PrefixCache(1 << 24, block=16)) as engine:
        shapes.clear()
        gate.shut()
        answers = [engine.stream(prompt(5, 160), max_tokens=4) for _ in range(4)]
        gate.open()
        results = [answer.result() for answer in answers]
    assert len({result.token_ids for result in results}) == 1
    assert sorted(r.statistics.cached_tokens for r in results)[1:] == [159] * 3
    assert sum(shape[1] for shape in shapes if shape[0] == 1 and shape[1] > 4) <= 160


def test_an_empty_cache_after_eviction_changes_nothing() -> None:
    with caching(KINDS["dense"], "oracle", PrefixCache(1 << 24, block=16)) as engine:
        first = engine.generate(prompt(3, 90), max_tokens=15)
        assert engine.cache is not None
        engine.cache.clear()
        second = engine.generate(prompt(3, 90), max_tokens=15)
    assert second.token_ids == first.token_ids
    assert second.statistics.cached_tokens == 0


# ------------------------------------------------------------------ loading ahead


@pytest.fixture
def kept(tmp_path: Path) -> Callable[[], PrefixCache]:
    """Opens a folder that holds the prefix of `prompt(5, 150)`."""

    def opened() -> PrefixCache:
        return PrefixCache(1 << 24, 1 << 24, tmp_path, block=16)

    with caching(KINDS["dense"], "tiny", opened()) as engine:
        engine.generate(prompt(5, 150), max_tokens=4)
    return opened


def test_what_a_queued_request_needs_is_loaded_while_it_waits(
    kept: Callable[[], PrefixCache],
) -> None:
    gate, log, cache = Gate(), Log(), kept()
    with caching(lambda: GatedTarget(gate), "tiny", cache, Limits(max_batch=1)) as engine:
        begin(engine, gate, log, "running", Ask(prompt(1, 4), ENDLESS, 40))
        waiting = engine.stream(prompt(5, 150), max_tokens=4)
        for _ in range(2):  # then a step begins that sees the waiting request
            eventually(lambda: gate.blocked)
            gate.let()
        eventually(lambda: cache.stats().loaded == 10)
        gate.open()
        log.until("running")
        assert waiting.result().statistics.cached_tokens == 149
        assert cache.stats().loaded == 10


def test_running_rows_do_not_wait_for_the_disk(kept: Callable[[], PrefixCache]) -> None:
    """A request whose prefix is still being loaded lets others pass, and is admitted after."""
    gate, log, disk, cache = Gate(), Log(), threading.Event(), kept()
    with caching(lambda: GatedTarget(gate), "tiny", cache) as engine:
        begin(engine, gate, log, "running", Ask(prompt(1, 4), ENDLESS, 400))
        cache._tiers.worker.submit(disk.wait)
        waiting = engine.stream(prompt(5, 150), max_tokens=4)
        log.submit(engine, "other", Ask(prompt(2, 60), ENDLESS, 5))
        gate.open()
        log.until("other")
        assert cache.stats().loaded == 0
        disk.set()
        assert waiting.result().statistics.cached_tokens == 149
        log.until("running")


def test_an_idle_engine_does_not_wait_for_a_busy_writer(kept: Callable[[], PrefixCache]) -> None:
    disk, cache = threading.Event(), kept()
    with caching(KINDS["dense"], "tiny", cache) as engine:
        cache._tiers.worker.submit(disk.wait)
        answer = engine.generate(prompt(5, 150), max_tokens=4)
        assert answer.statistics.cached_tokens == 149
        assert cache.stats().loaded == 10
        disk.set()


# ------------------------------------------------------------------ activity


def test_progress_age_grows_only_while_there_is_work() -> None:
    engine, gate = gated_engine()
    with engine:
        assert engine.activity.progress_seconds == 0
        gate.shut()
        answer = engine.stream(prompt(1, 3), sampling=ENDLESS, max_tokens=3)
        first = engine.activity.progress_seconds
        while engine.activity.progress_seconds <= first:
            pass
        gate.open()
        answer.result()
    assert isinstance(answer.result(), Completion)


def test_activity_of_nothing() -> None:
    seen = Activity().snapshot()
    assert (seen.running, seen.waiting, seen.accepted_by_position) == (0, 0, ())


def test_a_request_whose_row_cannot_join_the_others_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(batch: Batch, prefill: Prefill) -> int:
        raise RuntimeError("no room for its row")

    engine, _ = gated_engine()
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    with engine:
        with monkeypatch.context() as patch:
            patch.setattr(Batch, "join", refuse)
            engine.submit(Ask(prompt(1, 4), ENDLESS, 8), events.put)
            while isinstance(event := events.get(timeout=60), Chunk):
                pass
        assert "no room for its row" in str(event)
        log = Log()
        log.submit(engine, "next", Ask(prompt(2, 4), ENDLESS, 8))
        assert log.until("next")
