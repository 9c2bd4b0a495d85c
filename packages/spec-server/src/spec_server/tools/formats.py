"""Which format a model writes its tool calls in."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Literal

from spec_server.tools import parsers
from spec_server.tools.parsers import Parser

FormatName = Literal["json", "xml", "pythonic", "gemma", "other"]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes calls.

    Attributes:
        name: "other" for formats that mlx-lm parses and whose grammar is not known here.
        start: opens a call; "" if there is no such marker.
        end: closes it; "" where a call lasts to the end of the answer.
        parse: the text between the markers to calls.
        inside_string: whether a text that begins after `start` ends inside a string, so that an
            end marker there is part of a value.
        openers: what begins a call where the model left `start` out; they are part of the call.
    """

    name: FormatName
    start: str
    end: str
    parse: Parser
    inside_string: Callable[[str], bool]
    openers: tuple[str, ...] = ()


JSON = ToolFormat("json", "<tool_call>", "</tool_call>", parsers.parse_json, parsers.open_json)
XML = ToolFormat(
    "xml",
    "<tool_call>",
    "</tool_call>",
    parsers.parse_xml,
    parsers.open_xml,
    openers=("<function=",),
)
PYTHONIC = ToolFormat(
    "pythonic",
    "<|tool_call_start|>",
    "<|tool_call_end|>",
    parsers.parse_pythonic,
    parsers.open_pythonic,
)
GEMMA = ToolFormat(
    "gemma",
    "<|tool_call>",
    "<tool_call|>",
    parsers.parse_gemma,
    parsers.open_gemma,
    openers=("call:",),
)

_OWN = {"json_tools": JSON, "qwen3_coder": XML, "pythonic": PYTHONIC, "gemma4": GEMMA}
"""Names of mlx-lm's parsers that ours stand in for."""


def detect(
    template: str | None,
    vocabulary: Collection[str],
    *,
    mlx_name: str | None = None,
    mlx_start: str = "",
    mlx_end: str = "",
    mlx_parse: Callable[[str, Any], Any] | None = None,
) -> ToolFormat | None:
    """The format a chat template asks for, or None if it knows no tools.

    Args:
        template: the chat template's text.
        vocabulary: the tokenizer's tokens.
        mlx_name: the name of the parser that mlx-lm chose, if it chose one.
        mlx_start: its start marker.
        mlx_end: its end marker.
        mlx_parse: itself; it serves for formats that are not read here.
    """
    if mlx_name in _OWN:
        return _OWN[mlx_name]
    if mlx_parse is not None:
        parse = parsers.from_mlx(mlx_parse)
        return ToolFormat("other", mlx_start, mlx_end, parse, parsers.never_open)
    if template is None or "tools" not in template:
        return None
    if XML.openers[0] in template:
        return XML
    for known in (GEMMA, PYTHONIC, JSON):
        if known.start in template:
            return known
    return PYTHONIC if PYTHONIC.start in vocabulary else None
