"""Lookup: what it copies, when it keeps silent, and that no row sees another."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_core.chooser import RoundChooser, Sampler
from spec_core.conformance import check_drafter
from spec_core.decode import decode
from spec_core.errors import InvalidValueError, SeamError
from spec_core.request import Request
from spec_core.seams import Drafter, PerToken, Proposal, StateImage
from spec_core.testing import TinyTarget
from spec_drafters.lookup import FIRST_PAUSE, LAST_PAUSE, PATIENCE, Lookup, LookupState, Streak

TOKENS = st.lists(st.integers(0, 2), max_size=12)


def chooser(rows: int) -> RoundChooser:
    requests = [Request(prompt=(0,), max_tokens=1) for _ in range(rows)]
    return Sampler(16, requests).round([1] * rows)


def feed(lookup: Lookup, state: LookupState, texts: Sequence[Sequence[int]]) -> None:
    """Extend each row by its text, in one rectangle."""
    width = max(map(len, texts))
    columns = [[*text, *[0] * (width - len(text))] for text in texts]
    tokens = mx.array(columns, dtype=mx.int32).reshape(len(texts), width)
    lookup.extend(state, tokens, (), [len(text) for text in texts])


def ask(lookup: Lookup, state: LookupState, anchors: Sequence[int], count: int = 0) -> Proposal:
    anchor = mx.array(list(anchors), dtype=mx.int32)
    return lookup.propose(state, anchor, count or lookup.max_block, chooser(len(anchors)))


def guesses(proposal: Proposal) -> list[list[int]]:
    rows: list[list[int]] = proposal.tokens.tolist()  # type: ignore[assignment]
    return [row[:n] for row, n in zip(rows, proposal.lengths, strict=True)]


def one_row(lookup: Lookup, text: Sequence[int]) -> LookupState:
    state = lookup.new_state(1)
    feed(lookup, state, [text])
    return state


def lose(lookup: Lookup, state: LookupState) -> bool:
    """One round on a text of sevens, of which nothing is accepted; false if it kept silent."""
    proposal = ask(lookup, state, [7])
    width = proposal.tokens.shape[1]
    lookup.extend(state, mx.full((1, 1 + width), 7, dtype=mx.int32), (), [1])
    return proposal.lengths[0] > 0


class TestCopies:
    def test_as_many_as_matched_from_the_latest_place(self) -> None:
        lookup = Lookup(min_match=2)
        state = one_row(lookup, [1, 2, 9, 9, 9, 4, 1, 2, 5, 6, 7, 1])
        assert guesses(ask(lookup, state, [2])) == [[5, 6]]

    def test_the_longest_match_beats_the_latest(self) -> None:
        lookup = Lookup(min_match=2)
        state = one_row(lookup, [3, 1, 2, 9, 8, 7, 1, 2, 5, 6, 7, 3, 1])
        assert guesses(ask(lookup, state, [2])) == [[9, 8, 7]]

    def test_endings_below_the_minimum_are_misses(self) -> None:
        text = [1, 2, 3, 9, 1, 2]
        assert guesses(ask(Lookup(4), one_row(Lookup(4), text), [3])) == [[]]
        assert guesses(ask(Lookup(3), one_row(Lookup(3), text), [3])) == [[9, 1, 2]]

    def test_a_period_goes_on(self) -> None:
        lookup = Lookup(max_block=8)
        state = one_row(lookup, [1, 2, 3] * 6)
        assert guesses(ask(lookup, state, [1])) == [[2, 3, 1, 2, 3, 1, 2, 3]]

    @given(TOKENS, st.integers(0, 2), st.integers(1, 6))
    def test_never_beyond_count_and_copies_knows_the_length(
        self, text: list[int], anchor: int, count: int
    ) -> None:
        lookup = Lookup(min_match=1, max_block=6)
        state = one_row(lookup, text)
        whole = guesses(ask(lookup, state, [anchor]))[0]
        assert lookup.copies(state, [anchor]) == (len(whole),)
        assert guesses(ask(lookup, state, [anchor], count))[0] == whole[:count]

    def test_a_run_of_copies_doubles_until_the_block(self) -> None:
        passage = list(range(100, 220))
        lookup = Lookup(min_match=2, max_block=32)
        state = one_row(lookup, [*passage, 7, *passage[:1]])
        at, lengths = 1, []
        while at + 33 < len(passage):
            copied = guesses(ask(lookup, state, passage[at : at + 1]))[0]
            assert copied == passage[at + 1 : at + 1 + len(copied)]
            feed(lookup, state, [passage[at : at + 1 + len(copied)]])
            at += 1 + len(copied)
            lengths.append(len(copied))
        assert lengths == [2, 5, 11, 23, 32, 32]

    def test_an_empty_row_and_a_first_token_are_misses(self) -> None:
        lookup = Lookup(min_match=1)
        state = lookup.new_state(2)
        feed(lookup, state, [[], [4]])
        assert guesses(ask(lookup, state, [4, 4])) == [[], [4]]
        assert ask(lookup, lookup.new_state(1), [4]).tokens.shape == (1, 0)


class TestRows:
    @given(
        st.lists(st.lists(TOKENS, min_size=3, max_size=3), min_size=1, max_size=6),
        st.lists(st.integers(0, 2), min_size=3, max_size=3),
    )
    def test_a_row_in_a_batch_equals_the_row_alone(
        self, steps: list[list[list[int]]], anchors: list[int]
    ) -> None:
        lookup = Lookup(min_match=1, max_block=4)
        batch, solo = lookup.new_state(3), [lookup.new_state(1) for _ in range(3)]
        for texts in steps:
            together = ask(lookup, batch, anchors)
            alone = [ask(lookup, s, [a]) for s, a in zip(solo, anchors, strict=True)]
            assert guesses(together) == [guesses(p)[0] for p in alone]
            assert together.sources == tuple(p.sources[0] for p in alone)
            width = max(2, *map(len, texts))
            padded = mx.array([t + [0] * (width - len(t)) for t in texts], dtype=mx.int32)
            lookup.extend(batch, padded, (), [len(t) for t in texts])
            for state, row, text in zip(solo, range(3), texts, strict=True):
                lookup.extend(state, padded[row : row + 1], (), [len(text)])
            assert batch.lengths == [s.lengths[0] for s in solo]

    def test_copies_that_are_not_verified_have_lost_nothing(self) -> None:
        """A row whose copies a policy refuses shares forwards of many columns with others."""
        lookup = Lookup()
        refused, tried = one_row(lookup, [7] * 8), one_row(lookup, [7] * 8)
        for state, length in ((refused, 0), (tried, 3)):
            for _ in range(PATIENCE):
                assert guesses(ask(lookup, state, [7]))[0]
                lookup.verifying(state, [length])
                lookup.extend(state, mx.array([[7, 1]]), (), [1])
        assert guesses(ask(lookup, refused, [7]))[0]
        assert guesses(ask(lookup, tried, [7])) == [[]]

    def test_join_and_select_move_texts_and_streaks(self) -> None:
        lookup = Lookup()
        paused = one_row(lookup, [7] * 8)
        assert all(lose(lookup, paused) for _ in range(PATIENCE))
        fresh = lookup.new_state(2)
        feed(lookup, fresh, [[7] * 4, [1, 2, 3, 1]])
        fresh.join(paused)
        assert guesses(ask(lookup, fresh, [7, 2, 7])) == [[7] * 4, [3, 1], []]
        fresh.select([2, 1])
        assert fresh.rows == 2
        assert guesses(ask(lookup, fresh, [7, 2])) == [[], [3, 1]]

    @given(TOKENS, TOKENS, st.integers(0, 2))
    def test_a_restored_row_goes_on_as_the_original(
        self, text: list[int], more: list[int], anchor: int
    ) -> None:
        lookup = Lookup(min_match=1)
        state, restored = one_row(lookup, text), lookup.new_state(2)
        restored.restore(1, state.image(0))
        feed(lookup, restored, [[], more])
        feed(lookup, state, [more])
        assert restored.lengths == [0, len(text) + len(more)]
        assert (
            guesses(ask(lookup, restored, [anchor, anchor]))[1]
            == guesses(ask(lookup, state, [anchor]))[0]
        )

    @given(TOKENS, st.integers(0, 12))
    def test_images_of_two_spans_join_to_the_whole(self, text: list[int], cut: int) -> None:
        lookup = Lookup()
        before, whole = one_row(lookup, text[:cut]), one_row(lookup, text)
        parts = [before.image(0), whole.image(0, start=len(text[:cut]))]
        joined = mx.concatenate([part.per_token["tokens"].array for part in parts])
        assert joined.tolist() == text
        assert parts[1].length == whole.image(0).length == len(text)

    def test_a_late_start_keeps_absolute_positions(self) -> None:
        lookup = Lookup()
        state = lookup.new_state(1, start=100)
        feed(lookup, state, [[1, 2, 3, 1]])
        assert state.lengths == [104]
        assert guesses(ask(lookup, state, [2])) == [[3, 1]]
        image = state.image(0)
        assert (image.length, image.per_token["tokens"].array.tolist()) == (104, [1, 2, 3, 1])
        assert state.image(0, start=102).per_token["tokens"].array.tolist() == [3, 1]
        again = lookup.new_state(1)
        again.restore(0, image)
        assert again.lengths == [104]
        assert guesses(ask(lookup, again, [2])) == [[3, 1]]


class TestStreak:
    def test_pauses_double_and_a_win_clears_them(self) -> None:
        lost = Streak()
        for _ in range(PATIENCE):
            assert lost.active(100)
            lost = lost.after(0, 100)
        assert (lost.active(100 + FIRST_PAUSE - 1), lost.active(100 + FIRST_PAUSE)) == (False, True)
        again = lost.after(0, 200)
        assert again.resume_at == 200 + 2 * FIRST_PAUSE
        assert again.after(1, 300) == Streak()

    @given(st.lists(st.integers(0, 3), max_size=40))
    def test_it_is_off_exactly_while_a_pause_lasts(self, accepted: list[int]) -> None:
        streak, losses, length, off_until = Streak(), 0, 0, 0
        for count in accepted:
            length = max(length, streak.resume_at) + 1
            assert streak.active(length)
            streak = streak.after(count, length)
            losses = 0 if count else losses + 1
            off_until = 0
            if losses >= PATIENCE:
                off_until = length + min(FIRST_PAUSE * 2 ** (losses - PATIENCE), LAST_PAUSE)
            assert streak.resume_at == off_until
            assert streak.active(length) == (losses < PATIENCE)

    def test_rejected_rounds_turn_a_row_off_and_its_pause_ends(self) -> None:
        lookup = Lookup()
        state = one_row(lookup, [7] * 8)
        asked = [lose(lookup, state) for _ in range(PATIENCE + FIRST_PAUSE + 1)]
        assert asked == [True] * PATIENCE + [False] * FIRST_PAUSE + [True]

    def test_an_accepted_guess_keeps_it_on(self) -> None:
        lookup = Lookup()
        state = one_row(lookup, [7] * 8)
        for turn in range(4 * PATIENCE):
            assert ask(lookup, state, [7]).lengths[0] > 0
            kept = 2 if turn % PATIENCE == PATIENCE - 1 else 1
            lookup.extend(state, mx.full((1, 3), 7, dtype=mx.int32), (), [kept])

    def test_only_verified_proposals_count(self) -> None:
        lookup = Lookup()
        state = one_row(lookup, [7] * 8)
        for _ in range(2 * PATIENCE):
            assert ask(lookup, state, [7]).lengths[0] > 0
            lookup.copies(state, [7])
            lookup.extend(state, mx.array([[7]]), (), [1])  # a plain round after all
        for _ in range(2 * PATIENCE):
            lookup.extend(state, mx.array([[7, 7]]), (), [1])  # another drafter's guesses
        for _ in range(2 * PATIENCE):
            assert ask(lookup, state, [7]).lengths[0] > 0
            lookup.extend(state, mx.array([[7, 7]]), (), [0])  # a forward taken back


class TestLossless:
    def written(self, drafter: Drafter | None, prompt: Sequence[int], seed: int = 0) -> list[int]:
        rounds = decode(TinyTarget(seed=seed), drafter, prompt, max_tokens=32)
        return [token for outcome in rounds for token in outcome.tokens]

    @pytest.mark.parametrize("prompt", [[1, 1, 1], [3, 4, 5, 6] * 12, [2]])
    def test_repeated_prompts_change_nothing(self, prompt: list[int]) -> None:
        for seed in range(6):
            expected = self.written(None, prompt, seed=seed)
            assert self.written(Lookup(min_match=1), prompt, seed=seed) == expected

    def test_a_draft_that_is_always_wrong_is_never_committed(self) -> None:
        prompt = [1, 1, 1]
        plain = self.written(None, prompt)
        wrong = _AlwaysWrong([*prompt, *plain])
        outcomes = list(decode(TinyTarget(), wrong, prompt, max_tokens=32))
        assert [t for outcome in outcomes for t in outcome.tokens] == plain
        assert sum(outcome.drafted for outcome in outcomes) > 0
        assert all(outcome.accepted == 0 for outcome in outcomes)


class _AlwaysWrong(Lookup):
    """A lookup whose first guess never is the true next token."""

    def __init__(self, truth: Sequence[int]) -> None:
        super().__init__(min_match=1)
        self._truth = [*truth, 0]

    def propose(self, state, anchor, count, chooser):  # type: ignore[no-untyped-def]
        found = super().propose(state, anchor, count, chooser)
        if not found.lengths[0]:
            return found
        true_next = self._truth[state.lengths[0] + 1]
        wrong = mx.array([[(true_next + 1) % 8]], dtype=mx.int32)
        return Proposal(wrong, (1,), sources=found.sources)


class TestRefusals:
    def test_options_out_of_range(self) -> None:
        with pytest.raises(InvalidValueError, match="min_match is 0"):
            Lookup(min_match=0)
        with pytest.raises(InvalidValueError, match="min_match is 9"):
            Lookup(min_match=9, max_block=8)
        with pytest.raises(InvalidValueError, match="max_block is 0"):
            Lookup(min_match=0, max_block=0)

    @pytest.mark.parametrize("count", [0, 33])
    def test_a_count_beyond_the_block(self, count: int) -> None:
        lookup = Lookup()
        with pytest.raises(SeamError, match=f"count {count}"):
            lookup.propose(lookup.new_state(1), mx.array([1]), count, chooser(1))

    def test_what_does_not_fit_the_rows(self) -> None:
        lookup, tokens = Lookup(), mx.array([[1, 2]])
        state = lookup.new_state(1)
        for columns, taps, keep in (
            (tokens, (), [3]),
            (tokens, (), [1, 1]),
            (tokens[0], (), [1]),
            (tokens, (tokens,), [1]),
        ):
            with pytest.raises(SeamError, match="lookup extend"):
                lookup.extend(state, columns, taps, keep)
        for rows in ([1], [0, 0], [-1]):
            with pytest.raises(SeamError, match="select"):
                state.select(rows)
        assert state.lengths == [0]

    def test_foreign_states_and_images(self) -> None:
        lookup = Lookup()
        state = one_row(lookup, [1, 2])
        with pytest.raises(SeamError, match="depth 8 cannot join a LookupState of depth 32"):
            state.join(Lookup(max_block=8).new_state(1))
        with pytest.raises(SeamError, match="holds 2 positions"):
            state.restore(0, StateImage(0, 0))
        empty = lookup.new_state(1)
        with pytest.raises(SeamError, match="no tokens"):
            empty.restore(0, StateImage(0, 2))
        long = {"tokens": PerToken(mx.array([1, 2, 3]))}
        with pytest.raises(SeamError, match="at most 2"):
            empty.restore(0, StateImage(0, 2, per_token=long))


def test_it_keeps_the_contract_of_a_drafter() -> None:
    check_drafter(Lookup(min_match=1, max_block=4), TinyTarget(vocab=4))
