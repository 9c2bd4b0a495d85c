"""From a chat request's messages and tools to what a chat template reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from spec_core.errors import InvalidValueError
from spec_server.grammar import AnswerGrammar, CallsAnswer, Function, JsonAnswer
from spec_server.grammar.compiler import ANY_OBJECT
from spec_server.http.depth import MAX_DEPTH, nests_deeper
from spec_server.http.errors import ApiError, bad_field, unsupported
from spec_server.http.schemas import ChatMessage, ChatRequest, ContentPart, NamedChoice
from spec_server.text import Message
from spec_server.tools import ToolFormat

_RESERVED = frozenset(
    (
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "messages",
        "padding",
        "processor_kwargs",
        "raise_exception",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "strftime_now",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    )
)


def template_messages(messages: Sequence[ChatMessage]) -> list[Message]:
    """The conversation as templates expect it: text contents, arguments as objects."""
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: ChatMessage, path: str) -> Message:
    if message.content is None and message.role != "assistant":
        raise bad_field(f"{path}.content", None, "a text or a list of text parts")
    role = "system" if message.role == "developer" else message.role
    made: dict[str, Any] = {"role": role, "content": _text(message, path)}
    thought = message.reasoning_content or message.reasoning
    if thought and role == "assistant":
        made["reasoning_content"] = thought
    if message.name is not None:
        made["name"] = message.name
    if message.tool_call_id is not None:
        made["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        if role != "assistant":
            raise bad_field(f"{path}.tool_calls", "...", "left out unless the role is assistant")
        made["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(call.function.arguments),
                },
            }
            for call in message.tool_calls
        ]
    return made


def _text(message: ChatMessage, path: str) -> str:
    if message.content is None:
        return message.refusal or ""
    if isinstance(message.content, str):
        return message.content
    return "\n".join(_part(part, f"{path}.content[{i}]") for i, part in enumerate(message.content))


def _part(part: ContentPart, path: str) -> str:
    if part.type in ("text", "input_text", "output_text"):
        if part.text is None:
            raise ApiError(400, f"{path}.text is missing", param=f"{path}.text")
        return part.text
    if part.type == "refusal":
        return part.refusal or ""
    raise unsupported(f"{path}.type", f"parts of type {part.type!r:.80}; only text is understood")


def _arguments(text: str) -> Any:
    """An object where the text is one, as templates prefer; otherwise the text."""
    if nests_deeper(text, MAX_DEPTH):
        return text
    try:
        value = json.loads(text) if text.strip() else {}
    except ValueError:
        return text
    return value if isinstance(value, dict) else text


def thinking_switch(body: ChatRequest) -> bool | None:
    """Whether the model shall think; None leaves it to the template."""
    options = body.chat_template_kwargs or {}
    inner = options.get("enable_thinking")
    if inner is not None and not isinstance(inner, bool):
        raise bad_field("chat_template_kwargs.enable_thinking", inner, "true or false")
    if None not in (inner, body.enable_thinking) and inner != body.enable_thinking:
        raise bad_field(
            "chat_template_kwargs.enable_thinking", inner, "the same as enable_thinking"
        )
    chosen: bool | None = inner if body.enable_thinking is None else body.enable_thinking
    if chosen is None and body.reasoning_effort == "none":
        return False
    return chosen


def template_options(body: ChatRequest, template: str | None) -> tuple[dict[str, Any], list[str]]:
    """Further template variables, and notes on what the template does not know."""
    options = dict(body.chat_template_kwargs or {})
    options.pop("enable_thinking", None)
    for name in options:
        if name in _RESERVED or name.endswith("_token") or not name.isidentifier():
            raise unsupported(f"chat_template_kwargs.{name:.80}", "requests cannot set it")
    effort = body.reasoning_effort
    if effort is None or effort == "none":
        return options, []
    if template is not None and "reasoning_effort" in template:
        return {"reasoning_effort": effort, **options}, []
    return options, [f"reasoning_effort {effort!r:.40} is not graded by this model's template"]


def tool_functions(body: ChatRequest) -> list[Function]:
    """The functions that may be called.

    Raises:
        ApiError: two have the same name, or `tool_choice` asks for none that is there.
    """
    if body.tool_choice == "none":
        return []
    functions: dict[str, Function] = {}
    for index, tool in enumerate(body.tools or ()):
        name = tool.function.name
        if name in functions:
            raise bad_field(f"tools[{index}].function.name", name, "different from the others")
        functions[name] = Function(name, tool.function.parameters or {})
    if isinstance(body.tool_choice, NamedChoice):
        named = body.tool_choice.function.name
        if named not in functions:
            raise bad_field("tool_choice.function.name", named, "the name of one of the tools")
    if body.tool_choice == "required" and not functions:
        raise bad_field("tool_choice", "required", "left out, or none, without tools")
    return list(functions.values())


def answer_grammar(
    body: ChatRequest, functions: Sequence[Function], format: ToolFormat | None
) -> AnswerGrammar | None:
    """What the answer is held to, or None if it is free."""
    answer = _json_answer(body)
    if not functions:
        return answer
    if format is None:
        raise unsupported("tools", "the model's chat template knows no tools")
    parallel = body.parallel_tool_calls is not False
    if isinstance(body.tool_choice, NamedChoice):
        named = [f for f in functions if f.name == body.tool_choice.function.name]
        return CallsAnswer(format, named, parallel=False)
    if body.tool_choice == "required":
        return CallsAnswer(format, functions, parallel=parallel)
    if answer is not None:
        return CallsAnswer(format, functions, parallel=parallel, instead=answer)
    if any(tool.function.strict for tool in body.tools or ()):
        return CallsAnswer(format, functions, parallel=parallel, free=True)
    return None


def _json_answer(body: ChatRequest) -> JsonAnswer | None:
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object" or wanted.json_schema is None:
        return ANY_OBJECT
    return JsonAnswer(wanted.json_schema.schema_, "response_format.json_schema.schema")


def token_biases(bias: dict[str, float] | None) -> dict[int, float]:
    """Token ids to biases."""
    made: dict[int, float] = {}
    for key, value in (bias or {}).items():
        if not (key.isascii() and key.isdecimal() and len(key) < 10):
            raise InvalidValueError("logit_bias", key, "an object whose keys are token ids")
        made[int(key)] = float(value)
    return made
