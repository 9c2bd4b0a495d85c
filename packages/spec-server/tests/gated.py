"""An engine over a tiny target whose forwards wait until a test lets them go."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

from spec_core import FixedLength
from spec_core.testing import TinyTarget
from spec_server import Engine, Facts, Limits, Tokeniser
from spec_server.job import Labels
from spec_server.scheduler import Models
from spec_server.worker import Worker

VOCAB, WINDOW, PATIENCE = 31, 512, 60.0


class Letters:
    """A tokenizer whose tokens are letters; 0 ends an answer."""

    byte_tokens: frozenset[int] = frozenset()
    markers = None
    tool_format = None
    end_tokens = frozenset({0})

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(64 + i) for i in ids)


class Gate:
    """Forwards pass while it is open; each `let` lets one more pass while it is shut."""

    def __init__(self) -> None:
        self._free = threading.Condition()
        self._open = True
        self._permits = 0
        self._fault = ""
        self.waiting = 0
        self.passed = 0

    @property
    def blocked(self) -> bool:
        """A forward waits, and nothing lets it pass yet."""
        with self._free:
            return self.waiting > self._permits and not self._open

    def shut(self) -> None:
        with self._free:
            self._open, self._permits = False, 0

    def open(self) -> None:
        with self._free:
            self._open = True
            self._free.notify_all()

    def let(self, count: int = 1) -> None:
        with self._free:
            self._permits += count
            self._free.notify_all()

    def fail_next(self, message: str) -> None:
        self._fault = message

    def wait(self) -> None:
        with self._free:
            self.waiting += 1
            assert self._free.wait_for(lambda: self._open or self._permits > 0, PATIENCE)
            self._permits -= not self._open
            self.waiting -= 1
            self.passed += 1
            fault, self._fault = self._fault, ""
        if fault:
            raise RuntimeError(fault)


class GatedTarget(TinyTarget):
    """Counts forwards and lets them wait."""

    def __init__(self, gate: Gate) -> None:
        super().__init__(vocab=VOCAB)
        self.gate = gate
        self.shapes: list[tuple[int, ...]] = []

    def forward(self, tokens: Any, *args: Any, **kwargs: Any) -> Any:
        self.gate.wait()
        self.shapes.append(tuple(tokens.shape))
        return super().forward(tokens, *args, **kwargs)


def gated_engine(
    limits: Limits | None = None, on_target: Callable[[GatedTarget], None] | None = None
) -> tuple[Engine, Gate]:
    """Decodes plainly. The gate is open until a test shuts it."""
    gate = Gate()

    def load() -> Models:
        target = GatedTarget(gate)
        if on_target is not None:
            on_target(target)
        return Models(target, None, FixedLength())

    worker = Worker(load, limits or Limits())
    worker.start()
    facts = Facts("tiny", Labels("baseline"), WINDOW, "float32", 0, VOCAB)
    return Engine(worker, cast(Tokeniser, Letters()), facts), gate
