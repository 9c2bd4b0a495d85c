"""Tool calls: every format's notation, and what streaming makes of it."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_server.tools import MalformedCallError, ToolCall, ToolFormat, ToolSplit, detect
from spec_server.tools.formats import GEMMA, JSON, PYTHONIC, XML

SCHEMAS = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "metric": {"type": "boolean"},
            "note": {"type": ["string", "null"]},
            "spots": {"type": "array", "items": {"type": "number"}},
            "free": {},
        },
    },
    "now": {},
}

WEATHER = ("get_weather", {"city": "Paris", "days": 3})
NOW = ("now", {})

ONE = {
    JSON: '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n'
    "</tool_call>",
    XML: "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
    PYTHONIC: '<|tool_call_start|>[get_weather(city="Paris", days=3)]<|tool_call_end|>',
    GEMMA: '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>',
}
OTHER = {
    JSON: '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    XML: "<tool_call>\n<function=now>\n</function>\n</tool_call>",
    PYTHONIC: "<|tool_call_start|>[now()]<|tool_call_end|>",
    GEMMA: "<|tool_call>call:now{}<tool_call|>",
}
BROKEN = {
    JSON: '<tool_call>\n{"name": "now", "arguments": [1]}\n</tool_call>',
    XML: "<tool_call>\n<function>now</function>\n</tool_call>",
    PYTHONIC: "<|tool_call_start|>[now(1)]<|tool_call_end|>",
    GEMMA: "<|tool_call>call:now(1)<tool_call|>",
}
formats = pytest.mark.parametrize("format", list(ONE), ids=lambda f: f.name)


def run(format: ToolFormat, pieces: Sequence[str]) -> tuple[str, list[tuple[str, object]]]:
    split = ToolSplit(format, SCHEMAS)
    parts = [*map(split.feed, pieces), split.finish()]
    calls = [(call.name, json.loads(call.arguments)) for part in parts for call in part.calls]
    return "".join(part.content for part in parts), calls


def parsed(format: ToolFormat, body: str) -> list[tuple[str, object]]:
    return [(c.name, json.loads(c.arguments)) for c in format.parse(body, SCHEMAS)]


@formats
def test_one_call(format: ToolFormat) -> None:
    assert run(format, [ONE[format]]) == ("", [WEATHER])


@formats
def test_parallel_calls_keep_their_order(format: ToolFormat) -> None:
    assert run(format, [ONE[format] + "\n" + OTHER[format]]) == ("", [WEATHER, NOW])


@formats
def test_text_around_calls_is_kept(format: ToolFormat) -> None:
    text = f"Let me look.\n\n{ONE[format]}\nand then\n{OTHER[format]}\nDone."
    assert run(format, [text]) == ("Let me look.\nand then\nDone.", [WEATHER, NOW])
    assert run(format, [ONE[format] + "\nDone."]) == ("Done.", [WEATHER])


@formats
def test_malformed_call_is_content_to_the_letter(format: ToolFormat) -> None:
    text = f"Hm. {BROKEN[format]} So."
    content, calls = run(format, [text])
    assert calls == []
    assert content == text


@formats
def test_call_after_a_malformed_one_is_kept(format: ToolFormat) -> None:
    content, calls = run(format, [BROKEN[format] + "\n" + ONE[format]])
    assert calls == [WEATHER]
    assert content.strip() == BROKEN[format]


@formats
def test_cut_off_call_is_content(format: ToolFormat) -> None:
    text = ONE[format][: len(ONE[format]) * 2 // 3]
    assert run(format, [text]) == (text, [])


@formats
def test_missing_end_marker_at_the_end(format: ToolFormat) -> None:
    assert run(format, [ONE[format].removesuffix(format.end)]) == ("", [WEATHER])


@formats
@given(seed=st.integers(0, 2**32))
def test_pieces_do_not_matter(format: ToolFormat, seed: int) -> None:
    rng = random.Random(seed)
    parts = [ONE[format], OTHER[format], BROKEN[format], " text ", "<", "\n\n", ONE[format][:9]]
    text = "".join(rng.choices(parts, k=rng.randint(1, 6)))
    pieces, at = [], 0
    while at < len(text):
        size = rng.choice([1, 2, 3, 7, 30])
        pieces.append(text[at : at + size])
        at += size
    assert run(format, pieces) == run(format, [text])


@formats
def test_content_streams_before_a_call(format: ToolFormat) -> None:
    split = ToolSplit(format, SCHEMAS)
    assert split.feed("Hello there").content == "Hello there"
    assert split.feed(ONE[format][:3]).content == ""


def test_end_marker_inside_a_json_string() -> None:
    text = '<tool_call>{"name": "now", "arguments": {"a": "</tool_call> \\" }"}}</tool_call>'
    assert run(JSON, [text]) == ("", [("now", {"a": '</tool_call> " }'})])


def test_json_variants() -> None:
    assert parsed(JSON, '[{"name": "now"}, {"name": "now", "parameters": {"a": 1}}]') == [
        NOW,
        ("now", {"a": 1}),
    ]
    assert parsed(JSON, '{"name": "now", "arguments": "{\\"a\\": 1}"}') == [("now", {"a": 1})]
    assert parsed(JSON, '{"name": "now", "arguments": {"a": "x\ny"}}') == [("now", {"a": "x\ny"})]


@pytest.mark.parametrize(
    "body",
    ["", "{", "[]", "null", '{"name": 3}', '{"arguments": {}}', '{"name": "f", "arguments": 3}',
     '{"name": "f", "arguments": {"a": NaN}}', '{"name": "f", "arguments": {"a": 1e999}}',
     '{"name": "f", "arguments": ' + '{"a":' * 100_000 + "1" + "}" * 100_001],
)  # fmt: skip
def test_json_that_is_no_call(body: str) -> None:
    with pytest.raises(MalformedCallError):
        JSON.parse(body, SCHEMAS)


def test_half_a_surrogate_pair_stays_encodable() -> None:
    (call,) = JSON.parse('{"name": "now", "arguments": {"a": "\\ud83d"}}', SCHEMAS)
    assert call.arguments.encode()
    assert json.loads(call.arguments) == {"a": "\ud83d"}


def test_xml_values_follow_the_schema() -> None:
    body = "".join(
        f"<parameter={key}>\n{value}\n</parameter>\n"
        for key, value in {
            "city": "007",
            "days": "3",
            "metric": "True",
            "note": "null",
            "spots": "[1.5, 2]",
            "free": "maybe",
        }.items()
    )
    assert parsed(XML, f"<function=get_weather>\n{body}</function>") == [
        ("get_weather", {"city": "007", "days": 3, "metric": True, "note": None,
                         "spots": [1.5, 2], "free": "maybe"}),
    ]  # fmt: skip


def test_xml_keeps_lines_of_a_value() -> None:
    body = "<function=get_weather><parameter=city>\n\n a\n b\n\n</parameter></function>"
    assert parsed(XML, body) == [("get_weather", {"city": "\n a\n b\n"})]


def test_xml_without_an_opening_marker() -> None:
    text = "Sure.\n" + ONE[XML].removeprefix("<tool_call>\n")
    assert run(XML, [text]) == ("Sure.", [WEATHER])
    assert run(XML, ["<function=unknown>"]) == ("<function=unknown>", [])


def test_pythonic_literals() -> None:
    body = "[f.g(a='x, )', b={\"k\": [true, null, None]}, c=-1.5), now()]"
    assert parsed(PYTHONIC, body) == [
        ("f.g", {"a": "x, )", "b": {"k": [True, None, None]}, "c": -1.5}),
        NOW,
    ]
    for bad in ("[f(1)]", "[f(**a)]", "[f(a=b)]", "f", "[]", "[f(a=", "[f(a=" + "[" * 500 + "]"):
        with pytest.raises(MalformedCallError):
            PYTHONIC.parse(bad, SCHEMAS)


def test_gemma_nesting_and_quotes() -> None:
    body = (
        'call:f{o:{in:{d:[1,{k:<|"|>}]{,<|"|>}],e:[]}},t:true,n:null,x:-2.5e3,'
        'w:bare word,<|"|>q:k<|"|>:"json \\"s\\""}'
    )
    assert parsed(GEMMA, body) == [
        (
            "f",
            {
                "o": {"in": {"d": [1, {"k": "}]{,"}], "e": []}},
                "t": True,
                "n": None,
                "x": -2500.0,
                "w": "bare word",
                "q:k": 'json "s"',
            },
        )
    ]
    assert parsed(GEMMA, "call:now{}call:now{}") == [NOW, NOW]
    for bad in ("call:f{", "call:f{a:1", 'call:f{a:<|"|>x}', "call:f", "f{}", "call:f{a 1}",
                "call:f" + "{a:" * 3000):  # fmt: skip
        with pytest.raises(MalformedCallError):
            GEMMA.parse(bad, SCHEMAS)


def test_gemma_end_marker_inside_a_string_and_no_opener() -> None:
    text = '<|tool_call>call:now{a:<|"|>x<tool_call|>y<|"|>}<tool_call|>'
    assert run(GEMMA, [text]) == ("", [("now", {"a": "x<tool_call|>y"})])
    assert run(GEMMA, ["call:now{}<tool_call|>"]) == ("", [NOW])


def test_which_format() -> None:
    assert detect("{{ tools }} <tool_call>", ()) is JSON
    assert detect("{{ tools }} <tool_call>\n<function=x>", ()) is XML
    assert detect("{{ tools }} <|tool_call>", ()) is GEMMA
    assert detect("{{ tools }}", ("<|tool_call_start|>",)) is PYTHONIC
    assert detect("<tool_call>", ()) is None
    assert detect(None, ()) is None
    assert detect("anything", (), mlx_name="gemma4") is GEMMA


def test_formats_that_mlx_lm_parses() -> None:
    from mlx_lm.tool_parsers import mistral

    format = detect(
        "x",
        (),
        mlx_name="mistral",
        mlx_start=mistral.tool_call_start,
        mlx_end=mistral.tool_call_end,
        mlx_parse=mistral.parse_tool_call,
    )
    assert format is not None
    text = 'So: [TOOL_CALLS]now[ARGS]{"a": 1}'
    assert run(format, [text]) == ("So:", [("now", {"a": 1})])
    assert run(format, ["[TOOL_CALLS]nonsense"]) == ("[TOOL_CALLS]nonsense", [])
    assert format.parse('now[ARGS]{"a": 1}', {}) == (ToolCall("now", '{"a": 1}'),)
