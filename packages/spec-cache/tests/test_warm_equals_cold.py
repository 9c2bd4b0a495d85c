"""A warm row writes what a cold one does, and its drafter is as good."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest

from spec_cache import Namespace, PrefixCache, PrefixReuse, checkpoint_lengths, chunk_end
from spec_core import Batch, Request, RowOutcome, SamplingParams
from spec_core.batch import RowImage
from spec_core.seams import Drafter, StateImage
from spec_core.testing import NoisyOracle, TinyDrafter, TinyTarget

NAMESPACE = Namespace("tiny", "tiny")
BLOCK = 8
CHUNK = 24

TARGETS = {
    "dense": TinyTarget(),
    "window": TinyTarget(window=11),
    "recurrent": TinyTarget(recurrent=True),
}
SAMPLERS = {
    "greedy": SamplingParams(temperature=0.0),
    "seeded": SamplingParams(temperature=1.0, seed=5),
}


@dataclass
class Answer:
    tokens: list[int]
    accepted: list[int]
    cached: int
    computed: int


def drafters(target: TinyTarget) -> list[Drafter | None]:
    return [None, TinyDrafter(target), NoisyOracle(target)]


def answer(
    cache: PrefixCache | None,
    target: TinyTarget,
    drafter: Drafter | None,
    prompt: tuple[int, ...],
    sampling: SamplingParams,
) -> Answer:
    """An engine for one row: resume, prefill in chunks, decode, store on the way."""
    batch = Batch(target, drafter)
    hit = None if cache is None else cache.match(NAMESPACE, prompt)
    restored = None
    if hit is not None and hit.length:
        restored = RowImage(hit.parts["target"], hit.parts.get("drafter"))
    prefill = batch.prefill(Request(prompt, sampling, max_tokens=14), restored)
    length = done = 0 if hit is None else hit.length
    stops = checkpoint_lengths(len(prompt), BLOCK, marks=(30,), start=length)
    outcome: RowOutcome | None = None
    while outcome is None:
        end = chunk_end(done, CHUNK, len(prompt), BLOCK, stops)
        outcome = prefill.step(end - done)
        if cache is not None:
            start = cache.missing(NAMESPACE, prompt, end, since=done, checkpoint=end in stops)
            if start is not None:
                parts = by_name(prefill.image(start))
                cache.store(NAMESPACE, prompt, parts, checkpoint=end in stops)
        done = end
    outcomes = [outcome]
    key = batch.join(prefill)
    while outcomes[-1].finish is None:
        outcomes += batch.step()
    tokens = [t for one in outcomes for t in one.tokens]
    if cache is not None:
        row = (*prompt, *tokens[:-1])
        start = cache.missing(NAMESPACE, row, since=done, checkpoint=True)
        if start is not None:
            cache.store(NAMESPACE, row, by_name(batch.image(key, start)))
    return Answer(tokens, [o.accepted for o in outcomes[1:]], length, len(prompt) - length)


def by_name(image: RowImage) -> dict[str, StateImage]:
    parts = {"target": image.target}
    return parts if image.drafter is None else {**parts, "drafter": image.drafter}


def conversations(seed: int) -> list[tuple[int, ...]]:
    """Prompts of turns that share a system prompt, grow, and are edited in the middle."""
    rng = random.Random(seed)
    system = [rng.randrange(32) for _ in range(30)]
    text = system + [rng.randrange(32) for _ in range(12)]
    longer = text + [rng.randrange(32) for _ in range(23)]
    cut = rng.randrange(len(system) + 1, len(text))
    edited = [*longer[:cut], (longer[cut] + 1) % 32, *longer[cut + 1 :], 3]
    other = system + [rng.randrange(32) for _ in range(9)]
    return [tuple(text), tuple(longer), tuple(other), tuple(edited)]


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("which", range(3), ids=["plain", "drafter", "oracle"])
def test_turns_with_and_without_the_cache(kind: str, which: int, sampler: str) -> None:
    target, sampling = TARGETS[kind], SAMPLERS[sampler]
    drafter = drafters(target)[which]
    cached = 0
    with PrefixCache(1 << 22, block=BLOCK) as cache:
        for prompt in conversations(which):
            warm = answer(cache, target, drafter, prompt, sampling)
            cold = answer(None, target, drafter, prompt, sampling)
            assert warm.tokens == cold.tokens
            assert warm.accepted == cold.accepted
            cached += warm.cached
            again = answer(cache, target, drafter, prompt, sampling)
            assert (again.tokens, again.accepted) == (cold.tokens, cold.accepted)
            assert again.computed == 1
    assert cached > 100


@pytest.mark.parametrize("kind", TARGETS)
def test_turns_while_everything_is_evicted(kind: str, tmp_path: Path) -> None:
    """Little memory and little disk: entries come and go between the turns of a row."""
    target = TARGETS[kind]
    drafter = TinyDrafter(target)
    with PrefixCache(9000, 30000, tmp_path, block=BLOCK) as cache:
        for seed in (0, 1, 0):
            for number, prompt in enumerate(conversations(seed)):
                if number % 4 == 3:
                    cache.clear()
                warm = answer(cache, target, drafter, prompt, SAMPLERS["greedy"])
                cold = answer(None, target, drafter, prompt, SAMPLERS["greedy"])
                assert (warm.tokens, warm.accepted) == (cold.tokens, cold.accepted)
                cache.flush()
                stats = cache.stats()
                assert stats.ram_bytes <= stats.ram_limit
                assert stats.disk_bytes <= stats.disk_limit
        assert cache.stats().hits > 2
        assert cache.stats().evicted_ram > 10
        assert cache.stats().damaged == 0


def test_a_turn_pictures_only_what_is_new() -> None:
    target = TARGETS["dense"]
    with PrefixCache(1 << 22, block=BLOCK) as cache:
        prompt = tuple(range(30)) + tuple(range(17))
        answer(cache, target, None, prompt, SAMPLERS["greedy"])
        longer = (*prompt, 3, 4, 5)
        start = cache.missing(NAMESPACE, longer, checkpoint=True)
        assert start == len(prompt) // BLOCK * BLOCK


@pytest.mark.parametrize(
    ("at_once", "stored"),
    [(0, [24, 48, 72, 96, 100]), (60, [0, 0, 72, 72, 100]), (999, [0, 0, 0, 0, 100])],
)
def test_a_prompt_is_stored_as_it_grows_or_once_it_is_done(at_once: int, stored: list[int]) -> None:
    """How much of it other prompts find after each chunk."""
    prompt = tuple(range(32)) * 3 + (5, 4, 3, 2)
    found: list[int] = []
    with PrefixCache(1 << 22, block=BLOCK) as cache:
        reuse = PrefixReuse(cache, NAMESPACE, exact=False, at_once=at_once)
        admitted = reuse.admit(Batch(TARGETS["dense"]), Request(prompt, max_tokens=1))
        assert admitted is not None
        prefill, thread = admitted
        while prefill.remaining:
            prefill.step(reuse.chunk(thread, prefill.position, CHUNK))
            reuse.after_chunk(thread, prefill)
            found.append(cache.match(NAMESPACE, (*prompt, 9)).length)
    assert found == stored
