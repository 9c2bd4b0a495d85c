"""The routes that answer with a model's text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from spec_server.engine import Engine
from spec_server.http import answers, body, sse
from spec_server.http.access import Report
from spec_server.http.answers import Choice, Delta
from spec_server.http.body import ClientGoneError
from spec_server.http.errors import ApiError, Place, as_api_error
from spec_server.http.plan import (
    CHAT_PLACE,
    COMPLETION_PLACE,
    Plan,
    plan_chat,
    plan_completion,
)
from spec_server.http.replies import json_response
from spec_server.http.run import Run
from spec_server.http.service import Service
from spec_server.http.settings import ServerSettings


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a kind of answer is written.

    Attributes:
        object: the `object` of a stream's chunks.
        whole: all choices to a response's body.
        opening: a choice's first chunks.
        deltas: what a choice gained to chunks.
        closing: a choice's last chunk.
    """

    object: str
    whole: Callable[[Plan, Sequence[Choice]], dict[str, Any]]
    opening: Callable[[Plan, Choice], Iterable[dict[str, Any]]]
    deltas: Callable[[Plan, Choice, Delta], Iterable[dict[str, Any]]]
    closing: Callable[[Plan, Choice, dict[str, Any]], dict[str, Any]]


def _chat_opening(plan: Plan, choice: Choice) -> Iterable[dict[str, Any]]:
    yield answers.chat_chunk(plan, choice, {"role": "assistant"})


def _chat_closing(plan: Plan, choice: Choice, seen: dict[str, Any]) -> dict[str, Any]:
    return answers.chat_chunk(plan, choice, {}, finish=choice.finish_reason, x_spec=seen)


def _text_opening(plan: Plan, choice: Choice) -> Iterable[dict[str, Any]]:
    text = answers.echo(plan, choice)
    if text:
        yield answers.text_chunk(plan, choice, text)


def _text_closing(plan: Plan, choice: Choice, seen: dict[str, Any]) -> dict[str, Any]:
    return answers.text_chunk(plan, choice, "", finish=choice.finish_reason, x_spec=seen)


CHAT = Dialect(
    "chat.completion.chunk",
    answers.chat_completion,
    _chat_opening,
    answers.chat_deltas,
    _chat_closing,
)
TEXT = Dialect(
    "text_completion",
    answers.text_completion,
    _text_opening,
    answers.text_deltas,
    _text_closing,
)


class Answers:
    """An ASGI app: reads a body, asks the engine, writes whole answers or streams.

    Args:
        service: the app's state.
        dialect: how answers are written.
        read: the body.
        plan: the body to what the engine is asked; on another thread.
        place: names request fields in errors.
    """

    def __init__(
        self,
        service: Service,
        dialect: Dialect,
        read: Callable[[Request, ServerSettings], Any],
        plan: Callable[[Engine, ServerSettings, Any], Plan],
        place: Place,
    ) -> None:
        self._service = service
        self._dialect = dialect
        self._read = read
        self._plan = plan
        self._place = place

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        settings = self._service.settings
        engine = self._service.engine()
        asked = await self._read(Request(scope, receive), settings)
        place, report = self._place, Report.of(scope)

        def begin() -> Plan:
            nonlocal place
            plan = self._plan(engine, settings, asked)
            place = plan.place
            report.asked(plan)
            return plan

        try:
            async with self._service.run(receive) as run:
                plan = await run.start(begin, engine)
                reply = Reply(self._service, self._dialect, engine, plan, run, report)
                if plan.stream:
                    await reply.stream(send)
                else:
                    await json_response(await reply.whole())(scope, receive, send)
        except ApiError:
            raise
        except (ClientGoneError, asyncio.CancelledError):
            raise
        except Exception as error:
            raise as_api_error(error, place) from error


class Reply:
    """One answer on its way to the client."""

    def __init__(
        self,
        service: Service,
        dialect: Dialect,
        engine: Engine,
        plan: Plan,
        run: Run,
        report: Report,
    ) -> None:
        self._service = service
        self._dialect = dialect
        self._plan = plan
        self._run = run
        self._report = report
        self._choices = [
            Choice(index, ask, plan.tools, engine.tokeniser) for index, ask in enumerate(plan.asks)
        ]

    async def whole(self) -> dict[str, Any]:
        """The response's body, once all of it is there.

        Raises:
            SpecError: what the engine failed with.
            ClientGoneError: the client left.
        """
        async for _ in self._deltas():
            pass
        return self._dialect.whole(self._plan, self._choices)

    async def stream(self, send: Send) -> None:
        """Send the answer as events; errors become one, and [DONE] always comes last."""
        await send({"type": "http.response.start", "status": 200, "headers": [*sse.HEADERS]})
        try:
            async for piece in self._pieces():
                await _send(send, piece)
        except (ClientGoneError, asyncio.CancelledError):
            raise
        except Exception as error:
            shown = as_api_error(error, self._plan.place)
            self._report.failed(shown)
            self._service.metrics.failed(shown.status)
            await _send(send, sse.event(shown.envelope))
        await _send(send, sse.DONE)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _pieces(self) -> AsyncIterator[bytes]:
        """Events and comments, up to the usage."""
        plan, dialect = self._plan, self._dialect
        for choice in self._choices:
            for chunk in dialect.opening(plan, choice):
                yield sse.event(chunk)
        async for item in self._deltas():
            if item is None:
                yield sse.KEEPALIVE
                continue
            choice, delta = item
            chunks = [sse.event(c) for c in dialect.deltas(plan, choice, delta)]
            if choice.completion is not None:
                seen = answers.statistics(plan, [choice])
                chunks.append(sse.event(dialect.closing(plan, choice, seen)))
            if chunks:
                yield b"".join(chunks)
        if plan.include_usage:
            yield sse.event(answers.usage_chunk(plan, self._choices, dialect.object))

    async def _deltas(self) -> AsyncIterator[tuple[Choice, Delta] | None]:
        """What each event adds; None after a silence."""
        async for item in self._run.events(self._service.settings.keepalive_seconds):
            if item is None:
                yield None
                continue
            index, event = item
            if isinstance(event, Exception):
                raise event
            choice = self._choices[index]
            delta = choice.feed(event)
            if choice.enough:
                self._run.cancel(index)
            if choice.completion is not None:
                self._service.metrics.completed(choice.completion, choice.finish_reason)
                self._report.ended(choice)
            yield choice, delta


async def _send(send: Send, piece: bytes) -> None:
    await send({"type": "http.response.body", "body": piece, "more_body": True})


def chat_endpoint(service: Service) -> Answers:
    """`POST /v1/chat/completions`."""
    return Answers(service, CHAT, body.read_chat, plan_chat, CHAT_PLACE)


def completion_endpoint(service: Service) -> Answers:
    """`POST /v1/completions`."""
    return Answers(service, TEXT, body.read_completion, plan_completion, COMPLETION_PLACE)
