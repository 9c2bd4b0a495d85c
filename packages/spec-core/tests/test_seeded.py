"""With a seed, the tokens depend on the seed alone: not on mode, draft length or company."""

import random
from collections.abc import Sequence

import pytest

from spec_core import Batch, Request, SamplingParams, decode
from spec_core.seams import Drafter
from spec_core.testing import NoisyOracle, ScriptedDrafter, TinyDrafter, TinyTarget

TARGET = TinyTarget(vocab=24)
SEEDS = range(200)
COUNT = 10


def request(seed: int) -> Request:
    """Different prompts, temperatures and filters for different seeds."""
    prompt = tuple((seed * 7 + n * n) % 24 for n in range(1 + seed % 5))
    params = SamplingParams(
        temperature=(0.5, 1.0, 1.6)[seed % 3],
        top_k=(0, 0, 6)[seed % 3],
        top_p=(1.0, 0.9)[seed % 2],
        min_p=(0.0, 0.0, 0.0, 0.05)[seed % 4],
        presence_penalty=(0.0, 0.0, 0.8)[seed // 3 % 3],
        seed=seed * 1_000_003 - 77,
    )
    return Request(prompt, params, COUNT)


def in_a_batch(
    drafter: Drafter | None, requests: Sequence[Request], max_draft: int | None = None
) -> list[list[int]]:
    batch, tokens = Batch(TARGET, drafter), {}
    for each in requests:
        prefill = batch.prefill(
            Request(each.prompt, each.sampling, each.max_tokens, max_draft=max_draft)
        )
        first = prefill.step(100)
        tokens[first.key] = list(first.tokens)
        batch.join(prefill)
    while batch.rows:
        for outcome in batch.step():
            tokens[outcome.key] += outcome.tokens
    return list(tokens.values())


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """Each seed's tokens by plain decoding, alone."""
    return [
        [
            token
            for outcome in decode(
                TARGET, None, r.prompt, sampling=r.sampling, max_tokens=r.max_tokens
            )
            for token in outcome.tokens
        ]
        for r in map(request, SEEDS)
    ]


DRAFTERS = {
    "oracle": NoisyOracle(TARGET, 0.8),
    "drawn": NoisyOracle(TARGET, 0.6, stochastic=True, seed=3),
    "chain": TinyDrafter(TARGET),
    "block": TinyDrafter(TARGET, parallel=True),
    "reduced": TinyDrafter(TARGET, token_ids=range(1, 24, 2)),
    "copies": ScriptedDrafter(lambda text: text[-2:]),
}


def test_seeds_differ(alone: list[list[int]]) -> None:
    assert len({tuple(tokens) for tokens in alone}) == len(alone)


def test_a_batch_without_a_drafter_changes_nothing(alone: list[list[int]]) -> None:
    requests = [request(seed) for seed in SEEDS]
    assert in_a_batch(None, requests[:120]) + in_a_batch(None, requests[120:]) == alone


@pytest.mark.parametrize("max_draft", [1, 2, None])
@pytest.mark.parametrize("kind", DRAFTERS)
def test_every_mode_and_draft_length_gives_the_same_tokens(
    kind: str, max_draft: int | None, alone: list[list[int]]
) -> None:
    requests = [request(seed) for seed in SEEDS]
    got = []
    for start in range(0, len(requests), 50):
        got += in_a_batch(DRAFTERS[kind], requests[start : start + 50], max_draft)
    assert got == alone


@pytest.mark.parametrize("kind", ["chain", "drawn"])
def test_every_mode_alone(kind: str, alone: list[list[int]]) -> None:
    for seed in SEEDS[::10]:
        assert in_a_batch(DRAFTERS[kind], [request(seed)]) == [alone[seed]]


def test_sharing_noise_gets_drafts_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nearly as many drafts are accepted as by the rejection rule, which has the most possible.

    Draws that were independent of each other would agree far less often.
    """
    monkeypatch.setattr("spec_core.chooser.secrets.randbits", random.Random(3).getrandbits)
    drafter = TinyDrafter(TARGET)

    def share(seeds: Sequence[int | None]) -> float:
        accepted = drafted = 0
        for seed in seeds:
            params = SamplingParams(1.0, seed=seed)
            for outcome in decode(
                TARGET, drafter, (1, 2), sampling=params, max_tokens=30, max_draft=1
            ):
                accepted += outcome.accepted
                drafted += outcome.drafted
        return accepted / drafted

    assert share(range(12)) > 0.75 * share([None] * 12)


def test_rows_of_other_kinds_change_nothing(alone: list[list[int]]) -> None:
    """Greedy and unseeded rows beside a seeded one."""
    others = [
        Request((3, 4), SamplingParams(), 12),
        Request((5,), SamplingParams(1.0), 12),
        Request((6, 6, 6), SamplingParams(0.7, top_p=0.5, logprobs=2, frequency_penalty=1.0), 12),
    ]
    for seed in (0, 5, 11):
        for drafter in (None, DRAFTERS["chain"], DRAFTERS["drawn"]):
            got = in_a_batch(drafter, [others[0], request(seed), *others[1:]])
            assert got[1] == alone[seed]
