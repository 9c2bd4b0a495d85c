"""Traces: what a function computes, recorded once for each shape and built anew from the record.

`mx.compile` records the operations of one call and builds those of the next in C++, which takes a
fraction of what Python takes. What is traced here has no lengths in it. Where rows start is an
input (`TracedClock`), and so are the buffers of keys and values, whole: only a buffer that grew, or
other rows or columns, have a record of their own.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, ParamSpec, TypeVar

import mlx.core as mx

from spec_core.kv import RowClock

MOST_TRACES = 64
"""Traces that are kept. One takes a few megabytes of the host, and to make it twice as long as a
call without one; a server meets a shape for every width, number of rows and size of buffers."""

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class Traces(Generic[_Arguments, _Result]):
    """Traces of one function of arrays, by what they are for.

    Args:
        most: traces that are kept; the one that was not used for longest goes first.
    """

    def __init__(self, most: int = MOST_TRACES) -> None:
        self._most = most
        self._kept = _Kept()

    def __len__(self) -> int:
        """How many there are in this thread."""
        return len(self._kept.traces)

    def replay(
        self,
        key: Hashable,
        function: Callable[_Arguments, _Result],
        *arguments: _Arguments.args,
        **named: _Arguments.kwargs,
    ) -> _Result:
        """The function's result. It is only called where there is no trace under this key, which
        has to tell apart whatever differs but numbers in arrays. Lazy."""
        kept = self._kept.traces
        trace = kept.get(key) or mx.compile(function)
        result: _Result = trace(*arguments, **named)
        kept[key] = trace  # not before: one that raised is half a trace
        kept.move_to_end(key)
        if len(kept) > self._most:
            kept.popitem(last=False)
        return result

    def clear(self) -> None:
        """Forget those of this thread."""
        self._kept.traces.clear()


class _Kept(threading.local):
    """Each thread has traces of its own. MLX keeps a compiled function's graphs by thread and
    address, and forgets them in one thread only: in another one they would then be taken for those
    of the next function at that address."""

    def __init__(self) -> None:
        self.traces: OrderedDict[Hashable, Any] = OrderedDict()


class TracedClock(RowClock):
    """A clock of an open forward whose lengths only the device knows: to the host no two rows are
    known to be alike, and they may fill the buffers.

    Args:
        starts: [B] int32, the lengths.
        columns: of the forward.
        capacity: slots of the buffers.
    """

    __slots__ = ("_at", "_capacity", "_starts")

    def __init__(self, starts: mx.array, columns: int, capacity: int) -> None:
        super().__init__(starts.shape[0])
        self.begin(columns)
        self._starts = starts
        self._capacity = capacity
        self._at = starts[:, None] + mx.arange(columns, dtype=mx.int32)

    @property
    def uniform(self) -> bool:
        return False

    @property
    def longest(self) -> int:
        """The most that it can be."""
        return self._capacity - self.provisional

    def reads(self, columns: int) -> int:
        return self._capacity

    def offset(self) -> mx.array:
        return self._starts

    def positions(self, columns: int) -> mx.array:
        return self._at

    def ends(self, columns: int) -> mx.array:
        return self._starts + columns
