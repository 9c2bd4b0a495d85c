"""An answer's text as it grows: characters, stop strings, thoughts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spec_server.text.detokeniser import Decoder, Detokeniser
from spec_server.text.stops import StopMatcher
from spec_server.text.thinking import Split, ThinkingMarkers, ThinkingSplit


@dataclass(frozen=True, slots=True)
class Segment:
    """What some tokens added to an answer.

    Attributes:
        content: text for the reader.
        reasoning: text of the thought.
        used: how many of the tokens belong to the answer: all, unless a stop string ended it.
        stop: the stop string that ended the answer, or None.
    """

    content: str
    reasoning: str
    used: int
    stop: str | None = None


class AnswerText:
    """Tokens in, text out; everything that is not certain yet is held back."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        stops: Sequence[str] = (),
        markers: ThinkingMarkers | None = None,
        opens_thought: bool = False,
        one_thought: bool = False,
    ) -> None:
        self._detokeniser = Detokeniser(decoder)
        self._stops = StopMatcher(stops)
        self._split = ThinkingSplit(markers, opens_thought, one=one_thought)
        self._one_by_one = bool(stops)

    def feed(self, ids: Sequence[int]) -> Segment:
        """Add tokens (no end token). After a stop string the answer is over."""
        if not self._one_by_one:
            split = self._split.feed(self._detokeniser.feed(ids))
            return Segment(split.content, split.reasoning, len(ids))
        content, reasoning = "", ""
        for used, token in enumerate(ids, start=1):
            match = self._stops.feed(self._detokeniser.feed([token]))
            split = self._split.feed(match.text)
            if match.stop is not None:
                split = _joined(split, self._split.finish())
            content, reasoning = content + split.content, reasoning + split.reasoning
            if match.stop is not None:
                return Segment(content, reasoning, used, match.stop)
        return Segment(content, reasoning, len(ids))

    def finish(self, *, complete: bool) -> Segment:
        """Flush what was held back; `complete` as in `Detokeniser.finish`.

        A stop string that only becomes visible here still ends the text.
        """
        match = self._stops.feed(self._detokeniser.finish(complete=complete))
        rest = match.text if match.stop is not None else match.text + self._stops.finish()
        split = _joined(self._split.feed(rest), self._split.finish())
        return Segment(split.content, split.reasoning, 0, match.stop)


def _joined(first: Split, second: Split) -> Split:
    return Split(first.content + second.content, first.reasoning + second.reasoning)
