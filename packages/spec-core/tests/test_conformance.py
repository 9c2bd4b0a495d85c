"""The kit passes what is right, and names what is broken."""

from collections.abc import Sequence
from types import MappingProxyType

import mlx.core as mx
import pytest

from spec_core.conformance import (
    ConformanceError,
    check_drafter,
    check_policy,
    check_target,
    drafter_findings,
    policy_findings,
    target_findings,
)
from spec_core.policy import ConfidenceThreshold, FixedLength
from spec_core.seams import (
    Chooser,
    Forward,
    LogitRows,
    PerToken,
    Proposal,
    RowState,
    RowStatus,
    StateImage,
    TargetState,
)
from spec_core.testing import (
    NoisyOracle,
    ScriptedDrafter,
    TextState,
    TinyDrafter,
    TinyDrafterState,
    TinyState,
    TinyTarget,
)


def names(findings: Sequence[object]) -> set[str]:
    return {str(f).split(":")[0] for f in findings}


# --- what is right ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": 5},
        {"window": 1},
        {"recurrent": True},
        {"dtype": mx.bfloat16},
        {"dtype": mx.float16, "vocab": 7, "hidden": 8, "layers": 1, "seed": 3},
        {"tappable": False},
        {"has_lender": False},
    ],
    ids=str,
)
def test_tiny_target_passes(options: dict) -> None:
    check_target(TinyTarget(**options))


def test_tiny_target_passes_with_other_lengths() -> None:
    check_target(TinyTarget(), prompt_length=1, columns=2, seed=5)
    check_target(TinyTarget(window=4), prompt_length=30, columns=9)


TARGET = TinyTarget()


@pytest.mark.parametrize(
    "drafter",
    [
        NoisyOracle(TARGET, 0.5),
        NoisyOracle(TARGET, 0.8, stochastic=True, confident=True, max_block=3),
        TinyDrafter(TARGET, confident=True),
        TinyDrafter(TARGET, taps=(-1,), parallel=True, max_block=1),
        TinyDrafter(TARGET, taps=(1, 0), token_ids=range(0, 32, 3)),
        TinyDrafter(TARGET, taps=(), parallel=True, token_ids=range(1, 32, 2)),
        ScriptedDrafter(lambda text: text[-2:], confidence=[0.5, 0.5, 0.5, 0.5]),
        ScriptedDrafter(lambda text: (), max_block=2),
    ],
)
def test_tiny_drafters_pass(drafter: object) -> None:
    check_drafter(drafter, TARGET)


def test_policies_pass() -> None:
    check_policy(FixedLength)
    check_policy(lambda: FixedLength(0))
    check_policy(lambda: ConfidenceThreshold(0.5, 3))


def test_the_tiny_target_sees_every_earlier_token_and_its_position() -> None:
    """Otherwise a wrong commit could go unseen."""

    def last(text: list[int]) -> list[float]:
        logits = TARGET.forward(mx.array([text]), TARGET.new_state(1), logits="last").logits
        return logits[0, 0].tolist()

    text = [3, 1, 4, 1, 5, 9, 2, 6]
    base = last(text)
    for position in range(len(text)):
        changed = list(text)
        changed[position] += 1
        assert last(changed) != base
    assert last([*text[:2], text[3], text[2], *text[4:]]) != base
    assert last([0, *text]) != base


@pytest.mark.parametrize("probability", [0.0, 0.5, 1.0])
def test_the_oracle_is_right_as_often_as_it_says(probability: float) -> None:
    oracle = NoisyOracle(TARGET, probability, seed=2)
    share = sum(oracle.right(n) for n in range(2000)) / 2000
    assert abs(share - probability) < 0.05


# --- what is broken --------------------------------------------------------------------------


class CommitsOneMore(TinyTarget):
    """Commit is off by one: the last kept column is the one after it."""

    class State(TinyState):
        def commit(self, keep: Sequence[int]) -> None:
            fresh = self.fresh
            super().commit(keep)
            if fresh is not None and fresh.shape[1] > keep[0] > 0:
                wrong = fresh[0, keep[0] : keep[0] + 1]
                self.history[0] = mx.concatenate([self.history[0][:-1], wrong])

    def new_state(self, rows: int) -> TinyState:
        return self.State(self, rows)


class KeepsRejected(TinyTarget):
    """Rejected columns stay: the next ones come after them."""

    class State(TinyState):
        def commit(self, keep: Sequence[int]) -> None:
            self.clock.commit(keep)
            for row in range(self.rows if self.fresh is not None else 0):
                self.history[row] = mx.concatenate([self.history[row], self.fresh[row]])
            self.fresh = None

    def new_state(self, rows: int) -> TinyState:
        return self.State(self, rows)


class LeaksOnZero(TinyTarget):
    """A commit of zeros leaves something behind, where a forward had many columns."""

    class State(TinyState):
        def commit(self, keep: Sequence[int]) -> None:
            fresh = self.fresh
            super().commit(keep)
            if fresh is not None and fresh.shape[1] > 2 and not any(keep):
                self.history[0] = mx.concatenate([self.history[0], fresh[0, :1]])

    def new_state(self, rows: int) -> TinyState:
        return self.State(self, rows)


class CommitsFirstRowsKeep(TinyTarget):
    """Every row keeps as many as row 0 does."""

    class State(TinyState):
        def commit(self, keep: Sequence[int]) -> None:
            super().commit([min(keep[0], v) for v in self.clock.valid])

    def new_state(self, rows: int) -> TinyState:
        return self.State(self, rows)


class AnswersTwice(TinyTarget):
    """A second forward silently replaces the first."""

    def forward(self, tokens: mx.array, state: TargetState, **options: object) -> Forward:
        state.clock.provisional = 0
        return super().forward(tokens, state, **options)


class SwapsTaps(TinyTarget):
    """Taps come sorted, not in the order asked."""

    def forward(
        self, tokens: mx.array, state: TargetState, *, taps: Sequence[int] = (), **options: object
    ) -> Forward:
        return super().forward(tokens, state, taps=sorted(taps), **options)


class TapsShiftInSteps(TinyTarget):
    """A single step taps one layer too low."""

    def forward(
        self, tokens: mx.array, state: TargetState, *, taps: Sequence[int] = (), **options: object
    ) -> Forward:
        if tokens.shape[1] == 1:
            taps = [max(i - 1, -1) for i in taps]
        return super().forward(tokens, state, taps=taps, **options)


class TapsScaledEmbedding(TinyTarget):
    """Tap -1 is not what layer 0 was fed."""

    def forward(
        self, tokens: mx.array, state: TargetState, *, taps: Sequence[int] = (), **options: object
    ) -> Forward:
        forward = super().forward(tokens, state, taps=taps, **options)
        scaled = (t * 2 if i == -1 else t for i, t in zip(taps, forward.taps, strict=True))
        return Forward(forward.logits, tuple(scaled))


class LastColumn(TinyTarget):
    """ "last" takes the last column, real or not."""

    def forward(
        self,
        tokens: mx.array,
        state: TargetState,
        *,
        logits: LogitRows = "all",
        **options: object,
    ) -> Forward:
        if logits != "last":
            return super().forward(tokens, state, logits=logits, **options)
        every = super().forward(tokens, state, **options)
        return Forward(every.logits[:, -1:], every.taps)


class SeesPadding(TinyTarget):
    """Columns see each other whatever their order, so padding is visible."""

    def _windowed(self, state: TinyState, layer: int, new: mx.array) -> mx.array:
        old = mx.stack([held[:, layer].sum() for held in state.history])
        return mx.broadcast_to((old + new.sum(axis=1))[:, None], new.shape)


class SelectsSorted(TinyTarget):
    """Rows keep their old order."""

    class State(TinyState):
        def select(self, rows: Sequence[int]) -> None:
            super().select(rows if len(set(rows)) < len(rows) else sorted(rows))

    def new_state(self, rows: int) -> TinyState:
        return self.State(self, rows)


class AllowsDuplicates(TinyTarget):
    """A row may be taken twice."""

    class State(TinyState):
        def select(self, rows: Sequence[int]) -> None:
            if len(set(rows)) == len(rows):
                super().select(rows)

    def new_state(self, rows: int) -> TinyState:
        return self.State(self, rows)


class JoinsInFront(TinyTarget):
    """New rows come first."""

    class State(TinyState):
        def join(self, other: RowState) -> None:
            super().join(other)
            count = other.rows
            self.select([*range(self.rows - count, self.rows), *range(self.rows - count)])

    def new_state(self, rows: int) -> TinyState:
        return self.State(self, rows)


class MovesWhileProvisional(TinyTarget):
    """Rows may move under a provisional forward."""

    class State(TinyState):
        def select(self, rows: Sequence[int]) -> None:
            self.clock.provisional = 0
            super().select(rows)

    def new_state(self, rows: int) -> TinyState:
        return self.State(self, rows)


class LiveImage(TinyTarget):
    """An image is the live buffer, which the next commit changes."""

    class State(TinyState):
        pictured: mx.array | None = None

        def commit(self, keep: Sequence[int]) -> None:
            super().commit(keep)
            if self.pictured is not None:
                self.pictured[:1] = self.pictured[:1] + 1

        def image(self, row: int, start: int = 0) -> StateImage:
            image = super().image(row, start)
            self.pictured = image.per_token["layer0"].array
            return image

    def new_state(self, rows: int) -> TinyState:
        return self.State(self, rows)


class ForgetsStart(TinyTarget):
    """An image always begins at 0, whatever was asked."""

    class State(TinyState):
        def image(self, row: int, start: int = 0) -> StateImage:
            whole = super().image(row)
            return StateImage(start, whole.length, whole.per_token)

    def new_state(self, rows: int) -> TinyState:
        return self.State(self, rows)


class ShortReach(TinyTarget):
    """It claims to need fewer positions than it does."""

    class State(TinyState):
        def image(self, row: int, start: int = 0) -> StateImage:
            whole = super().image(row, start)
            parts = {n: PerToken(p.array, 2) for n, p in whole.per_token.items()}
            return StateImage(start, whole.length, MappingProxyType(parts))

        def _restored(self, name: str, image: StateImage) -> mx.array:
            return image.per_token[name].array

    def new_state(self, rows: int) -> TinyState:
        return self.State(self, rows)


class WrongLengths(TinyTarget):
    """Lengths count provisional columns that were given back."""

    class State(TinyState):
        @property
        def lengths(self) -> Sequence[int]:
            return tuple(n + 1 for n in self.clock.lengths)

    def new_state(self, rows: int) -> TinyState:
        return self.State(self, rows)


@pytest.mark.parametrize(
    ("broken", "name"),
    [
        (CommitsOneMore, "commit"),
        (KeepsRejected, "commit"),
        (KeepsRejected, "commit-zero"),
        (LeaksOnZero, "commit-zero"),
        (CommitsFirstRowsKeep, "commit-ragged"),
        (AnswersTwice, "double-forward"),
        (SwapsTaps, "tap-order"),
        (TapsShiftInSteps, "steps"),
        (TapsScaledEmbedding, "tap-embedding"),
        (LastColumn, "logits-modes"),
        (SeesPadding, "padding"),
        (SeesPadding, "steps"),
        (SelectsSorted, "select"),
        (SelectsSorted, "hole"),
        (AllowsDuplicates, "select-refused"),
        (JoinsInFront, "join"),
        (MovesWhileProvisional, "provisional-rows"),
        (LiveImage, "image-owned"),
        (ForgetsStart, "image-start"),
        (ShortReach, "image"),
        (WrongLengths, "commit"),
    ],
)
def test_a_broken_target_is_named(broken: type[TinyTarget], name: str) -> None:
    with pytest.raises(ConformanceError, match="'tiny' breaks its contract") as caught:
        check_target(broken())
    assert name in {f.check for f in caught.value.findings}


@pytest.mark.parametrize("broken", [LeaksOnZero, SwapsTaps, AllowsDuplicates, LastColumn])
def test_a_narrow_fault_gives_few_findings(broken: type[TinyTarget]) -> None:
    """Where only one thing is wrong, most other checks still pass."""
    assert len(target_findings(broken())) <= 6


def test_a_tolerance_forgives_rounding_only() -> None:
    class Rounds(TinyTarget):
        def forward(self, tokens: mx.array, state: TargetState, **options: object) -> Forward:
            forward = super().forward(tokens, state, **options)
            if forward.logits is None:
                return forward
            return Forward(forward.logits + 1e-4 * tokens.shape[1], forward.taps)

    assert "steps" in names(target_findings(Rounds()))
    assert target_findings(Rounds(), tolerance=1e-2) == ()
    assert "commit" in names(target_findings(CommitsOneMore(), tolerance=1e-2))


class IgnoresKeep(TinyDrafter):
    """Rejected columns are learnt too."""

    def extend(
        self, state: RowState, tokens: mx.array, taps: Sequence[mx.array], keep: Sequence[int]
    ) -> None:
        super().extend(state, tokens, taps, [tokens.shape[1]] * len(keep))


class MixesChunks(TinyDrafter):
    """Only the newest chunk counts."""

    def extend(
        self, state: RowState, tokens: mx.array, taps: Sequence[mx.array], keep: Sequence[int]
    ) -> None:
        super().extend(state, tokens, taps, keep)
        state.seen = [
            mx.concatenate([s[: s.shape[0] - k] * 0, s[s.shape[0] - k :]])
            for s, k in zip(state.seen, keep, strict=True)
        ]


class MixesRows(TinyDrafter):
    """Every row is told row 0's anchor."""

    def propose(self, state: RowState, anchor: mx.array, count: int, chooser: Chooser) -> Proposal:
        return super().propose(state, mx.zeros_like(anchor) + anchor[0], count, chooser)


class DropsLogQ(TinyDrafter):
    """Claims that drawn tokens were certain."""

    def propose(self, state: RowState, anchor: mx.array, count: int, chooser: Chooser) -> Proposal:
        proposal = super().propose(state, anchor, count, chooser)
        return Proposal(proposal.tokens, proposal.lengths)


class UnnormalisedLogQ(TinyDrafter):
    """States logits instead of log-probabilities."""

    def propose(self, state: RowState, anchor: mx.array, count: int, chooser: Chooser) -> Proposal:
        proposal = super().propose(state, anchor, count, chooser)
        return Proposal(proposal.tokens, proposal.lengths, proposal.log_q + 1.0)


class TooMany(TinyDrafter):
    """Gives the whole block whatever was asked."""

    def propose(self, state: RowState, anchor: mx.array, count: int, chooser: Chooser) -> Proposal:
        return super().propose(state, anchor, self.max_block, chooser)


class Remembers(TinyDrafter):
    """Proposing changes the state."""

    def propose(self, state: RowState, anchor: mx.array, count: int, chooser: Chooser) -> Proposal:
        proposal = super().propose(state, anchor, count, chooser)
        state.seen = [s + 1 for s in state.seen]
        return proposal


class Boasts(TinyDrafter):
    """Confidence is a logit."""

    def propose(self, state: RowState, anchor: mx.array, count: int, chooser: Chooser) -> Proposal:
        proposal = super().propose(state, anchor, count, chooser)
        return Proposal(
            proposal.tokens, proposal.lengths, proposal.log_q, proposal.confidence * 10 - 5
        )


class RelativeStart(TinyDrafter):
    """Positions are counted from where it began."""

    def new_state(self, rows: int, start: int = 0) -> TinyDrafterState:
        return TinyDrafterState(rows, 0)


class LosesBase(TextState):
    """A restored text forgets its order."""

    def restore(self, row: int, image: StateImage) -> None:
        super().restore(row, image)
        self.text[row].tokens.reverse()


class ForgetfulScript(ScriptedDrafter):
    def new_state(self, rows: int, start: int = 0) -> TextState:
        return LosesBase(rows, start)


@pytest.mark.parametrize(
    ("broken", "name"),
    [
        (IgnoresKeep(TARGET), "keep"),
        (MixesChunks(TARGET), "chunked-extend"),
        (MixesRows(TARGET), "batch"),
        (MixesRows(TARGET), "select"),
        (DropsLogQ(TARGET), "log-q"),
        (DropsLogQ(TARGET, token_ids=range(0, 32, 3)), "log-q"),
        (UnnormalisedLogQ(TARGET), "log-q"),
        (TooMany(TARGET), "proposal"),
        (TooMany(TARGET), "count-bounds"),
        (Remembers(TARGET), "propose-pure"),
        (Boasts(TARGET, confident=True), "confidence"),
        (RelativeStart(TARGET), "start"),
        (TinyDrafter(TARGET, taps=(5,)), "description"),
        (ForgetfulScript(lambda text: text[-3:-1]), "image"),
    ],
)
def test_a_broken_drafter_is_named(broken: TinyDrafter, name: str) -> None:
    assert name in names(drafter_findings(broken, TARGET))
    with pytest.raises(ConformanceError, match=name):
        check_drafter(broken, TARGET)


class LooksAhead(FixedLength):
    """Drops the whole block where its last score is low."""

    def truncate(
        self,
        rows: Sequence[RowStatus],
        lengths: Sequence[int],
        confidence: Sequence[Sequence[float]],
    ) -> Sequence[int]:
        return [n if c[-1] > 0.3 else 0 for n, c in zip(lengths, confidence, strict=True)]


class ForgetsRows(FixedLength):
    def lengths(self, rows: Sequence[RowStatus]) -> Sequence[int]:
        return [2]


def test_a_broken_policy_is_named() -> None:
    assert names(policy_findings(LooksAhead)) == {"truncate-causal"}
    assert names(policy_findings(ForgetsRows)) == {"lengths"}
    with pytest.raises(ConformanceError, match="truncate-causal"):
        check_policy(LooksAhead)
