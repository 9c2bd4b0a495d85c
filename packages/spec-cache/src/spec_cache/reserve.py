"""Who is computing which prefix."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from types import TracebackType

from spec_cache.keys import Chain
from spec_cache.search import Index


class Reservation:
    """Blocks that one request is computing. Release it, or use it as a context manager."""

    def __init__(self, owner: Reservations, keys: Iterable[bytes]) -> None:
        self._owner = owner
        self._keys = tuple(keys)

    def release(self) -> None:
        """Nobody waits for these blocks any more. May be called more than once."""
        self._owner.drop(self._keys)
        self._keys = ()

    def __enter__(self) -> Reservation:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class Reservations:
    """All blocks that are being computed, by key; each by the first that asked for it."""

    def __init__(self, mutex: threading.RLock) -> None:
        self._mutex = mutex
        self._keys: set[bytes] = set()

    def make(self, index: Index, chain: Chain) -> Reservation:
        with self._mutex:
            keys = [chain.key(n + 1) for n in range(chain.length // chain.block)]
            new = [k for k in keys if k not in self._keys and index.find(k) is None]
            self._keys.update(new)
        return Reservation(self, new)

    def drop(self, keys: Iterable[bytes]) -> None:
        with self._mutex:
            self._keys.difference_update(keys)

    def pending(self, index: Index, chain: Chain, blocks: int, limit: int) -> int:
        """How many of the first `limit` tokens will be stored, `blocks` full blocks being so."""
        if not self._keys:
            return 0
        while (blocks + 1) * chain.block <= limit:
            key = chain.key(blocks + 1)
            if key not in self._keys and index.find(key) is None:
                break
            blocks += 1
        return blocks * chain.block
