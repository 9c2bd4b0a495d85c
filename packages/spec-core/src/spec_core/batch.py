"""Batches: rows join after their prefill, share each forward, and leave the moment they finish.

A single sequence is a batch of one. Nothing here knows how a target, a drafter or a sampler works.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from spec_core.chooser import Sampler
from spec_core.device import start
from spec_core.errors import InvalidValueError, SeamError, UnsupportedError
from spec_core.policy import FixedLength
from spec_core.request import Request
from spec_core.round import (
    Flight,
    Lanes,
    Prompts,
    Row,
    allowances,
    commit,
    launch,
    propose,
    settle,
    submit,
)
from spec_core.seams import (
    Drafter,
    DrafterState,
    DraftPolicy,
    RowOutcome,
    StateImage,
    Target,
    TargetState,
)

_KEYS = itertools.count()
"""A key names one row for good: a policy may outlive its batch, and knows rows by their keys."""


@dataclass(frozen=True, slots=True)
class RowImage:
    """A picture of one row: the target's part, and the drafter's where there is one."""

    target: StateImage
    drafter: StateImage | None


class Prefill:
    """A row on its own states while its prompt is computed, chunk by chunk.

    Made by `Batch.prefill`. `step` until it gives the first token, then `Batch.join`.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        row: Row,
        restored: RowImage | None,
        prompts: Prompts,
    ) -> None:
        self.row = row
        self._prompts = prompts
        self.target = target
        self.drafter = drafter
        self.state: TargetState = target.new_state(1)
        self.drafts: DrafterState | None = None
        self.sampler = Sampler(target.info.vocab_size, [row.request])
        self.anchor: mx.array | None = None
        self.newest = -1
        self._done = 0
        if restored is not None:
            self._restore(restored)
        elif drafter is not None:
            self.drafts = drafter.new_state(1)

    @property
    def position(self) -> int:
        """Prompt tokens computed so far, restored ones included."""
        return self._done

    @property
    def remaining(self) -> int:
        """Prompt tokens still to compute."""
        return len(self.row.request.prompt) - self._done

    @property
    def finished(self) -> bool:
        return self.anchor is not None

    def step(self, tokens: int) -> RowOutcome | None:
        """Compute up to `tokens` more of the prompt; with the last of them, the first answer token.

        Raises:
            InvalidValueError: `tokens` is below 1.
            SeamError: the prompt is already done.
        """
        if tokens < 1:
            raise InvalidValueError("prefill chunk", tokens, "at least 1 token")
        if self.finished:
            raise SeamError("the prefill is finished; join it to its batch")
        self._prompts.chunks += 1
        chunk = self.row.request.prompt[self._done : self._done + tokens]
        columns = mx.array([chunk], dtype=mx.int32)
        last = len(chunk) == self.remaining
        taps = () if self.drafter is None else self.drafter.taps
        forward = self.target.forward(
            columns, self.state, taps=taps, logits="last" if last else "none"
        )
        self.state.commit([len(chunk)])
        if self.drafter is not None and self.drafts is not None:
            self.drafter.extend(self.drafts, columns, forward.taps, [len(chunk)])
            start(*self.drafts.pending())
        self._done += len(chunk)
        if not last:
            mx.eval(*self.state.pending())
            return None
        assert forward.logits is not None
        return self._first(forward.logits)

    def image(self, start: int = 0) -> RowImage:
        """A picture of what is computed so far, from position `start` on."""
        return _picture(self.state, self.drafts, 0, start)

    def _first(self, logits: mx.array) -> RowOutcome:
        constraint, asked = self.row.request.constraint, self.row.request.sampling.logprobs
        masks = None if constraint is None else mx.array(constraint.masks([]))[None]
        chooser = self.sampler.round([len(self.row.request.prompt)])
        verdict = chooser.accept(logits, None, masks)
        self.sampler.observe(verdict)
        self.anchor = verdict.next_token
        mx.eval(*verdict.arrays(), self.anchor, *self.state.pending(), *self.sampler.pending())
        tokens = verdict.read()[0][1]
        self.newest = tokens[-1]
        kept = self.row.cut(tokens)
        if constraint is not None:
            constraint.advance(kept)
        logprobs = None if asked is None else verdict.read_logprobs(0, len(kept), asked)
        return RowOutcome(
            self.row.key, kept, 0, 0, finish=self.row.finish, prefill=True, logprobs=logprobs
        )

    def _restore(self, image: RowImage) -> None:
        length = image.target.length
        if not 0 < length < len(self.row.request.prompt):
            raise InvalidValueError(
                "restored length", length, "positive and shorter than the prompt"
            )
        self.state.restore(0, image.target)
        self._done = length
        if self.drafter is None:
            return
        if image.drafter is None:
            self.drafts = self.drafter.new_state(1, start=length)
        else:
            self.drafts = self.drafter.new_state(1)
            self.drafts.restore(0, image.drafter)


class Batch:
    """Rows at different lengths that share each forward.

    Args:
        target: the model whose output is wanted.
        drafter: guesses for every row, or None for plain decoding.
        policy: how far to draft; the drafter's whole block if None.

    Raises:
        UnsupportedError: the drafter reads taps of a target that has none.
    """

    def __init__(
        self, target: Target, drafter: Drafter | None = None, policy: DraftPolicy | None = None
    ) -> None:
        if drafter is not None and drafter.taps and not target.info.tappable:
            raise UnsupportedError(
                f"{drafter.name} reads the target's hidden states, which "
                f"{target.info.family} does not offer: {target.info.taps_refused}"
            )
        self._target = target
        self._drafter = drafter
        self._policy: DraftPolicy = policy or FixedLength()
        self._lanes: Lanes | None = None
        self._flight: Flight | None = None
        self._ready: list[RowOutcome] = []
        self._prompts = Prompts()

    @property
    def rows(self) -> int:
        """Rows that still decode."""
        return sum(row.finish is None for row in self._rows())

    @property
    def busy(self) -> bool:
        """A further `step` is wanted: rows decode, outcomes wait, or ended rows hold memory."""
        return self._lanes is not None or bool(self._ready)

    @property
    def keys(self) -> list[int]:
        """Keys of the rows that still decode."""
        return [row.key for row in self._rows() if row.finish is None]

    def prefill(self, request: Request, restored: RowImage | None = None) -> Prefill:
        """Start a row on its own states. `restored` holds a prefix of the prompt, from a cache.

        Raises:
            InvalidValueError: a token id is out of range, or the prompt exceeds the context.
        """
        window = self._target.info.context_window
        if len(request.prompt) >= window:
            raise InvalidValueError(
                "prompt length", len(request.prompt), f"below the context window of {window} tokens"
            )
        row = Row(next(_KEYS), request)
        return Prefill(self._target, self._drafter, row, restored, self._prompts)

    def join(self, prefill: Prefill) -> int:
        """Add a prefilled row; its states move into a free slot. Returns the row's key.

        Raises:
            SeamError: the prefill is not finished, or its row already ended.
        """
        if prefill.anchor is None or prefill.row.finish is not None:
            raise SeamError("only a prefill that has given its first token, and goes on, can join")
        self._drain()
        self._release()
        lanes = self._lanes
        if lanes is None:
            self._lanes = Lanes(
                self._target,
                self._drafter,
                self._policy,
                [prefill.row],
                prefill.state,
                prefill.drafts,
                prefill.sampler,
                prefill.anchor,
                [prefill.newest],
                self._prompts,
            )
            return prefill.row.key
        lanes.state.join(prefill.state)
        if lanes.drafts is not None and prefill.drafts is not None:
            lanes.drafts.join(prefill.drafts)
        lanes.sampler.join(prefill.sampler)
        lanes.anchor = mx.concatenate([lanes.anchor, prefill.anchor])
        lanes.newest = [*lanes.newest, prefill.newest]
        lanes.rows.append(prefill.row)
        return prefill.row.key

    def leave(self, key: int) -> None:
        """Take a row out before its end (a client left). Unknown keys are ignored: it ended.

        What the round in flight gave to other rows comes with the next `step`.
        """
        self._drain()
        self._ready = [outcome for outcome in self._ready if outcome.key != key]
        for row in self._rows():
            if row.key == key and row.finish is None:
                row.finish = "stop"
        self._release()

    def image(self, key: int, start: int = 0) -> RowImage:
        """A picture of a row, which may just have finished, from position `start` on.

        Raises:
            SeamError: no such row; a finished row is gone once the next step has begun.
        """
        self._drain()
        for index, row in enumerate(self._rows()):
            if row.key == key and self._lanes is not None:
                return _picture(self._lanes.state, self._lanes.drafts, index, start)
        raise SeamError(f"row {key} is not in the batch; image it before the next step")

    def step(self) -> list[RowOutcome]:
        """Settle one round and give its outcomes; finished rows leave before the next one.

        Plain rounds are pipelined: the next one already runs when this one is settled.
        """
        if self._ready:
            ready, self._ready = self._ready, []
            return ready
        if self._flight is None:
            self._compact()
        lanes = self._lanes
        if lanes is None:
            return []
        flight = self._flight
        if flight is None:
            flight = launch(lanes)
            submit(lanes, flight)
        self._flight = self._run_ahead(lanes, flight)
        return settle(lanes, flight)

    def _run_ahead(self, lanes: Lanes, flight: Flight) -> Flight | None:
        """The next plain round, launched before `flight` is settled, where that cannot be wrong."""
        if not flight.plain or any(row.finish or row.remaining < 2 for row in lanes.rows):
            return None
        if any(row.request.constraint for row in lanes.rows) or self._wants_drafts(lanes, flight):
            return None
        commit(lanes, flight, [1] * len(lanes.rows))
        ahead = launch(lanes, plain=True)
        submit(lanes, ahead)
        return ahead

    def _wants_drafts(self, lanes: Lanes, flight: Flight) -> bool:
        """Whether the round after `flight` may want to draft.

        A drafter that searches text cannot know before `flight` is settled; it is asked one token
        earlier instead, so that a run of copies starts one step late and a miss costs nothing.
        """
        if lanes.drafter is None or not any(allowances(lanes, lanes.statuses())):
            return False
        if not lanes.drafter.needs_host_tokens or lanes.copier is not None:
            return True
        anchor, lanes.anchor = lanes.anchor, flight.tokens[:, 0]
        try:
            return propose(lanes, lanes.chooser()) is not None
        finally:
            lanes.anchor = anchor

    def _rows(self) -> Sequence[Row]:
        return [] if self._lanes is None else self._lanes.rows

    def _drain(self) -> None:
        """Settle the round in flight; rows may only move afterwards."""
        if self._flight is not None and self._lanes is not None:
            flight, self._flight = self._flight, None
            self._ready += settle(self._lanes, flight)

    def _release(self) -> None:
        """Take finished rows out, unless an end is not reported yet: such a row can be imaged."""
        if not self._ready:
            self._compact()

    def _compact(self) -> None:
        """Take finished rows out: the last row fills each hole, so that one row moves at most."""
        lanes = self._lanes
        if lanes is None or all(row.finish is None for row in lanes.rows):
            return
        order = _fill_holes([row.finish is None for row in lanes.rows])
        if not order:
            self._lanes = None
            return
        lanes.state.select(order)
        if lanes.drafts is not None:
            lanes.drafts.select(order)
        lanes.sampler.select(order)
        lanes.anchor = lanes.anchor[mx.array(order, dtype=mx.int32)]
        lanes.newest = [lanes.newest[index] for index in order]
        lanes.rows = [lanes.rows[index] for index in order]


def _fill_holes(stays: Sequence[bool]) -> list[int]:
    """The order of the rows that stay: each hole is filled by the last row."""
    order = list(range(len(stays)))
    index = 0
    while index < len(order):
        if stays[order[index]]:
            index += 1
            continue
        last = order.pop()
        if index < len(order):
            order[index] = last
    return order


def _picture(state: TargetState, drafts: DrafterState | None, index: int, start: int) -> RowImage:
    return RowImage(
        state.image(index, start), None if drafts is None else drafts.image(index, start)
    )
