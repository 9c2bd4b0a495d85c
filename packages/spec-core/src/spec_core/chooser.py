"""The sampler of a batch: one per batch, and one RoundChooser per round.

`Sampler` owns what outlives a round (parameters, seeds, penalty counts). `RoundChooser` is the
sampler of one round at known positions; drafter and acceptance use the same one, so a drafter
never learns how a row samples.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from spec_core import accept
from spec_core.errors import InvalidValueError
from spec_core.request import Request
from spec_core.sampling import Columns, History, Stream, gumbel, noise_key, shape, uniform
from spec_core.seams import DraftChoice, Proposal, TokenLogprob


@dataclass(frozen=True, slots=True)
class Verdict:
    """What acceptance said; lazy until read.

    Attributes:
        accepted: [B] accepted drafts, before any cut.
        tokens: [B, K + 1]: the accepted drafts, then the target's own token at column
            accepted[b]; columns beyond are meaningless.
        logprobs: [B, K + 1] log-softmax of the raw logits at `tokens`, or None.
        top_ids, top_logprobs: [B, K + 1, N] the N most likely tokens, or None.
    """

    accepted: mx.array
    tokens: mx.array
    logprobs: mx.array | None = None
    top_ids: mx.array | None = None
    top_logprobs: mx.array | None = None

    @property
    def next_token(self) -> mx.array:
        """[B] the newest token of each row, the next anchor."""
        if self.tokens.shape[1] == 1:
            return self.tokens[:, 0]
        return mx.take_along_axis(self.tokens, self.accepted[:, None], axis=1)[:, 0]

    def arrays(self) -> list[mx.array]:
        optional = (self.logprobs, self.top_ids, self.top_logprobs)
        return [self.accepted, self.tokens, *(a for a in optional if a is not None)]

    def read(self) -> list[tuple[int, list[int]]]:
        """(accepted, emitted tokens) of each row. Waits."""
        accepted: list[int] = self.accepted.tolist()  # type: ignore[assignment]
        tokens: list[list[int]] = self.tokens.tolist()  # type: ignore[assignment]
        return [(a, row[: a + 1]) for a, row in zip(accepted, tokens, strict=True)]

    def read_logprobs(self, row: int, count: int, top: int) -> tuple[TokenLogprob, ...]:
        """Log-probabilities of the first `count` emitted tokens of a row, if they were made."""
        assert self.logprobs is not None
        tokens: list[int] = self.tokens[row, :count].tolist()  # type: ignore[assignment]
        values: list[float] = self.logprobs[row, :count].tolist()  # type: ignore[assignment]
        tops: list[list[tuple[int, float]]] = [[] for _ in tokens]
        if self.top_ids is not None and self.top_logprobs is not None and top:
            ids: list[list[int]] = self.top_ids[row, :count, :top].tolist()  # type: ignore[assignment]
            best: list[list[float]] = self.top_logprobs[row, :count, :top].tolist()  # type: ignore[assignment]
            tops = [list(zip(i, b, strict=True)) for i, b in zip(ids, best, strict=True)]
        return tuple(
            TokenLogprob(token, value, tuple(alternatives))
            for token, value, alternatives in zip(tokens, values, tops, strict=True)
        )


class Sampler:
    """The sampling state of B rows, over V tokens.

    Attributes:
        logprobs: how many alternatives to report at most; None: no row asks for log-probabilities.
        none_accepted: [B] zeros.

    Raises:
        InvalidValueError: a request's logit_bias or prompt names a token id outside 0..V-1.
    """

    def __init__(self, vocab_size: int, requests: Sequence[Request] = ()) -> None:
        self.vocab_size = vocab_size
        self.requests = list(requests)
        for request in self.requests:
            _check_ids(request, vocab_size)
        self._seeds = [
            secrets.randbits(64) if r.sampling.seed is None else r.sampling.seed
            for r in self.requests
        ]
        self._rounds = [0] * len(self.requests)
        self._history: History | None = None
        if any(r.sampling.counts_tokens for r in self.requests):
            self._history = _prompt_history(self.requests, vocab_size)
        self._refresh()

    @property
    def rows(self) -> int:
        return len(self.requests)

    @property
    def plain_greedy(self) -> bool:
        """Every row is greedy without penalties or bias: the choice is an argmax of raw logits."""
        return self._plain_greedy

    def select(self, rows: Sequence[int]) -> None:
        self.requests = [self.requests[r] for r in rows]
        self._seeds = [self._seeds[r] for r in rows]
        self._rounds = [self._rounds[r] for r in rows]
        if self._history is not None:
            if any(r.sampling.counts_tokens for r in self.requests):
                index = mx.array(list(rows), dtype=mx.int32)
                self._history = History(self._history.generated[index], self._history.prompt[index])
            else:
                self._history = None
        self._refresh()

    def join(self, other: Sampler) -> None:
        if self._history is not None or other._history is not None:
            mine = self._history or _no_history(self.rows, self.vocab_size)
            theirs = other._history or _no_history(other.rows, self.vocab_size)
            self._history = History(
                mx.concatenate([mine.generated, theirs.generated]),
                mx.concatenate([mine.prompt, theirs.prompt]),
            )
        self.requests += other.requests
        self._seeds += other._seeds
        self._rounds += other._rounds
        self._refresh()

    def round(self, positions: Sequence[int]) -> RoundChooser:
        """The chooser of a round whose slot 0 stands at these absolute positions."""
        self._rounds = [n + 1 for n in self._rounds]
        return RoundChooser(self, positions, self._history, list(self._rounds))

    def observe(self, verdict: Verdict) -> None:
        """Count what a round emits, lazily. A cut ends its row, whose counts then do not matter."""
        if self._history is None:
            return
        columns = verdict.tokens.shape[1]
        emitted = mx.arange(columns, dtype=mx.int32) <= verdict.accepted[:, None]
        rows = mx.arange(self.rows, dtype=mx.int32)[:, None]
        counted = self._history.generated.at[rows, verdict.tokens].add(emitted.astype(mx.float32))
        self._history = replace(self._history, generated=counted)

    def pending(self) -> list[mx.array]:
        return [] if self._history is None else [self._history.generated]

    def _refresh(self) -> None:
        params = [r.sampling for r in self.requests]
        self._plain_greedy = not any(
            not p.greedy or p.counts_tokens or p.logit_bias for p in params
        ) and not any(r.constraint for r in self.requests)
        self.logprobs = max((p.logprobs for p in params if p.logprobs is not None), default=None)
        self.none_accepted = mx.zeros((self.rows,), dtype=mx.int32)
        self._columns: Columns | None = None

    def columns(self) -> Columns:
        if self._columns is None:
            self._columns = Columns.of([r.sampling for r in self.requests], self.vocab_size)
        return self._columns

    def key(self, row: int, round_index: int, stream: Stream, position: int) -> tuple[int, int]:
        """The noise key of a row: seeded rows share one stream and forget the round."""
        if self.requests[row].sampling.coupled:
            return noise_key(self._seeds[row], 0, Stream.SHARED, position)
        return noise_key(self._seeds[row], round_index, stream, position)

    def uniform(self, row: int, round_index: int, position: int) -> float:
        return uniform(self._seeds[row], round_index, position)


def _check_ids(request: Request, vocab_size: int) -> None:
    allowed = f"token ids from 0 to {vocab_size - 1}"
    wrong = next((t for t in request.prompt if not 0 <= t < vocab_size), None)
    if wrong is not None:
        raise InvalidValueError("prompt", wrong, allowed)
    wrong = next((t for t in request.sampling.logit_bias if t >= vocab_size), None)
    if wrong is not None:
        raise InvalidValueError("logit_bias", wrong, allowed)


def _no_history(rows: int, vocab_size: int) -> History:
    table = (rows, vocab_size)
    return History(mx.zeros(table, dtype=mx.float32), mx.zeros(table, dtype=mx.bool_))


def _prompt_history(requests: Sequence[Request], vocab_size: int) -> History:
    seen = np.zeros((len(requests), vocab_size), dtype=np.bool_)
    for row, request in enumerate(requests):
        seen[row, list(request.prompt)] = True
    return History(mx.zeros((len(requests), vocab_size)), mx.array(seen))


class RoundChooser:
    """One round's sampler (seams.Chooser), and its acceptance.

    Args:
        sampler: the batch's sampling state.
        positions: absolute position of the token that slot 0 chooses, for each row.
        history: penalty tables at the round's start, or None.
        rounds: each row's round number, which keeps unseeded noise fresh.
    """

    def __init__(
        self,
        sampler: Sampler,
        positions: Sequence[int],
        history: History | None,
        rounds: Sequence[int],
    ) -> None:
        self._sampler = sampler
        self._positions = positions
        self._history = history
        self._rounds = rounds

    # ------------------------------------------------------------------ drafting

    def draft(
        self, logits: mx.array, slot: int, prefix: mx.array, token_ids: mx.array | None = None
    ) -> DraftChoice:
        if self._sampler.plain_greedy:
            return DraftChoice(_argmax(logits, token_ids), None)
        history = None if self._history is None else _after(self._history, prefix)
        choice = self._draft(logits[:, None], slot, history, token_ids)
        log_q = None if choice.log_q is None else choice.log_q[:, 0]
        return DraftChoice(choice.tokens[:, 0], log_q)

    def draft_block(self, logits: mx.array, token_ids: mx.array | None = None) -> DraftChoice:
        if self._sampler.plain_greedy:
            return DraftChoice(_argmax(logits, token_ids), None)
        if self._history is None:
            return self._draft(logits, 0, None, token_ids)
        prefix = mx.zeros((logits.shape[0], 0), dtype=mx.int32)
        choices: list[DraftChoice] = []
        for slot in range(logits.shape[1]):
            choice = self.draft(logits[:, slot], slot, prefix, token_ids)
            choices.append(choice)
            prefix = mx.concatenate([prefix, choice.tokens[:, None]], axis=1)
        log_q = [c.log_q for c in choices if c.log_q is not None]
        return DraftChoice(prefix, mx.stack(log_q, axis=1) if log_q else None)

    def _draft(
        self, logits: mx.array, slot: int, history: History | None, token_ids: mx.array | None
    ) -> DraftChoice:
        """[B, T, Vd] logits of slots slot.. under the rows' own parameters."""
        columns = self._sampler.columns()
        if token_ids is not None:
            columns, history = _reduced(columns, history, token_ids)
        shaped = shape(logits, columns, history)
        names = _ids(logits.shape[-1]) if token_ids is None else token_ids.astype(mx.uint32)
        tokens = _argmax(
            shaped + self._noise(Stream.DRAFT, slot, shaped.shape[1], names), token_ids
        )
        if not any(r.sampling.rejection for r in self._sampler.requests):
            return DraftChoice(tokens, None)
        log_q = _log_softmax(shaped)
        if token_ids is not None:
            full = mx.full((*log_q.shape[:-1], self._sampler.vocab_size), -mx.inf)
            full[..., token_ids] = log_q
            log_q = full
        return DraftChoice(tokens, log_q)

    # ------------------------------------------------------------------ acceptance

    def accept(
        self, logits: mx.array, proposal: Proposal | None, masks: mx.array | None = None
    ) -> Verdict:
        """Accept a prefix of the proposal and choose the token after it, lazily.

        Args:
            logits: [B, K + 1, V] of [anchor | drafts]; K = 0 for a plain step.
            proposal: the drafts, at least K columns, or None if K = 0.
            masks: [B, K + 1, V] tokens that each row's grammar allows, or None.
        """
        columns = logits.shape[1]
        drafts = None if proposal is None else proposal.tokens[:, : columns - 1]
        if self._sampler.plain_greedy and masks is None:
            shaped = logits
            chosen = _argmax(logits, None)
        else:
            history = None if self._history is None else _before_each(self._history, drafts)
            shaped = shape(logits, self._sampler.columns(), history, masks)
            chosen = _argmax(
                shaped + self._noise(Stream.TARGET, 0, columns, _ids(logits.shape[-1])), None
            )
        accepted, tokens = self._sampler.none_accepted, chosen
        if proposal is not None and drafts is not None and columns > 1:
            lengths = mx.array(proposal.lengths, dtype=mx.int32)
            accepted = accept.match(drafts, lengths, chosen)
            if any(r.sampling.rejection for r in self._sampler.requests):
                accepted, tokens = self._reject(shaped, proposal, drafts, lengths, accepted, chosen)
        return self._report(Verdict(accepted, tokens), logits)

    def _reject(
        self,
        shaped: mx.array,
        proposal: Proposal,
        drafts: mx.array,
        lengths: mx.array,
        accepted: mx.array,
        chosen: mx.array,
    ) -> tuple[mx.array, mx.array]:
        """The rejection rule for the rows that use it; the others keep their match."""
        sampler, count = self._sampler, drafts.shape[1]
        rule = mx.array([r.sampling.rejection for r in sampler.requests])
        uniforms = mx.array(
            [
                [sampler.uniform(row, n, at + slot) for slot in range(count)]
                for row, (n, at) in enumerate(zip(self._rounds, self._positions, strict=True))
            ],
            dtype=mx.float32,
        )
        log_q = None if proposal.log_q is None else proposal.log_q[:, :count]
        passed, following = accept.rejection(_log_softmax(shaped), log_q, drafts, lengths, uniforms)
        keys = self._keys(Stream.TARGET, 0, count + 1)
        key = mx.take_along_axis(keys, passed[:, None, None], axis=1)[:, 0]
        token = _argmax(following + gumbel(key, _ids(shaped.shape[-1])), None)
        padded = mx.concatenate([drafts, mx.zeros_like(drafts[:, :1])], axis=1)
        at_end = mx.arange(count + 1, dtype=mx.int32) == passed[:, None]
        tokens = mx.where(at_end, token[:, None], padded)
        return (
            mx.where(rule, passed, accepted),
            mx.where(rule[:, None], tokens, chosen),
        )

    def _report(self, verdict: Verdict, logits: mx.array) -> Verdict:
        """Add log-probabilities of the raw logits where a row asked for them."""
        top = self._sampler.logprobs
        if top is None:
            return verdict
        values = _log_softmax(logits.astype(mx.float32))
        verdict = replace(
            verdict,
            logprobs=mx.take_along_axis(values, verdict.tokens[..., None], axis=-1)[..., 0],
        )
        if not top:
            return verdict
        ids = mx.argsort(-values, axis=-1)[..., :top]
        return replace(verdict, top_ids=ids, top_logprobs=mx.take_along_axis(values, ids, axis=-1))

    # ------------------------------------------------------------------ noise

    def _noise(self, stream: Stream, slot: int, count: int, token_ids: mx.array) -> mx.array:
        """[B, count, V] Gumbel noise of slots slot..; zero for greedy rows."""
        sampling = [not r.sampling.greedy for r in self._sampler.requests]
        if not any(sampling):
            return mx.zeros((1, 1, 1))
        noise = gumbel(self._keys(stream, slot, count), token_ids)
        return noise if all(sampling) else mx.where(mx.array(sampling)[:, None, None], noise, 0.0)

    def _keys(self, stream: Stream, slot: int, count: int) -> mx.array:
        """[B, count, 2] noise keys of slots slot.., uint32."""
        return mx.array(
            [
                [self._sampler.key(row, n, stream, at + slot + j) for j in range(count)]
                for row, (n, at) in enumerate(zip(self._rounds, self._positions, strict=True))
            ],
            dtype=mx.uint32,
        )


def _ids(vocab_size: int) -> mx.array:
    return mx.arange(vocab_size, dtype=mx.uint32)


def _argmax(logits: mx.array, token_ids: mx.array | None) -> mx.array:
    """Index of the largest entry, the lowest of equals, int32; mapped to target ids."""
    best = mx.argmax(logits, axis=-1).astype(mx.int32)
    return best if token_ids is None else token_ids[best].astype(mx.int32)


def _log_softmax(x: mx.array) -> mx.array:
    return x - mx.logsumexp(x, axis=-1, keepdims=True)


def _after(history: History, prefix: mx.array) -> History:
    """[B, 1, V] tables after the first drafts of a block."""
    generated = history.generated
    if prefix.shape[1]:
        rows = mx.arange(prefix.shape[0], dtype=mx.int32)[:, None]
        generated = generated.at[rows, prefix].add(1.0)
    return History(generated[:, None], history.prompt[:, None])


def _before_each(history: History, drafts: mx.array | None) -> History:
    """[B, K + 1, V] tables: entry i after the first i drafts."""
    generated = history.generated[:, None]
    if drafts is not None and drafts.shape[1]:
        one_hot = drafts[..., None] == mx.arange(generated.shape[-1], dtype=mx.int32)
        grown = generated + mx.cumsum(one_hot.astype(mx.float32), axis=1)
        generated = mx.concatenate([generated, grown], axis=1)
    return History(generated, history.prompt[:, None])


def _reduced(
    columns: Columns, history: History | None, token_ids: mx.array
) -> tuple[Columns, History | None]:
    """The tables as seen by a drafter with a reduced vocabulary."""
    if columns.bias is not None:
        columns = replace(columns, bias=columns.bias[:, token_ids])
    if history is not None:
        history = History(history.generated[..., token_ids], history.prompt[..., token_ids])
    return columns, history
