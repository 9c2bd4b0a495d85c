"""Who may talk to the server: keys, hosts, origins. Pure ASGI, outside of all routes."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from spec_server.http.access import Report, path_inside
from spec_server.http.errors import ApiError
from spec_server.http.settings import ServerSettings

OPEN_PATHS = frozenset(("/health", "/readyz"))
"""Answered without a key and whatever the Host: they say nothing but whether the server works."""


class Gate:
    """Lets a request through if key, Host and Origin allow it; answers preflights.

    A web page can make a browser send requests to a server on this machine. It cannot forge the
    Origin header, and under a name of its own (DNS rebinding) it cannot forge the Host header
    either; so both are checked. With a key, the Host does not matter: the page does not have it.
    What is refused is raised, for `access.Access` to write.

    Args:
        app: what is behind the gate.
        settings: keys, hosts and origins.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._settings = settings
        self._keys = [key.encode() for key in settings.api_keys]
        self._open_at_root = ("HEAD", "GET") if settings.page else ("HEAD",)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        granted = self._cors(headers)
        Report.of(scope).headers.update(granted)
        if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            await self._preflight(headers, granted)(scope, receive, send)
            return
        self._check(scope, headers)
        await self._app(scope, receive, send)

    def _preflight(self, headers: Headers, granted: Mapping[str, str]) -> ASGIApp:
        if not granted:
            raise _forbidden_origin(headers.get("origin", ""))
        wanted = headers.get("access-control-request-headers", "")
        return Response(
            status_code=204,
            headers={
                "Access-Control-Allow-Methods": "GET, HEAD, POST, OPTIONS",
                "Access-Control-Allow-Headers": wanted or "authorization, content-type",
                "Access-Control-Max-Age": "600",
            },
        )

    def _cors(self, headers: Headers) -> dict[str, str]:
        """The headers that let a listed origin read the answer."""
        origin, listed = headers.get("origin"), self._settings.cors_origins
        if origin is None or not (origin in listed or "*" in listed):
            return {}
        return {
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Expose-Headers": "Retry-After, X-Request-Id",
            "Vary": "Origin",
        }

    def _check(self, scope: Scope, headers: Headers) -> None:
        path = path_inside(scope)
        if path in OPEN_PATHS:
            return
        host = headers.get("host", "")
        if not self._keys and not self._host_allowed(host):
            raise ApiError(
                403,
                f"the Host {host!r:.200} is not allowed; use an address, or add it with "
                "--allowed-host",
                code="host_not_allowed",
            )
        origin = headers.get("origin")
        if origin is not None and not self._origin_allowed(origin, scope, host):
            raise _forbidden_origin(origin)
        if self._keys and not (path == "/" and scope["method"] in self._open_at_root):
            self._check_key(headers)

    def _host_allowed(self, host: str) -> bool:
        name = _host_name(host)
        allowed = self._settings.allowed_hosts
        if "*" in allowed or name in allowed or name == "localhost":
            return True
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return False
        return True

    def _origin_allowed(self, origin: str, scope: Scope, host: str) -> bool:
        """A listed origin, or the server's own pages."""
        listed = self._settings.cors_origins
        return origin in listed or "*" in listed or origin == f"{scope.get('scheme')}://{host}"

    def _check_key(self, headers: Headers) -> None:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        found = [hmac.compare_digest(key, given.encode("utf-8", "replace")) for key in self._keys]
        if not any(found):
            raise ApiError(
                401,
                "the API key is missing or wrong; send it as Authorization: Bearer KEY, or as "
                "x-api-key",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )


def _forbidden_origin(origin: str) -> ApiError:
    return ApiError(
        403,
        f"pages of the origin {origin!r:.200} may not use this server; allow it with --cors-origin",
        code="origin_not_allowed",
    )


def _host_name(host: str) -> str:
    """Host without its port, lower case."""
    host = host.strip().lower()
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]
