"""Takes tool calls out of a stream of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spec_server.tools.formats import ToolFormat
from spec_server.tools.parsers import MalformedCallError, ToolCall


@dataclass(frozen=True, slots=True)
class ToolPiece:
    """What a piece of text turned out to be: text for the reader, then calls. Either may be empty.

    (A text that stood between two calls of one piece comes before both.)
    """

    content: str = ""
    calls: tuple[ToolCall, ...] = ()


@dataclass(slots=True)
class _Found:
    content: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)


class ToolSplit:
    """Separates calls from content; the markup of a call that parses is in neither.

    A call is held back until it is complete. One that does not parse, or that the answer's end
    cuts off, comes out as content, to the letter. White space before calls, and after them where
    nothing stands before or behind it, belongs to the markup. What comes out does not depend on
    how the text was cut into pieces.

    Args:
        format: how the model writes calls.
        schemas: function name to the JSON schema of its parameters.
    """

    def __init__(self, format: ToolFormat, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        self._format = format
        self._schemas = schemas
        self._openers = [format.start] if format.start else []
        self._openers += _openers(format, schemas)
        self._held = ""
        self._inside = False
        self._opener = ""
        self._searched = 0
        self._after_call = False
        self._began = False

    def feed(self, text: str) -> ToolPiece:
        """Add text."""
        found = _Found()
        self._held += text
        while self._seek_end(found) if self._inside else self._seek_start(found):
            pass
        return ToolPiece("".join(found.content), tuple(found.calls))

    def finish(self) -> ToolPiece:
        """Flush what was held back; a last call needs no end marker."""
        found = _Found()
        if not (self._inside and self._accept(self._held, found)):
            self._text(self._opener + self._held, found)
        self._held, self._opener, self._inside = "", "", False
        return ToolPiece("".join(found.content), tuple(found.calls))

    def _seek_start(self, found: _Found) -> bool:
        """Look for the next call; false if no more is certain."""
        hits = [(self._held.find(o), o) for o in self._openers if o in self._held]
        if not hits:
            cut = len(self._held) - self._uncertain()
            self._text(self._held[:cut], found)
            self._held = self._held[cut:]
            return False
        at, opener = min(hits, key=lambda hit: (hit[0], -len(hit[1])))
        before = self._held[:at].rstrip()
        if before:
            self._text(before, found)
        begin = at + len(opener) if opener == self._format.start else at
        self._opener, self._held = self._held[len(before) : begin], self._held[begin:]
        self._inside, self._searched = True, 0
        return True

    def _seek_end(self, found: _Found) -> bool:
        """Look for the end of the call that has begun; false if it is not there yet."""
        at, size = self._next_end()
        if at < 0:
            return False
        body = self._held[:at]
        if not self._accept(body, found):
            if self._format.inside_string(body):
                self._searched = at + max(size, 1)
                return True
            self._text(self._opener + self._held[: at + size], found)
        self._held, self._opener, self._inside = self._held[at + size :], "", False
        return True

    def _next_end(self) -> tuple[int, int]:
        """Where the call ends: at its end marker, or before the next start marker; or -1."""
        end, start = self._format.end, self._format.start
        ends = self._held.find(end, self._searched) if end else -1
        starts = self._held.find(start, self._searched) if start else -1
        if ends >= 0 and (starts < 0 or ends < starts):
            return ends, len(end)
        if starts >= 0:
            return starts, 0
        unsure = max(len(end), len(start)) - 1
        self._searched = max(self._searched, len(self._held) - unsure)
        return -1, 0

    def _accept(self, body: str, found: _Found) -> bool:
        try:
            found.calls.extend(self._format.parse(body, self._schemas))
        except MalformedCallError:
            return False
        self._after_call = True
        return True

    def _text(self, text: str, found: _Found) -> None:
        if self._after_call:
            if not text.strip():
                return
            text = text if self._began else text.lstrip()
            self._after_call = False
        self._began = self._began or bool(text)
        found.content.append(text)

    def _uncertain(self) -> int:
        """Length of the end of the held text that may yet belong to markup."""
        size = 0
        for opener in self._openers:
            for length in range(min(len(opener) - 1, len(self._held)), size, -1):
                if opener.startswith(self._held[-length:]):
                    size = length
                    break
        body = self._held[: len(self._held) - size]
        return size + len(body) - len(body.rstrip())


def _openers(format: ToolFormat, schemas: Mapping[str, Any]) -> Sequence[str]:
    """What opens a call without a start marker: only with a known function's name behind it."""
    after = {"xml": ">", "gemma": "{"}.get(format.name, "")
    return [f"{opener}{name}{after}" for opener in format.openers for name in schemas]
