"""Tokens chosen one slot after the other, without a wait in between."""

from __future__ import annotations

import mlx.core as mx

from spec_core.seams import Chooser


class Picks:
    """The chain of choices of one proposal.

    Args:
        chooser: the round's.
        anchor: [B] the token before the first choice.
        token_ids: [Vd] target ids of a reduced vocabulary, or None.
    """

    def __init__(self, chooser: Chooser, anchor: mx.array, token_ids: mx.array | None) -> None:
        self._chooser = chooser
        self._token_ids = token_ids
        self._anchor = anchor
        self._tokens: list[mx.array] = []
        self._log_q: list[mx.array] = []

    @property
    def last(self) -> mx.array:
        """[B] the newest token: the anchor before anything was chosen."""
        return self._tokens[-1] if self._tokens else self._anchor

    def pick(self, logits: mx.array) -> None:
        """Choose the next token from [B, V] logits."""
        prefix = self.tokens if self._tokens else self._anchor[:, None][:, :0]
        choice = self._chooser.draft(logits, len(self._tokens), prefix, self._token_ids)
        self._tokens.append(choice.tokens)
        if choice.log_q is not None:
            self._log_q.append(choice.log_q)

    @property
    def tokens(self) -> mx.array:
        """[B, K] what was chosen."""
        return mx.stack(self._tokens, axis=1)

    @property
    def log_q(self) -> mx.array | None:
        """[B, K, V], or None where no row needs it."""
        return mx.stack(self._log_q, axis=1) if self._log_q else None
