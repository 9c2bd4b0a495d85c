"""The HTTP surface, in process: shapes, streams, errors, limits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from spec_server import Engine
from spec_server.http import EngineSlot, ServerSettings, create_app
from spec_server.http.depth import MAX_DEPTH

TEXT = "alpha beta gamma delta2"
BASE = "http://127.0.0.1"
CHAT, TEXTS = "/v1/chat/completions", "/v1/completions"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = [WEATHER, NOW]


def ask(script: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": script}], **more}


@pytest.fixture(scope="module")
def client(scripted_engine: Engine) -> Iterator[TestClient]:
    app = create_app(scripted_engine, ServerSettings(max_body_bytes=50_000))
    with TestClient(app, base_url=BASE, raise_server_exceptions=False) as made:
        yield made


def whole(client: TestClient, body: dict[str, Any], path: str = CHAT) -> dict[str, Any]:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def events(client: TestClient, body: dict[str, Any], path: str = CHAT) -> list[dict[str, Any]]:
    """A stream's events; it ends with [DONE] and nothing after it."""
    response = client.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line and not line.startswith(":")]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def assembled(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """A stream's chat message, put together as clients do; the chunks' rules are checked."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}
    assert len({(c["id"], c["created"], c["model"]) for c in chunks}) == 1
    with_choices = [c for c in chunks if c["choices"]]
    assert with_choices[0]["choices"][0]["delta"]["role"] == "assistant"
    for chunk in with_choices:
        (choice,) = chunk["choices"]
        delta = choice["delta"]
        assert isinstance(delta["content"], str)
        assert (choice["finish_reason"] is None) == (chunk is not with_choices[-1])
        message["content"] += delta["content"]
        message["reasoning_content"] += delta.get("reasoning_content", "")
        assert delta.get("reasoning") == delta.get("reasoning_content")
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(message["tool_calls"]):
                assert call["id"]
                assert call["type"] == "function"
                message["tool_calls"].append({"id": call["id"], **call["function"]})
            else:
                assert "id" not in call
                message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
    message["finish_reason"] = with_choices[-1]["choices"][0]["finish_reason"]
    return message


def of_whole(answer: dict[str, Any]) -> dict[str, Any]:
    choice = answer["choices"][0]
    message = choice["message"]
    assert message["role"] == "assistant"
    return {
        "content": message["content"] or "",
        "reasoning_content": message.get("reasoning_content", ""),
        "tool_calls": [
            {"id": c["id"], **c["function"]} for c in message.get("tool_calls", ()) if c["type"]
        ],
        "finish_reason": choice["finish_reason"],
    }


def both(client: TestClient, body: dict[str, Any]) -> dict[str, Any]:
    """The answer; that stream and whole agree is checked on the way."""
    one, other = of_whole(whole(client, body)), assembled(events(client, body))
    for message in (one, other):
        ids = [call.pop("id") for call in message["tool_calls"]]
        assert len(set(ids)) == len(ids)
    assert one == other
    return one


# ------------------------------------------------------------------ answers


def test_shape_of_a_chat_completion(client: TestClient) -> None:
    answer = whole(client, ask("S", model="default"))
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["model"] == "scripted"
    (choice,) = answer["choices"]
    assert choice["index"] == 0
    assert choice["message"]["content"] == TEXT
    assert (choice["finish_reason"], choice["logprobs"]) == ("stop", None)
    usage = answer["usage"]
    assert usage["completion_tokens"] == 8
    assert usage["total_tokens"] == usage["prompt_tokens"] + 8
    seen = answer["x_spec"]
    assert seen["mode"] == "lookup"
    assert seen["rounds"] == len(seen["round_accepts"])
    assert seen["mean_accept_length"] == 1 + seen["accepted"] / seen["rounds"]
    details = usage["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == seen["accepted"]
    assert details["rejected_prediction_tokens"] == seen["drafted"] - seen["accepted"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == seen["cached_tokens"]


@pytest.mark.parametrize(
    ("script", "more", "expected"),
    [
        ("S", {}, {"content": TEXT, "finish_reason": "stop"}),
        ("U", {}, {"content": "hi 😀漢!", "finish_reason": "stop"}),
        ("K", {}, {"content": "42.", "reasoning_content": "add them", "finish_reason": "stop"}),
        ("K", {"max_tokens": 2}, {"reasoning_content": "add", "finish_reason": "length"}),
        ("S", {"max_tokens": 3}, {"content": "alpha be", "finish_reason": "length"}),
        ("U", {"max_tokens": 5}, {"content": "hi ", "finish_reason": "length"}),
        ("S", {"stop": "beta gamma"}, {"content": "alpha ", "finish_reason": "stop"}),
        ("S", {"stop": ["pha"]}, {"content": "al", "finish_reason": "stop"}),
        ("S", {"stop": ["ga", "beta"]}, {"content": "alpha ", "finish_reason": "stop"}),
        ("S", {"stop": "al"}, {"content": "", "finish_reason": "stop"}),
        ("S", {"max_tokens": 4, "max_completion_tokens": 3},
         {"content": "alpha be", "finish_reason": "length"}),
        ("T", {}, {"content": "<tool_call>\n{\"name\": \"get_weather\", \"arguments\": "
                              "{\"city\": \"Paris\"}}\n</tool_call>", "finish_reason": "stop"}),
    ],
)  # fmt: skip
def test_texts(
    client: TestClient, script: str, more: dict[str, Any], expected: dict[str, Any]
) -> None:
    empty = {"content": "", "reasoning_content": "", "tool_calls": []}
    assert both(client, ask(script, **more)) == {**empty, **expected}


@pytest.mark.parametrize(
    ("script", "calls", "content", "reason"),
    [
        ("T", [("get_weather", {"city": "Paris"})], "", "tool_calls"),
        ("P", [("get_weather", {"city": "Rome"}), ("now", {})], "done", "tool_calls"),
        ("B", [], "<tool_call>{broken</tool_call> then", "stop"),
        ("S", [], TEXT, "stop"),
    ],
)
def test_tool_calls(
    client: TestClient, script: str, calls: list[Any], content: str, reason: str
) -> None:
    message = both(client, ask(script, tools=TOOLS))
    found = [(c["name"], json.loads(c["arguments"])) for c in message["tool_calls"]]
    assert (found, message["content"], message["finish_reason"]) == (calls, content, reason)


def test_one_call_where_parallel_calls_are_off(client: TestClient) -> None:
    message = both(client, ask("P", tools=TOOLS, parallel_tool_calls=False))
    assert [call["name"] for call in message["tool_calls"]] == ["get_weather"]
    assert (message["content"], message["finish_reason"]) == ("", "tool_calls")


def test_tool_choice_none_hides_the_tools(client: TestClient) -> None:
    message = both(client, ask("T", tools=TOOLS, tool_choice="none"))
    assert message["tool_calls"] == []
    plain = whole(client, ask("T"))["usage"]["prompt_tokens"]
    hidden = whole(client, ask("T", tools=TOOLS, tool_choice="none"))["usage"]["prompt_tokens"]
    assert hidden == plain


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "now"}}], ids=str
)
def test_a_call_can_be_required(client: TestClient, choice: Any) -> None:
    tools = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object",
             "properties": {"zone": {"enum": ["utc"]}}, "required": ["zone"]}}}]  # fmt: skip
    message = both(client, ask("S", tools=tools, tool_choice=choice, parallel_tool_calls=False))
    (call,) = message["tool_calls"]
    assert (call["name"], json.loads(call["arguments"])) == ("now", {"zone": "utc"})
    assert message["finish_reason"] == "tool_calls"


def test_a_required_call_that_is_cut_off_is_reported_as_length(client: TestClient) -> None:
    message = both(client, ask("S", tools=TOOLS, tool_choice="required", max_tokens=4))
    assert (message["tool_calls"], message["finish_reason"]) == ([], "length")


def test_json_schema_and_json_object(client: TestClient) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, "x"]}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    formats = [{"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}]
    message = both(client, ask("S", response_format=formats[0]))
    assert json.loads(message["content"])["a"] in (1, "x")
    cut = both(client, ask("S", response_format={"type": "json_object"}, max_tokens=3))
    assert cut["content"].lstrip().startswith("{")
    assert cut["finish_reason"] == "length"
    assert both(client, ask("S", response_format={"type": "text"}))["content"] == TEXT


def test_thinking_switch(client: TestClient) -> None:
    on = both(client, ask("S", enable_thinking=True))
    assert (on["content"], on["reasoning_content"]) == ("42.", "hmm")
    assert both(client, ask("S", chat_template_kwargs={"enable_thinking": True})) == on
    off = both(client, ask("S", enable_thinking=False))
    assert (off["content"], off["reasoning_content"]) == (TEXT, "")
    assert both(client, ask("S", reasoning_effort="none")) == off
    cut = both(client, ask("S", enable_thinking=True, max_tokens=2))
    assert (cut["content"], cut["reasoning_content"]) == ("", "hmm")
    noted = whole(client, ask("S", reasoning_effort="high"))
    assert any("reasoning_effort" in note for note in noted["x_spec"]["fallbacks"])
    usage = whole(client, ask("K"))["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 4


def test_usage_in_streams(client: TestClient) -> None:
    chunks = events(client, ask("S", stream_options={"include_usage": True}))
    assert [c["choices"] == [] for c in chunks] == [False] * (len(chunks) - 1) + [True]
    assert all(c["usage"] is None for c in chunks[:-1])
    expected = whole(client, ask("S"))["usage"]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert chunks[-1]["usage"][name] == expected[name]
    without = events(client, ask("S"))
    assert all("usage" not in c and len(c["choices"]) == 1 for c in without)
    assert [bool(c.get("x_spec")) for c in without] == [False] * (len(without) - 1) + [True]


@pytest.mark.parametrize("budget", range(1, 12))
def test_delivered_tokens_are_what_usage_claims(client: TestClient, budget: int) -> None:
    body = ask("S", max_tokens=budget, logprobs=True)
    answer = whole(client, body)
    ended = budget >= 8
    assert answer["usage"]["completion_tokens"] == min(budget, 8)
    assert answer["choices"][0]["finish_reason"] == ("stop" if ended else "length")
    assert len(answer["choices"][0]["logprobs"]["content"]) == min(budget, 8) - ended


def test_logprobs(client: TestClient) -> None:
    body = ask("U", logprobs=True, top_logprobs=3)
    content = whole(client, body)["choices"][0]["logprobs"]["content"]
    assert bytes(b for entry in content for b in entry["bytes"]).decode() == "hi 😀漢!"
    for entry in content:
        assert entry["logprob"] > -0.001
        assert entry["top_logprobs"][0]["token"] == entry["token"]
        assert len(entry["top_logprobs"]) == 3
    streamed = [
        entry
        for chunk in events(client, body)
        for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == content


def test_several_choices(client: TestClient) -> None:
    answer = whole(client, ask("S", n=3))
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2]
    assert {c["message"]["content"] for c in answer["choices"]} == {TEXT}
    assert answer["usage"]["completion_tokens"] == 24
    texts = {0: "", 1: "", 2: ""}
    for chunk in events(client, ask("S", n=3)):
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["delta"]["content"]
    assert set(texts.values()) == {TEXT}


def test_seeds(client: TestClient) -> None:
    free = {"logit_bias": {"257": -100}, "temperature": 2.0, "max_tokens": 12}

    def text(**more: Any) -> list[str]:
        answer = whole(client, ask("!", **free, **more))
        return [c["message"]["content"] for c in answer["choices"]]

    assert text(seed=1) == text(seed=1) != text(seed=2)
    assert len({*text(), *text(), *text()}) > 1
    several = text(seed=1, n=3)
    assert several[0] == text(seed=1)[0]
    assert len(set(several)) == 3


def test_completions(client: TestClient) -> None:
    answer = whole(client, {"prompt": "S"}, TEXTS)
    assert answer["object"] == "text_completion"
    assert answer["choices"][0]["text"] == TEXT
    ids = [answer["usage"]["prompt_tokens"], len(TEXT)]
    assert ids[0] == 1
    by_ids = whole(client, {"prompt": [50]}, TEXTS)["choices"][0]["text"]
    assert by_ids == TEXT
    many = whole(client, {"prompt": ["S", "U"], "n": 2, "echo": True}, TEXTS)
    assert [c["text"] for c in many["choices"]] == ["S" + TEXT] * 2 + ["Uhi 😀漢!"] * 2
    assert many["usage"]["prompt_tokens"] == 2
    chunks = events(client, {"prompt": [[50], [50]], "echo": True}, TEXTS)
    texts = ["", ""]
    for chunk in chunks:
        assert chunk["object"] == "text_completion"
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == ["S" + TEXT] * 2


def test_completion_logprobs(client: TestClient) -> None:
    body = {"prompt": "S", "logprobs": 2}
    found = whole(client, body, TEXTS)["choices"][0]["logprobs"]
    assert "".join(found["tokens"]) == TEXT
    assert found["text_offset"] == [0, 2, 6, 8, 13, 17, 20]
    assert [max(t, key=t.__getitem__) for t in found["top_logprobs"]] == found["tokens"]
    parts = [c["choices"][0]["logprobs"] for c in events(client, body, TEXTS)]
    assert [t for p in parts if p for t in p["tokens"]] == found["tokens"]
    assert [o for p in parts if p for o in p["text_offset"]] == found["text_offset"]


def test_penalties_and_bias_are_honoured(client: TestClient) -> None:
    banned = whole(client, ask("S", logit_bias={"257": -100}, max_tokens=12))
    assert banned["choices"][0]["message"]["content"] == TEXT + "!!!!!"
    repeated = ask("S", logit_bias={"257": -100}, max_tokens=12, presence_penalty=2)
    text = whole(client, repeated)["choices"][0]["message"]["content"]
    assert text.startswith(TEXT + "!")
    assert "!!" not in text


def test_content_parts_and_roles(client: TestClient) -> None:
    messages = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": w} for w in ("say", "S")]},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "S"},
    ]  # fmt: skip
    assert whole(client, {"messages": messages})["choices"][0]["message"]["content"] == TEXT


def test_the_same_prompt_again_is_reused(client: TestClient) -> None:
    body = ask("long " * 30 + "S")
    first, second = whole(client, body), whole(client, body)
    assert second["choices"][0]["message"] == first["choices"][0]["message"]
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= 0.9 * second["usage"]["prompt_tokens"]
    assert second["x_spec"]["cache_stopped"] == "end"


# ------------------------------------------------------------------ errors


def refused(
    client: TestClient, body: Any, status: int = 400, path: str = CHAT, **more: Any
) -> dict[str, Any]:
    response = client.post(path, json=body, **more)
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


@pytest.mark.parametrize(
    ("more", "param", "mentions"),
    [
        ({"temperature": 3}, "temperature", "is 3; it must be a number, at least 0 and at most 2"),
        ({"temperature": "hot"}, "temperature", "'hot'"),
        ({"temperature": True}, "temperature", "True"),
        ({"top_p": 0}, "top_p", "more than 0 and at most 1"),
        ({"top_k": 1.5}, "top_k", "1.5"),
        ({"min_p": 2}, "min_p", "2"),
        ({"max_tokens": 0}, "max_tokens", "is 0; it must be a whole number, at least 1"),
        ({"max_completion_tokens": -1}, "max_completion_tokens", "-1"),
        ({"seed": "x"}, "seed", "'x'"),
        ({"presence_penalty": 2.5}, "presence_penalty", "at least -2 and at most 2"),
        ({"repetition_penalty": 0}, "repetition_penalty", "0"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "'x'"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "101"),
        ({"logit_bias": {"999999": 1}}, "logit_bias", "999999"),
        ({"stop": [""]}, "stop[0]", "''"),
        ({"stop": 5}, "stop", "5"),
        ({"stop": ["a"] * 17}, "stop", "at most 16"),
        ({"n": 0}, "n", "is 0; it must be a whole number, at least 1 and at most 16"),
        ({"n": 17}, "n", "is 17; it must be a whole number, at least 1 and at most 16"),
        ({"stream": "yes"}, "stream", "'yes'"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
        ({"logprobs": 3}, "logprobs", "3"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "21"),
        ({"tools": [{"type": "web"}]}, "tools[0].type", "'web'"),
        ({"tools": [NOW, NOW]}, "tools[1].function.name", "different"),
        ({"tool_choice": "required"}, "tool_choice", "required"),
        ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice", "'maybe'"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}},
         "tool_choice.function.name", "'f'"),
        ({"response_format": {"type": "yaml"}}, "response_format.type", "'yaml'"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
         "response_format", "'not'"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "odd"}}}},
         "response_format", "cannot be enforced: Invalid type: odd"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"if": {}}}}],
          "tool_choice": "required"}, "tools", "'if'"),
        ({"functions": [{}]}, "functions", "tools"),
        ({"store": True}, "store", "stored"),
        ({"modalities": ["audio"]}, "modalities", "text"),
        ({"chat_template": "x"}, "chat_template", "template"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs.chat_template",
         "cannot set"),
        ({"chat_template_kwargs": {"enable_thinking": 1}}, "chat_template_kwargs.enable_thinking",
         "true or false"),
        ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
         "chat_template_kwargs.enable_thinking", "same"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": "hi"}, "messages", "'hi'"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "'robot'"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "None"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "5"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
         "messages[0].content[0].type", "image_url"),
        ({"messages": [{"role": "assistant", "content": "S"}]}, "messages",
         "must begin with the user"),
        ({"max_draft": -1}, "max_draft", "-1"),
        ({"user": 5}, "user", "5"),
    ],
    ids=lambda v: json.dumps(v)[:60] if isinstance(v, dict) else None,
)  # fmt: skip
def test_a_wrong_field_is_named(
    client: TestClient, more: dict[str, Any], param: str, mentions: str
) -> None:
    error = refused(client, ask("S", **more))
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert mentions in error["message"]


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [99999]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": ["a"] * 17}, "prompt"),
        ({"logprobs": 21}, "logprobs"),
    ],
)
def test_wrong_fields_of_completions(client: TestClient, more: dict[str, Any], param: str) -> None:
    assert refused(client, {"prompt": "S", **more}, path=TEXTS)["param"] == param


def test_unknown_and_null_fields_are_ignored(client: TestClient) -> None:
    nothing = dict.fromkeys(
        ("stop", "tools", "temperature", "max_tokens", "n", "stream", "seed", "response_format")
    )
    assert both(client, ask("S", frobnicate=1, **nothing))["content"] == TEXT


def test_context(client: TestClient) -> None:
    error = refused(client, ask("x" * 400 + "S", max_tokens=7))
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "messages"
    for number in ("256", "7"):
        assert number in error["message"]
    endless = {"logit_bias": {"257": -100}}
    answer = whole(client, {"prompt": "S" * 250, "max_tokens": 100, **endless}, TEXTS)
    assert answer["usage"]["completion_tokens"] == 6
    assert answer["choices"][0]["finish_reason"] == "length"
    for stream in (False, True):
        body = {"prompt": "S" * 256, "stream": stream}
        assert refused(client, body, path=TEXTS)["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("raw", "status", "code"),
    [
        (b"{", 400, "invalid_json"),
        (b"", 400, "invalid_json"),
        (b"\xff\xfe", 400, "invalid_json"),
        (b'{"temperature": NaN}', 400, "invalid_json"),
        (b"[" * 30_000, 400, "invalid_json"),
        (b'{"messages": [{"role": "user", "content": "\xed\xa0\x80"}]}', 400, "invalid_json"),
        ('{"messages": [{"role": "user", "content": "S"}]}'.encode("utf-16"), 400, "invalid_json"),
        (b"[]", 400, None),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400, None),
        (b'{"messages": [{"role": "user", "content": "S"}], "temperature": 1e999}', 400, None),
        (b" " * 60_000, 413, "body_too_large"),
    ],
)
def test_bodies_that_are_no_request(
    client: TestClient, raw: bytes, status: int, code: str | None
) -> None:
    response = client.post(CHAT, content=raw, headers={"content-type": "application/json"})
    assert response.status_code == status, response.text
    assert response.json()["error"]["code"] == code


def test_a_body_may_nest_so_deep_and_no_deeper(client: TestClient) -> None:
    def body(depth: int, text: str = "S") -> bytes:
        """A chat whose metadata, one level down, nests up to `depth`."""
        values = "[" * (depth - 2) + "]" * (depth - 2)
        messages = json.dumps([{"role": "user", "content": text}])
        return f'{{"messages": {messages}, "metadata": {{"a": {values}}}}}'.encode()

    def status(raw: bytes) -> tuple[int, str | None]:
        answer = client.post(CHAT, content=raw, headers={"content-type": "application/json"})
        return answer.status_code, answer.json().get("error", {}).get("message")

    assert status(body(MAX_DEPTH)) == (200, None)
    assert status(body(MAX_DEPTH, '[{"\\' * 20 + "S")) == (200, None)
    code, message = status(body(MAX_DEPTH + 1))
    assert code == 400
    assert message is not None
    assert f"deeper than {MAX_DEPTH}" in message


def test_past_arguments_that_nest_deep_stay_text(client: TestClient) -> None:
    deep = '{"a": ' * 5000 + "1" + "}" * 5000
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "now", "arguments": deep}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "S"},
    ]  # fmt: skip
    assert whole(client, {"messages": messages})["choices"][0]["message"]["content"] == TEXT


def test_a_chunked_body_is_bounded_too(client: TestClient) -> None:
    response = client.post(
        CHAT,
        content=(b" " * 10_000 for _ in range(10)),
        headers={"content-type": "application/json"},
    )
    assert response.status_code == 413


def test_models(client: TestClient) -> None:
    listed = client.get("/v1/models").json()
    assert listed["object"] == "list"
    (card,) = listed["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("scripted", "model", 256)
    assert isinstance(card["created"], int)
    full = client.app.state.service.engine().facts.model  # type: ignore[attr-defined]
    for name in ("scripted", "default", full):
        assert client.get(f"/v1/models/{name}").json()["id"] == name
        assert whole(client, ask("S", model=name))["choices"][0]["message"]["content"] == TEXT
    for response in (client.get("/v1/models/a/b"), client.post(CHAT, json=ask("S", model="a/b"))):
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "model_not_found"


def test_other_paths(client: TestClient) -> None:
    assert client.head("/").status_code == 200
    for path in ("/v1/embeddings", "/nothing"):
        response = client.post(path, json={})
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "not_found"
    response = client.get(CHAT)
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
    assert response.json()["error"]["code"] == "method_not_allowed"


def test_health_and_metrics(client: TestClient) -> None:
    whole(client, ask("S" + TEXT + "S"))
    for path in ("/health", "/readyz"):
        answer = client.get(path)
        assert (answer.status_code, answer.json()["status"]) == (200, "ok")
    text = client.get("/metrics").text
    values = {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if not line.startswith("#")
    }
    drafted, accepted = (
        values[f"spec_decode_num_{name}_total"] for name in ("draft_tokens", "accepted_tokens")
    )
    assert 0 < accepted <= drafted
    by_position = [
        v for k, v in values.items() if k.startswith("spec_decode_num_accepted_tokens_p")
    ]
    assert sum(by_position) == accepted
    for name in (
        "spec_decode_num_drafts_total",
        "spec_num_requests_running",
        "spec_num_requests_waiting",
        "spec_prefix_cache_queries_total",
        "spec_prefix_cache_hits_total",
        "spec_kv_cache_usage_perc",
        "spec_prompt_tokens_total",
        "spec_generation_tokens_total",
        "spec_time_to_first_token_seconds_count",
        "spec_time_per_output_token_seconds_count",
        "spec_e2e_request_latency_seconds_count",
        "spec_request_queue_time_seconds_count",
        'spec_request_success_total{finished_reason="stop"}',
    ):
        assert name in values


def test_while_the_model_loads() -> None:
    with TestClient(create_app(EngineSlot()), base_url=BASE) as client:
        for response in (
            client.get("/readyz"),
            client.get("/health"),
            client.get("/v1/models"),
            client.post(CHAT, json=ask("S")),
        ):
            assert response.status_code == 503
            assert response.headers["retry-after"]
        assert client.head("/").status_code == 200
        assert "spec_num_requests_running 0.0" in client.get("/metrics").text


def test_log_lines_hold_no_text(client: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="spec_server.access"):
        whole(client, ask("secret words S"))
        refused(client, ask("secret words S", temperature=9))
    first, second = (r.getMessage() for r in caplog.records if r.name == "spec_server.access")
    assert "status=200" in first
    assert "completion_tokens=8" in first
    assert "status=400" in second
    assert "secret" not in first + second
    assert "alpha" not in first
