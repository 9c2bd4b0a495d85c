"""Stop strings over a stream of text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spec_core.errors import InvalidValueError


@dataclass(frozen=True, slots=True)
class StopMatch:
    """What may be shown after a piece of text, and the stop string that ended it, if one did."""

    text: str
    stop: str | None


class StopMatcher:
    """Holds text back while it might begin a stop string, and ends the text right before a match.

    The stop string that is complete first wins (of several that end at the same character, the
    longest), so the result does not depend on how the text was cut into pieces.

    Raises:
        InvalidValueError: a stop string is empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if any(not stop for stop in stops):
            raise InvalidValueError("stop", list(stops), "strings of at least one character")
        self._stops = tuple(stops)
        self._held = ""

    def feed(self, text: str) -> StopMatch:
        """Add text. After a match the matcher holds nothing and must not be fed again."""
        if not self._stops:
            return StopMatch(text, None)
        self._held += text
        found = [(self._held.find(stop), stop) for stop in self._stops if stop in self._held]
        if found:
            start, stop = min(found, key=lambda hit: (hit[0] + len(hit[1]), hit[0]))
            shown, self._held = self._held[:start], ""
            return StopMatch(shown, stop)
        keep = self._possible_start()
        shown, self._held = (
            self._held[: len(self._held) - keep],
            self._held[len(self._held) - keep :],
        )
        return StopMatch(shown, None)

    def finish(self) -> str:
        """The text still held back: no stop string can complete any more."""
        held, self._held = self._held, ""
        return held

    def _possible_start(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = min(len(self._held), max(map(len, self._stops)) - 1)
        for size in range(longest, 0, -1):
            tail = self._held[-size:]
            if any(stop.startswith(tail) for stop in self._stops):
                return size
        return 0
