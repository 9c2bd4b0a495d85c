"""What a check found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "note", "problem"]
"""In order; works, but should be known; does not work."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        section: what it belongs to: "machine", "packages", "settings" or "model".
        name: what was looked at.
        status: how it is.
        seen: what was seen.
        advice: what to do; "" if nothing.
    """

    section: str
    name: str
    status: Status
    seen: str
    advice: str = ""
