"""No body makes the server answer 5xx, and every error is in its envelope."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from spec_server import Engine
from spec_server.http import ServerSettings, create_app
from spec_server.http.schemas import ChatRequest, CompletionRequest

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
    st.sampled_from(["S", "auto", "required", "json_object", "", "\x00", "<|im_end|>", "S" * 300]),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.sampled_from(["type", "function", "name", "schema", "json_schema", "5", "a", ""]),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=8,
)
keywords = st.sampled_from(
    ["type", "properties", "items", "enum", "const", "anyOf", "pattern", "format", "minimum",
     "maxLength", "required", "additionalProperties", "$ref", "not", "minItems", "oneOf"]
)  # fmt: skip
schemas = st.recursive(
    st.one_of(
        st.booleans(),
        st.fixed_dictionaries({"type": st.sampled_from(["string", "integer", "object", "null"])}),
    ),
    lambda inner: st.dictionaries(
        keywords, st.one_of(inner, values, st.dictionaries(st.text(max_size=3), inner, max_size=2)),
        max_size=3,
    ),
    max_leaves=5,
)  # fmt: skip
functions = st.fixed_dictionaries(
    {"name": st.sampled_from(["f", "get_weather", "", "a b", "é"])},
    optional={"parameters": schemas},
)
tools = st.lists(
    st.fixed_dictionaries({"type": st.just("function"), "function": functions}), max_size=3
)
messages = st.lists(
    st.one_of(
        values,
        st.fixed_dictionaries(
            {
                "role": st.sampled_from(["user", "system", "assistant", "tool", "developer"]),
                "content": st.one_of(values, st.sampled_from(["S", "U", "K", "T"])),
            },
            optional={"tool_calls": values, "name": values, "reasoning_content": values},
        ),
    ),
    max_size=3,
)
formats = st.one_of(
    values,
    st.fixed_dictionaries(
        {
            "type": st.sampled_from(["text", "json_object", "json_schema"]),
            "json_schema": st.fixed_dictionaries({"name": st.just("n"), "schema": schemas}),
        }
    ),
)


right = st.just([{"role": "user", "content": "S"}])
RIGHT: dict[str, Any] = {
    "model": st.just("default"),
    "n": st.integers(1, 3),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0.1, 1),
    "top_k": st.integers(0, 5),
    "min_p": st.floats(0, 1),
    "seed": st.integers(-5, 5),
    "stop": st.one_of(st.text(min_size=1, max_size=3), st.lists(st.just("a"), max_size=2)),
    "stream": st.booleans(),
    "logit_bias": st.dictionaries(st.sampled_from(["1", "300", "x"]), st.floats(-100, 100)),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0.5, 2),
    "logprobs": st.booleans(),
    "top_logprobs": st.integers(0, 20),
    "enable_thinking": st.booleans(),
    "reasoning_effort": st.sampled_from(["none", "low", "high"]),
    "parallel_tool_calls": st.booleans(),
    "chat_template_kwargs": st.dictionaries(st.sampled_from(["a", "tools", "x"]), values),
    "echo": st.booleans(),
}


def bodies(kind: type[ChatRequest | CompletionRequest], **special: Any) -> Any:
    """Objects with a request's fields, mostly right ones, and a small budget."""
    optional = {
        name: st.one_of(*[right] * 3, values) if right is not None else values
        for name, right in ((n, RIGHT.get(n)) for n in kind.model_fields)
    }
    optional |= special | dict.fromkeys(kind.UNSUPPORTED, values)
    weighed = [*kind.model_fields] * 3 + [*special] * 12 + [*kind.UNSUPPORTED]
    few = st.lists(st.sampled_from(weighed), max_size=5, unique=True)
    return few.flatmap(
        lambda names: st.fixed_dictionaries(
            {
                "max_tokens": st.integers(1, 4),
                "stream": st.booleans(),
                **{name: optional[name] for name in names},
            }
        )
    )


chats = bodies(
    ChatRequest,
    messages=st.one_of(right, right, messages),
    tools=st.one_of(tools, tools, values),
    tool_choice=st.one_of(st.sampled_from(["none", "auto", "required"]), values),
    response_format=formats,
).flatmap(
    lambda body: (
        st.fixed_dictionaries({}).map(lambda _: body)
        if "messages" in body
        else right.map(lambda m: {**body, "messages": m})
    )
)
completions = bodies(
    CompletionRequest,
    prompt=st.one_of(
        st.sampled_from(["S", "U"]), st.lists(st.integers(-1, 300), max_size=3), values
    ),
    logprobs=st.one_of(st.integers(0, 20), values),
).map(lambda body: {"prompt": "S", **body})


@pytest.fixture(scope="module")
def client(scripted_engine: Engine) -> Iterator[TestClient]:
    app = create_app(scripted_engine, ServerSettings())
    with TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False) as made:
        yield made


def check(client: TestClient, path: str, raw: bytes) -> None:
    answer = client.post(path, content=raw, headers={"content-type": "application/json"})
    assert answer.status_code in (200, 400, 404, 429), (answer.status_code, answer.text)
    if answer.headers["content-type"].startswith("text/event-stream"):
        assert answer.text.endswith("data: [DONE]\n\n")
        events = [json.loads(e[6:]) for e in answer.text.split("\n\n")[:-2] if e[0] != ":"]
        errors = [e["error"] for e in events if "error" in e]
    else:
        content = answer.json()
        errors = [] if answer.status_code == 200 else [content["error"]]
    for error in errors:
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str)
        assert error["message"]
        assert error["type"] in ("invalid_request_error", "rate_limit_error")


fuzzed = settings(
    max_examples=500,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@fuzzed
@given(body=chats)
def test_chat(client: TestClient, body: Any) -> None:
    check(client, "/v1/chat/completions", json.dumps(body).encode())


@fuzzed
@given(body=completions)
def test_completions(client: TestClient, body: Any) -> None:
    check(client, "/v1/completions", json.dumps(body).encode())


@settings(max_examples=200, deadline=None, derandomize=True)
@given(raw=st.one_of(st.binary(max_size=60), values.map(json.dumps).map(str.encode)))
def test_any_bytes(client: TestClient, raw: bytes) -> None:
    check(client, "/v1/chat/completions", raw)
    check(client, "/v1/completions", raw)


def test_the_engine_is_well_after_all_that(client: TestClient) -> None:
    body = {"messages": [{"role": "user", "content": "S"}]}
    answer = client.post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["message"]["content"] == "alpha beta gamma delta2"
    assert client.get("/health").json()["waiting"] == 0
