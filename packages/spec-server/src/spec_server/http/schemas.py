"""Request bodies: types, ranges, and the fields that are known but not honoured."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

Text = Annotated[str, Field(strict=True)]

MAX_SALT = 256
"""Characters of a tenant's salt at most."""


class Body(BaseModel):
    """A JSON object; unknown fields are ignored, values are never coerced."""

    model_config = ConfigDict(
        strict=True, extra="ignore", allow_inf_nan=False, protected_namespaces=(), frozen=True
    )


def _stops(value: object) -> object:
    return [value] if isinstance(value, str) else value


class FunctionCall(Body):
    """The call in an assistant message of the past."""

    name: str = Field(min_length=1)
    arguments: str = ""


class PastToolCall(Body):
    """A call in an assistant message of the past."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ContentPart(Body):
    """A part of a message's content; only text is understood."""

    type: str
    text: str | None = None
    refusal: str | None = None


class ChatMessage(Body):
    """A message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[PastToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None


class FunctionSpec(Body):
    """A function that the model may call."""

    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolSpec(Body):
    """A tool; only functions are understood."""

    type: Literal["function"]
    function: FunctionSpec


class NamedFunction(Body):
    """The function that must be called."""

    name: str


class NamedChoice(Body):
    """`tool_choice` that names a function."""

    type: Literal["function"]
    function: NamedFunction


class JsonSchemaSpec(Body):
    """The schema of `response_format`."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """`response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaSpec | None = None

    @model_validator(mode="after")
    def _schema_is_there(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError('an object with a json_schema where its type is "json_schema"')
        return self


class StreamOptions(Body):
    """`stream_options`."""

    include_usage: bool | None = None


Penalty = Annotated[float | None, Field(ge=-2, le=2)]


class AnswerRequest(Body):
    """What chat and completions share."""

    model: str | None = None
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=0)] = None
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    seed: Annotated[int | None, Field(ge=-(2**63), le=2**63 - 1)] = None
    presence_penalty: Penalty = None
    frequency_penalty: Penalty = None
    repetition_penalty: Annotated[float | None, Field(gt=0, le=10)] = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=2048)]] | None,
        Field(max_length=16),
        BeforeValidator(_stops),
    ] = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_draft: Annotated[int | None, Field(ge=0)] = None
    cache_salt: Annotated[str | None, Field(min_length=1, max_length=MAX_SALT)] = None
    user: str | None = None
    metadata: dict[str, Any] | None = None

    UNSUPPORTED: ClassVar[dict[str, tuple[tuple[object, ...], str]]] = {
        "store": ((False,), "answers are not stored"),
        "service_tier": (("auto", "default"), "there are no service tiers"),
        "chat_template": ((), "the model's own chat template is used"),
    }
    """Field to the values that ask for nothing, and why others cannot be honoured."""

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatRequest(AnswerRequest):
    """`POST /v1/chat/completions`."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    tools: list[ToolSpec] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None

    UNSUPPORTED: ClassVar[dict[str, tuple[tuple[object, ...], str]]] = {
        **AnswerRequest.UNSUPPORTED,
        "functions": (([],), "this is the old form of tools; use tools"),
        "function_call": ((), "this is the old form of tool_choice; use tool_choice"),
        "modalities": ((["text"],), "only text is written"),
        "audio": ((), "only text is written"),
        "prediction": ((), "predicted outputs are not used; drafts need no hint here"),
        "web_search_options": ((), "there is no web search"),
        "verbosity": (("medium",), "the model has no such switch"),
        "best_of": ((1,), "use n"),
        "suffix": (("",), "chat has no suffix"),
        "echo": ((False,), "chat has no echo"),
    }


class CompletionRequest(AnswerRequest):
    """`POST /v1/completions`."""

    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool | None = None
    logprobs: Annotated[int | None, Field(ge=0, le=20)] = None

    UNSUPPORTED: ClassVar[dict[str, tuple[tuple[object, ...], str]]] = {
        **AnswerRequest.UNSUPPORTED,
        "suffix": (("",), "the text after the answer is not taken into account"),
        "best_of": ((1,), "answers are not ranked; use n"),
    }
