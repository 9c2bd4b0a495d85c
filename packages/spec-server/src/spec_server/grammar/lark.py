"""Grammars in llguidance's Lark dialect: JSON answers, and tool calls in each model's format."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spec_server.errors import GrammarError
from spec_server.grammar.schema import ANNOTATIONS
from spec_server.tools import ToolFormat
from spec_server.tools.parsers import GEMMA_QUOTE, schema_types

WHITE_SPACE = r"( |\n[ \t]{0,24})"
"""Between JSON tokens: a space, or a new line and its indentation. Bounded, so that no model can
write white space without end."""

MarkerIds = Callable[[str], Sequence[int]]
"""The token ids of a marker."""


@dataclass(frozen=True, slots=True)
class Function:
    """A function that may be called.

    Attributes:
        name: its name.
        parameters: the JSON schema of its arguments, an object.
    """

    name: str
    parameters: Mapping[str, Any]


class Rules:
    """Collects rules; `text` is the grammar."""

    def __init__(self, marker_ids: MarkerIds) -> None:
        self.marker_ids = marker_ids
        self._lines: list[str] = []

    def add(self, body: str, attributes: str = "") -> str:
        """Add a rule and return its name."""
        name = f"r{len(self._lines)}"
        self._lines.append(f"{name}{attributes}: {body}")
        return name

    def terminal(self, pattern: str) -> str:
        """Add a terminal and return its name."""
        name = f"T{len(self._lines)}"
        self._lines.append(f"{name}: {pattern}")
        return name

    def text(self, start: str) -> str:
        return "\n".join(["%llguidance {}", f"start: {start}", *self._lines, ""])


def quoted(text: str) -> str:
    """A literal."""
    return json.dumps(text) if text else '""'


def embedded(schema: Mapping[str, Any] | bool, **options: str) -> str:
    """A JSON value that a schema describes."""
    if schema is False:
        raise GrammarError("a schema is false, which nothing satisfies; remove that property")
    base = {} if schema is True else dict(schema)
    guidance = {"whitespace_pattern": WHITE_SPACE, **options}
    return f"%json {json.dumps({**base, 'x-guidance': guidance})}"


def json_answer(schema: Mapping[str, Any] | bool) -> str:
    """The whole answer is one JSON value."""
    return f"%llguidance {{}}\nstart: {embedded(schema)}\n"


def tool_calls(
    format: ToolFormat,
    functions: Sequence[Function],
    marker_ids: MarkerIds,
    *,
    parallel: bool,
    free: bool = False,
    answer: Mapping[str, Any] | bool | None = None,
) -> str:
    """One call, or several if `parallel`; with `answer` a JSON value may stand in their place, and
    with `free` any text around them.

    Raises:
        GrammarError: the format's grammar is not known, or a parameter's schema would not be
            enforced in it.
    """
    writers = {"json": _json_call, "xml": _xml_call, "pythonic": _python_call, "gemma": _gemma_call}
    if format.name not in writers:
        raise GrammarError(
            f"tool calls between {format.start!r} and {format.end!r} cannot be required of this "
            "model: the grammar of that format is not known here; use tool_choice auto"
        )
    rules = Rules(marker_ids)
    bodies = [rules.add(writers[format.name](rules, function)) for function in functions]
    start, end = _marker(format.start, marker_ids), _marker(format.end, marker_ids)
    if format.name == "pythonic":
        one = rules.add(" | ".join(bodies))
        more = f' (", " {one})*' if parallel else ""
        calls = rules.add(f'{start} "[" {one}{more} "]" {end}')
    else:
        line = "" if format.name == "gemma" else ' "\\n"'
        one = rules.add(f"{start}{line} ({' | '.join(bodies)}){line} {end}")
        calls = rules.add(f"{one} ({line} {one})*" if parallel else one)
    if free:
        return rules.text(_within_text(rules, format, calls, parallel))
    if answer is None:
        return rules.text(calls)
    return rules.text(f"{calls} | {rules.add(embedded(answer))}")


def _within_text(rules: Rules, format: ToolFormat, calls: str, parallel: bool) -> str:
    """Any text without the start marker, with calls where it stands."""
    if not _marker(format.start, rules.marker_ids).startswith("<["):
        raise GrammarError(
            f"strict functions need a model that opens calls with one token, but {format.start!r} "
            "is several here; leave strict out"
        )
    text = rules.terminal(f"/(?s:.*)/ & ~/(?s:.*){_regex(format.start)}(?s:.*)/")
    return rules.add(f"({text} {calls})* {text}" if parallel else f"{text} ({calls} {text})?")


def _regex(text: str) -> str:
    """A pattern for a literal, inside slashes."""
    return re.escape(text).replace("/", r"\/")


def _marker(text: str, marker_ids: MarkerIds) -> str:
    ids = marker_ids(text)
    return f"<[{ids[0]}]>" if len(ids) == 1 else quoted(text)


def _json_call(rules: Rules, function: Function) -> str:
    head = '{"name": ' + json.dumps(function.name, ensure_ascii=False) + ', "arguments": '
    return f'{quoted(head)} {embedded(_closed(function.parameters))} "}}"'


def _closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """An object of the named properties only, unless the schema says otherwise."""
    return {"type": "object", "additionalProperties": False, **schema}


def _members(function: Function) -> Iterable[tuple[str, Mapping[str, Any] | bool, bool]]:
    """Name, schema and whether it is required, of each parameter. References keep their root."""
    root = function.parameters
    for keyword in root:
        if keyword not in ("type", "properties", "required", "additionalProperties", "$defs"):
            if keyword in ANNOTATIONS or keyword == "definitions" or keyword.startswith("x-"):
                continue
            raise GrammarError(_unenforced(function.name, keyword))
    required = root.get("required", ())
    properties = root.get("properties", {})
    missing = [name for name in required if name not in properties]
    if missing:
        raise GrammarError(f"{function.name} requires {missing[0]!r}, which has no schema")
    shared = {k: root[k] for k in ("$defs", "definitions") if k in root}
    for name, schema in properties.items():
        if schema is not False:
            inner = schema if schema is True or not shared else {**schema, **shared}
            yield name, inner, name in required


def _unenforced(function: str, keyword: str) -> str:
    return (
        f"the parameters of {function} have the keyword {keyword!r}, which cannot be enforced in "
        "this model's tool-call format; remove it, or use tool_choice auto"
    )


def _xml_call(rules: Rules, function: Function) -> str:
    parts = [quoted(f"<function={function.name}>\n")]
    for name, schema, required in _members(function):
        value = _xml_value(rules, function.name, schema)
        member = rules.add(f"{quoted(f'<parameter={name}>' + chr(10))} {value}")
        parts.append(member if required else f"{member}?")
    return " ".join([*parts, quoted("</function>")])


def _xml_value(rules: Rules, function: str, schema: Mapping[str, Any] | bool) -> str:
    types, close = schema_types(schema), quoted("\n</parameter>\n")
    if types and "string" not in types:
        return f"{embedded(schema)} {close}"
    values = _plain_strings(function, schema)
    if values:
        return f"({' | '.join(values)}) {close}"
    body = rules.add("/(?s:.*)/", '[suffix="</parameter>"]')
    return f'{body} "\\n"'


def _plain_strings(function: str, schema: Mapping[str, Any] | bool) -> list[str]:
    """The literals that a schema of unquoted strings allows; empty: any string.

    Raises:
        GrammarError: it restricts them in another way.
    """
    plain = {} if isinstance(schema, bool) else schema
    known = (*ANNOTATIONS, "type", "enum", "const", "$defs", "definitions")
    for keyword in plain:
        if keyword not in known and not keyword.startswith("x-"):
            raise GrammarError(_unenforced(function, keyword))
    values = plain.get("enum", [plain["const"]] if "const" in plain else [])
    return [quoted(v if isinstance(v, str) else json.dumps(v)) for v in values]


def _python_call(rules: Rules, function: Function) -> str:
    members = [
        (f"{quoted(name + '=')} {embedded(schema, json_allowed_escapes='nrt')}", required)
        for name, schema, required in _members(function)
    ]
    if any(not name.isidentifier() for name, _, _ in _members(function)):
        raise GrammarError(f"{function.name} has a parameter whose name is no Python identifier")
    return f'{quoted(function.name + "(")} {_listed(rules, members, ", ")} ")"'


def _gemma_call(rules: Rules, function: Function) -> str:
    return f"{quoted('call:' + function.name)} {_gemma_object(rules, function)}"


def _gemma_object(rules: Rules, function: Function) -> str:
    members = [
        (f"{quoted(name + ':')} {_gemma_value(rules, function.name, schema)}", required)
        for name, schema, required in _members(function)
    ]
    return f'"{{" {_listed(rules, members, ",")} "}}"'


def _gemma_value(rules: Rules, function: str, schema: Mapping[str, Any] | bool) -> str:
    if isinstance(schema, bool):
        return _gemma_string(rules, function, schema)
    if "anyOf" in schema:
        options = [_gemma_value(rules, function, member) for member in schema["anyOf"]]
        return rules.add(" | ".join(options))
    types = sorted(schema_types(schema)) or ["string"]
    rest = {k: v for k, v in schema.items() if k != "type"}
    options = [_gemma_typed(rules, function, {**rest, "type": kind}, kind) for kind in types]
    return options[0] if len(options) == 1 else rules.add(" | ".join(options))


def _gemma_typed(rules: Rules, function: str, schema: Mapping[str, Any], kind: str) -> str:
    if kind == "string":
        return _gemma_string(rules, function, schema)
    if kind == "object":
        return rules.add(_gemma_object(rules, Function(function, schema)))
    if kind != "array":
        return embedded(schema)
    for keyword in schema:
        if keyword not in ("type", "items", *ANNOTATIONS):
            raise GrammarError(_unenforced(function, keyword))
    item = _gemma_value(rules, function, schema.get("items", True))
    return rules.add(f'"[" ({item} ("," {item})*)? "]"')


def _gemma_string(rules: Rules, function: str, schema: Mapping[str, Any] | bool) -> str:
    quote = _marker(GEMMA_QUOTE, rules.marker_ids)
    values = _plain_strings(function, schema)
    if values:
        return f"{quote} ({' | '.join(values)}) {quote}"
    if quote == quoted(GEMMA_QUOTE):
        return f"{quote} {rules.add('/(?s:.*)/', f'[suffix={quote}]')}"
    body = rules.terminal(f"/(?s:.*)/ & ~/(?s:.*){_regex(GEMMA_QUOTE)}(?s:.*)/")
    return f"{quote} {body} {quote}"


def _listed(rules: Rules, members: Sequence[tuple[str, bool]], separator: str) -> str:
    """Members in order, the optional ones left out at will, with separators in between."""
    first, later = rules.add('""'), rules.add('""')
    for body, required in reversed(members):
        member = rules.add(body)
        skip_first, skip_later = ("", "") if required else (f" | {first}", f" | {later}")
        begun = rules.add(f"{member} {later}{skip_first}")
        later = rules.add(f"{quoted(separator)} {member} {later}{skip_later}")
        first = begun
    return first
