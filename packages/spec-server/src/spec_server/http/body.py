"""Reading a request's body, within bounds of size and time."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from spec_server.http.depth import MAX_DEPTH, nests_deeper
from spec_server.http.errors import ApiError, bad_field, from_validation, unsupported
from spec_server.http.schemas import MAX_SALT, AnswerRequest, ChatRequest, CompletionRequest
from spec_server.http.settings import ServerSettings

Model = TypeVar("Model", bound=BaseModel)

_LARGE = 262_144
"""Bodies beyond this are parsed on another thread."""

SALT_HEADER = "X-Cache-Salt"
"""Requests share prefixes only with those of the same salt."""


class ClientGoneError(Exception):
    """The client left; nobody reads an answer."""


async def read_chat(request: Request, settings: ServerSettings) -> ChatRequest:
    """A chat request.

    Raises:
        ApiError: the body is too large, too slow, no JSON, or a field is wrong.
        ClientGoneError: the client left.
    """
    return await _read(request, settings, ChatRequest)


async def read_completion(request: Request, settings: ServerSettings) -> CompletionRequest:
    """A completion request; errors as in `read_chat`."""
    return await _read(request, settings, CompletionRequest)


Kind = TypeVar("Kind", bound=AnswerRequest)


async def _read(request: Request, settings: ServerSettings, kind: type[Kind]) -> Kind:
    _check_type(request)
    raw = await _bytes(request, settings)
    salt = _salt(request)
    large = len(raw) > _LARGE
    asked = await asyncio.to_thread(parse, raw, kind) if large else parse(raw, kind)
    return asked if salt is None else asked.model_copy(update={"cache_salt": salt})


def _salt(request: Request) -> str | None:
    """The tenant's salt as a gateway sets it; it goes before the body's."""
    given = request.headers.getlist(SALT_HEADER)
    if not given:
        return None
    if len(given) > 1 or not 0 < len(given[0]) <= MAX_SALT:
        raise ApiError(
            400,
            f"the header {SALT_HEADER} must be there once, with 1 to {MAX_SALT} characters",
            param=SALT_HEADER,
            code="invalid_header",
        )
    return given[0]


def parse(raw: bytes, kind: type[Kind]) -> Kind:
    """Bytes to a checked request; raises ApiError."""
    content = _json(raw)
    if not isinstance(content, dict):
        raise ApiError(400, "the body must be a JSON object")
    for name, (harmless, why) in kind.UNSUPPORTED.items():
        value = content.get(name)
        if value is not None and value not in harmless:
            raise unsupported(name, why)
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise from_validation(error, kind) from None


def _check_type(request: Request) -> None:
    """Only application/json: a page of another origin cannot send that without a preflight."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(
            415,
            f"the content type is {kind!r:.80}; it must be application/json",
            code="unsupported_media_type",
        )


async def _bytes(request: Request, settings: ServerSettings) -> bytes:
    most = settings.max_body_bytes
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced) > most:
        raise _too_large(most)
    pieces, size = [], 0
    try:
        async with asyncio.timeout(settings.body_seconds):
            async for piece in request.stream():
                size += len(piece)
                if size > most:
                    raise _too_large(most)
                pieces.append(piece)
    except TimeoutError:
        raise ApiError(
            408,
            f"the body took more than {settings.body_seconds:g} s to arrive (--body-seconds)",
            code="body_timeout",
            headers={"Connection": "close"},
        ) from None
    except ClientDisconnect:
        raise ClientGoneError from None
    return b"".join(pieces)


def _too_large(most: int) -> ApiError:
    return ApiError(
        413,
        f"the body is larger than {most} bytes; send less, or raise the limit (--max-body)",
        code="body_too_large",
        headers={"Connection": "close"},
    )


def _json(raw: bytes) -> Any:
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8: {error}", code="invalid_json") from None
    if nests_deeper(text, MAX_DEPTH):
        raise ApiError(
            400,
            f"the body nests deeper than {MAX_DEPTH} objects and lists; flatten it",
            code="invalid_json",
        )
    try:
        content = json.loads(text, parse_constant=_no_constant)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None
    if "\\u" in text:
        _check_characters(content)
    return content


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _check_characters(content: Any) -> None:
    """Refuse halves of surrogate pairs, which no text can hold."""
    try:
        json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise bad_field("body", "...", "text without unpaired surrogates") from None
