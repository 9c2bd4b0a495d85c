"""Every error as an HTTP status and the envelope that OpenAI clients expect."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from starlette.exceptions import HTTPException

from spec_core import SpecError
from spec_core.errors import InvalidValueError
from spec_server.errors import (
    ContextLengthError,
    EngineBusyError,
    EngineClosedError,
    GrammarError,
    MemoryLimitError,
    PromptError,
    TemplateError,
)

_log = logging.getLogger("spec_server")

_SHOWN = 80


class ApiError(Exception):
    """An answer that is an error.

    Attributes:
        status: HTTP status.
        message: a sentence.
        type: the envelope's `type`.
        param: the field that is wrong, or None.
        code: a word for programs, or None.
        headers: to be sent along.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def envelope(self) -> dict[str, Any]:
        """The body."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }


@dataclass(frozen=True, slots=True)
class Place:
    """Which request fields the engine's words for them stand for.

    Attributes:
        prompt: the field that holds the prompt.
        names: engine parameter to request field.
    """

    prompt: str = "messages"
    names: Mapping[str, str] = field(default_factory=dict)


def bad_field(name: str, value: object, allowed: str) -> ApiError:
    """400 for a field's value."""
    return ApiError(400, f"{name} is {shown(value)}; it must be {allowed}", param=name)


def unsupported(name: str, why: str) -> ApiError:
    """400 for a field that is known but cannot be honoured."""
    return ApiError(400, f"{name} cannot be honoured: {why}", param=name, code="unsupported_value")


def not_found(what: str) -> ApiError:
    """404 for a path."""
    return ApiError(404, f"there is no {what} here", code="not_found")


def model_not_found(name: str, served: str) -> ApiError:
    """404 for a model's name."""
    return ApiError(
        404,
        f"the model {name!r:.200} is not served here; this server has {served!r}",
        param="model",
        code="model_not_found",
    )


def loading() -> ApiError:
    """503 until the model answers."""
    return ApiError(
        503,
        "the model is still being loaded; try again in a moment",
        type="server_error",
        code="loading",
        headers={"Retry-After": "2"},
    )


def closing() -> ApiError:
    """503 while the server shuts down."""
    return ApiError(
        503,
        "the server is shutting down",
        type="server_error",
        code="shutting_down",
        headers={"Retry-After": "5"},
    )


def as_api_error(error: BaseException, place: Place | None = None) -> ApiError:
    """What any exception is to a client."""
    place = place or Place()
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        return _from_starlette(error)
    if isinstance(error, SpecError):
        return _from_engine(error, place)
    _log.error("internal error", exc_info=error)
    return ApiError(
        500,
        f"internal error: {type(error).__name__}; the server's log says more",
        type="server_error",
        code="internal_error",
    )


def _from_engine(error: SpecError, place: Place) -> ApiError:
    message = str(error)
    if isinstance(error, InvalidValueError):
        name = place.names.get(error.field, error.field)
        return bad_field(name, error.value, error.allowed)
    if isinstance(error, ContextLengthError):
        return ApiError(400, message, param=place.prompt, code="context_length_exceeded")
    if isinstance(error, MemoryLimitError):
        return ApiError(400, message, param=place.prompt, code="insufficient_memory")
    if isinstance(error, GrammarError):
        return ApiError(400, message, param=place.names.get("grammar"), code="invalid_grammar")
    if isinstance(error, TemplateError):
        return ApiError(400, message, param=place.prompt, code="template_error")
    if isinstance(error, PromptError):
        return ApiError(400, message, param=place.prompt)
    if isinstance(error, EngineBusyError):
        return ApiError(
            429, message, type="rate_limit_error", code="queue_full", headers={"Retry-After": "1"}
        )
    if isinstance(error, EngineClosedError):
        return closing()
    _log.error("the engine failed: %s", message, exc_info=error)
    return ApiError(500, message, type="server_error", code="engine_error")


def _from_starlette(error: HTTPException) -> ApiError:
    if error.status_code == 404:
        return ApiError(404, "there is no such path here", code="not_found")
    if error.status_code == 405:
        return ApiError(
            405,
            "this path does not take this method",
            code="method_not_allowed",
            headers=error.headers,
        )
    phrase = error.detail or HTTPStatus(error.status_code).phrase
    return ApiError(error.status_code, phrase, headers=error.headers)


def from_validation(error: ValidationError, kind: type[BaseModel]) -> ApiError:
    """400 that names the first field that is wrong, its value and what is allowed.

    Args:
        error: what pydantic found.
        kind: the model, which knows both ends of a number's range.
    """
    found = error.errors(include_url=False, include_context=False)
    first = min(found, key=lambda entry: len(entry["loc"]) == 0)
    name = field_path(first["loc"])
    if first["type"] == "missing":
        return ApiError(400, f"{name} is missing", param=name, code="missing_field")
    wanted = " or ".join(
        dict.fromkeys(_wanted(entry["msg"]) for entry in found if _same(entry["loc"], first["loc"]))
    )
    return bad_field(name, first["input"], _range(kind.model_fields.get(name)) or wanted)


def _range(field: FieldInfo | None) -> str | None:
    """What a number may be, for instance "a number, at least 0 and at most 2"; None for fields
    without a range."""
    if field is None:
        return None
    ends = [
        f"{words} {getattr(entry, end)}"
        for entry in field.metadata
        for end, words in _ENDS.items()
        if hasattr(entry, end)
    ]
    number = "a whole number" if int in get_args(field.annotation) else "a number"
    return f"{number}, {' and '.join(ends)}" if ends else None


_ENDS = {"gt": "more than", "ge": "at least", "lt": "less than", "le": "at most"}
"""The ends of a range as annotated types have them, and in words."""


def _same(loc: tuple[int | str, ...], other: tuple[int | str, ...]) -> bool:
    return field_path(loc) == field_path(other)


def _wanted(message: str) -> str:
    message = message.replace(" after validation", "")
    for lead, instead in _LEADS.items():
        if message.startswith(lead):
            return instead + message.removeprefix(lead)
    return message[:1].lower() + message[1:]


_LEADS = {
    "Input should be ": "",
    "Value error, ": "",
    "String should have ": "a text with ",
    "List should have ": "a list with ",
    "Dictionary should have ": "an object with ",
}
"""How pydantic's sentences begin, and what stands behind "it must be" instead."""


def field_path(loc: tuple[int | str, ...]) -> str:
    """`messages[0].content` from ("messages", 0, "user", "content"): names of union members, which
    pydantic puts in between, are left out."""
    text = ""
    for part in loc:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part.isidentifier() and part not in _UNION_MEMBERS:
            text += f".{part}" if text else part
    return text


_UNION_MEMBERS = frozenset(("str", "int", "float", "bool", "dict", "list", "none"))


def shown(value: object) -> str:
    """A value for a message, cut to a readable length."""
    text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
