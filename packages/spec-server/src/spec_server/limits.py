"""How much an engine does at once."""

from __future__ import annotations

from dataclasses import dataclass

from spec_core.errors import InvalidValueError


@dataclass(frozen=True, slots=True)
class Limits:
    """How much runs at once.

    Attributes:
        max_batch: rows that are prefilled or decoded at the same time; others wait.
        max_queue: requests that may wait for a row; more are refused.
        context_window: the most positions of a request, prompt and answer together; None: what
            the target was made for.
        prefill_chunk: the most prompt tokens of one forward.
        step_seconds: how long a prefill chunk may hold up rows that are decoded.
        memory_bytes: what the process may use, weights included; None: four fifths of the
            machine's memory, or nine tenths of what a GPU recommends.

    Raises:
        InvalidValueError: a limit is out of range.
    """

    max_batch: int = 8
    max_queue: int = 256
    context_window: int | None = None
    prefill_chunk: int = 512
    step_seconds: float = 0.1
    memory_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_batch", "prefill_chunk"):
            if getattr(self, name) < 1:
                raise InvalidValueError(name, getattr(self, name), "at least 1")
        if self.max_queue < 0:
            raise InvalidValueError("max_queue", self.max_queue, "at least 0")
        if self.context_window is not None and self.context_window < 2:
            raise InvalidValueError("context_window", self.context_window, "at least 2 positions")
        if not self.step_seconds > 0:
            raise InvalidValueError("step_seconds", self.step_seconds, "more than 0 seconds")
        if self.memory_bytes is not None and self.memory_bytes < 1:
            raise InvalidValueError("memory_bytes", self.memory_bytes, "at least 1 byte")
