"""From a request body to what the engine is asked, one `Ask` a choice."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from spec_core import SamplingParams
from spec_server.engine import Ask, Engine
from spec_server.grammar import thought_switch
from spec_server.http.conversation import (
    answer_grammar,
    template_messages,
    template_options,
    thinking_switch,
    token_biases,
    tool_functions,
)
from spec_server.http.errors import Place, bad_field, model_not_found, unsupported
from spec_server.http.schemas import AnswerRequest, ChatRequest, CompletionRequest
from spec_server.http.settings import ServerSettings
from spec_server.text import Prompt
from spec_server.tools import ToolFormat

CHAT_PLACE = Place("messages", {"grammar": "response_format", "prompt": "messages"})
TOOLS_PLACE = Place("messages", {"grammar": "tools", "prompt": "messages"})
COMPLETION_PLACE = Place("prompt")


@dataclass(frozen=True, slots=True)
class Tools:
    """How calls are taken out of the answer.

    Attributes:
        schemas: function name to the JSON schema of its parameters.
        parallel: more than one call may be given back.
    """

    format: ToolFormat
    schemas: Mapping[str, Mapping[str, Any]]
    parallel: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """What is asked of the engine, and how it is reported.

    Attributes:
        asks: one a choice.
        prompts: what each choice's prompt was, where it is echoed; else empty texts.
        prompt_tokens: of all distinct prompts together.
        place: names request fields in the engine's errors.
        notes: what was asked for and is not done, one sentence each.
    """

    id: str
    model: str
    created: int
    asks: Sequence[Ask]
    place: Place
    prompt_tokens: int
    stream: bool = False
    include_usage: bool = False
    logprobs: int | None = None
    tools: Tools | None = None
    echoes: Sequence[str] = ()
    notes: Sequence[str] = field(default_factory=tuple)


def model_names(engine: Engine, settings: ServerSettings) -> tuple[str, ...]:
    """Every name that the model answers to; the first is the one that is shown."""
    full = engine.facts.model
    short = full.rstrip("/").rpartition("/")[2]
    return tuple(dict.fromkeys((*settings.served_names, short, full, "default")))


def plan_chat(engine: Engine, settings: ServerSettings, body: ChatRequest) -> Plan:
    """Render and tokenise a conversation.

    Raises:
        ApiError: a field is wrong or cannot be honoured.
        SpecError: the engine refuses something.
    """
    name = _model(engine, settings, body)
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_field("top_logprobs", body.top_logprobs, "left out unless logprobs is true")
    functions = tool_functions(body)
    format = engine.tokeniser.tool_format
    grammar = answer_grammar(body, functions, format)
    template = engine.tokeniser.wrapper.chat_template
    options, notes = template_options(body, template if isinstance(template, str) else None)
    thinking = thought_switch(grammar, thinking_switch(body))
    prompt = engine.tokeniser.render(
        template_messages(body.messages),
        thinking=thinking,
        tools=[t.model_dump(exclude_none=True) for t in body.tools or ()] if functions else None,
        options=options,
        limit=engine.facts.context_window,
    )
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    tools = None
    if functions and format is not None:
        schemas = {f.name: f.parameters for f in functions}
        tools = Tools(format, schemas, body.parallel_tool_calls is not False)
    ask = Ask(
        prompt,
        _sampling(engine, body, logprobs),
        _budget(settings, body.max_tokens, body.max_completion_tokens),
        tuple(body.stop or ()),
        body.max_draft,
        one_thought=tools is not None or grammar is not None,
        grammar=grammar,
        thinking=thinking,
        cache_salt=body.cache_salt or "",
    )
    return Plan(
        id=f"chatcmpl-{secrets.token_hex(12)}",
        model=name,
        created=int(time.time()),
        asks=_choices(settings, [ask], body.n),
        place=CHAT_PLACE if tools is None else TOOLS_PLACE,
        prompt_tokens=len(prompt.ids),
        stream=bool(body.stream),
        include_usage=body.include_usage,
        logprobs=logprobs,
        tools=tools,
        notes=notes,
    )


def plan_completion(engine: Engine, settings: ServerSettings, body: CompletionRequest) -> Plan:
    """Tokenise the prompts; errors as in `plan_chat`."""
    name = _model(engine, settings, body)
    if body.echo and body.logprobs is not None:
        raise unsupported("echo", "there are no log-probabilities of the prompt; leave one out")
    prompts = [_prompt(engine, given) for given in _prompts(body.prompt)]
    sampling = _sampling(engine, body, body.logprobs)
    budget = _budget(settings, body.max_tokens, None)
    asks = [
        Ask(
            prompt,
            sampling,
            budget,
            tuple(body.stop or ()),
            body.max_draft,
            split_thought=False,
            cache_salt=body.cache_salt or "",
        )
        for prompt in prompts
    ]
    times = body.n or 1
    return Plan(
        id=f"cmpl-{secrets.token_hex(12)}",
        model=name,
        created=int(time.time()),
        asks=_choices(settings, asks, body.n),
        place=COMPLETION_PLACE,
        prompt_tokens=sum(len(prompt.ids) for prompt in prompts),
        stream=bool(body.stream),
        include_usage=body.include_usage,
        logprobs=body.logprobs,
        echoes=[
            engine.tokeniser.decode(prompt.ids) if not isinstance(given, str) else given
            for prompt, given in zip(prompts, _prompts(body.prompt), strict=True)
            for _ in range(times)
        ]
        if body.echo
        else (),
    )


def _model(engine: Engine, settings: ServerSettings, body: AnswerRequest) -> str:
    """The name to answer under.

    Raises:
        ApiError: another model is asked for, or options only make sense in a stream.
    """
    if body.stream_options is not None and not body.stream:
        raise bad_field("stream_options", "...", "left out unless stream is true")
    names = model_names(engine, settings)
    if body.model is None or body.model == "default":
        return names[0]
    if body.model not in names:
        raise model_not_found(body.model, names[0])
    return body.model


def _budget(settings: ServerSettings, *given: int | None) -> int | None:
    asked = [budget for budget in given if budget is not None]
    return min(asked) if asked else settings.default_max_tokens


def _sampling(engine: Engine, body: AnswerRequest, logprobs: int | None) -> SamplingParams:
    """What the request says, on top of what the model's makers recommend."""
    asked = {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "min_p": body.min_p,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "repetition_penalty": body.repetition_penalty,
        "seed": body.seed,
    }
    given = {name: value for name, value in asked.items() if value is not None}
    bias = token_biases(body.logit_bias)
    recommended = engine.facts.sampling
    return replace(recommended, **given, logit_bias=bias, logprobs=logprobs)  # type: ignore[arg-type]


def _choices(settings: ServerSettings, asks: Sequence[Ask], n: int | None) -> list[Ask]:
    """Every prompt `n` times; seeds differ, so that seeded choices do."""
    times, most = 1 if n is None else n, settings.max_choices
    if not 1 <= times <= most:
        raise bad_field("n", n, f"a whole number, at least 1 and at most {most}")
    if len(asks) * times > most:
        raise bad_field(
            "prompt", f"{len(asks)} prompts, n {times}", f"at most {most} answers in all"
        )
    return [_seeded(ask, choice) for ask in asks for choice in range(times)]


def _seeded(ask: Ask, choice: int) -> Ask:
    seed = ask.sampling.seed
    if seed is None or not choice:
        return ask
    return replace(ask, sampling=replace(ask.sampling, seed=(seed + choice) % 2**63))


Given = str | list[int]


def _prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> Sequence[Given]:
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise bad_field("prompt", prompt, "a text, or a list that is not empty")
    if isinstance(prompt[0], int):
        return [prompt]
    return prompt


def _prompt(engine: Engine, given: Given) -> Prompt:
    if isinstance(given, str):
        return engine.tokeniser.encode(given, limit=engine.facts.context_window)
    if not given:
        raise bad_field("prompt", given, "a list of token ids that is not empty")
    return Prompt(tuple(given))
