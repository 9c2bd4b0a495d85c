"""The prefix cache beside a batch: what is restored before a prefill, and stored after its chunks.

A prefill pauses at block borders and at the lengths where a checkpoint is worth it; after each
pause, what is new is pictured and stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from spec_cache.cache import PrefixCache
from spec_cache.keys import Namespace
from spec_cache.plan import checkpoint_lengths, chunk_end
from spec_cache.reserve import Reservation
from spec_cache.results import Hit
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
        stopped: why reuse ended there, in a word; "off" without a cache.
    """

    length: int = 0
    stopped_at: int = 0
    stopped: str = "off"


@dataclass(slots=True)
class Thread:
    """One request's dealings with the cache. Owned by the thread that owns MLX.

    Attributes:
        namespace: its tenant's.
        tokens: the prompt, and later prompt and answer.
        stops: lengths at which the prefill pauses for a checkpoint.
        reuse: what was found.
        reservation: lets others with the same prefix wait; None once the prompt is done.
        stored: the length up to which it was matched or stored.
    """

    namespace: Namespace
    tokens: tuple[int, ...]
    stops: tuple[int, ...]
    reuse: Reuse
    reservation: Reservation | None
    stored: int

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
        exact: rows resume at stored checkpoints only (recurrent state) or mostly (windows smaller
            than a block, or than a prefill's chunks, within which they forget), so that prefills
            pause for some.
        at_once: prompt tokens that may be stored together, once the first token is out: fewer,
            larger copies, none of which it waits for. 0 where rows forget, so that each chunk must
            be stored when it is computed.
    """

    def __init__(
        self, cache: PrefixCache, namespace: Namespace, *, exact: bool, at_once: int = 0
    ) -> None:
        self.cache = cache
        self._namespace = namespace
        self._exact = exact
        self._at_once = at_once

    def prefetch(self, request: Request, salt: str = "") -> Future[bool]:
        """Begin to load from disk what `admit` will restore; see `PrefixCache.prefetch`."""
        return self.cache.prefetch(self._of(salt), request.prompt)

    def admit(
        self, batch: Batch, request: Request, salt: str = ""
    ) -> tuple[Prefill, Thread] | None:
        """Begin a prefill behind the longest stored prefix.

        Args:
            batch: where the row will be decoded.
            request: what is asked.
            salt: its tenant's; tenants with different salts share nothing.

        Returns:
            The prefill, and what the other methods want; None where another request is computing
            more of the prompt, so that it should be asked again later.
        """
        namespace = self._of(salt)
        hit = self.cache.match(namespace, request.prompt)
        if hit.pending > hit.length:
            return None
        if hit.length < _WORTHWHILE:
            hit = replace(hit, length=0, parts={})
        prefill = batch.prefill(request, _row_image(hit))
        thread = Thread(
            namespace=namespace,
            tokens=request.prompt,
            stops=self._stops(hit, len(request.prompt)),
            reuse=Reuse(hit.length, hit.stopped_at, hit.stopped.value),
            reservation=self.cache.reserve(namespace, request.prompt),
            stored=hit.length,
        )
        return prefill, thread

    def chunk(self, thread: Thread, position: int, wanted: int) -> int:
        """How many tokens of the prompt the next chunk has."""
        prompt = len(thread.tokens)
        end = chunk_end(position, wanted, prompt, self.cache.block, thread.stops)
        return end - position

    def after_chunk(self, thread: Thread, prefill: Prefill) -> None:
        """Store what a chunk added, or leave it for later."""
        length, done = prefill.position, prefill.remaining == 0
        if not done and length - thread.stored < self._at_once:
            return
        checkpoint = length in thread.stops if self._exact else done
        start = self.cache.missing(
            thread.namespace, thread.tokens, length, since=thread.stored, checkpoint=checkpoint
        )
        if start is not None:
            parts = _parts(prefill.image(start))
            self.cache.store(thread.namespace, thread.tokens, parts, checkpoint=checkpoint)
        thread.stored = length
        if done:
            thread.release()

    def end_of_turn(self, thread: Thread, answer: Sequence[int], batch: Batch, key: int) -> None:
        """Store a finished row, all but its newest token.

        Args:
            thread: the row's.
            answer: every token that it has emitted.
            batch: where it is; it has not left yet.
            key: its key there.
        """
        tokens = (*thread.tokens, *answer)
        length = len(tokens) - 1
        start = self.cache.missing(
            thread.namespace, tokens, length, since=thread.stored, checkpoint=True
        )
        if start is not None:
            self.cache.store(thread.namespace, tokens, _parts(batch.image(key, start)))

    def _of(self, salt: str) -> Namespace:
        """A tenant's namespace."""
        return self._namespace if not salt else replace(self._namespace, salt=salt)

    def _stops(self, hit: Hit, prompt: int) -> tuple[int, ...]:
        """Where to pause for checkpoints: where others part from this prompt, one is worth it."""
        if not self._exact:
            return ()
        return checkpoint_lengths(prompt, self.cache.block, (hit.stopped_at,), start=hit.length)


def _row_image(hit: Hit) -> RowImage | None:
    if not hit.length:
        return None
    return RowImage(hit.parts["target"], hit.parts.get("drafter"))


def _parts(image: RowImage) -> dict[str, StateImage]:
    parts = {"target": image.target}
    if image.drafter is not None:
        parts["drafter"] = image.drafter
    return parts
