"""JSON responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from spec_server.http.errors import ApiError
from spec_server.http.sse import to_json


def json_response(
    content: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """UTF-8 JSON that can always be encoded."""
    return Response(
        to_json(content), status, media_type="application/json", headers=dict(headers or {})
    )


def error_response(error: ApiError) -> Response:
    """An error in its envelope."""
    return json_response(error.envelope, error.status, error.headers)
