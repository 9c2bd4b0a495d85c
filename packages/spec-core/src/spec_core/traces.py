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

MOST_TRACES, _MOST_MET = 64, 256
"""Traces that are kept, and keys that are remembered. A trace takes the host a few megabytes, and
to make it takes several calls' time: so what is met for the first time is not traced. A server
meets a shape for every width, number of rows and size of buffers."""

Buffers = list[list[mx.array]]
"""Keys and values of each layer."""

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
        """The function's result, from a trace that is made when a key is met for the second time.
        The key has to tell apart whatever differs but numbers and shapes of arrays. Lazy."""
        kept = self._kept
        trace = kept.traces.get(key)
        if trace is None:
            if not kept.met(key):
                return function(*arguments, **named)
            trace = mx.compile(function)
        result: _Result = trace(*arguments, **named)
        kept.traces[key] = trace  # not before: one that raised is half a trace
        kept.traces.move_to_end(key)
        if len(kept.traces) > self._most:
            kept.traces.popitem(last=False)
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
        self._met: OrderedDict[Hashable, None] = OrderedDict()

    def met(self, key: Hashable) -> bool:
        """Whether this key was asked for lately."""
        known = key in self._met
        self._met[key] = None
        self._met.move_to_end(key)
        if len(self._met) > _MOST_MET:
            self._met.popitem(last=False)
        return known


def shapes_of(buffers: Buffers) -> tuple[object, ...]:
    """What a key has to know of buffers: layers are alike. (Where some are not, MLX tells them
    apart behind the key.)"""
    return (len(buffers), *(buffer.shape for buffer in buffers[0]))


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

    @classmethod
    def over(cls, starts: mx.array, columns: int, buffers: Buffers) -> TracedClock:
        """The clock of rows in these buffers."""
        return cls(starts, columns, min(each.shape[2] for pair in buffers for each in pair))

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
