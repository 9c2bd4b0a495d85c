"""The ASGI app over an engine."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from spec_server.engine import Engine
from spec_server.http.access import Access
from spec_server.http.endpoints import chat_endpoint, completion_endpoint
from spec_server.http.errors import model_not_found
from spec_server.http.metrics import CONTENT_TYPE
from spec_server.http.plan import model_names
from spec_server.http.replies import json_response
from spec_server.http.security import Gate
from spec_server.http.service import EngineSlot, Service
from spec_server.http.settings import ServerSettings
from spec_server.http.webpage import web_page


def create_app(engine: Engine | EngineSlot, settings: ServerSettings | None = None) -> Starlette:
    """An ASGI app that serves an engine; mount it under any path, or run it alone.

    The app does not close the engine, and needs no lifespan events.

    Args:
        engine: what answers, or a slot that will hold it.
        settings: keys, hosts, limits. By default only this machine's own programs may use it.
    """
    slot = engine if isinstance(engine, EngineSlot) else EngineSlot(engine)
    service = Service(slot, settings or ServerSettings())
    pages = Pages(service)
    app = Starlette(
        routes=[
            Route("/", pages.root, methods=["GET", "HEAD"]),
            Route("/health", pages.health, methods=["GET", "HEAD"]),
            Route("/readyz", pages.health, methods=["GET", "HEAD"]),
            Route("/metrics", pages.metrics, methods=["GET"]),
            Route("/v1/models", pages.models, methods=["GET"]),
            Route("/v1/models/{name:path}", pages.model, methods=["GET"]),
            Route("/v1/chat/completions", chat_endpoint(service), methods=["POST"]),
            Route("/v1/completions", completion_endpoint(service), methods=["POST"]),
        ],
        middleware=[
            Middleware(Access, metrics=service.metrics),
            Middleware(Gate, settings=service.settings),
        ],
        exception_handlers={404: _raise, 405: _raise},
    )
    app.state.service = service
    return app


def _raise(request: Request, error: Exception) -> Response:
    """The outermost layer writes every error."""
    raise error


class Pages:
    """The routes that tell about the server."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def root(self, request: Request) -> Response:
        """The page for people, or a pointer; agents probe it with HEAD."""
        if self._service.settings.page:
            page = web_page()
            return Response(page.text, media_type="text/html", headers=dict(page.headers))
        text = (
            "spec-server: an OpenAI-compatible server.\n"
            "POST v1/chat/completions, v1/completions; GET v1/models, health, readyz, metrics\n"
        )
        return Response(text, media_type="text/plain")

    async def health(self, request: Request) -> Response:
        """200 while requests can be answered, 503 with the reason otherwise."""
        trouble = self._service.trouble()
        facts: dict[str, object] = {"status": trouble or "ok"}
        engine = self._service.slot.engine
        if engine is not None:
            seen = engine.activity
            facts |= {
                "mode": engine.facts.labels.mode,
                "running": seen.running,
                "waiting": seen.waiting,
                "progress_age_seconds": round(seen.progress_seconds, 3),
            }
        headers = {"Retry-After": "2"} if trouble else {}
        return json_response(facts, 503 if trouble else 200, headers)

    async def metrics(self, request: Request) -> Response:
        """Prometheus text."""
        return Response(self._service.metrics.text(), headers={"content-type": CONTENT_TYPE})

    async def models(self, request: Request) -> Response:
        """The models served: one."""
        return json_response({"object": "list", "data": [self._card(self._service.engine())]})

    async def model(self, request: Request) -> Response:
        """The model under one of its names, which may hold slashes."""
        engine = self._service.engine()
        name = request.path_params["name"]
        names = model_names(engine, self._service.settings)
        if name not in names:
            raise model_not_found(name, names[0])
        return json_response({**self._card(engine), "id": name})

    def _card(self, engine: Engine) -> dict[str, object]:
        facts = engine.facts
        sampling = facts.sampling
        return {
            "id": model_names(engine, self._service.settings)[0],
            "object": "model",
            "created": int(self._service.started),
            "owned_by": "spec",
            "max_model_len": facts.context_window,
            "x_spec": {
                "mode": facts.labels.mode,
                "drafter": facts.labels.drafter,
                "fallbacks": list(facts.labels.fallbacks),
                "dtype": facts.dtype,
                "default_sampling": {
                    "temperature": sampling.temperature,
                    "top_p": sampling.top_p,
                    "top_k": sampling.top_k,
                    "min_p": sampling.min_p,
                    "repetition_penalty": sampling.repetition_penalty,
                },
            },
        }


__all__ = ["EngineSlot", "ServerSettings", "create_app"]
