"""Whatever drafts: what comes out is what the target alone would have written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_core import (
    Batch,
    ConfidenceThreshold,
    DraftPolicy,
    FixedLength,
    Request,
    RowOutcome,
    SamplingParams,
)
from spec_core.batch import RowImage
from spec_core.conformance.drafter import check_drafter
from spec_core.seams import Drafter, StateImage
from spec_core.testing import TinyTarget
from spec_drafters.spec import Selector

from .families import FAMILIES, VOCAB, drafter, target

SAMPLING = {
    "greedy": SamplingParams(),
    "seeded": SamplingParams(temperature=0.9, top_p=0.95, seed=5),
    "penalised": SamplingParams(presence_penalty=0.7, repetition_penalty=1.2),
}


def request(prompt: Sequence[int], sampling: str, tokens: int) -> Request:
    return Request(
        prompt=tuple(prompt),
        sampling=SAMPLING[sampling],
        max_tokens=tokens,
        end_tokens=frozenset({VOCAB - 1}),
    )


def run(
    target: TinyTarget,
    drafter: Drafter | None,
    requests: Sequence[Request],
    policy: DraftPolicy | None = None,
    *,
    chunk: int = 5,
    restored: RowImage | None = None,
    gap: int = 0,
) -> list[list[RowOutcome]]:
    """Outcomes of each request, in order and without their keys; `gap` rounds lie between two rows'
    beginnings."""
    batch = Batch(target, drafter, policy)
    seen: dict[int, list[RowOutcome]] = {}

    def keep(outcomes: Sequence[RowOutcome]) -> None:
        for outcome in outcomes:
            seen.setdefault(outcome.key, []).append(replace(outcome, key=0))

    for index, each in enumerate(requests):
        prefill = batch.prefill(each, restored if index == 0 else None)
        while (first := prefill.step(chunk)) is None:
            pass
        keep([first])
        if first.finish is None:
            batch.join(prefill)
        for _ in range(gap):
            keep(batch.step())
    while batch.rows:
        keep(batch.step())
    return list(seen.values())


def written(outcomes: Sequence[RowOutcome]) -> list[int]:
    return [token for outcome in outcomes for token in outcome.tokens]


@cache
def alone(seed: int, prompt: tuple[int, ...], sampling: str, tokens: int) -> list[int]:
    """What the target itself writes."""
    return written(run(target(seed), None, [request(prompt, sampling, tokens)])[0])


PROMPTS = [(1,), (1, 2, 3, 4, 5, 6, 0, 1, 2), (3, 3, 3, 3), (6, 5, 4, 3, 2, 1)]


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=4)
@given(
    seed=st.integers(0, 3),
    length=st.sampled_from([None, 1, 2]),
    sampling=st.sampled_from(list(SAMPLING)),
    gap=st.integers(0, 3),
)
def test_a_batch_writes_what_the_target_writes(
    family: str, seed: int, length: int | None, sampling: str, gap: int
) -> None:
    """Rows of different length that join late and end at different times."""
    tiny = target(seed)
    requests = [request(p, sampling, 9 + 4 * i) for i, p in enumerate(PROMPTS)]
    seen = run(tiny, drafter(family, tiny, seed), requests, FixedLength(length), gap=gap)
    for index, each in enumerate(requests):
        assert written(seen[index]) == alone(seed, each.prompt, sampling, each.max_tokens)


@pytest.mark.parametrize("family", FAMILIES)
def test_some_guesses_are_accepted_and_some_are_not(family: str) -> None:
    """Otherwise the other tests would say little."""
    drafted = accepted = 0
    for seed in range(4):
        tiny = target(seed)
        requests = [request(p, "greedy", 20) for p in PROMPTS]
        for outcomes in run(tiny, drafter(family, tiny, seed), requests):
            drafted += sum(outcome.drafted for outcome in outcomes)
            accepted += sum(outcome.accepted for outcome in outcomes)
    assert 0 < accepted < drafted


@pytest.mark.parametrize("family", [n for n, s in FAMILIES.items() if s.confidence])
def test_cutting_by_confidence_changes_nothing(family: str) -> None:
    tiny = target(1)
    requests = [request(p, "seeded", 15) for p in PROMPTS]
    seen = run(tiny, drafter(family, tiny, 1), requests, ConfidenceThreshold(0.5))
    for index, each in enumerate(requests):
        assert written(seen[index]) == alone(1, each.prompt, "seeded", 15)


def cut(image: StateImage, length: int) -> StateImage:
    """The image that a row of `length` positions would have given: a cache's hit on a prefix."""
    parts = {
        name: type(part)(part.array[: part.array.shape[0] - (image.length - length)], part.reach)
        for name, part in image.per_token.items()
    }
    return StateImage(image.start, length, parts)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [1, 4, 8])
def test_a_restored_prefix_is_as_good_as_a_computed_one(family: str, length: int) -> None:
    """Another text with the same prefix: the same tokens, and the same guesses accepted."""
    tiny = target(2)
    guess = drafter(family, tiny, 2)
    common, tail = (1, 2, 3, 4, 5, 6, 0, 1, 2), (4, 4)
    before = Batch(tiny, guess).prefill(request(common, "greedy", 4))
    before.step(8)
    whole = before.image()
    assert whole.drafter is not None
    image = RowImage(cut(whole.target, length), cut(whole.drafter, length))
    new = [request(common[:length] + tail, "greedy", 24), request(PROMPTS[2], "greedy", 20)]
    cold, warm = run(tiny, guess, new), run(tiny, guess, new, restored=image, chunk=3)
    assert written(warm[0]) == alone(2, new[0].prompt, "greedy", 24)
    assert [o.accepted for o in warm[0]] == [o.accepted for o in cold[0]]
    assert warm[1] == cold[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_drafter_that_begins_in_the_middle_changes_nothing(family: str) -> None:
    """A hit that holds the target's part only."""
    tiny = target(3)
    guess = drafter(family, tiny, 3)
    prompt = (1, 2, 3, 4, 5, 6, 0, 1, 2)
    before = Batch(tiny, None).prefill(request(prompt, "greedy", 4))
    before.step(7)
    image = RowImage(before.image().target, None)
    seen = run(tiny, guess, [request(prompt, "greedy", 20)], restored=image)
    assert written(seen[0]) == alone(3, prompt, "greedy", 20)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        # The kit draws tokens of its own choice: all of them have to be candidates.
        ("dflash2", {"selector": Selector(4, VOCAB)}),
        ("dspark with a silent anchor", {}),
        ("eagle3 of a part of the vocabulary", {}),
    ],
)
def test_keeps_the_contract_of_a_drafter(family: str, changes: dict[str, Any]) -> None:
    tiny = target()
    made = drafter(family, tiny, **changes)
    check_drafter(made, tiny, tolerance=2e-4, prompt_length=20)
