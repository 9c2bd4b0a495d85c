"""N-gram lookup: where the text's ending occurred before, propose what followed it there.

No weights, no taps: it copies from the prompt and from what was written so far, which pays where
text repeats (edits, quotations, code, loops). A miss costs a few dictionary look-ups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

import mlx.core as mx

from spec_core.errors import InvalidValueError, SeamError
from spec_core.seams import Chooser, PerToken, Proposal, RowState, StateImage
from spec_drafters.suffix_index import Match, SuffixIndex

PATIENCE = 3
"""Lost proposals in a row after which a row pauses."""

FIRST_PAUSE = 16
LAST_PAUSE = 256
"""Tokens of the first pause, and of the longest one; every further loss doubles it."""


@dataclass(frozen=True, slots=True)
class Streak:
    """Whether a row's recent proposals were worth verifying. Pure: `after` gives the next state.

    After `PATIENCE` losses in a row the row pauses for `FIRST_PAUSE` tokens, then one proposal
    decides: a win clears the record, a loss doubles the pause up to `LAST_PAUSE`.

    Attributes:
        losses: proposals in a row of which nothing was accepted.
        resume_at: the row length from which the row may propose again.
    """

    losses: int = 0
    resume_at: int = 0

    def active(self, length: int) -> bool:
        """Whether a row of `length` tokens may propose."""
        return length >= self.resume_at

    def after(self, accepted: int, length: int) -> Streak:
        """The streak once a proposal was verified and the row has `length` tokens."""
        if accepted > 0:
            return Streak()
        losses = self.losses + 1
        if losses < PATIENCE:
            return Streak(losses, self.resume_at)
        pause = min(FIRST_PAUSE << min(losses - PATIENCE, 16), LAST_PAUSE)
        return Streak(losses, length + pause)


class _Row:
    """One row's text and how its proposals fared. Positions before `start` were never seen."""

    __slots__ = ("index", "proposed", "start", "streak")

    def __init__(self, depth: int, start: int) -> None:
        self.index = SuffixIndex(depth)
        self.start = start
        self.streak = Streak()
        self.proposed = False

    @property
    def length(self) -> int:
        return self.start + len(self.index.tokens)

    def extend(self, tokens: Sequence[int], *, verified: bool) -> None:
        """Append kept tokens; `verified` says that guesses were forwarded with them."""
        self.index.extend(tokens)
        if self.proposed and verified and tokens:
            self.streak = self.streak.after(len(tokens) - 1, self.length)
        self.proposed = False

    def match(self, anchor: int, shortest: int) -> Match | None:
        if not self.streak.active(self.length):
            return None
        match = self.index.find(anchor)
        return match if match is not None and match.length >= shortest else None


class LookupState:
    """The texts of B rows and their indexes, on the host.

    A row's image holds its tokens; a restored row is indexed anew and starts without a streak.
    """

    def __init__(self, rows: int, start: int, depth: int) -> None:
        self._depth = depth
        self._rows = [_Row(depth, start) for _ in range(rows)]

    @property
    def rows(self) -> int:
        return len(self._rows)

    @property
    def lengths(self) -> Sequence[int]:
        """Positions of each row, those before its start included."""
        return [row.length for row in self._rows]

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order. Raises SeamError for an unknown or repeated row."""
        if len(set(rows)) != len(rows) or any(not 0 <= row < self.rows for row in rows):
            raise SeamError(f"select({list(rows)}) needs different rows of 0..{self.rows - 1}")
        self._rows = [self._rows[row] for row in rows]

    def join(self, other: RowState) -> None:
        """Append the rows of another lookup state, which is empty afterwards.

        Raises:
            SeamError: `other` is of another kind, or compares endings of another length.
        """
        if not isinstance(other, LookupState) or other._depth != self._depth:
            raise SeamError(f"join: {_kind(other)} cannot join {_kind(self)}")
        self._rows += other._rows
        other._rows = []

    def image(self, row: int, start: int = 0) -> StateImage:
        """The row's tokens from position `start` on; fewer where the row itself began later."""
        held = self._rows[row]
        first = max(start - held.start, 0)
        tokens = mx.array(held.index.tokens[first:], dtype=mx.int32)
        return StateImage(
            start, held.length, per_token=MappingProxyType({"tokens": PerToken(tokens)})
        )

    def restore(self, row: int, image: StateImage) -> None:
        """Index an image's tokens in an empty row. An image that holds only the newest positions
        is legal: what lies before them is never found.

        Raises:
            SeamError: the row is not empty, or the image has no such tokens.
        """
        held = self._rows[row]
        if held.length:
            raise SeamError(f"restore: row {row} holds {held.length} positions, not 0")
        entry = image.per_token.get("tokens")
        if entry is None or entry.array.ndim != 1 or entry.array.shape[0] > image.length:
            seen = "no tokens" if entry is None else f"tokens of shape {entry.array.shape}"
            raise SeamError(
                f"restore: the image has {seen}; it needs at most {image.length}, one a position"
            )
        fresh = _Row(self._depth, image.length - entry.array.shape[0])
        fresh.extend(_ints(entry.array), verified=False)
        self._rows[row] = fresh

    def pending(self) -> Sequence[mx.array]:
        """Nothing: the state lives on the host."""
        return ()


class Lookup:
    """Proposes what followed the longest earlier occurrence of the row's ending.

    The longest match wins, and the most recent among equals. As many tokens are copied as
    matched: the longer the ending, the longer it goes on as before (in greedy chat text of the two
    small models a quarter to a half of such copies is accepted whole, at every length from 2 to
    16). So a run of copies doubles its length every round, up to `max_block`.

    Args:
        min_match: the shortest ending that counts, anchor included.
        max_block: the most tokens copied at once, and the longest ending compared.

    Raises:
        InvalidValueError: not 1 <= min_match <= max_block.
    """

    name = "lookup"
    taps: Sequence[int] = ()
    needs_host_tokens = True
    copies_only = True

    def __init__(self, min_match: int = 2, max_block: int = 32) -> None:
        if max_block < 1:
            raise InvalidValueError("max_block", max_block, "at least 1")
        if not 1 <= min_match <= max_block:
            raise InvalidValueError("min_match", min_match, f"in 1..{max_block} (max_block)")
        self.min_match = min_match
        self.max_block = max_block

    def new_state(self, rows: int, start: int = 0) -> LookupState:
        """Empty rows whose first token will be at position `start`."""
        return LookupState(rows, start, self.max_block)

    def extend(
        self, state: RowState, tokens: mx.array, taps: Sequence[mx.array], keep: Sequence[int]
    ) -> None:
        """Append the first keep[b] of the [B, T] columns to row b. Reads `tokens` on the host.

        Where row b had a proposal and it was verified, keep[b] == 1 counts as a loss.

        Raises:
            SeamError: `tokens` or `keep` do not fit the state's rows, or taps are given.
        """
        rows = _rows(state)
        shape = tokens.shape
        if taps or tokens.ndim != 2 or shape[0] != len(rows) or len(keep) != len(rows):
            raise SeamError(
                f"lookup extend: {len(taps)} taps, tokens of shape {shape} and {len(keep)} values "
                f"of keep do not fit {len(rows)} rows (it takes no taps)"
            )
        if any(not 0 <= kept <= shape[1] for kept in keep):
            raise SeamError(f"lookup extend: keep {list(keep)} is not within 0..{shape[1]} columns")
        columns: list[list[int]] = tokens.tolist()  # type: ignore[assignment]
        for row, text, kept in zip(rows, columns, keep, strict=True):
            row.extend(text[:kept], verified=shape[1] > 1)

    def copies(self, state: RowState, anchors: Sequence[int]) -> tuple[int, ...]:
        """The most tokens that `propose` would copy in each row; changes nothing."""
        self._check(state, len(anchors), 1)
        matches = [
            row.match(anchor, self.min_match)
            for row, anchor in zip(_rows(state), anchors, strict=True)
        ]
        return tuple(0 if match is None else match.length for match in matches)

    def verifying(self, state: RowState, lengths: Sequence[int]) -> None:
        """Rows of which nothing is verified have not lost anything."""
        for row, length in zip(_rows(state), lengths, strict=True):
            row.proposed = row.proposed and length > 0

    def propose(self, state: RowState, anchor: mx.array, count: int, chooser: Chooser) -> Proposal:
        """Copy up to `count` tokens a row; a row without a match gets length 0.

        The copies are deterministic (`log_q` None). Reads `anchor` on the host.

        Raises:
            SeamError: `count` is not in 1..max_block, or `anchor` does not fit the rows.
        """
        self._check(state, anchor.shape[0], count)
        anchors = _ints(anchor)
        guesses = [
            self._guess(row, token, count) for row, token in zip(_rows(state), anchors, strict=True)
        ]
        width = max(map(len, guesses), default=0)
        padded = [
            guess + [token] * (width - len(guess))
            for guess, token in zip(guesses, anchors, strict=True)
        ]
        return Proposal(
            tokens=mx.array(padded, dtype=mx.int32).reshape(len(guesses), width),
            lengths=tuple(map(len, guesses)),
            sources=tuple(self.name if guess else "" for guess in guesses),
        )

    def _guess(self, row: _Row, anchor: int, count: int) -> list[int]:
        match = row.match(anchor, self.min_match)
        row.proposed = match is not None
        return [] if match is None else row.index.after(match, anchor, min(count, match.length))

    def _check(self, state: RowState, anchors: int, count: int) -> None:
        rows = _rows(state)
        if anchors != len(rows) or not 1 <= count <= self.max_block:
            raise SeamError(
                f"lookup: {anchors} anchors and count {count}; it needs {len(rows)} anchors and "
                f"a count in 1..{self.max_block}"
            )


def _rows(state: RowState) -> list[_Row]:
    if not isinstance(state, LookupState):
        raise SeamError(f"a LookupState is needed, not a {type(state).__name__}")
    return state._rows


def _kind(state: RowState) -> str:
    if isinstance(state, LookupState):
        return f"a LookupState of depth {state._depth}"
    return f"a {type(state).__name__}"


def _ints(array: mx.array) -> list[int]:
    values: list[int] = array.tolist()  # type: ignore[assignment]
    return values
