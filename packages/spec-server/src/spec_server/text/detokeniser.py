"""Token ids to text, piece by piece, without ever splitting a character."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_WINDOW = 32
_OVERLAP = 8


class Decoder(Protocol):
    """What turns token ids into text in one go."""

    def decode(self, ids: Sequence[int]) -> str: ...

    @property
    def byte_tokens(self) -> Collection[int]:
        """Tokens whose run is only decoded as a whole (byte fallback); empty for most."""


class Detokeniser:
    """Decodes a growing answer; the pieces join to `decode(all ids)`.

    Invariant: `decode(window)` begins with the `shown` characters that are already out, and what
    follows the window extends it without changing them. Only the end of the text can still
    change: one replacement character (a character whose bytes are not all there), or a run of
    byte-fallback tokens.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._window: list[int] = []
        self._shown = 0

    def feed(self, ids: Sequence[int]) -> str:
        """Add tokens; returns the characters that are now certain."""
        self._window.extend(ids)
        text = self._decoder.decode(self._window)
        certain = self._certain(text)
        piece, self._shown = text[self._shown : certain], max(certain, self._shown)
        if certain == len(text) and len(self._window) > _WINDOW:
            self._window = self._window[-_OVERLAP:]
            self._shown = len(self._decoder.decode(self._window))
        return piece

    def finish(self, *, complete: bool = True) -> str:
        """The rest of the text.

        Args:
            complete: the answer ended by itself. If not, it was cut, perhaps inside a character,
                and a last character that lacks bytes is left out.
        """
        rest = self._decoder.decode(self._window)[self._shown :]
        self._window, self._shown = [], 0
        return rest if complete else rest.rstrip(_REPLACEMENT)

    def _certain(self, text: str) -> int:
        if self._window and self._window[-1] in self._decoder.byte_tokens:
            return len(self._decoder.decode(self._before_run()))
        return len(text) - 1 if text.endswith(_REPLACEMENT) else len(text)

    def _before_run(self) -> list[int]:
        end = len(self._window)
        while end and self._window[end - 1] in self._decoder.byte_tokens:
            end -= 1
        return self._window[:end]
