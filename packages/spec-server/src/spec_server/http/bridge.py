"""From the engine's thread to the event loop: one wake-up for all events that come together."""

from __future__ import annotations

import asyncio
from collections import deque

from spec_server.job import Event

Arrived = tuple[int, Event] | BaseException
"""A job's number and its event, or what ends the whole request."""


class Bridge:
    """Carries events into the queues of an event loop.

    Waking a loop makes the engine's thread give the interpreter up, and the loop that wakes may
    keep it for as long as it likes. So a round's first event wakes it, and the others ride along.

    Args:
        loop: the one that reads the queues.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._waiting: deque[tuple[asyncio.Queue[Arrived], Arrived]] = deque()
        self._woken = False

    def put(self, queue: asyncio.Queue[Arrived], item: Arrived) -> None:
        """From any thread. What is put from one thread arrives in its order."""
        self._waiting.append((queue, item))
        if self._woken:
            return
        self._woken = True
        try:
            self.loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:  # the loop has ended, and the clients with it
            self._woken = False
            self._waiting.clear()

    def _deliver(self) -> None:
        """On the loop. What is put from now on wakes it again, so nothing is left behind."""
        self._woken = False
        while self._waiting:
            queue, item = self._waiting.popleft()
            queue.put_nowait(item)
