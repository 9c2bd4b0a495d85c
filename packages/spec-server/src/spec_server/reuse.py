"""The prefix cache beside a batch: what is restored before a prefill, and stored after its chunks.

A prefill pauses at block borders and at the lengths where recurrent state is worth a checkpoint;
after each pause, what is new is pictured and stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from spec_cache import (
    Hit,
    Namespace,
    PrefixCache,
    Reservation,
    checkpoint_lengths,
    chunk_end,
)
from spec_core import Batch, Prefill, Request, RowImage, StateImage


_WORTHWHILE = 16
"""Shorter hits are computed anew: templates begin alike, and a restored row costs a copy."""


@dataclass(frozen=True, slots=True)
class Reuse:
    """What a hit said, for an answer's statistics.

    Attributes:
        length: prompt tokens that were restored.
        stopped_at: how many leading tokens are stored at all; the first that was never seen here
            has this position.
        stopped: why reuse ended there, in a word.
    """

    length: int = 0
    stopped_at: int = 0
    stopped: str = "off"


@dataclass(slots=True)
class Thread:
    """One request's dealings with the cache. Owned by the engine's thread.

    Attributes:
        tokens: the prompt, and later prompt and answer.
        stored: the length up to which it was matched or stored.
    """

    tokens: tuple[int, ...]
    stops: tuple[int, ...] = ()
    stored: int = 0
    reuse: Reuse = field(default_factory=Reuse)
    reservation: Reservation | None = None

    def release(self) -> None:
        """Others need not wait for this prompt any more."""
        if self.reservation is not None:
            self.reservation.release()
            self.reservation = None


class PrefixReuse:
    """A cache and the namespace of one engine's rows.

    Args:
        cache: where pictures are kept.
        namespace: names everything that changes a state.
        recurrent: the rows have state that can only be resumed where a checkpoint was stored.
    """

    def __init__(self, cache: PrefixCache, namespace: Namespace, *, recurrent: bool) -> None:
        self.cache = cache
        self._namespace = namespace
        self._recurrent = recurrent

    def admit(self, batch: Batch, request: Request) -> tuple[Prefill, Thread] | None:
        """Begin a prefill behind the longest stored prefix; None: another request is computing
        more of it, so ask again later."""
        hit = self.cache.match(self._namespace, request.prompt)
        if hit.pending > hit.length:
            return None
        if hit.length < _WORTHWHILE:
            hit = replace(hit, length=0, parts={})
        prefill = batch.prefill(request, _row_image(hit))
        length, block = len(request.prompt), self.cache.block
        stops = checkpoint_lengths(length, block, start=hit.length) if self._recurrent else ()
        thread = Thread(
            tokens=request.prompt,
            stops=stops,
            stored=hit.length,
            reuse=Reuse(hit.length, hit.stopped_at, hit.stopped.value),
            reservation=self.cache.reserve(self._namespace, request.prompt),
        )
        return prefill, thread

    def chunk(self, thread: Thread, position: int, wanted: int) -> int:
        """How many tokens of the prompt the next chunk has."""
        prompt = len(thread.tokens)
        end = chunk_end(position, wanted, prompt, self.cache.block, thread.stops)
        return end - position

    def after_chunk(self, thread: Thread, prefill: Prefill) -> None:
        """Store what a chunk added."""
        length = prefill.position
        done = prefill.remaining == 0
        self._store(thread, length, prefill, checkpoint=done or length in thread.stops)
        if done:
            thread.release()

    def end_of_turn(self, thread: Thread, answer: Sequence[int], batch: Batch, key: int) -> None:
        """Store a finished row, all but its newest token."""
        thread.tokens = (*thread.tokens, *answer)
        length = len(thread.tokens) - 1
        start = self.cache.missing(
            self._namespace, thread.tokens, length, since=thread.stored, checkpoint=True
        )
        if start is not None:
            parts = _parts(batch.image(key, start))
            self.cache.store(self._namespace, thread.tokens, parts)

    def _store(self, thread: Thread, length: int, prefill: Prefill, *, checkpoint: bool) -> None:
        start = self.cache.missing(
            self._namespace, thread.tokens, length, since=thread.stored, checkpoint=checkpoint
        )
        if start is not None:
            parts = _parts(prefill.image(start))
            self.cache.store(self._namespace, thread.tokens, parts, checkpoint=checkpoint)
        thread.stored = length


def _row_image(hit: Hit) -> RowImage | None:
    if not hit.length:
        return None
    return RowImage(hit.parts["target"], hit.parts.get("drafter"))


def _parts(image: RowImage) -> dict[str, StateImage]:
    parts = {"target": image.target}
    if image.drafter is not None:
        parts["drafter"] = image.drafter
    return parts
