"""Events on their way from the engine's thread to an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, cast

from spec_server import Chunk
from spec_server.http.bridge import Arrived, Bridge

EVENT = Chunk("", "", ())


class Loop:
    """Keeps what it is asked to call."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def call_soon_threadsafe(self, call: Callable[[], None]) -> None:
        self.calls.append(call)


def numbers(queue: asyncio.Queue[Arrived]) -> list[int]:
    found = []
    while not queue.empty():
        item = queue.get_nowait()
        assert isinstance(item, tuple)
        found.append(item[0])
    return found


def test_what_comes_together_wakes_the_loop_once() -> None:
    loop, first, second = Loop(), asyncio.Queue[Arrived](), asyncio.Queue[Arrived]()
    bridge = Bridge(cast(Any, loop))
    for number in range(3):
        bridge.put(first, (number, EVENT))
        bridge.put(second, (10 + number, EVENT))
    assert (first.qsize(), second.qsize(), len(loop.calls)) == (0, 0, 1)
    loop.calls.pop()()
    assert (numbers(first), numbers(second)) == ([0, 1, 2], [10, 11, 12])
    bridge.put(second, (13, EVENT))
    loop.calls.pop()()
    assert numbers(second) == [13]
    assert not loop.calls


def test_nothing_is_lost_between_threads() -> None:
    async def main() -> list[int]:
        bridge, queue = Bridge(asyncio.get_running_loop()), asyncio.Queue[Arrived]()

        def work() -> None:
            for number in range(20_000):
                bridge.put(queue, (number, EVENT))

        thread = threading.Thread(target=work)
        thread.start()
        found = []
        while len(found) < 20_000:
            item = await queue.get()
            assert isinstance(item, tuple)
            found.append(item[0])
        thread.join()
        return found

    assert asyncio.run(asyncio.wait_for(main(), 60)) == list(range(20_000))


def test_a_loop_that_has_ended_keeps_nothing() -> None:
    loop, queue = asyncio.new_event_loop(), asyncio.Queue[Arrived]()
    bridge = Bridge(loop)
    loop.close()
    for number in range(3):
        bridge.put(queue, (number, EVENT))
    assert queue.empty()
    assert not bridge._waiting
