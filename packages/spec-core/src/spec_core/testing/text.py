"""Drafters that know the text: a script, and an oracle with a chosen error rate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import mlx.core as mx
import numpy as np

from spec_core.errors import SeamError
from spec_core.seams import Chooser, PerToken, Proposal, RowState, StateImage, Target
from spec_core.testing._hashes import ODD, fraction, mix_int, words
from spec_core.testing._rows import check_count, checked, ints, newest
from spec_core.testing.target import TinyTarget, continuation


@dataclass(slots=True)
class TextRow:
    """One row's text from position `base` on."""

    base: int
    tokens: list[int]

    @property
    def length(self) -> int:
        return self.base + len(self.tokens)


class TextState:
    """The text of each row, on the host."""

    def __init__(self, rows: int, start: int) -> None:
        self.text = [TextRow(start, []) for _ in range(rows)]

    @property
    def rows(self) -> int:
        return len(self.text)

    @property
    def lengths(self) -> Sequence[int]:
        return tuple(row.length for row in self.text)

    def extend(self, tokens: mx.array, keep: Sequence[int]) -> None:
        """Append the first keep[b] of [B, T] tokens to row b."""
        if len(keep) != self.rows or any(not 0 <= k <= tokens.shape[1] for k in keep):
            raise SeamError(f"keep {list(keep)} does not fit tokens of shape {tokens.shape}")
        for row, columns, count in zip(self.text, ints(tokens), keep, strict=True):
            row.tokens.extend(columns[:count])

    def select(self, rows: Sequence[int]) -> None:
        self.text = [self.text[r] for r in checked(rows, self.rows)]

    def join(self, other: RowState) -> None:
        if not isinstance(other, TextState):
            raise SeamError(f"join: cannot join a {type(other).__name__} to a TextState")
        self.text = self.text + other.text

    def image(self, row: int, start: int = 0) -> StateImage:
        held = self.text[row]
        array = newest(mx.array(held.tokens, dtype=mx.int32), held.length, start)
        tokens = MappingProxyType({"tokens": PerToken(array)})
        return StateImage(start, held.length, per_token=tokens)

    def restore(self, row: int, image: StateImage) -> None:
        if self.text[row].length:
            raise SeamError(f"restore: row {row} holds {self.text[row].length} positions, not 0")
        array = image.per_token["tokens"].array
        self.text[row] = TextRow(image.length - array.shape[0], ints(array[None])[0])

    def pending(self) -> Sequence[mx.array]:
        return ()


def _padded(guesses: Sequence[Sequence[int]]) -> mx.array:
    width = max((len(g) for g in guesses), default=0)
    return mx.array([[*g, *[0] * (width - len(g))] for g in guesses], dtype=mx.int32).reshape(
        len(guesses), width
    )


class ScriptedDrafter:
    """Proposes what a function of the text says.

    Args:
        script: from the row's text with the anchor last to the guesses that follow; fewer than
            asked, or none, is legal. More are cut.
        max_block: the most tokens it proposes.
        confidence: what it claims for slot 0, 1, ... of every row; None: it does not know.
        name: for statistics.
    """

    taps: Sequence[int] = ()
    needs_host_tokens = True

    def __init__(
        self,
        script: Callable[[tuple[int, ...]], Sequence[int]],
        *,
        max_block: int = 4,
        confidence: Sequence[float] | None = None,
        name: str = "scripted",
    ) -> None:
        self.script, self.max_block, self.confidence, self.name = (
            script,
            max_block,
            confidence,
            name,
        )

    @classmethod
    def by_position(cls, tokens: Sequence[int], *, max_block: int = 4) -> ScriptedDrafter:
        """One that knows the whole text, prompt included, and proposes what comes next in it."""
        whole = tuple(tokens)
        return cls(lambda text: whole[len(text) :], max_block=max_block)

    def new_state(self, rows: int, start: int = 0) -> TextState:
        return TextState(rows, start)

    def extend(
        self, state: RowState, tokens: mx.array, taps: Sequence[mx.array], keep: Sequence[int]
    ) -> None:
        _text(state).extend(tokens, keep)

    def propose(self, state: RowState, anchor: mx.array, count: int, chooser: Chooser) -> Proposal:
        check_count(count, self.max_block)
        anchors = ints(anchor[:, None])
        guesses = [
            list(self.script((*row.tokens, first[0])))[:count]
            for row, first in zip(_text(state).text, anchors, strict=True)
        ]
        tokens, lengths = _padded(guesses), tuple(len(g) for g in guesses)
        return Proposal(tokens, lengths, None, self._scores(tokens), (self.name,) * len(guesses))

    def _scores(self, tokens: mx.array) -> mx.array | None:
        if self.confidence is None:
            return None
        row = mx.array(list(self.confidence)[: tokens.shape[1]], dtype=mx.float32)
        return mx.broadcast_to(row[None], (tokens.shape[0], row.shape[0]))


def _text(state: RowState) -> TextState:
    if not isinstance(state, TextState):
        raise SeamError(f"a TextState is needed, not a {type(state).__name__}")
    return state


class NoisyOracle:
    """Knows the target's greedy continuation, and is right with a chosen probability.

    Whether a position is right is a hash of (seed, absolute position), so it does not depend on
    the batch or on the draft length.

    Args:
        target: asked for its greedy continuation of each row's text.
        probability: of being right, at each position.
        seed: of the errors.
        max_block: the most tokens it proposes.
        stochastic: guesses are drawn through the chooser from logits that favour what it would
            have guessed, so that `log_q` is stated where rows sample.
        confident: states a confidence: 0.95 where it is right, 0.2 where it is not.
        name: for statistics.
    """

    taps: Sequence[int] = ()
    needs_host_tokens = True

    def __init__(
        self,
        target: Target,
        probability: float = 0.7,
        seed: int = 0,
        max_block: int = 4,
        *,
        stochastic: bool = False,
        confident: bool = False,
        name: str = "oracle",
    ) -> None:
        self.target, self.probability, self.seed, self.max_block = (
            target,
            probability,
            seed,
            max_block,
        )
        self.stochastic, self.confident, self.name = stochastic, confident, name
        self._known = target.known if isinstance(target, TinyTarget) else {}

    def new_state(self, rows: int, start: int = 0) -> TextState:
        return TextState(rows, start)

    def extend(
        self, state: RowState, tokens: mx.array, taps: Sequence[mx.array], keep: Sequence[int]
    ) -> None:
        _text(state).extend(tokens, keep)

    def propose(self, state: RowState, anchor: mx.array, count: int, chooser: Chooser) -> Proposal:
        check_count(count, self.max_block)
        rows, anchors = _text(state).text, [first[0] for first in ints(anchor[:, None])]
        guesses = [self._guesses(row, a, count) for row, a in zip(rows, anchors, strict=True)]
        tokens, log_q = mx.array(guesses, dtype=mx.int32), None
        if self.stochastic:
            choice = chooser.draft_block(self._favouring(tokens, rows))
            tokens, log_q = choice.tokens, choice.log_q
        confidence = self._confidence(rows, count) if self.confident else None
        names = (self.name,) * len(rows)
        return Proposal(tokens, (count,) * len(rows), log_q, confidence, names)

    def right(self, position: int) -> bool:
        """Whether the guess for this absolute position is the target's own token."""
        return fraction(position * ODD + self.seed * 40503 + 11) < self.probability

    def _guesses(self, row: TextRow, anchor: int, count: int) -> list[int]:
        truth = continuation(self.target, [*row.tokens, anchor], count, self._known)
        return [self._noisy(t, row.length + 1 + i) for i, t in enumerate(truth)]

    def _noisy(self, token: int, position: int) -> int:
        if self.right(position):
            return token
        vocab = self.target.info.vocab_size
        return (token + 1 + mix_int(position + self.seed * 31) % (vocab - 1)) % vocab

    def _favouring(self, tokens: mx.array, rows: Sequence[TextRow]) -> mx.array:
        """[B, K, V] logits: hashed noise, with 2.5 added to the guess."""
        vocab, count = self.target.info.vocab_size, tokens.shape[1]
        table = words(257, vocab, self.seed + 31)
        noise = np.stack([table[(row.length + np.arange(count)) % 257] for row in rows])
        scaled = mx.array(noise.astype(np.float32) * (3.0 / 2**32))
        return scaled + 2.5 * (mx.arange(vocab) == tokens[..., None])

    def _confidence(self, rows: Sequence[TextRow], count: int) -> mx.array:
        return mx.array(
            [[0.95 if self.right(r.length + 1 + i) else 0.2 for i in range(count)] for r in rows]
        )
