"""The round: propose, verify, accept, commit, observe. One function pair for all modes and sizes.

`launch` builds and submits, `settle` waits once. Plain decoding is a round of length 0, and may be
launched before its predecessor is settled.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from spec_core.chooser import RoundChooser, Sampler, Verdict
from spec_core.device import runs_beside_host, start
from spec_core.errors import SeamError
from spec_core.request import Request
from spec_core.seams import (
    Copier,
    Drafter,
    DrafterState,
    DraftPolicy,
    Finish,
    Forward,
    Proposal,
    RowOutcome,
    RowStatus,
    Target,
    TargetState,
)


@dataclass(slots=True)
class Row:
    """One sequence in a batch. `finish` is set the moment it ends."""

    key: int
    request: Request
    emitted: int = 0
    finish: Finish | None = None

    @property
    def remaining(self) -> int:
        return self.request.max_tokens - self.emitted

    def cut(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Emit tokens up to the first end token or the budget, and set `finish`."""
        kept = tuple(tokens[: self.remaining])
        for index, token in enumerate(kept):
            if token in self.request.end_tokens:
                kept, self.finish = kept[: index + 1], "stop"
                break
        self.emitted += len(kept)
        if self.finish is None and self.remaining == 0:
            self.finish = "length"
        return kept


@dataclass(slots=True)
class Flight:
    """A launched round.

    Attributes:
        tokens: [B, T] the forwarded columns, anchor first.
        lengths: guesses verified in each row.
        sources: who guessed, in each row.
        prompts: how many chunks of prompts there had been at launch.
        committed: the columns are already kept (a plain round whose anchor is settled).
    """

    tokens: mx.array
    lengths: tuple[int, ...]
    sources: tuple[str, ...]
    forward: Forward
    verdict: Verdict
    started: float
    prompts: int
    committed: bool = False

    @property
    def plain(self) -> bool:
        return self.tokens.shape[1] == 1


@dataclass(slots=True)
class Prompts:
    """How many chunks of prompts were computed beside a batch's rounds."""

    chunks: int = 0


@dataclass(slots=True)
class Lanes:
    """B rows that share each forward: their states, in the same order everywhere.

    Attributes:
        anchor: [B] each row's newest token, perhaps still being computed.
        newest: the newest token of each row that is settled, on the host.
        prompts: counts the chunks that delay a round in flight.
    """

    target: Target
    drafter: Drafter | None
    policy: DraftPolicy
    rows: list[Row]
    state: TargetState
    drafts: DrafterState | None
    sampler: Sampler
    anchor: mx.array
    newest: list[int]
    prompts: Prompts
    settled_at: float = 0.0
    copier: Copier | None = field(init=False)

    def __post_init__(self) -> None:
        self.copier = self.drafter if isinstance(self.drafter, Copier) else None

    @property
    def taps(self) -> Sequence[int]:
        return () if self.drafter is None else self.drafter.taps

    def chooser(self) -> RoundChooser:
        """The sampler of the next round: slot 0 stands right after the anchor."""
        return self.sampler.round([n + 1 for n in self.state.lengths])

    @property
    def copies_only(self) -> bool:
        """Nothing but copies is ever proposed."""
        return self.copier is not None and self.copier.copies_only

    def statuses(self) -> list[RowStatus]:
        return [
            RowStatus(row.key, n, row.remaining, row.request.max_draft, copies)
            for row, n, copies in zip(self.rows, self.state.lengths, self._copies(), strict=True)
        ]

    def _copies(self) -> Sequence[int]:
        if self.copier is None or self.drafts is None:
            return (0,) * len(self.rows)
        return self.copier.copies(self.drafts, self.newest)


def launch(lanes: Lanes, *, plain: bool = False) -> Flight:
    """Propose, verify and accept, lazily; only what a host decision needs is read."""
    started = time.perf_counter()
    chooser = lanes.chooser()
    proposal = None if plain else propose(lanes, chooser)
    lengths = proposal.lengths if proposal else (0,) * len(lanes.rows)
    columns = lanes.anchor[:, None]
    if proposal:
        if runs_beside_host():
            start(proposal.tokens)  # the device drafts while the verify is being built
        columns = mx.concatenate([columns, proposal.tokens[:, : max(lengths)]], axis=1)
    valid = None if columns.shape[1] == 1 else [n + 1 for n in lengths]
    forward = lanes.target.forward(columns, lanes.state, taps=lanes.taps, valid=valid)
    if forward.logits is None:
        raise SeamError('the target gave no logits for logits="all"; it must give [B, T, V]')
    masks = _masks(lanes.rows, proposal, forward.logits)
    verdict = chooser.accept(forward.logits, proposal, masks)
    lanes.sampler.observe(verdict)
    lanes.anchor = verdict.next_token
    sources = (proposal.sources if proposal else ()) or ("",) * len(lengths)
    return Flight(columns, lengths, sources, forward, verdict, started, lanes.prompts.chunks)


def submit(lanes: Lanes, flight: Flight) -> None:
    """Start the device's work on a flight without waiting."""
    pending = list(lanes.drafts.pending()) if lanes.drafts is not None else []
    start(*flight.verdict.arrays(), lanes.anchor, *lanes.sampler.pending(), *pending)


def settle(lanes: Lanes, flight: Flight) -> list[RowOutcome]:
    """Wait for the verdict, cut, commit and observe. Rows that had finished before give nothing."""
    verdicts = flight.verdict.read()
    emitted, outcomes = [0] * len(lanes.rows), []
    for index, (row, (accepted, tokens)) in enumerate(zip(lanes.rows, verdicts, strict=True)):
        if row.finish is None:
            outcome = _outcome(row, index, flight, accepted, tokens)
            outcomes.append(outcome)
            emitted[index] = len(outcome.tokens)
            if row.request.constraint is not None:
                row.request.constraint.advance(outcome.tokens)
    if not flight.committed:
        commit(lanes, flight, emitted)
    lanes.newest = [tokens[-1] for _, tokens in verdicts]
    now = time.perf_counter()
    alone = flight.prompts == lanes.prompts.chunks
    lanes.policy.observe(outcomes, now - max(flight.started, lanes.settled_at) if alone else None)
    lanes.settled_at = now
    return outcomes


def commit(lanes: Lanes, flight: Flight, keep: Sequence[int]) -> None:
    """Keep columns in the target's state and tell the drafter. The newest token stays outside."""
    lanes.state.commit(keep)
    if lanes.drafter is not None and lanes.drafts is not None:
        columns = flight.tokens
        if lanes.drafter.needs_host_tokens and flight.plain:
            # Reading the flight's own column could mean to wait for the flight.
            columns = mx.array([[token] for token in lanes.newest], dtype=mx.int32)
        lanes.drafter.extend(lanes.drafts, columns, flight.forward.taps, keep)
    flight.committed = True


def propose(lanes: Lanes, chooser: RoundChooser) -> Proposal | None:
    """Ask the policy how far, the drafter what, and cut; None if no row gets a guess."""
    if lanes.drafter is None or lanes.drafts is None:
        return None
    statuses = lanes.statuses()
    wanted = allowances(lanes, statuses)
    count = max(wanted)
    if count == 0:
        return None
    proposal = lanes.drafter.propose(lanes.drafts, lanes.anchor, count, chooser)
    lengths = [min(n, w) for n, w in zip(proposal.lengths, wanted, strict=True)]
    if lanes.policy.needs_confidence and proposal.confidence is not None:
        scores: list[list[float]] = proposal.confidence.tolist()  # type: ignore[assignment]
        cut = lanes.policy.truncate(statuses, lengths, scores)
        lengths = [min(n, c) for n, c in zip(lengths, cut, strict=True)]
    if lanes.copier is not None:
        lanes.copier.verifying(lanes.drafts, lengths)
    if max(lengths) == 0:
        return None
    return Proposal(
        proposal.tokens, tuple(lengths), proposal.log_q, proposal.confidence, proposal.sources
    )


def allowances(lanes: Lanes, statuses: Sequence[RowStatus]) -> list[int]:
    """Guesses to ask for in each row: the policy's wish, the row's cap, the budget, and what the
    drafter has."""
    assert lanes.drafter is not None
    block, copies_only = lanes.drafter.max_block, lanes.copies_only
    caps = [
        min(
            s.copies if copies_only else block,
            s.remaining - 1,
            block if s.max_draft is None else s.max_draft,
        )
        for s in statuses
    ]
    wishes = lanes.policy.lengths(statuses)
    return [max(0, min(wish, cap)) for wish, cap in zip(wishes, caps, strict=True)]


def _outcome(
    row: Row, index: int, flight: Flight, accepted: int, tokens: Sequence[int]
) -> RowOutcome:
    kept = row.cut(tokens)
    asked = row.request.sampling.logprobs
    return RowOutcome(
        key=row.key,
        tokens=kept,
        drafted=flight.lengths[index],
        accepted=accepted,
        source=flight.sources[index] if flight.lengths[index] else "",
        finish=row.finish,
        logprobs=None if asked is None else flight.verdict.read_logprobs(index, len(kept), asked),
    )


def _masks(rows: Sequence[Row], proposal: Proposal | None, logits: mx.array) -> mx.array | None:
    """[B, T, V] tokens that the rows' grammars allow. Reads the drafts while the verify runs."""
    if all(row.request.constraint is None for row in rows):
        return None
    start(logits)
    drafts: list[list[int]] = [[] for _ in rows] if proposal is None else proposal.tokens.tolist()  # type: ignore[assignment]
    masks = np.ones(logits.shape, dtype=np.bool_)
    for index, row in enumerate(rows):
        if row.request.constraint is not None:
            length = proposal.lengths[index] if proposal else 0
            masks[index, : length + 1] = row.request.constraint.masks(drafts[index][:length])
    return mx.array(masks)
