"""Splitting an answer into the thought and what is meant for the reader."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Split:
    """A piece of an answer: text for the reader, and thought. Either may be empty."""

    content: str
    reasoning: str


@dataclass(frozen=True, slots=True)
class ThinkingMarkers:
    """What opens and closes a thought in a model's text, for instance `<think>`, `</think>`."""

    start: str
    end: str


class ThinkingSplit:
    """Separates thought from content in a stream; the markers appear in neither.

    White space around a thought belongs to the markers: it is dropped from the thought's ends and
    from the beginning of the content that follows. Without markers everything is content,
    untouched. What comes out does not depend on how the text was cut into pieces.

    Args:
        markers: the model's markers, or None.
        inside: the prompt already opened the thought.
        one: only a thought at the beginning is one; markers behind it are content.
    """

    def __init__(
        self, markers: ThinkingMarkers | None, inside: bool = False, *, one: bool = False
    ) -> None:
        self._markers = markers
        self._one = one
        self._closed = False
        self._inside = inside and markers is not None
        self._held = ""
        self._skip_space = self._inside
        self._content_began = False

    def feed(self, text: str) -> Split:
        """Add text; what might be part of a marker, or be dropped space, is held back."""
        if self._markers is None:
            return Split(text, "")
        self._held += text
        content: list[str] = []
        reasoning: list[str] = []
        while True:
            marker = self._markers.end if self._inside else self._markers.start
            at = self._held.find(marker)
            if at < 0 or self._is_content(self._held[:at]):
                break
            self._closed = self._inside
            piece, self._held = self._held[:at], self._held[at + len(marker) :]
            (reasoning if self._inside else content).append(self._last_piece(piece))
            self._inside, self._skip_space = not self._inside, True
        piece = self._take(_settled(self._held, marker))
        (reasoning if self._inside else content).append(piece)
        return Split("".join(content), "".join(reasoning))

    def _is_content(self, before: str) -> bool:
        """Whether an opening marker that stands behind `before` is a part of the content."""
        if not self._one or self._inside:
            return False
        return self._closed or self._content_began or bool(before.strip())

    def finish(self) -> Split:
        """Flush what was held back; a thought that was cut short stays a thought."""
        held, self._held = self._held, ""
        if self._inside:
            return Split("", self._strip(held).rstrip())
        return Split(self._strip(held), "")

    def _last_piece(self, piece: str) -> str:
        """The end of a part, right before a marker."""
        piece = self._strip(piece)
        if self._inside or not (self._content_began or piece.strip()):
            return piece.rstrip()
        return piece

    def _take(self, size: int) -> str:
        """Release up to `size` held characters, but no space that may yet be dropped."""
        piece = self._held[:size]
        if self._inside or not self._content_began:
            piece = piece[: len(piece.rstrip())]
        self._held = self._held[len(piece) :]
        return self._strip(piece)

    def _strip(self, piece: str) -> str:
        if self._skip_space:
            piece = piece.lstrip()
            self._skip_space = not piece
        if piece.strip() and not self._inside:
            self._content_began = True
        return piece


def _settled(held: str, marker: str) -> int:
    """How many characters cannot be part of a marker that is still to be completed."""
    for size in range(min(len(held), len(marker) - 1), 0, -1):
        if marker.startswith(held[-size:]):
            return len(held) - size
    return len(held)
