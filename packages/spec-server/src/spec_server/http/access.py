"""The outermost layer: errors to envelopes, one log line a request, a request id."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from typing import TYPE_CHECKING, Self

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spec_server.http.body import ClientGoneError
from spec_server.http.errors import ApiError, as_api_error
from spec_server.http.metrics import Metrics
from spec_server.http.replies import error_response

if TYPE_CHECKING:
    from spec_server.http.answers import Choice
    from spec_server.http.plan import Plan

log = logging.getLogger("spec_server.access")

_KEY = "spec_server.report"
_PROBES = frozenset(("/health", "/readyz", "/metrics"))
"""What programs ask again and again: logged at debug level, unless it fails."""

_GONE = 499
"""What logs call a request whose client left."""


def path_inside(scope: Scope) -> str:
    """The request's path within the app, which may be mounted below a prefix."""
    path: str = scope["path"]
    return path[len(scope.get("root_path", "")) :] or "/"


class Report:
    """What the log line says about one request: no prompt, no answer.

    Attributes:
        id: the request's, sent back as X-Request-Id.
        status: HTTP status, once there is one.
        headers: sent with the response, whichever layer writes it.
    """

    def __init__(self) -> None:
        self.headers: dict[str, str] = {}
        self.id = secrets.token_hex(8)
        self.status = 0
        self._began = time.perf_counter()
        self._facts: dict[str, object] = {}

    @classmethod
    def of(cls, scope: Scope) -> Report:
        """The request's report."""
        report: Report = scope.setdefault(_KEY, cls())
        return report

    def attach(self, scope: Scope) -> Self:
        """Let the layers inside find it."""
        scope[_KEY] = self
        return self

    def asked(self, plan: Plan) -> None:
        """What the request is."""
        self._facts |= {"id": plan.id, "prompt_tokens": plan.prompt_tokens}
        if plan.stream:
            self._facts["stream"] = True
        if len(plan.asks) > 1:
            self._facts["choices"] = len(plan.asks)

    def ended(self, choice: Choice) -> None:
        """How one of its answers ended."""
        completion = choice.completion
        assert completion is not None
        seen = completion.statistics
        before = self._facts.get("completion_tokens", 0)
        assert isinstance(before, int)
        self._facts |= {
            "completion_tokens": before + completion.completion_tokens,
            "cached_tokens": seen.cached_tokens,
            "finish": choice.finish_reason,
            "mode": seen.mode,
            "accept_length": f"{seen.mean_accept_length:.2f}",
            "ttft_ms": f"{seen.ttft_seconds * 1e3:.0f}",
            "tokens_per_second": f"{seen.tokens_per_second:.1f}",
        }

    def failed(self, error: ApiError) -> None:
        """An error was sent, perhaps inside a stream."""
        self._facts["error"] = error.code or error.type

    def level(self, scope: Scope) -> int:
        """At which level it is logged."""
        probe = path_inside(scope) in _PROBES and self.status < 400
        return logging.DEBUG if probe else logging.INFO

    def line(self, scope: Scope) -> str:
        """The log line."""
        milliseconds = (time.perf_counter() - self._began) * 1e3
        client = scope.get("client") or ("-",)
        facts = {
            "client": client[0],
            "request": self.id,
            "status": self.status,
            "ms": f"{milliseconds:.0f}",
        }
        shown = " ".join(f"{name}={value}" for name, value in (facts | self._facts).items())
        path = scope["path"].encode("ascii", "backslashreplace").decode()[:200]
        return f"{scope['method']} {path!r} {shown}"


class Access:
    """Wraps the whole app.

    Args:
        app: what is inside.
        metrics: told of refusals.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        report = Report().attach(scope)

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                report.status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = report.id
                headers.update(report.headers)
            await send(message)

        try:
            await self._app(scope, receive, answer)
        except ClientGoneError:
            report.status = _GONE
        except asyncio.CancelledError:
            report.status = report.status or _GONE
            raise
        except Exception as error:
            await self._refuse(as_api_error(error), report, scope, receive, answer)
        finally:
            log.log(report.level(scope), "%s", report.line(scope))

    async def _refuse(
        self, error: ApiError, report: Report, scope: Scope, receive: Receive, send: Send
    ) -> None:
        report.failed(error)
        self._metrics.failed(error.status)
        if not report.status:
            await error_response(error)(scope, receive, send)
