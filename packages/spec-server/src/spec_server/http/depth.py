"""How deep JSON may nest: what reads it further on recurses, so the text is checked first."""

from __future__ import annotations

import re
from itertools import accumulate

MAX_DEPTH = 128
"""Objects and lists inside each other."""

_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
_OTHER = re.compile(r"[^\[\]{}]+")
_STEPS = {"[": 1, "{": 1, "]": -1, "}": -1}


def nests_deeper(text: str, most: int) -> bool:
    """Whether JSON text opens more than `most` objects and lists inside each other.

    Linear in the text, and not recursive. Text that is not JSON may be told either.
    """
    if text.count("[") + text.count("{") <= most:
        return False
    brackets = _OTHER.sub("", _STRING.sub("", text))
    return any(depth > most for depth in accumulate(map(_STEPS.__getitem__, brackets)))
