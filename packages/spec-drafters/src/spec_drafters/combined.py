"""Lookup and another drafter together: a lookup hit replaces the drafter that round, row by row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

import mlx.core as mx

from spec_core.errors import SeamError
from spec_core.seams import Chooser, Copier, Drafter, DrafterState, Proposal, RowState, StateImage
from spec_drafters.lookup import Lookup

COMBINED_MIN_MATCH = 8
"""The shortest match whose copy is worth a trained drafter's guesses. From 4 on copies bring more
than DSpark drafts in greedy chat text of the bundled model, but less in the code and tool calls
that its drafter knows; from 8 on they cost nothing there and keep most of the gain."""

_LOOKUP = "lookup."
_DRAFTER = "drafter."

_Entry = TypeVar("_Entry")


class CombinedState:
    """The two states, row by row in step. Images name the parts "lookup.*" and "drafter.*"."""

    def __init__(self, lookup: DrafterState, drafter: DrafterState) -> None:
        self.lookup = lookup
        self.drafter = drafter

    @property
    def rows(self) -> int:
        return self.drafter.rows

    @property
    def lengths(self) -> Sequence[int]:
        """Positions of each row, as both parts count them."""
        return self.drafter.lengths

    def select(self, rows: Sequence[int]) -> None:
        self.lookup.select(rows)
        self.drafter.select(rows)

    def join(self, other: RowState) -> None:
        """Append the rows of another combined state. Raises SeamError for any other kind."""
        if not isinstance(other, CombinedState):
            raise SeamError(f"join: a {type(other).__name__} cannot join a CombinedState")
        self.lookup.join(other.lookup)
        self.drafter.join(other.drafter)

    def image(self, row: int, start: int = 0) -> StateImage:
        """Both parts in one image. Raises SeamError if they disagree on the positions."""
        lookup, drafter = self.lookup.image(row, start), self.drafter.image(row, start)
        if lookup.length != drafter.length:
            raise SeamError(
                f"image: lookup has {lookup.length} positions in row {row} and the drafter "
                f"{drafter.length}; both must be extended every round"
            )
        return StateImage(
            start=start,
            length=lookup.length,
            per_token=_merged(lookup.per_token, drafter.per_token),
            at_end=_merged(lookup.at_end, drafter.at_end),
        )

    def restore(self, row: int, image: StateImage) -> None:
        """Give each part its own half of an image. Raises SeamError if a part finds it unfit."""
        self.lookup.restore(row, _half(image, _LOOKUP))
        self.drafter.restore(row, _half(image, _DRAFTER))

    def pending(self) -> Sequence[mx.array]:
        return [*self.lookup.pending(), *self.drafter.pending()]


@dataclass(frozen=True, slots=True)
class Combined:
    """A lookup hit replaces the drafter's guesses; rows without one use the drafter.

    If every row hits, the drafter does not run at all. Each part keeps its own block: `count` is
    capped for each of them separately. Copies have no confidence of their own and count as sure
    (1.0) beside a drafter that states one.

    Args:
        lookup: asked first. A trained drafter is hard to beat, so let it insist on longer matches
            than alone; see `with_lookup`.
        drafter: asked for the rows where the lookup has nothing.
    """

    lookup: Copier
    drafter: Drafter

    @property
    def name(self) -> str:
        """For instance "dspark+lookup"."""
        return f"{self.drafter.name}+{self.lookup.name}"

    @property
    def taps(self) -> Sequence[int]:
        return self.drafter.taps

    @property
    def max_block(self) -> int:
        return max(self.lookup.max_block, self.drafter.max_block)

    @property
    def needs_host_tokens(self) -> bool:
        return True

    @property
    def copies_only(self) -> bool:
        return False

    def new_state(self, rows: int, start: int = 0) -> CombinedState:
        return CombinedState(
            self.lookup.new_state(rows, start), self.drafter.new_state(rows, start)
        )

    def extend(
        self, state: RowState, tokens: mx.array, taps: Sequence[mx.array], keep: Sequence[int]
    ) -> None:
        """Tell both parts, whoever guessed. Raises SeamError as they do."""
        held = _combined(state)
        self.lookup.extend(held.lookup, tokens, (), keep)
        self.drafter.extend(held.drafter, tokens, taps, keep)

    def copies(self, state: RowState, anchors: Sequence[int]) -> Sequence[int]:
        """What the lookup could copy in each row."""
        return self.lookup.copies(_combined(state).lookup, anchors)

    def verifying(self, state: RowState, lengths: Sequence[int]) -> None:
        """Tell the lookup what became of its copies; rows without one have lost nothing."""
        self.lookup.verifying(_combined(state).lookup, lengths)

    def propose(self, state: RowState, anchor: mx.array, count: int, chooser: Chooser) -> Proposal:
        """Guess up to `count` tokens a row, as many as the row's guesser can.

        In a batch where some rows hit and the drafter samples, `log_q` is as wide as the longest
        copy; a hit row's is 0 at the copied token and -inf elsewhere.

        Raises:
            SeamError: `count` is not in 1..max_block.
        """
        if not 1 <= count <= self.max_block:
            raise SeamError(f"{self.name}: count is {count}; it must be in 1..{self.max_block}")
        held = _combined(state)
        copied = self.lookup.propose(
            held.lookup, anchor, min(count, self.lookup.max_block), chooser
        )
        if all(copied.lengths):
            return _signed(copied, self.lookup.name)
        drafted = self.drafter.propose(
            held.drafter, anchor, min(count, self.drafter.max_block), chooser
        )
        drafted = _signed(drafted, self.drafter.name)
        if not any(copied.lengths):
            return drafted
        return _merge(_signed(copied, self.lookup.name), drafted, anchor)


def with_lookup(drafter: Drafter, lookup: Lookup | None = None) -> Combined:
    """`drafter`, replaced by lookup wherever at least `COMBINED_MIN_MATCH` tokens match.

    Args:
        drafter: a trained drafter.
        lookup: another lookup, for instance with its own `min_match`.
    """
    return Combined(lookup or Lookup(min_match=COMBINED_MIN_MATCH), drafter)


def _merge(copied: Proposal, drafted: Proposal, anchor: mx.array) -> Proposal:
    """Row by row: the copy where there is one, the draft elsewhere."""
    hits = [length > 0 for length in copied.lengths]
    width = max(copied.tokens.shape[1], drafted.tokens.shape[1])
    hit = mx.array(hits)[:, None]
    tokens = mx.where(
        hit, _widened(copied.tokens, width, anchor), _widened(drafted.tokens, width, anchor)
    )
    log_q, confidence = drafted.log_q, drafted.confidence
    if log_q is not None:
        log_q = _with_one_hot(log_q, tokens, hit, width)
    if confidence is not None:
        sure = mx.array(1.0, dtype=confidence.dtype)
        confidence = mx.where(hit, sure, _padded(confidence, width))
    return Proposal(
        tokens=tokens,
        lengths=_chosen(hits, copied.lengths, drafted.lengths),
        log_q=log_q,
        confidence=confidence,
        sources=_chosen(hits, copied.sources, drafted.sources),
    )


def _with_one_hot(log_q: mx.array, tokens: mx.array, hit: mx.array, width: int) -> mx.array:
    """[B, width, V]: log q of a deterministic guess in the hit rows, `log_q` in the others."""
    vocabulary = mx.arange(log_q.shape[2], dtype=tokens.dtype)
    zero, never = mx.array(0.0, dtype=log_q.dtype), mx.array(-mx.inf, dtype=log_q.dtype)
    sure = mx.where(tokens[..., None] == vocabulary, zero, never)
    return mx.where(hit[..., None], sure, _padded(log_q, width))


def _widened(tokens: mx.array, width: int, anchor: mx.array) -> mx.array:
    """[B, width] tokens; added columns repeat the anchor, a legal token."""
    missing = width - tokens.shape[1]
    return mx.concatenate([tokens, mx.repeat(anchor[:, None], missing, axis=1)], axis=1)


def _padded(values: mx.array, width: int) -> mx.array:
    """[B, width, ...]; added columns are 0 and never read."""
    missing = [(0, 0)] * values.ndim
    missing[1] = (0, width - values.shape[1])
    return mx.pad(values, missing)


def _signed(proposal: Proposal, name: str) -> Proposal:
    """The proposal with a source for every row: who guessed, "" where nobody did."""
    sources = proposal.sources or (name,) * len(proposal.lengths)
    return Proposal(
        proposal.tokens,
        proposal.lengths,
        proposal.log_q,
        proposal.confidence,
        tuple(s if n else "" for s, n in zip(sources, proposal.lengths, strict=True)),
    )


def _chosen(
    hits: Sequence[bool], copied: Sequence[_Entry], drafted: Sequence[_Entry]
) -> tuple[_Entry, ...]:
    return tuple(c if hit else d for hit, c, d in zip(hits, copied, drafted, strict=True))


def _merged(lookup: Mapping[str, _Entry], drafter: Mapping[str, _Entry]) -> Mapping[str, _Entry]:
    """Both parts' arrays under their own prefixes."""
    named = {_LOOKUP + name: entry for name, entry in lookup.items()}
    named.update({_DRAFTER + name: entry for name, entry in drafter.items()})
    return MappingProxyType(named)


def _half(image: StateImage, prefix: str) -> StateImage:
    """The part of an image that one of the two made."""

    def own(entries: Mapping[str, _Entry]) -> Mapping[str, _Entry]:
        return MappingProxyType(
            {n.removeprefix(prefix): e for n, e in entries.items() if n.startswith(prefix)}
        )

    return StateImage(image.start, image.length, own(image.per_token), own(image.at_end))


def _combined(state: RowState) -> CombinedState:
    if not isinstance(state, CombinedState):
        raise SeamError(f"a CombinedState is needed, not a {type(state).__name__}")
    return state
