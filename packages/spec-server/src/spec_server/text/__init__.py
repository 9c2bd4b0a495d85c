"""Text on both sides of the tokens: templates in, characters, stop strings and thoughts out."""

from spec_server.text.answer import AnswerText, Segment
from spec_server.text.detokeniser import Detokeniser
from spec_server.text.stops import StopMatch, StopMatcher
from spec_server.text.thinking import ThinkingSplit
from spec_server.text.tokeniser import Message, Prompt, Tokeniser

__all__ = [
    "AnswerText",
    "Detokeniser",
    "Message",
    "Prompt",
    "Segment",
    "StopMatch",
    "StopMatcher",
    "ThinkingSplit",
    "Tokeniser",
]
