"""The longest earlier occurrence of a text's ending, found without scanning the text.

The index is a trie over contexts read backwards: the path to a node spells the newest token
first. A context that occurred once is a leaf and grows only when it occurs again, so there are
about as many entries as tokens. Every inner node remembers its most recent occurrence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_TOKEN_BITS = 32
_ROOT = 0


@dataclass(frozen=True, slots=True)
class Match:
    """An earlier occurrence of the text's ending.

    Attributes:
        end: index of the occurrence's last token.
        length: how many tokens agree, at most the index's `depth`.
    """

    end: int
    length: int


class SuffixIndex:
    """Tokens of one text, appended one by one, and where their endings occurred before.

    An append or a query takes at most `depth` steps, and no more than the longest repetition
    there plus one; neither depends on the length of the text.

    Args:
        depth: the longest ending that is compared, at least 1.
    """

    __slots__ = ("_children", "_recent", "depth", "tokens")

    def __init__(self, depth: int = 32) -> None:
        self.depth = depth
        self.tokens: list[int] = []
        # (node, token) -> the inner node there (>= 0), or a leaf with its one occurrence (~end).
        self._children: dict[int, int] = {}
        self._recent: list[int] = [-1]

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens (ids in 0..2**32 - 1)."""
        for token in tokens:
            self.tokens.append(token)
            self._insert(len(self.tokens) - 1)

    def _insert(self, end: int) -> None:
        """Record the contexts that end at `end`, down to the first that is new."""
        text, children, recent = self.tokens, self._children, self._recent
        node = _ROOT
        for at in range(end, max(end - self.depth, -1), -1):
            key = node << _TOKEN_BITS | text[at]
            child = children.get(key)
            if child is None:
                children[key] = ~end
                return
            if child < 0:
                child = self._split(key, ~child, end - at + 1)
            recent[child] = end
            node = child

    def _split(self, key: int, earlier: int, length: int) -> int:
        """Turn the leaf at `key` into an inner node; its one occurrence moves a step deeper."""
        node = len(self._recent)
        self._recent.append(earlier)
        self._children[key] = node
        if earlier >= length:
            self._children[node << _TOKEN_BITS | self.tokens[earlier - length]] = ~earlier
        return node

    def find(self, anchor: int) -> Match | None:
        """The most recent among the longest earlier occurrences of the text's ending, the text
        being followed by `anchor` (which is not appended)."""
        text, children = self.tokens, self._children
        node, length, end, token = _ROOT, 0, -1, anchor
        while length < min(self.depth, len(text) + 1):
            child = children.get(node << _TOKEN_BITS | (text[-length] if length else token))
            if child is None:
                break
            length += 1
            if child < 0:
                return Match(~child, self._agreeing(~child, length))
            node, end = child, self._recent[child]
        return Match(end, length) if length else None

    def _agreeing(self, end: int, length: int) -> int:
        """How many tokens before the anchor's end agree with those before `end`; `length` do."""
        text, size = self.tokens, len(self.tokens)
        most = min(self.depth, end + 1)
        while length < most and text[end - length] == text[size - length]:
            length += 1
        return length

    def after(self, match: Match, anchor: int, count: int) -> list[int]:
        """The `count` tokens that follow the occurrence, in the text that ends with `anchor`.

        Where the occurrence overlaps the ending, the copy runs into itself: a text of period p
        goes on with period p.
        """
        text = self.tokens
        period = len(text) - match.end
        copied = text[match.end + 1 : match.end + 1 + min(count, period - 1)]
        if len(copied) < count:
            copied.append(anchor)
        while len(copied) < count:
            copied.append(copied[-period])
        return copied
