"""Giving modules another class for the length of one call.

mlx-lm has no hooks. A module whose class is exchanged for a subclass keeps its parameters, its
attributes and its place in the tree, and gets its own class back when the call ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import mlx.core as mx
from mlx.nn.layers.base import Module

from spec_core.device import start

Wrapper = Callable[[Any, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""What a swapped module does when called: (module, its own call, args, kwargs) -> result."""


class Wrapping:
    """Subclasses that route a module's call through `wrapper`, one for each class met."""

    def __init__(self, wrapper: Wrapper) -> None:
        self._wrapper = wrapper
        self._made: dict[type, type] = {}

    def of(self, cls: type) -> type:
        """The subclass of `cls` whose call goes through the wrapper."""
        if cls not in self._made:
            self._made[cls] = self._make(cls)
        return self._made[cls]

    def _make(self, cls: type) -> type:
        own, wrapper = cls.__call__, self._wrapper

        def __call__(module: Module, *args: Any, **kwargs: Any) -> Any:
            return wrapper(module, own, args, kwargs)

        return type(cls.__name__, (cls,), {"__call__": __call__, "__module__": cls.__module__})


class Subclassing(Protocol):
    """Gives a class the subclass that stands in for it."""

    def of(self, cls: type) -> type: ...


Swap = tuple[Module, Subclassing]
"""A module, and what stands in for its class while the swap lasts. Several on one module nest."""


@contextmanager
def swapped(swaps: Sequence[Swap]) -> Iterator[None]:
    """Exchange classes; whatever happens, every module has its own again afterwards."""
    own = [(module, type(module)) for module, _ in swaps]
    try:
        for module, subclassing in swaps:
            _set_class(module, subclassing.of(type(module)))
        yield
    finally:
        for module, cls in own:
            _set_class(module, cls)


def _set_class(module: Module, cls: type) -> None:
    # Without a detour over the module's parameters, which is most of the time a swap takes.
    object.__setattr__(module, "__class__", cls)


def hidden_of(output: Any) -> mx.array:
    """The hidden states in what a decoder layer returned (itself, or first of a tuple)."""
    hidden: mx.array = output[0] if isinstance(output, tuple) else output
    return hidden


def with_hidden(output: Any, hidden: mx.array) -> Any:
    """The same output with other hidden states."""
    return (hidden, *output[1:]) if isinstance(output, tuple) else hidden


class EarlyStarts:
    """Lets the device begin while the host still builds later layers.

    Building a forward of 36 layers takes the host as long as the device takes to run it.
    """

    def __init__(self, layers: Sequence[Module], stride: int) -> None:
        wrapping = Wrapping(_start)
        self.swaps: list[Swap] = [(layer, wrapping) for layer in layers[stride - 1 : -1 : stride]]


def _start(
    layer: Module, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    output = own(layer, *args, **kwargs)
    start(hidden_of(output))
    return output


class Recorder:
    """What decoder layers are given and give, taken during one call and then let go."""

    def __init__(self, layers: Sequence[Module]) -> None:
        self._layers = list(layers)
        self._wrapping = Wrapping(self._record)
        self._inputs: dict[int, mx.array] = {}
        self._outputs: dict[int, mx.array] = {}
        self._calls = 0

    def swaps(self, taps: Sequence[int]) -> list[Swap]:
        """The swaps that record these taps; layer 0 gives -1 as well as 0."""
        return [(self._layers[i], self._wrapping) for i in sorted({max(tap, 0) for tap in taps})]

    def take(self, taps: Sequence[int]) -> tuple[mx.array, ...]:
        """The recorded taps in the order asked; forgets everything that was recorded."""
        inputs, outputs = self._inputs, self._outputs
        expected = len({max(tap, 0) for tap in taps})
        calls = self._calls
        self.clear()
        if calls != expected:
            raise ValueError(f"{expected} decoder layers were tapped, but they ran {calls} times")
        first = id(self._layers[0])
        return tuple(inputs[first] if tap < 0 else outputs[id(self._layers[tap])] for tap in taps)

    def clear(self) -> None:
        self._inputs, self._outputs, self._calls = {}, {}, 0

    def _record(
        self,
        layer: Module,
        own: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        output = own(layer, *args, **kwargs)
        self._calls += 1
        self._inputs[id(layer)] = args[0]
        self._outputs[id(layer)] = hidden_of(output)
        return output
