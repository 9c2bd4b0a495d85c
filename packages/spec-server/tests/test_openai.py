"""The real `openai` package against a server on loopback."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

from spec_server import Engine, Limits
from spec_server.http import EngineSlot, ServerSettings

from .gated import gated_engine
from .live import eventually, live

TEXT = "alpha beta gamma delta2"
MODEL = "default"
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    },
    {"type": "function", "function": {"name": "now"}},
]


def user(script: str) -> Any:
    return [{"role": "user", "content": script}]


@pytest.fixture(scope="module")
def client(scripted_engine: Engine) -> Iterator[OpenAI]:
    with (
        live(scripted_engine, ServerSettings(api_keys=("sesame",))) as server,
        OpenAI(base_url=server.url, api_key="sesame", max_retries=0, timeout=60) as made,
    ):
        yield made


def test_chat(client: OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=user("S"))
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    details = answer.usage.completion_tokens_details
    assert details is not None
    assert (answer.model_extra or {})["x_spec"]["accepted"] == details.accepted_prediction_tokens


def test_streaming_with_usage(client: OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=user("U"), stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "hi 😀漢!"
    assert [c.usage is not None for c in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].choices == []
    assert chunks[-2].choices[0].finish_reason == "stop"


def test_reasoning(client: OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=user("K"))
    message = answer.choices[0].message
    assert (message.content, (message.model_extra or {})["reasoning_content"]) == (
        "42.",
        "add them",
    )
    with client.chat.completions.stream(model=MODEL, messages=user("K")) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "42."


def test_one_and_parallel_tool_calls(client: OpenAI) -> None:
    for script, names in (("T", ["get_weather"]), ("P", ["get_weather", "now"])):
        whole = client.chat.completions.create(model=MODEL, messages=user(script), tools=TOOLS)
        assert whole.choices[0].finish_reason == "tool_calls"
        calls: Any = whole.choices[0].message.tool_calls
        assert [call.function.name for call in calls] == names
        with client.chat.completions.stream(
            model=MODEL, messages=user(script), tools=TOOLS
        ) as stream:
            final = stream.get_final_completion().choices[0]
        assert final.finish_reason == "tool_calls"
        streamed: Any = final.message.tool_calls
        assert [(c.function.name, json.loads(c.function.arguments)) for c in streamed] == [
            (c.function.name, json.loads(c.function.arguments)) for c in calls
        ]


def test_a_tool_s_result_is_answered(client: OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=user("T"), tools=TOOLS)
    message = whole.choices[0].message
    calls: Any = message.tool_calls
    history = [
        *user("T"),
        message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": calls[0].id, "content": "It is S"},
    ]
    answer = client.chat.completions.create(model=MODEL, messages=history, tools=TOOLS)
    assert answer.choices[0].message.content == TEXT


class Named(BaseModel):
    """A structured answer."""

    kind: bool


def test_structured_output(client: OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=user("S"), response_format=Named, max_tokens=200
    )
    assert isinstance(answer.choices[0].message.parsed, Named)
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(
            model=MODEL, messages=user("S"), response_format=Named, max_tokens=2
        )


def test_strict_functions_parse(client: OpenAI) -> None:
    tool = openai.pydantic_function_tool(Named, name="pick")
    answer = client.chat.completions.parse(
        model=MODEL, messages=user("S"), tools=[tool], tool_choice="required", max_tokens=200
    )
    calls: Any = answer.choices[0].message.tool_calls
    assert isinstance(calls[0].function.parsed_arguments, Named)
    free = client.chat.completions.parse(model=MODEL, messages=user("S"), tools=[tool])
    assert free.choices[0].message.content == TEXT


def test_logprobs_n_and_stop(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=user("S"), logprobs=True, top_logprobs=2, n=2, stop=["gamma"]
    )
    assert [c.message.content for c in answer.choices] == ["alpha beta "] * 2
    entries: Any = answer.choices[0].logprobs
    assert all(len(e.top_logprobs) == 2 and e.logprob <= 0 for e in entries.content)


def test_completions_with_token_ids(client: OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=[50], logprobs=1, max_tokens=4)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("alpha beta ga", "length")
    several = client.completions.create(model=MODEL, prompt=["S", "U"], echo=True)
    assert [c.text for c in several.choices] == ["S" + TEXT, "Uhi 😀漢!"]
    pieces = client.completions.create(model=MODEL, prompt="S", stream=True)
    assert "".join(p.choices[0].text for p in pieces if p.choices) == TEXT


def test_models(client: OpenAI) -> None:
    assert [card.id for card in client.models.list()] == ["scripted"]
    assert client.models.retrieve("default").object == "model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("an/other")


def test_errors_are_the_right_exceptions(client: OpenAI) -> None:
    chat = client.chat.completions
    with pytest.raises(openai.BadRequestError) as bad:
        chat.create(model=MODEL, messages=user("S"), temperature=3)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as long:
        chat.create(model=MODEL, messages=user("x" * 400))
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as missing:
        chat.create(model="gpt-9", messages=user("S"))
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError) as locked:
        client.with_options(api_key="guess").models.list()
    assert locked.value.code == "invalid_api_key"


def test_refusals_that_are_not_about_the_request(client: OpenAI) -> None:
    page = client.with_options(default_headers={"Origin": "https://evil.example"})
    with pytest.raises(openai.PermissionDeniedError) as elsewhere:
        page.chat.completions.create(model=MODEL, messages=user("S"))
    assert elsewhere.value.code == "origin_not_allowed"
    with (
        live(EngineSlot()) as server,
        OpenAI(base_url=server.url, api_key="-", max_retries=0) as early,
        pytest.raises(openai.InternalServerError) as loading,
    ):
        early.chat.completions.create(model=MODEL, messages=user("S"))
    assert (loading.value.status_code, loading.value.code) == (503, "loading")


def test_an_error_inside_a_stream_is_raised() -> None:
    engine, gate = gated_engine()
    with engine, live(engine) as server, OpenAI(base_url=server.url, api_key="-") as client:
        stream = client.completions.create(
            model="tiny", prompt=[5, 6], stream=True, logit_bias={"0": -100}, max_tokens=400
        )
        next(iter(stream))
        gate.fail_next("out of luck")
        with pytest.raises(openai.APIError, match="out of luck"):
            list(stream)


def test_a_full_queue_is_retried_until_there_is_room() -> None:
    engine, gate = gated_engine(Limits(max_batch=1, max_queue=0))

    async def main(url: str) -> tuple[Any, Any]:
        async with AsyncOpenAI(base_url=url, api_key="-", max_retries=0) as client:
            gate.shut()
            create = client.completions.create
            first = asyncio.create_task(create(model="tiny", prompt=[5], max_tokens=2))
            while not engine.activity.waiting:
                await asyncio.sleep(0.01)
            with pytest.raises(openai.RateLimitError):
                await create(model="tiny", prompt=[6], max_tokens=2)
            patient = client.with_options(max_retries=5).completions.create
            second = asyncio.create_task(patient(model="tiny", prompt=[6], max_tokens=2))
            await asyncio.sleep(0.05)
            gate.open()
            return await first, await second

    with engine, live(engine) as server:
        answers = asyncio.run(main(server.url))
    assert [a.usage.prompt_tokens for a in answers] == [1, 1]


def test_a_client_s_timeout_frees_the_row() -> None:
    engine, gate = gated_engine()
    with engine, live(engine) as server:
        gate.shut()
        with (
            OpenAI(base_url=server.url, api_key="-", timeout=0.2, max_retries=0) as client,
            pytest.raises(openai.APITimeoutError),
        ):
            client.completions.create(model="tiny", prompt=[5], max_tokens=300)
        eventually(lambda: not server.open_requests)
        gate.open()
        eventually(lambda: not engine.activity.running)
