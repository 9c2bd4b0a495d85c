"""Structured output: what the masks allow validates, with and without speculation."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_core import Batch, Request, SamplingParams
from spec_core.seams import Drafter
from spec_core.testing import NoisyOracle, TinyDrafter, TinyTarget
from spec_server.errors import GrammarError
from spec_server.grammar import (
    ANY_OBJECT,
    AnswerGrammar,
    CallsAnswer,
    Function,
    GrammarCompiler,
    GrammarConstraint,
    GrammarLimits,
    JsonAnswer,
    check_schema,
)
from spec_server.text import Tokeniser
from spec_server.tools import ToolFormat, ToolSplit
from spec_server.tools.formats import GEMMA, JSON, PYTHONIC, XML

V = 4096
# A neighbour's files, not its code: spec-server must not depend on spec-cli.
TINY = Path(__file__).parents[2] / "spec-cli" / "src" / "spec_cli" / "models" / "spec-tiny"


@cache
def tokeniser() -> Tokeniser:
    return Tokeniser.load(TINY)


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tokeniser(), V)


@cache
def texts() -> list[str]:
    return [tokeniser().token_text(i) for i in range(V)]


@cache
def closers() -> np.ndarray[Any, np.dtype[np.bool_]]:
    return np.array([text[:1] in tuple('"}],)<\n') for text in texts()])


def constraint(grammar: AnswerGrammar, thinking: bool | None = False) -> GrammarConstraint:
    return compiler().compile(grammar, thinking=thinking, opens_thought=False)


def walk(row: GrammarConstraint, seed: int, steps: int = 700) -> str | None:
    """A random text that the masks allow, or None if it did not end in time."""
    rng, out, queue = random.Random(seed), list[int](), list[int]()
    for step in range(steps):
        allowed = row.masks([])[0]
        ends = [e for e in tokeniser().end_tokens if allowed[e]]
        allowed[list(tokeniser().end_tokens)] = False
        choices = np.flatnonzero(allowed)
        assert ends or len(choices), f"stuck after {tokeniser().decode(out)!r}"
        if ends and (not len(choices) or rng.random() < 0.5):
            row.advance([ends[0]])
            assert row.failure is None
            return tokeniser().decode(out)
        if len(choices) > 2000 and not queue and rng.random() < 0.2:
            ways_out = ("\n</parameter>\n", '<|"|>', '"')
            queue = list(tokeniser().marker_ids(rng.choice(ways_out)))
        if queue and allowed[queue[0]]:
            token = queue.pop(0)
        else:
            queue = []
            closing = np.flatnonzero(allowed & closers())
            prefer = step > 10 and len(closing) and rng.random() < 0.6
            token = int(rng.choice(list(closing if prefer else choices)))
        out.append(token)
        row.advance([token])
    return None


def walks(grammar: AnswerGrammar, count: int) -> list[str]:
    found = [walk(constraint(grammar), seed) for seed in range(count)]
    ended = [text for text in found if text is not None]
    assert len(ended) > count * 0.7
    return ended


OBJECT = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", 3, None]}, "maxItems": 3},
        "next": {"anyOf": [{"$ref": "#/$defs/leaf"}, {"type": "null"}]},
    },
    "required": ["name", "age", "tags", "next"],
    "additionalProperties": False,
    "$defs": {"leaf": {"type": "object", "properties": {"x": {"type": "number"}},
                       "required": ["x"], "additionalProperties": False}},
}  # fmt: skip

SCHEMAS: list[Any] = [
    OBJECT,
    {"type": "object"},
    {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}},
    {"type": "object", "properties": {"a": {}, "b": {"type": "null"}}, "minProperties": 1,
     "additionalProperties": False},
    {"type": "object", "patternProperties": {"^a": {"type": "string"}},
     "additionalProperties": False},
    {"type": "object", "minProperties": 1, "maxProperties": 1},
    {"type": "array", "prefixItems": [{"type": "string"}, {"type": "null"}], "minItems": 2,
     "items": {"type": "integer"}, "maxItems": 4},
    {"type": "string", "pattern": "^[a-z]{2,4}$"},
    {"type": "string", "format": "date"},
    {"type": "integer", "minimum": -100, "maximum": 7},
    {"type": "integer", "multipleOf": 3, "minimum": 10, "maximum": 20},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    {"enum": ["a", 1, None, {"x": 1}, [1, 2]]},
    {"const": {"a": [1]}},
    {"oneOf": [{"type": "string"}, {"type": "integer"}]},
    {"allOf": [{"minimum": 3}, {"maximum": 7}], "type": "integer"},
    {"allOf": [{"properties": {"a": {"type": "integer"}}, "required": ["a"]}], "type": "object"},
    {"$ref": "#/$defs/x", "$defs": {"x": {"type": "string"}}, "maxLength": 2},
    {"type": "object", "properties": {"v": {"type": "integer", "maximum": 9, "minimum": 0},
     "n": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["v", "n"],
     "additionalProperties": False},
    {"type": ["integer", "string"], "minimum": 5, "maxLength": 1},
    True,
]  # fmt: skip


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda s: json.dumps(s)[:50])
def test_everything_allowed_validates(schema: Any) -> None:
    validator = jsonschema.Draft202012Validator(schema)
    for text in walks(JsonAnswer(schema), 15):
        validator.validate(json.loads(text))


def test_json_object_mode_gives_objects() -> None:
    assert all(isinstance(json.loads(text), dict) for text in walks(ANY_OBJECT, 15))


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"not": {"type": "string"}}, "'not'"),
        ({"type": "array", "uniqueItems": True}, "'uniqueItems'"),
        ({"properties": {"a": {"if": {}}}}, r"schema.properties.a .* 'if'"),
        ({"anyOf": [{"maxLenght": 3}]}, r"schema.anyOf\[0\] .* 'maxLenght'"),
        ({"type": "string", "nullable": True}, "'nullable'"),
        ({"x-guidance": {"lenient": True}}, "'x-guidance'"),
        ({"type": "number", "exclusiveMinimum": True}, "exclusiveMinimum"),
        ({"type": "object", "minProperties": 3}, "minProperties"),
        ({"type": "strnig"}, "strnig"),
        ({"type": "string", "format": "zork"}, "zork"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-ahead"),
        ({"$ref": "#/$defs/none"}, "none"),
        ({"$ref": "http://example.com/x"}, "example.com"),
        ({"type": "integer", "minimum": 3, "maximum": 1}, "minimum"),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "oneOf"),
        ({"properties": []}, "properties"),
        ({"anyOf": {}}, "anyOf"),
        ({"items": 3}, "items"),
        (False, "false"),
        ("string", "JSON schema"),
        ({"enum": []}, "anyOf|enum"),
    ],
)
def test_what_would_not_be_enforced_is_named(schema: Any, named: str) -> None:
    with pytest.raises(GrammarError, match=named):
        constraint(JsonAnswer(schema))


def test_limits_are_named() -> None:
    deep: Any = {}
    for _ in range(60):
        deep = {"type": "object", "properties": {"a": deep}}
    with pytest.raises(GrammarError, match="deeper"):
        check_schema(deep)
    with pytest.raises(GrammarError, match="bytes"):
        check_schema({"enum": ["x" * 100] * 2000})
    with pytest.raises(GrammarError, match="not plain JSON"):
        check_schema({"const": float("nan")})
    slow = GrammarCompiler(tokeniser(), V, GrammarLimits(seconds=0.0))
    with pytest.raises(GrammarError, match="to compile"):
        slow.compile(JsonAnswer(OBJECT), thinking=False, opens_thought=False)


# ------------------------------------------------------------------------------ masks of a block


def tokens_of(text: str) -> list[int]:
    return list(tokeniser().marker_ids(text))


def test_masks_of_a_block_equal_single_steps_and_are_rolled_back() -> None:
    text = tokens_of('{"name": "Bo", "age": 7, "tags": [], "next": null}')
    ahead, stepped = constraint(JsonAnswer(OBJECT)), constraint(JsonAnswer(OBJECT))
    block = ahead.masks(text)
    for index, token in enumerate(text):
        assert (block[index] == stepped.masks([])[0]).all()
        stepped.advance([token])
    assert (block[-1] == stepped.masks([])[0]).all()
    assert (ahead.masks([])[0] == block[0]).all()


def test_masks_are_open_behind_a_draft_outside_the_grammar() -> None:
    row = constraint(JsonAnswer(OBJECT))
    block = row.masks([*tokens_of('{"'), *tokens_of("?"), 100, 101])
    outside = 1 + len(tokens_of('{"'))
    assert not block[outside - 1].all()
    assert block[outside:].all()


def test_end_tokens_only_where_the_grammar_accepts() -> None:
    row, ends = constraint(JsonAnswer({"type": "integer"})), list(tokeniser().end_tokens)
    assert not row.masks([])[0][ends].any()
    row.advance(tokens_of("12"))
    assert row.masks([])[0][ends].all()
    assert row.accepting


def test_a_matcher_that_gives_up_allows_only_an_end_and_says_so() -> None:
    row = constraint(JsonAnswer(OBJECT))
    row.advance(tokens_of("?"))
    assert set(np.flatnonzero(row.masks([1, 2])[0])) == tokeniser().end_tokens
    row.advance([min(tokeniser().end_tokens)])
    assert row.failure


def test_a_thought_comes_before_the_grammar() -> None:
    think, end = tokens_of("<think>"), tokens_of("</think>")
    row = constraint(JsonAnswer(OBJECT), thinking=True)
    assert row.masks([])[0][think].all()
    for off in (None, False):
        assert not constraint(JsonAnswer(OBJECT), thinking=off).masks([])[0][think].any()
    free = CallsAnswer(JSON, FUNCTIONS, free=True)
    assert constraint(free, thinking=None).masks([])[0][think].all()
    row.advance([*think, *tokens_of("anything } at all")])
    free = row.masks([])[0]
    assert free.sum() == V - len(tokeniser().end_tokens)
    block = row.masks([*end, *tokens_of("\n\n"), *tokens_of("{")])
    assert block[1][tokens_of("\n\n")].all()
    assert not block[2][tokens_of("\n\n")].any()
    assert block[2][tokens_of("{")].all()


def test_a_thought_that_the_prompt_opened() -> None:
    row = compiler().compile(JsonAnswer(OBJECT), thinking=True, opens_thought=True)
    assert row.masks([])[0][tokens_of("hello")].all()


# ------------------------------------------------------------------------------ tool calls

FUNCTIONS = [
    Function(
        "get_weather",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "n": {"type": "integer", "minimum": 0, "maximum": 9},
                "unit": {"enum": ["c", "f"]},
                "where": {
                    "type": "object",
                    "properties": {"x": {"type": "null"}, "y": {"type": "string"}},
                    "required": ["y"],
                    "additionalProperties": False,
                },
                "flags": {"type": "array", "items": {"type": "boolean"}},
                "note": {"type": ["string", "null"]},
            },
            "required": ["city", "flags"],
            "additionalProperties": False,
        },
    ),
    Function("now", {}),
]
formats = pytest.mark.parametrize("format", [JSON, XML, PYTHONIC, GEMMA], ids=lambda f: f.name)


def calls_in(format: ToolFormat, text: str) -> tuple[str, list[tuple[str, Any]]]:
    split = ToolSplit(format, {f.name: f.parameters for f in FUNCTIONS})
    parts = [split.feed(text), split.finish()]
    calls = [(c.name, json.loads(c.arguments)) for part in parts for c in part.calls]
    return "".join(part.content for part in parts), calls


@formats
def test_required_calls_parse_and_validate(format: ToolFormat) -> None:
    schemas = {f.name: f.parameters for f in FUNCTIONS}
    names = set()
    for text in walks(CallsAnswer(format, FUNCTIONS), 20):
        content, calls = calls_in(format, text)
        assert content == ""
        assert calls
        names |= {name for name, _ in calls}
        for name, arguments in calls:
            jsonschema.validate(arguments, schemas[name])
    assert names == set(schemas)


@formats
def test_named_function_alone_and_no_parallel_calls(format: ToolFormat) -> None:
    grammar = CallsAnswer(format, FUNCTIONS[1:], parallel=False)
    for text in walks(grammar, 3):
        assert calls_in(format, text) == ("", [("now", {})])


def test_a_call_or_an_answer() -> None:
    grammar = CallsAnswer(JSON, FUNCTIONS, instead=JsonAnswer({"type": "integer"}))
    kinds = {text.startswith("<tool_call>") for text in walks(grammar, 12)}
    assert kinds == {True, False}


def test_what_a_format_cannot_enforce_is_named() -> None:
    schema = {"type": "object", "properties": {"d": {"type": "string", "format": "date"}}}
    for format in (XML, GEMMA):
        with pytest.raises(GrammarError, match=r"f have the keyword 'format'"):
            constraint(CallsAnswer(format, [Function("f", schema)]))
    for format in (JSON, PYTHONIC):
        constraint(CallsAnswer(format, [Function("f", schema)]))
    with pytest.raises(GrammarError, match="'minProperties'"):
        constraint(CallsAnswer(XML, [Function("f", {"minProperties": 1})]))


# ------------------------------------------------------------------------------ in rounds

TARGET = TinyTarget(vocab=V, seed=3)
SHORT = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99},
                   "b": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}},
    "required": ["a", "b"],
    "additionalProperties": False,
}  # fmt: skip
DRAFTERS: Mapping[str, Drafter | None] = {
    "plain": None,
    "oracle": NoisyOracle(TARGET, 0.9, max_block=5),
    "tiny": TinyDrafter(TARGET),
}


class Masked(NoisyOracle):
    """Knows what the target writes under the grammar: a script that was recorded before."""

    def __init__(self, scripts: Mapping[tuple[int, ...], Sequence[int]]) -> None:
        super().__init__(TARGET, max_block=5)
        self.scripts = scripts

    def _guesses(self, row: Any, anchor: int, count: int) -> list[int]:
        text = [*row.tokens, anchor]
        for prompt, answer in self.scripts.items():
            if tuple(text[: len(prompt)]) == prompt:
                left = list(answer[len(text) - len(prompt) :])[:count]
                return left + [0] * (count - len(left))
        return [0] * count


def decode(
    drafter: Drafter | None, prompts: Sequence[Sequence[int]], sampling: SamplingParams
) -> list[list[int]]:
    """Constrained rows in one batch, an unconstrained one among them."""
    batch, rows = Batch(TARGET, drafter), dict[int, int]()
    out: list[list[int]] = [[] for _ in prompts]
    for index, prompt in enumerate(prompts):
        request = Request(
            tuple(prompt),
            sampling,
            max_tokens=60,
            end_tokens=tokeniser().end_tokens,
            constraint=None if index == 1 else constraint(JsonAnswer(SHORT)),
        )
        prefill = batch.prefill(request)
        first = prefill.step(100)
        assert first is not None
        out[index].extend(first.tokens)
        if first.finish is None:
            rows[batch.join(prefill)] = index
    while batch.rows:
        for outcome in batch.step():
            out[rows[outcome.key]].extend(outcome.tokens)
    mx.clear_cache()
    return out


@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(), SamplingParams(temperature=1.0, seed=5)],
    ids=["greedy", "seeded"],
)
def test_same_tokens_with_and_without_speculation_alone_and_in_batches(
    sampling: SamplingParams,
) -> None:
    prompts = [[5, 6, 7], [8, 9], [10] * 4, [11, 12]]
    plain = decode(None, prompts, sampling)
    for index, tokens in enumerate(plain):
        if index != 1 and tokens[-1] in tokeniser().end_tokens:
            text = tokeniser().decode(tokens[:-1])
            jsonschema.validate(json.loads(text), SHORT)
    alone = [decode(None, [p, prompts[1]], sampling)[0] for p in prompts if p != prompts[1]]
    assert alone == [t for i, t in enumerate(plain) if i != 1]
    scripted = Masked(
        {tuple(p): t for i, (p, t) in enumerate(zip(prompts, plain, strict=True)) if i != 1}
    )
    for drafter in (*DRAFTERS.values(), scripted):
        assert decode(drafter, prompts, sampling) == plain


@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_unseeded_sampling_with_speculation_stays_in_the_grammar(seed: int) -> None:
    rng = random.Random(seed)
    prompts = [[rng.randrange(10, 99) for _ in range(3)] for _ in range(3)]
    drafter = TinyDrafter(TARGET, seed=seed % 7)
    for index, tokens in enumerate(decode(drafter, prompts, SamplingParams(temperature=1.2))):
        if index != 1 and tokens[-1] in tokeniser().end_tokens:
            jsonschema.validate(json.loads(tokeniser().decode(tokens[:-1])), SHORT)
