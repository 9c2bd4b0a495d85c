"""The bundled pair over HTTP, through the `openai` package, in every mode."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from typing import Any

import pytest
from openai import OpenAI

from .conftest import Serve

MODEL = "spec-tiny"


def function(name: str, **properties: Any) -> Any:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    described = {"name": name, "description": f"{name} of a city", "parameters": parameters}
    return {"type": "function", "function": described}


TOOLS = [
    function("get_weather", city={"type": "string"}),
    function("get_time", city={"type": "string"}),
]
QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]
HELLO = [{"role": "user", "content": "Hello"}]
CODE = [{"role": "user", "content": "Write a Python function that adds two numbers."}]


@pytest.fixture(scope="module")
def client_of(serve: Serve) -> Iterator[Any]:
    with ExitStack() as stack:

        @cache
        def of(mode: str) -> OpenAI:
            url = serve("trained", mode).url
            return stack.enter_context(OpenAI(base_url=url, api_key="-", timeout=120))

        yield of


@pytest.fixture
def client(client_of: Any, mode: str) -> OpenAI:
    made: OpenAI = client_of(mode)
    return made


def create(client: OpenAI, messages: Any, **more: Any) -> Any:
    return client.chat.completions.create(
        model=MODEL, messages=messages, **{"max_tokens": 96, **more}
    )


@pytest.mark.parametrize("messages", [HELLO, CODE], ids=["hello", "code"])
def test_greedy_text_is_the_baseline_s(client_of: Any, client: OpenAI, messages: Any) -> None:
    ours, plain = create(client, messages), create(client_of("baseline"), messages)
    assert ours.choices[0].message.content == plain.choices[0].message.content
    assert ours.usage.completion_tokens == plain.usage.completion_tokens
    chunks = list(create(client, messages, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == ours.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == ours.usage.completion_tokens


def test_a_trained_drafter_helps(client: OpenAI, mode: str) -> None:
    seen = create(client, CODE).model_extra["x_spec"]
    assert seen["mode"] == mode
    least = {"baseline": 1.0, "lookup": 1.0, "dspark": 3.0, "dflash": 3.0}[mode]
    assert seen["mean_accept_length"] >= least


def test_a_tool_call_and_its_result(client: OpenAI) -> None:
    whole = create(client, QUESTION, tools=TOOLS).choices[0]
    (call,) = whole.message.tool_calls
    assert (whole.finish_reason, call.function.name) == ("tool_calls", "get_weather")
    assert json.loads(call.function.arguments)["city"].strip() == "Paris"
    with client.chat.completions.stream(model=MODEL, messages=QUESTION, tools=TOOLS) as stream:
        streamed = stream.get_final_completion().choices[0]
    (again,) = streamed.message.tool_calls or ()
    assert (again.function.name, again.function.arguments) == (
        call.function.name,
        call.function.arguments,
    )
    assert not streamed.message.content
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 21}'}
    history = [*QUESTION, whole.message.model_dump(exclude_none=True), result]
    answer = create(client, history, tools=TOOLS).choices[0]
    assert answer.finish_reason == "stop"
    assert "21" in answer.message.content


def test_parallel_calls_and_their_results(client_of: Any, client: OpenAI) -> None:
    """The pair calls once by itself; with its first end token banned it goes on until a penalty on
    what separates calls outweighs the second end token."""
    more = {
        "tools": TOOLS,
        "tool_choice": "required",
        "frequency_penalty": 0.5,
        "logit_bias": {"2": -100},
        "max_tokens": 200,
        "extra_body": {"enable_thinking": False},
    }
    whole, plain = create(client, QUESTION, **more), create(client_of("baseline"), QUESTION, **more)
    calls = whole.choices[0].message.tool_calls
    assert len(calls) >= 2
    assert len({call.id for call in calls}) == len(calls)
    assert whole.choices[0].finish_reason == "tool_calls"
    made = [(call.function.name, call.function.arguments) for call in calls]
    assert made == [
        (call.function.name, call.function.arguments)
        for call in plain.choices[0].message.tool_calls
    ]
    with client.chat.completions.stream(model=MODEL, messages=QUESTION, **more) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert [(c.function.name, c.function.arguments) for c in streamed.message.tool_calls] == made
    assert (streamed.finish_reason, streamed.message.content or "") == ("tool_calls", "")
    results = [{"role": "tool", "tool_call_id": c.id, "content": '{"temp": 21}'} for c in calls]
    history = [*QUESTION, whole.choices[0].message.model_dump(exclude_none=True), *results]
    answer = create(client, history, tools=TOOLS, tool_choice="none").choices[0]
    assert answer.message.content
    assert not answer.message.tool_calls


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_time"}}], ids=str
)
def test_a_call_that_must_be_made(client: OpenAI, choice: Any) -> None:
    whole = create(client, HELLO, tools=TOOLS, tool_choice=choice).choices[0]
    assert whole.finish_reason == "tool_calls"
    for call in whole.message.tool_calls:
        assert call.function.name in ("get_weather", "get_time")
        assert set(json.loads(call.function.arguments)) == {"city"}
        if choice != "required":
            assert call.function.name == "get_time"


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 16},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "kind": {"enum": ["cat", "dog"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "seed"])
def test_structured_output_is_valid_and_the_same_in_every_mode(
    client_of: Any, client: OpenAI, sampling: Any
) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "pet", "schema": PERSON}}
    more = {"response_format": wanted, "max_tokens": 200, **sampling}
    answer, plain = create(client, HELLO, **more), create(client_of("baseline"), HELLO, **more)
    assert answer.choices[0].message.content == plain.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    value = json.loads(answer.choices[0].message.content)
    assert list(value) == ["name", "age", "kind"]
    assert 0 <= value["age"] <= 130
    assert value["kind"] in ("cat", "dog")
    assert len(value["name"]) <= 16


def test_seeds_are_kept_in_every_mode(client_of: Any, client: OpenAI) -> None:
    def text(one: OpenAI, seed: int) -> str:
        answer = create(one, CODE, temperature=1.0, seed=seed, max_tokens=40)
        content: str = answer.choices[0].message.content
        return content

    assert [text(client, s) for s in (1, 2)] == [text(client_of("baseline"), s) for s in (1, 2)]
    assert text(client, 1) != text(client, 2)


def test_logprobs_are_the_target_s(client_of: Any, client: OpenAI) -> None:
    more = {"logprobs": True, "top_logprobs": 5, "max_tokens": 24}
    ours = create(client, CODE, **more).choices[0].logprobs.content
    plain = create(client_of("baseline"), CODE, **more).choices[0].logprobs.content
    assert [e.token for e in ours] == [e.token for e in plain]
    for one, other in zip(ours, plain, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [t.token for t in one.top_logprobs] == [t.token for t in other.top_logprobs]


def test_n_and_stop(client: OpenAI) -> None:
    answer = create(client, CODE, n=2, stop=["return"])
    assert {c.finish_reason for c in answer.choices} == {"stop"}
    assert len({c.message.content for c in answer.choices}) == 1
    assert "return" not in answer.choices[0].message.content
