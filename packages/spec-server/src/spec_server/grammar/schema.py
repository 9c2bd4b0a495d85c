"""Which JSON schemas are enforced to the letter, and which are refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spec_server.errors import GrammarError

Schema = Mapping[str, Any] | bool
"""A JSON schema as it was parsed."""

MAX_DEPTH = 48
"""Schemas inside schemas."""

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLES = ("items", "additionalProperties", "additionalItems")
_VALUES = (
    "type",
    "enum",
    "const",
    "required",
    "minProperties",
    "maxProperties",
    "minItems",
    "maxItems",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
    "minLength",
    "maxLength",
    "pattern",
    "format",
    "$ref",
)
ENFORCED = frozenset((*_MAPS, *_LISTS, *_SINGLES, *_VALUES))
"""Keywords that the grammar enforces."""

ANNOTATIONS = frozenset(
    (
        "title",
        "description",
        "default",
        "example",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
        "discriminator",
        "externalDocs",
        "$comment",
        "$schema",
        "$id",
        "$anchor",
    )
)
"""Keywords that say nothing about which values are valid."""


@dataclass(frozen=True, slots=True)
class _Place:
    schema: Any
    path: str
    depth: int


def check_schema(schema: object, name: str = "schema", *, max_bytes: int = 131_072) -> None:
    """Refuse what would not be enforced; the grammar compiler refuses the rest.

    Args:
        schema: a parsed JSON schema.
        name: the field it came in, for messages.
        max_bytes: the most it may take as JSON text.

    Raises:
        GrammarError: it is not a schema, too large or too deep, or has a keyword that is unknown,
            not enforced, or wrongly typed; the message names keyword and place.
    """
    _check_size(schema, name, max_bytes)
    places = [_Place(schema, name, 0)]
    while places:
        place = places.pop()
        if isinstance(place.schema, bool):
            continue
        if not isinstance(place.schema, dict):
            raise GrammarError(f"{place.path} is {place.schema!r:.80}; it must be a JSON schema")
        if place.depth > MAX_DEPTH:
            raise GrammarError(f"{name} nests deeper than {MAX_DEPTH} schemas; flatten it")
        _check_keywords(place)
        places.extend(_children(place))


def _check_size(schema: object, name: str, max_bytes: int) -> None:
    try:
        size = len(json.dumps(schema, allow_nan=False).encode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"{name} is not plain JSON: {error}") from error
    if size > max_bytes:
        raise GrammarError(f"{name} has {size} bytes; at most {max_bytes} are allowed")


def _check_keywords(place: _Place) -> None:
    for keyword, value in place.schema.items():
        if keyword == "x-guidance" or not (
            keyword in ENFORCED or keyword in ANNOTATIONS or keyword.startswith("x-")
        ):
            raise GrammarError(
                f"{place.path} has the keyword {keyword!r:.80}, which would not be enforced; "
                "remove it"
            )
        if keyword.startswith("exclusive") and isinstance(value, bool):
            raise GrammarError(f"{place.path}.{keyword} is {value}; it must be a number")
    _check_min_properties(place)


def _check_min_properties(place: _Place) -> None:
    """An open object might repeat a key, so only its required keys and one more are certain."""
    wanted = place.schema.get("minProperties", 0)
    required = place.schema.get("required", ())
    closed = place.schema.get("additionalProperties") is False
    if not isinstance(wanted, int) or not isinstance(required, Sequence):
        return
    if wanted > len(required) + 1 and (not closed or "patternProperties" in place.schema):
        raise GrammarError(
            f"{place.path}.minProperties is {wanted}, which would not be enforced beyond the "
            f"{len(required)} required properties and one more; require more properties, or set "
            "additionalProperties to false"
        )


def _children(place: _Place) -> Iterator[_Place]:
    schema: Mapping[str, Any] = place.schema
    for keyword in _MAPS:
        members = schema.get(keyword, {})
        if not isinstance(members, dict):
            raise GrammarError(f"{place.path}.{keyword} must be an object of schemas")
        for key, member in members.items():
            yield _Place(member, f"{place.path}.{keyword}.{key:.40}", place.depth + 1)
    for keyword in _LISTS:
        listed = schema.get(keyword, [])
        if not isinstance(listed, list):
            raise GrammarError(f"{place.path}.{keyword} must be a list of schemas")
        for index, member in enumerate(listed):
            yield _Place(member, f"{place.path}.{keyword}[{index}]", place.depth + 1)
    for keyword in _SINGLES:
        if keyword in schema:
            member = schema[keyword]
            for entry in member if isinstance(member, list) else [member]:
                yield _Place(entry, f"{place.path}.{keyword}", place.depth + 1)
