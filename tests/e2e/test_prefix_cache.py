"""The prefix cache with real models: a warm answer is the cold one, guesses included."""

from __future__ import annotations

import queue
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from spec_core import Prefill, RowOutcome, SamplingParams
from spec_server import Ask, CacheOptions, Completion, Engine, Prompt
from spec_server.job import Event

LARGE = 64 << 20
CODE = "".join(
    f"def {name}(values):\n    return [value {sign} 2 for value in values]\n\n"
    for name in ("add", "double", "power", "shift", "scale")
    for sign in ("+", "*", "-", "**")
)
TARGETS = ("dense", "quantised", "window", "wide", "hybrid")
MODES = ("baseline", "lookup", "dspark", "dflash", "eagle3", "dspark+lookup")
CASES = [(target, mode) for target in TARGETS for mode in MODES]
QUICK = [("dense", "dflash"), ("wide", "dspark"), ("hybrid", "eagle3")]
TRAINED = [("trained", "dspark"), ("trained", "dflash")]
WIDE_WINDOW, WIDE_RING = 96, 128

Load = Callable[..., Engine]


def _slow(*values: str) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def load(
    folders: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Load]:
    """Engines by target, mode, bytes for prefixes (None: no cache) and on disk, loaded once."""
    with ExitStack() as stack:

        @cache
        def make(target: str, mode: str, ram: int | None, disk: int = 0) -> Engine:
            name = "dense" if target == "quantised" else target
            drafts, _, lookup = mode.partition("+")
            trained = drafts not in ("baseline", "lookup")
            folder = tmp_path_factory.mktemp("kept") if disk else None
            return stack.enter_context(
                Engine.load(
                    folders(name),
                    mode=drafts,  # type: ignore[arg-type]
                    drafter=folders(f"{name}:{drafts}") if trained else None,
                    lookup_drafts=bool(lookup) if trained else None,
                    dtype="float32",
                    kv_bits=8 if target == "quantised" else None,
                    prefix_cache=None if ram is None else CacheOptions(ram, disk, folder),
                )
            )

        yield make


class Conversation:
    """Turns that go on, are taken back to the middle, or are edited there."""

    def __init__(self, random: random.Random, system: list[int], words: list[int]) -> None:
        self._random = random
        self._words = words
        self.tokens = list(system)

    def ask(self) -> tuple[int, ...]:
        """The next prompt."""
        if len(self.tokens) > 80 and self._random.random() < 0.4:
            cut = self._random.randrange(20, len(self.tokens))
            later = self.tokens[cut + 1 :] if self._random.random() < 0.5 else []
            self.tokens = [*self.tokens[:cut], self._random.choice(self._words), *later]
        self.tokens += self.text(self._random.randrange(1, 60))
        return tuple(self.tokens)

    def text(self, length: int) -> list[int]:
        start = self._random.randrange(len(self._words) - length)
        return self._words[start : start + length]

    def answered(self, tokens: tuple[int, ...]) -> None:
        self.tokens += tokens


def sampling_of(turn: int) -> SamplingParams:
    """Greedy, or so hot that even a random drafter is often right."""
    return SamplingParams(temperature=3.0, seed=turn) if turn % 2 else SamplingParams()


def same(warm: Completion, cold: Completion) -> bool:
    return (
        warm.token_ids == cold.token_ids
        and warm.statistics.round_accepts == cold.statistics.round_accepts
        and warm.statistics.mean_accept_length == cold.statistics.mean_accept_length
    )


@pytest.mark.parametrize(("target", "mode"), CASES, ids=["-".join(case) for case in CASES])
def test_warm_equals_cold(load: Load, target: str, mode: str) -> None:
    cold, warm = load(target, mode, None), load(target, mode, LARGE)
    assert converse(cold, warm, turns=5, seed=1) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize(("target", "mode"), [*CASES, *TRAINED])
def test_warm_equals_cold_for_long(load: Load, target: str, mode: str) -> None:
    cold, warm = load(target, mode, None), load(target, mode, LARGE)
    assert converse(cold, warm, turns=40, seed=3) > 0.3


@pytest.mark.parametrize("target", ["dense", "quantised", "wide", "hybrid", _slow("trained")])
def test_warm_equals_cold_while_much_is_evicted(load: Load, target: str) -> None:
    mode = "dspark"
    small = 1 << (18 if target == "quantised" else 22 if target == "trained" else 19)
    cold, warm = load(target, mode, None), load(target, mode, small)
    assert converse(cold, warm, turns=8, seed=2) > 0
    assert warm.cache is not None
    seen = warm.cache.stats()
    assert seen.evicted_ram or seen.refused_entries
    assert seen.ram_bytes <= small


@pytest.mark.parametrize(
    ("target", "mode"), [*QUICK, *(_slow(*case) for case in CASES if case not in QUICK)]
)
def test_warm_equals_cold_while_memory_holds_a_row_and_the_disk_the_rest(
    load: Load, target: str, mode: str
) -> None:
    small = 1 << (18 if target in ("dense", "quantised") else 20)
    cold, warm = load(target, mode, None), load(target, mode, small, 1 << 26)
    assert converse(cold, warm, turns=12, seed=4, forget=False) > 0.4
    assert warm.cache is not None
    seen = warm.cache.stats()
    assert seen.evicted_ram
    assert seen.loaded
    assert not seen.damaged
    assert not seen.disk_off


@pytest.mark.parametrize("mode", ["dspark", *map(_slow, [m for m in MODES if m != "dspark"])])
def test_warm_equals_cold_before_and_after_a_ring_wraps(load: Load, mode: str) -> None:
    """Conversations that begin well within the window, and grow beyond the whole ring."""
    cold, warm = load("wide", mode, None), load("wide", mode, LARGE)
    chance = random.Random(8)
    words = [*cold.tokeniser.encode(CODE).ids]
    lengths, cached = [], []
    for talk in range(3):
        tokens = words[40 * talk : 40 * talk + chance.randrange(25, 40)]
        while len(tokens) < WIDE_RING + 40:
            turn = len(lengths)
            prompt, sampling = Prompt(tuple(tokens)), sampling_of(turn)
            answers = [e.generate(prompt, sampling=sampling, max_tokens=6) for e in (warm, cold)]
            assert same(*answers), (turn, answers)
            lengths.append(len(prompt.ids))
            cached.append(answers[0].statistics.cached_tokens)
            tokens = [*tokens, *answers[1].token_ids, *words[turn : turn + chance.randrange(3, 17)]]
    assert any(
        0 < seen < length < WIDE_WINDOW for length, seen in zip(lengths, cached, strict=True)
    )
    assert any(WIDE_WINDOW < seen < WIDE_RING for seen in cached)
    assert any(seen > WIDE_RING for seen in cached)


def converse(cold: Engine, warm: Engine, *, turns: int, seed: int, forget: bool = True) -> float:
    """Hold three conversations with both engines; the share of prompt tokens that were reused.

    Half-way, the cache is emptied, if it is to `forget`.
    """
    assert cold.cache is None
    assert warm.cache is not None
    chance = random.Random(seed)
    words = [*cold.tokeniser.encode(CODE).ids]
    system = words[: chance.randrange(70, 150)]
    talks = [Conversation(chance, system, words) for _ in range(3)]
    asked = reused = 0
    for turn in range(turns):
        if forget and turn == turns // 2:
            warm.cache.clear()
        talk = chance.choice(talks)
        prompt, sampling = Prompt(talk.ask()), sampling_of(turn)
        answers = [e.generate(prompt, sampling=sampling, max_tokens=8) for e in (warm, cold)]
        assert same(*answers), (turn, answers)
        asked += len(prompt.ids)
        reused += answers[0].statistics.cached_tokens
        assert answers[1].statistics.cached_tokens == 0
        talk.answered(answers[1].token_ids)
    return reused / asked


@pytest.mark.parametrize("mode", ["dspark", "dflash"])
def test_a_warm_drafter_guesses_as_well_as_a_cold_one(load: Load, mode: str) -> None:
    """The trained pair: most of its guesses are right, and they need the prompt."""
    cold, warm = load("trained", mode, None), load("trained", mode, LARGE)
    asked = [{"role": "user", "content": f"Write a function that doubles a list.\n{CODE[:300]}"}]
    prompt = cold.tokeniser.render(asked)
    answers = [engine.generate(prompt, max_tokens=40) for engine in (cold, warm, warm)]
    assert answers[2].statistics.cached_tokens == len(prompt.ids) - 1
    assert answers[0].statistics.mean_accept_length > 2
    assert same(answers[1], answers[0])
    assert same(answers[2], answers[0])


@pytest.mark.parametrize("length", [40, 300])
@pytest.mark.parametrize("target", ["dense", "quantised", "window", "wide", "hybrid"])
def test_a_fully_cached_prompt_costs_one_step(
    load: Load, monkeypatch: pytest.MonkeyPatch, target: str, length: int
) -> None:
    steps: list[int] = []

    def step(prefill: Prefill, tokens: int) -> RowOutcome | None:
        steps.append(tokens)
        return computed(prefill, tokens)

    computed = Prefill.step
    monkeypatch.setattr(Prefill, "step", step)
    engine = load(target, "dspark", LARGE)
    prompt = Prompt(tuple(random.Random(length).randrange(256) for _ in range(length)))
    first = engine.generate(prompt, max_tokens=5)
    assert sum(steps) == length - first.statistics.cached_tokens
    steps.clear()
    again = engine.generate(prompt, max_tokens=5)
    assert steps == [1]
    assert again.token_ids == first.token_ids
    assert again.statistics.cached_tokens == length - 1
    assert (again.statistics.cache_stopped, again.statistics.cache_stopped_at) == (
        "end",
        length - 1,
    )


@pytest.mark.parametrize("target", ["dense", "window", "hybrid"])
def test_requests_at_once_compute_a_prompt_once(load: Load, target: str) -> None:
    engine = load(target, "dspark", LARGE)
    prompt = Prompt(tuple(random.Random(target).randrange(256) for _ in range(400)))
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    engine.submit_all([(Ask(prompt, max_tokens=6), events.put)] * 3)
    done: list[Completion] = []
    while len(done) < 3:
        event: Any = events.get(timeout=60)
        if event.completion is not None:
            done.append(event.completion)
    assert len({completion.token_ids for completion in done}) == 1
    cached = sorted(completion.statistics.cached_tokens for completion in done)
    assert cached[0] < 64
    assert cached[1:] == [399, 399]


def test_the_point_where_conversations_part_becomes_a_checkpoint(load: Load) -> None:
    """Recurrent state: the third conversation with a system prompt reuses all of it."""
    engine, chance = load("hybrid", "baseline", LARGE), random.Random(5)
    system = [chance.randrange(256) for _ in range(500)]
    cached = []
    for user in range(3):
        prompt = Prompt((*system, user, *(chance.randrange(256) for _ in range(30))))
        cached.append(engine.generate(prompt, max_tokens=2).statistics.cached_tokens)
    assert cached[1:] == [256, 500]


def test_tenants_are_apart(load: Load) -> None:
    engine = load("dense", "baseline", LARGE)
    prompt = Prompt(tuple(random.Random(9).randrange(256) for _ in range(200)))

    def cached(salt: str) -> int:
        answer = engine.generate(prompt, max_tokens=2, cache_salt=salt)
        return answer.statistics.cached_tokens

    assert [cached(salt) for salt in ("", "a", "b", "a", "b", "")] == [0, 0, 0, 199, 199, 199]


def test_a_folder_outlives_the_engine(folders: Callable[[str], Path], tmp_path: Path) -> None:
    prompt = Prompt(tuple(random.Random(4).randrange(256) for _ in range(300)))

    def answer(kept: bool) -> Completion:
        cache = CacheOptions(LARGE, 1 << 26, tmp_path / "kept") if kept else None
        with Engine.load(folders("hybrid"), mode="lookup", prefix_cache=cache) as engine:
            return engine.generate(prompt, max_tokens=8)

    first, second, cold = answer(True), answer(True), answer(False)
    assert first.token_ids == second.token_ids == cold.token_ids
    assert (first.statistics.cached_tokens, second.statistics.cached_tokens) == (0, 299)


def test_two_conversations_hold_a_common_system_prompt_once(load: Load) -> None:
    engine, chance = load("wide", "dspark", LARGE), random.Random(6)
    assert engine.cache is not None
    engine.cache.clear()
    system = [chance.randrange(256) for _ in range(1024)]
    grown = [0]
    for user in range(3):
        engine.generate(Prompt((*system, user, 7, 7)), max_tokens=2)
        grown.append(engine.cache.stats().ram_bytes)
    assert grown[2] - grown[1] < 0.15 * grown[1]
    assert grown[3] - grown[2] < 0.15 * grown[1]
