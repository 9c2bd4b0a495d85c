"""Server-sent events."""

from __future__ import annotations

import json
from typing import Any

DONE = b"data: [DONE]\n\n"
KEEPALIVE = b": still working\n\n"
"""A comment: clients ignore it, proxies see that the connection lives."""

HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


def event(payload: dict[str, Any]) -> bytes:
    """One event."""
    return b"data: " + to_json(payload) + b"\n\n"


def to_json(payload: Any) -> bytes:
    """Compact UTF-8."""
    text = json.dumps(payload, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")
