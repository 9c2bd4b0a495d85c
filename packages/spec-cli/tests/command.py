"""What tests see of the fixture `spec`, which runs the command."""

from __future__ import annotations

from typing import Protocol


class Ran(Protocol):
    """What a command did."""

    code: int
    out: str
    err: str


class Spec(Protocol):
    """Runs `spec` with these arguments."""

    def __call__(self, *arguments: str, stdin: str | bytes | None = None) -> Ran: ...
