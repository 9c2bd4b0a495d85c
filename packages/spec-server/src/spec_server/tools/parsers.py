"""From the text between a call's markers to its name and arguments, one function a format."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn


class MalformedCallError(ValueError):
    """The text is not a call in the model's format; it is shown as content."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call.

    Attributes:
        name: the function's name.
        arguments: its arguments, a JSON object as text.
    """

    name: str
    arguments: str


Schemas = Mapping[str, Mapping[str, Any]]
"""Function name to the JSON schema of its parameters."""

Parser = Callable[[str, Schemas], tuple[ToolCall, ...]]
"""The text between the markers to its calls; raises MalformedCallError."""


def parse_json(text: str, schemas: Schemas) -> tuple[ToolCall, ...]:
    """`{"name": ..., "arguments": {...}}`, or a list of those (Hermes, Qwen and others)."""
    value = _load_json(text.strip())
    entries = value if isinstance(value, list) else [value]
    if not entries:
        raise MalformedCallError("no call in the list")
    return tuple(_json_call(entry) for entry in entries)


def _json_call(entry: object) -> ToolCall:
    if not isinstance(entry, dict):
        raise MalformedCallError("a call must be an object")
    inner = entry.get("function")
    if isinstance(inner, dict):
        entry = inner
    arguments = entry.get("arguments", entry.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _load_json(arguments) if arguments.strip() else {}
    return _call(entry.get("name"), arguments)


def parse_xml(text: str, schemas: Schemas) -> tuple[ToolCall, ...]:
    """`<function=name><parameter=key>value</parameter>...</function>` (Qwen3-Coder)."""
    calls = []
    rest = text.strip()
    while rest:
        match = re.match(r"<function=\s*([^\s<>]+)\s*>(.*?)</function>\s*", rest, re.DOTALL)
        if match is None:
            raise MalformedCallError("no <function=...> ... </function>")
        name, body = match.groups()
        properties = _properties(schemas.get(name, {}))
        calls.append(_call(name, dict(_parameters(body, properties))))
        rest = rest[match.end() :]
    if not calls:
        raise MalformedCallError("no function in the call")
    return tuple(calls)


def _parameters(body: str, properties: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    rest = body.strip()
    while rest:
        match = re.match(r"<parameter=\s*([^\s<>]+)\s*>(.*?)</parameter>\s*", rest, re.DOTALL)
        if match is None:
            raise MalformedCallError("no <parameter=...> ... </parameter>")
        key, value = match.groups()
        yield key, _typed(value.removeprefix("\n").removesuffix("\n"), properties.get(key))
        rest = rest[match.end() :]


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    properties = schema.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def _typed(text: str, schema: object) -> Any:
    """A value that was written without quotes: a string where the schema allows one."""
    types = schema_types(schema)
    if text.strip() == "null" and "null" in types:
        return None
    if "string" in types:
        return text
    try:
        return _load_json(text)
    except MalformedCallError:
        lowered = text.strip().lower()
        if "boolean" in types and lowered in ("true", "false"):
            return lowered == "true"
        return text


def schema_types(schema: object) -> frozenset[str]:
    """The types a value may have, as far as `type`, `enum`, `const` and `anyOf` say so."""
    if not isinstance(schema, Mapping):
        return frozenset()
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset((kind,))
    if isinstance(kind, list):
        return frozenset(k for k in kind if isinstance(k, str))
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    found = {_NAMES[type(v)] for v in values if type(v) in _NAMES}
    for keyword in ("anyOf", "oneOf"):
        for member in schema.get(keyword, ()):
            found |= schema_types(member)
    return frozenset(found)


_NAMES: Mapping[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
    list: "array",
    dict: "object",
}


def parse_pythonic(text: str, schemas: Schemas) -> tuple[ToolCall, ...]:
    """`[name(key=value, ...), ...]` with Python or JSON literals (LFM2 and others)."""
    try:
        body = ast.parse(text.strip(), mode="eval").body
        elements = body.elts if isinstance(body, ast.List) else [body]
        if not elements:
            raise MalformedCallError("no call in the list")
        return tuple(_python_call(element) for element in elements)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise MalformedCallError(f"not a list of calls: {error}") from error


def _python_call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call) or node.args:
        raise MalformedCallError("not a call with named arguments")
    keys = [keyword.arg for keyword in node.keywords]
    if None in keys:
        raise MalformedCallError("** is not a named argument")
    literal = _JsonNames()
    values = [ast.literal_eval(literal.visit(keyword.value)) for keyword in node.keywords]
    return _call(ast.unparse(node.func), dict(zip(keys, values, strict=True)))


class _JsonNames(ast.NodeTransformer):
    """true, false and null, as templates write them inside Python calls."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        known = {"true": True, "false": False, "null": None}
        if node.id not in known:
            return node
        return ast.copy_location(ast.Constant(known[node.id]), node)


GEMMA_QUOTE = '<|"|>'
"""What opens and closes a string in Gemma 4's calls."""


def parse_gemma(text: str, schemas: Schemas) -> tuple[ToolCall, ...]:
    """`call:name{key:value, ...}` with bare keys and strings in <|"|> (Gemma 4)."""
    reader = _GemmaReader(text)
    calls = []
    reader.skip_space()
    while not reader.at_end:
        reader.expect("call:")
        name = reader.take(r"[\w.-]+")
        try:
            calls.append(_call(name, reader.members()))
        except RecursionError as error:
            raise MalformedCallError("nested too deeply") from error
        reader.skip_space()
    if not calls:
        raise MalformedCallError("no call")
    return tuple(calls)


class _GemmaReader:
    """Reads Gemma 4's notation from left to right."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    @property
    def at_end(self) -> bool:
        return self._at >= len(self._text)

    def skip_space(self) -> None:
        self._at += len(self._text) - self._at - len(self._text[self._at :].lstrip())

    def sees(self, wanted: str) -> bool:
        self.skip_space()
        if not self._text.startswith(wanted, self._at):
            return False
        self._at += len(wanted)
        return True

    def expect(self, wanted: str) -> None:
        if not self.sees(wanted):
            raise MalformedCallError(f"{wanted!r} is missing at character {self._at}")

    def take(self, pattern: str) -> str:
        match = re.compile(pattern).match(self._text, self._at)
        if match is None:
            raise MalformedCallError(f"nothing that fits at character {self._at}")
        self._at = match.end()
        return match.group()

    def members(self) -> dict[str, Any]:
        self.expect("{")
        found: dict[str, Any] = {}
        if self.sees("}"):
            return found
        while True:
            self.skip_space()
            key = self._key()
            self.expect(":")
            found[key] = self._value()
            if self.sees("}"):
                return found
            self.expect(",")

    def _key(self) -> str:
        for quote in (GEMMA_QUOTE, '"'):
            if self.sees(quote):
                return self._until(quote)
        return self.take(r'[^:{}\[\],<"]+').strip()

    def _value(self) -> Any:
        self.skip_space()
        if self._text.startswith("{", self._at):
            return self.members()
        if self.sees("["):
            return self._items()
        if self.sees(GEMMA_QUOTE):
            return self._until(GEMMA_QUOTE)
        if self._text.startswith('"', self._at):
            return self._quoted()
        return self._bare()

    def _items(self) -> list[Any]:
        found: list[Any] = []
        if self.sees("]"):
            return found
        while True:
            found.append(self._value())
            if self.sees("]"):
                return found
            self.expect(",")

    def _until(self, quote: str) -> str:
        end = self._text.find(quote, self._at)
        if end < 0:
            raise MalformedCallError(f"a string has no closing {quote}")
        piece, self._at = self._text[self._at : end], end + len(quote)
        return piece

    def _quoted(self) -> Any:
        """An ordinary JSON string, which models mix in."""
        try:
            value, self._at = json.JSONDecoder(strict=False).raw_decode(self._text, self._at)
        except ValueError as error:
            raise MalformedCallError(str(error)) from error
        return value

    def _bare(self) -> Any:
        word = self.take(r"[^,{}\[\]]+").strip()
        try:
            return _load_json(word)
        except MalformedCallError:
            return word


def _load_json(text: str) -> Any:
    """JSON as RFC 8259 has it, with bare control characters in strings allowed."""
    try:
        return json.loads(text, strict=False, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise MalformedCallError(str(error)) from error


def _no_constant(name: str) -> NoReturn:
    raise MalformedCallError(f"{name} is not JSON")


def _call(name: object, arguments: object) -> ToolCall:
    if not isinstance(name, str) or not name:
        raise MalformedCallError("the call has no name")
    if not isinstance(arguments, Mapping):
        raise MalformedCallError("the arguments are not an object")
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, legal only as an escape
        text = json.dumps(arguments)
    except (ValueError, TypeError, RecursionError) as error:
        raise MalformedCallError(f"the arguments are not JSON: {error}") from error
    return ToolCall(name, text)


def open_json(text: str) -> bool:
    """Whether the text ends inside a JSON string."""
    return len(re.sub(r"\\.", "", text, flags=re.DOTALL).split('"')) % 2 == 0


def open_xml(text: str) -> bool:
    """Whether the text ends inside a parameter's value."""
    return text.rfind("<parameter=") > text.rfind("</parameter>")


def open_pythonic(text: str) -> bool:
    """Whether the text ends inside a Python string."""
    quote = ""
    for piece in re.findall(r"\\.|[\"']|[^\\\"']+", text, flags=re.DOTALL):
        if piece == quote:
            quote = ""
        elif not quote and piece in "\"'":
            quote = piece
    return bool(quote)


def open_gemma(text: str) -> bool:
    """Whether the text ends inside a string."""
    return text.count(GEMMA_QUOTE) % 2 == 1


def never_open(text: str) -> bool:
    """For formats whose strings are not understood here: the first end marker ends the call."""
    return False


def from_mlx(function: Callable[[str, Any], Any]) -> Parser:
    """One of mlx-lm's own parsers, for the formats that are not read here."""

    def parse(text: str, schemas: Schemas) -> tuple[ToolCall, ...]:
        tools = [
            {"type": "function", "function": {"name": name, "parameters": dict(schema)}}
            for name, schema in schemas.items()
        ]
        try:
            found = function(text, tools)
        except Exception as error:  # each parser raises whatever its expressions do
            raise MalformedCallError(str(error)) from error
        entries = found if isinstance(found, list) else [found]
        return tuple(_json_call(entry) for entry in entries)

    return parse
