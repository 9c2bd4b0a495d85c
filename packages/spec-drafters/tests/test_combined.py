"""Lookup beside a drafter: who guesses, what is asked, and that the parts stay whole."""

from __future__ import annotations

import random
from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_core.adaptive import AdaptiveLength
from spec_core.batch import Batch
from spec_core.chooser import RoundChooser, Sampler
from spec_core.conformance import check_drafter
from spec_core.copies import CopyLength, WithCopies
from spec_core.curves import CostCurves, RoundCost
from spec_core.decode import decode
from spec_core.errors import SeamError
from spec_core.policy import ConfidenceThreshold, FixedLength
from spec_core.request import Request
from spec_core.sampling import SamplingParams
from spec_core.seams import Chooser, Drafter, Proposal, RowState
from spec_core.testing import NoisyOracle, ScriptedDrafter, TinyDrafter, TinyTarget
from spec_drafters.combined import Combined, CombinedState, with_lookup
from spec_drafters.lookup import Lookup

MISS, HIT = [1, 2, 3, 4, 5], [1, 2, 9, 8, 1]
"""Texts that a lookup cannot and can continue after the anchor 2."""


def chooser(rows: int, vocab: int = 16, **sampling: float) -> RoundChooser:
    params = SamplingParams(**sampling)  # type: ignore[arg-type]
    request = Request(prompt=(0,), max_tokens=1, sampling=params)
    return Sampler(vocab, [request] * rows).round([6] * rows)


class Recorded(ScriptedDrafter):
    """A scripted drafter that remembers the counts it was asked for."""

    def __init__(self, *, max_block: int = 3, confidence: Sequence[float] | None = None) -> None:
        super().__init__(lambda text: [13, 14, 15], max_block=max_block, confidence=confidence)
        self.counts: list[int] = []

    def propose(self, state: RowState, anchor: mx.array, count: int, chooser: Chooser) -> Proposal:
        self.counts.append(count)
        return super().propose(state, anchor, count, chooser)


def filled(combined: Combined, texts: Sequence[Sequence[int]], taps: int = 0) -> CombinedState:
    state = combined.new_state(len(texts))
    hidden = [mx.ones((len(texts), len(texts[0]), 4)) for _ in range(taps)]
    combined.extend(
        state, mx.array([list(t) for t in texts], dtype=mx.int32), hidden, [len(t) for t in texts]
    )
    return state


def propose(combined: Combined, state: CombinedState, count: int) -> Proposal:
    anchor = mx.full((state.rows,), 2, dtype=mx.int32)
    return combined.propose(state, anchor, count, chooser(state.rows))


def guesses(proposal: Proposal) -> list[list[int]]:
    rows: list[list[int]] = proposal.tokens.tolist()  # type: ignore[assignment]
    return [row[:n] for row, n in zip(rows, proposal.lengths, strict=True)]


class TestWhoGuesses:
    def test_a_hit_replaces_the_drafter_row_by_row(self) -> None:
        combined = Combined(Lookup(), Recorded())
        proposal = propose(combined, filled(combined, [MISS, HIT, MISS]), 3)
        assert guesses(proposal) == [[13, 14, 15], [9, 8], [13, 14, 15]]
        assert proposal.sources == ("scripted", "lookup", "scripted")
        assert (proposal.log_q, proposal.confidence) == (None, None)

    def test_the_drafter_does_not_run_where_every_row_hits(self) -> None:
        drafter = Recorded()
        combined = Combined(Lookup(), drafter)
        proposal = propose(combined, filled(combined, [HIT, HIT]), 3)
        assert guesses(proposal) == [[9, 8], [9, 8]]
        assert proposal.sources == ("lookup", "lookup")
        assert drafter.counts == []

    def test_it_is_the_drafter_alone_where_no_row_hits(self) -> None:
        combined = Combined(Lookup(), Recorded(confidence=[0.5, 0.25, 0.125]))
        proposal = propose(combined, filled(combined, [MISS]), 2)
        assert guesses(proposal) == [[13, 14]]
        assert proposal.confidence is not None
        assert proposal.confidence.tolist() == [[0.5, 0.25]]

    def test_nobody_knows_anything(self) -> None:
        combined = Combined(Lookup(), ScriptedDrafter(lambda text: []))
        proposal = propose(combined, filled(combined, [MISS, MISS]), 2)
        assert (proposal.lengths, proposal.sources) == ((0, 0), ("", ""))

    @pytest.mark.parametrize(("count", "asked"), [(1, 1), (3, 3), (16, 3)])
    def test_each_part_has_its_own_block(self, count: int, asked: int) -> None:
        drafter = Recorded()
        combined = Combined(Lookup(max_block=16), drafter)
        loop = [2] * 20
        proposal = propose(
            combined, filled(combined, [loop, [*range(3, 13), *range(4, 14)]]), count
        )
        assert combined.max_block == 16
        assert guesses(proposal) == [[2] * count, [13, 14, 15][:asked]]
        assert drafter.counts == [asked]

    def test_the_longer_block_may_be_the_drafters(self) -> None:
        combined = Combined(Lookup(max_block=2), Recorded())
        assert combined.max_block == 3
        assert guesses(propose(combined, filled(combined, [HIT, MISS]), 3)) == [
            [9, 8],
            [13, 14, 15],
        ]

    def test_with_lookup_asks_for_longer_matches_than_lookup_alone(self) -> None:
        combined = with_lookup(Recorded())
        assert propose(combined, filled(combined, [HIT]), 3).sources == ("scripted",)
        assert propose(combined, filled(combined, [[1, 2, 9, 8] * 3 + [1]]), 3).sources == (
            "lookup",
        )
        assert with_lookup(Recorded(), Lookup(5)).lookup.max_block == Lookup(5).max_block
        assert combined.name == "scripted+lookup"


class TestScores:
    def test_copies_count_as_sure_beside_a_confident_drafter(self) -> None:
        combined = Combined(Lookup(max_block=8), Recorded(confidence=[0.5, 0.25, 0.125]))
        state = filled(combined, [[2] * 8, [*range(3, 11)]])
        proposal = propose(combined, state, 8)
        scores = np.array(proposal.confidence).tolist()
        assert scores[0] == [1.0] * 8
        assert scores[1][:3] == [0.5, 0.25, 0.125]
        assert ConfidenceThreshold(0.2).truncate([], proposal.lengths, scores) == [8, 2]

    @pytest.mark.parametrize("parallel", [False, True])
    def test_sampled_rows_keep_their_distribution_and_copies_get_one_hot(
        self, parallel: bool
    ) -> None:
        target = TinyTarget(vocab=16)
        drafter = TinyDrafter(target, taps=(), max_block=3, parallel=parallel)
        combined = Combined(Lookup(max_block=6), drafter)
        state = filled(combined, [[2] * 6, [*range(3, 9)]])
        sampled = chooser(2, temperature=1.0)
        anchor = mx.array([2, 2], dtype=mx.int32)
        proposal = combined.propose(state, anchor, 6, sampled)
        alone = drafter.propose(state.drafter, anchor, 3, sampled)
        assert proposal.lengths == (6, 3)
        assert proposal.log_q is not None
        assert alone.log_q is not None
        assert proposal.log_q.shape == (2, 6, 16)
        copied = np.exp(np.array(proposal.log_q[0]))
        assert copied.tolist() == np.eye(16)[[2] * 6].tolist()
        assert mx.array_equal(proposal.log_q[1, :3], alone.log_q[1])
        assert guesses(proposal)[1] == alone.tokens.tolist()[1]  # type: ignore[index]
        assert np.isfinite(np.array(proposal.log_q[1])).all()

    def test_what_a_mixed_batch_emits_has_the_targets_distribution(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("secrets.randbits", random.Random(7).getrandbits)
        rows, vocab = 4000, 8
        drafter = TinyDrafter(TinyTarget(vocab=vocab), taps=(), max_block=3)
        combined = Combined(Lookup(), drafter)
        state = filled(combined, [[2] * 6, [3, 4, 5, 6, 7, 1]] * (rows // 2))
        sampled = chooser(rows, vocab, temperature=1.0)
        proposal = combined.propose(state, mx.full((rows,), 2, dtype=mx.int32), 3, sampled)
        logits = mx.array([0.1, 1.3, 1.0, -0.5, 0.7, -1.2, 0.4, 0.0])
        verdict = sampled.accept(mx.broadcast_to(logits, (rows, 4, vocab)), proposal)
        firsts = np.array([tokens[0] for _, tokens in verdict.read()])
        expected = np.array(mx.softmax(logits)) * rows / 2
        for part in (firsts[0::2], firsts[1::2]):
            seen = np.bincount(part, minlength=vocab)
            assert ((seen - expected) ** 2 / expected).sum() < 24.3  # 7 degrees, p = 0.001


class TestState:
    def pair(self) -> tuple[Combined, TinyDrafter]:
        drafter = TinyDrafter(TinyTarget(vocab=16), taps=(0,), max_block=3)
        return Combined(Lookup(), drafter), drafter

    def test_an_image_holds_both_parts_and_restores_them(self) -> None:
        combined, _ = self.pair()
        state = filled(combined, [HIT, MISS], taps=1)
        image = state.image(1)
        assert set(image.per_token) == {"lookup.tokens", "drafter.seen"}
        assert (image.start, image.length) == (0, 5)
        restored = combined.new_state(2)
        restored.restore(0, state.image(1))
        restored.restore(1, state.image(0))
        state.select([1, 0])
        assert restored.lengths == state.lengths
        assert guesses(propose(combined, restored, 3)) == guesses(propose(combined, state, 3))

    def test_an_image_without_one_part_is_refused(self) -> None:
        combined, _ = self.pair()
        image = filled(combined, [MISS], taps=1).drafter.image(0)
        with pytest.raises(SeamError, match="no tokens"):
            combined.new_state(1).restore(0, image)

    def test_rows_join_and_leave_in_both_parts(self) -> None:
        combined, _ = self.pair()
        whole = filled(combined, [MISS, HIT, MISS], taps=1)
        expected = guesses(propose(combined, whole, 3))
        parts = filled(combined, [MISS, HIT], taps=1)
        parts.join(filled(combined, [MISS], taps=1))
        assert guesses(propose(combined, parts, 3)) == expected
        parts.select([1, 2])
        assert parts.lookup.rows == parts.drafter.rows == parts.rows == 2
        assert guesses(propose(combined, parts, 3)) == expected[1:]

    def test_both_parts_start_late_and_are_extended_together(self) -> None:
        combined, _ = self.pair()
        state = combined.new_state(1, start=40)
        combined.extend(state, mx.array([MISS]), [mx.ones((1, 5, 4))], [2])
        assert list(state.lookup.lengths) == list(state.drafter.lengths) == [42]
        assert len(state.pending()) == len(state.drafter.pending()) > 0

    def test_parts_out_of_step_are_named(self) -> None:
        combined, _ = self.pair()
        state = filled(combined, [MISS], taps=1)
        combined.lookup.extend(state.lookup, mx.array([[1]]), (), [1])
        with pytest.raises(SeamError, match="lookup has 6 positions in row 0 and the drafter 5"):
            state.image(0)

    def test_foreign_states_and_counts_are_refused(self) -> None:
        combined, drafter = self.pair()
        state = filled(combined, [MISS], taps=1)
        with pytest.raises(SeamError, match="TinyDrafterState"):
            state.join(drafter.new_state(1))
        with pytest.raises(SeamError, match="CombinedState"):
            combined.extend(drafter.new_state(1), mx.array([MISS]), [], [5])
        for count in (0, 33):
            with pytest.raises(SeamError, match=f"count is {count}"):
                propose(combined, state, count)


def batch_tokens(
    target: TinyTarget, drafter: Drafter | None, requests: Sequence[Request], length: int | None
) -> list[list[int]]:
    """What a batch of all requests writes, row by row."""
    batch = Batch(target, drafter, FixedLength(length))
    written: dict[int, list[int]] = {}
    for request in requests:
        prefill = batch.prefill(request)
        while (first := prefill.step(5)) is None:
            pass
        written[first.key] = list(first.tokens)
        if first.finish is None:
            batch.join(prefill)
    while batch.rows:
        for outcome in batch.step():
            written[outcome.key] += outcome.tokens
    return list(written.values())


class TestLossless:
    @settings(max_examples=10, deadline=None)
    @given(
        st.integers(0, 99),
        st.sampled_from([None, 1, 2, 6]),
        st.sampled_from([{}, {"temperature": 0.8, "seed": 3}]),
        st.booleans(),
    )
    def test_a_batch_writes_what_plain_decoding_writes(
        self, seed: int, length: int | None, sampling: dict[str, float], stochastic: bool
    ) -> None:
        target = TinyTarget(seed=seed)
        requests = [
            Request(
                prompt=prompt,
                max_tokens=14 + 3 * i,
                sampling=SamplingParams(**sampling),  # type: ignore[arg-type]
            )
            for i, prompt in enumerate([(1, 1, 1, 1), (1, 2, 3) * 3, (5, 6, 7)])
        ]
        for drafter in (
            TinyDrafter(target, parallel=stochastic),
            NoisyOracle(target, stochastic=stochastic, confident=True),
        ):
            combined = Combined(Lookup(min_match=1, max_block=6), drafter)
            assert batch_tokens(target, combined, requests, length) == batch_tokens(
                target, None, requests, None
            )


def test_it_keeps_the_contract_of_a_drafter() -> None:
    """On texts that never repeat, so that each row asks the drafter, alone and in a batch."""
    target = TinyTarget(vocab=64)
    combined = Combined(Lookup(max_block=6), TinyDrafter(target, confident=True))
    texts = [[n + 12 * row for n in range(11)] for row in range(4)]
    check_drafter(combined, target, texts=texts)


def curves(column: float, longest: int) -> CostCurves:
    """Rounds of 10 ms, and so many more for each guess."""
    points = ((r, n, r * (10.0 + column * n)) for r in (1, 2, 4) for n in range(longest + 1))
    return CostCurves((RoundCost(r, n, 64, ms / 1e3) for r, n, ms in points), cut=1e-3)


def some_request(chance: random.Random, vocab: int) -> Request:
    """Of text that repeats itself, so that some rows copy; some may not draft, some end soon."""
    phrase = [chance.randrange(vocab) for _ in range(chance.randint(1, 6))]
    seeded = SamplingParams(temperature=chance.choice([0.3, 1.0]), seed=chance.randrange(9))
    return Request(
        tuple(phrase * chance.randint(1, 5)),
        sampling=chance.choice([SamplingParams(), seeded]),
        max_tokens=chance.choice([2, 3, 9, 40]),
        max_draft=chance.choice([None, None, 0, 2]),
    )


@pytest.mark.parametrize("seed", range(24))
def test_auto_beside_copies_gives_each_row_its_own_text(seed: int) -> None:
    """Rows that copy, draft, may not draft and end, beside each other: blocks are cut by scores
    where some rows have none, or nothing to cut."""
    chance = random.Random(seed)
    target = TinyTarget(vocab=chance.choice([6, 16]), seed=seed)
    drafter = TinyDrafter(target, max_block=5, confident=True)
    combined = Combined(Lookup(max_block=12, min_match=1), drafter)
    # Where columns cost, blocks are cut by scores; where they do not, copies are long.
    auto = AdaptiveLength(curves(3.0, 5), dwell=4)
    policy = WithCopies(CopyLength(curves(0.1, 12)), auto)
    requests = [some_request(chance, target.info.vocab_size) for _ in range(6)]
    batch, texts, keys = Batch(target, combined, policy), {}, {}
    waiting = [*requests]
    while waiting or batch.busy:
        if waiting and (batch.rows < 2 or chance.random() < 0.2):
            request = waiting.pop()
            prefill = batch.prefill(request)
            while (first := prefill.step(512)) is None:
                pass
            texts[id(request)] = [*first.tokens]
            if first.finish is None:
                keys[batch.join(prefill)] = id(request)
        for outcome in batch.step():
            texts[keys[outcome.key]] += outcome.tokens
    for request in requests:
        alone = decode(
            target,
            None,
            request.prompt,
            sampling=request.sampling,
            max_tokens=request.max_tokens,
        )
        assert texts[id(request)] == [token for outcome in alone for token in outcome.tokens]


def test_a_drafter_without_taps_guesses_where_nothing_matches() -> None:
    target, prompt = TinyTarget(), (5, 1, 9)
    plain = target.greedy(prompt, 30)
    whole = [*prompt, *plain]
    knows = ScriptedDrafter(lambda text: whole[len(text) : len(text) + 3], max_block=3)
    never = Combined(Lookup(min_match=30, max_block=32), knows)
    outcomes = list(decode(target, never, prompt, max_tokens=30))
    assert [token for outcome in outcomes for token in outcome.tokens] == plain
    assert {outcome.source for outcome in outcomes if outcome.drafted} == {knows.name}
