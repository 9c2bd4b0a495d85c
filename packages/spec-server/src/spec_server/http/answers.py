"""What clients are sent: choices as they grow, usage, statistics."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from spec_core import TokenLogprob
from spec_server.engine import Ask
from spec_server.http.plan import Plan, Tools
from spec_server.results import AnswerStatistics, Chunk, Completion
from spec_server.text import Tokeniser
from spec_server.tools import ToolCall, ToolPiece, ToolSplit


@dataclass(frozen=True, slots=True)
class Delta:
    """What a chunk added to a choice."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()

    @property
    def empty(self) -> bool:
        return not (self.content or self.reasoning or self.calls or self.logprobs)


@dataclass(slots=True)
class Choice:
    """One choice of a response, assembled from the engine's chunks.

    Attributes:
        index: its number in the response.
        completion: the engine's report, at the end.
        enough: no more of the answer is wanted (the one call that was allowed is there).
    """

    index: int
    ask: Ask
    tools: Tools | None
    tokeniser: Tokeniser
    completion: Completion | None = None
    enough: bool = False
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[tuple[str, ToolCall]] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    _split: ToolSplit | None = None

    def __post_init__(self) -> None:
        if self.tools is not None:
            self._split = ToolSplit(self.tools.format, self.tools.schemas)

    def feed(self, chunk: Chunk) -> Delta:
        """Take a chunk in and say what it adds."""
        piece = self._piece(chunk)
        calls = piece.calls
        if self.tools is not None and not self.tools.parallel and calls:
            calls, self.enough = calls[:1], True
        shown = tuple(
            entry for entry in chunk.logprobs or () if entry.token not in self.tokeniser.end_tokens
        )
        self.content.append(piece.content)
        self.reasoning.append(chunk.reasoning)
        self.calls.extend((f"call_{secrets.token_hex(12)}", call) for call in calls)
        self.logprobs.extend(shown)
        self.completion = chunk.completion
        return Delta(piece.content, chunk.reasoning, calls, shown)

    def _piece(self, chunk: Chunk) -> ToolPiece:
        if self._split is None:
            return ToolPiece(chunk.text)
        if self.enough:
            return ToolPiece()
        piece = self._split.feed(chunk.text)
        if chunk.completion is None:
            return piece
        rest = self._split.finish()
        return ToolPiece(piece.content + rest.content, piece.calls + rest.calls)

    @property
    def finish_reason(self) -> str:
        assert self.completion is not None
        if self.calls and (self.enough or self.completion.finish_reason != "length"):
            return "tool_calls"
        return self.completion.finish_reason

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of the thought, its markers included."""
        assert self.completion is not None
        if not self.completion.reasoning or self.tokeniser.markers is None:
            return 0
        close = self.tokeniser.marker_ids(self.tokeniser.markers.end)
        ids = self.completion.token_ids
        for end in range(len(close), len(ids) + 1):
            if ids[end - len(close) : end] == close:
                return end
        return len(ids)


# ------------------------------------------------------------------ chat


def chat_completion(plan: Plan, choices: Sequence[Choice]) -> dict[str, Any]:
    """A whole `chat.completion`."""
    return {
        "id": plan.id,
        "object": "chat.completion",
        "created": plan.created,
        "model": plan.model,
        "choices": [_chat_choice(plan, choice) for choice in choices],
        "usage": usage(plan, choices),
        "x_spec": statistics(plan, choices),
    }


def _chat_choice(plan: Plan, choice: Choice) -> dict[str, Any]:
    content = "".join(choice.content)
    message: dict[str, Any] = {
        "role": "assistant",
        "content": content or (None if choice.calls else ""),
        "refusal": None,
    }
    reasoning = "".join(choice.reasoning)
    if reasoning:
        message |= {"reasoning_content": reasoning, "reasoning": reasoning}
    if choice.calls:
        message["tool_calls"] = [_call(call_id, call) for call_id, call in choice.calls]
    return {
        "index": choice.index,
        "message": message,
        "logprobs": _chat_logprobs(plan, choice, choice.logprobs),
        "finish_reason": choice.finish_reason,
    }


def _call(call_id: str, call: ToolCall) -> dict[str, Any]:
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def chat_chunk(
    plan: Plan, choice: Choice, delta: dict[str, Any], *, finish: str | None = None, **more: Any
) -> dict[str, Any]:
    """One `chat.completion.chunk`; `content` is there in every delta."""
    one = {
        "index": choice.index,
        "delta": {"content": "", **delta},
        "logprobs": more.pop("logprobs", None),
        "finish_reason": finish,
    }
    return _chunk(plan, "chat.completion.chunk", [one]) | more


def chat_deltas(plan: Plan, choice: Choice, delta: Delta) -> Iterable[dict[str, Any]]:
    """The chunks that carry a delta."""
    logprobs = _chat_logprobs(plan, choice, delta.logprobs) if delta.logprobs else None
    if delta.reasoning:
        both = {"reasoning_content": delta.reasoning, "reasoning": delta.reasoning}
        yield chat_chunk(plan, choice, both, logprobs=logprobs)
        logprobs = None
    if delta.content or logprobs is not None:
        yield chat_chunk(plan, choice, {"content": delta.content}, logprobs=logprobs)
    first = len(choice.calls) - len(delta.calls)
    for index, (call_id, call) in enumerate(choice.calls[first:], start=first):
        begun = {"index": index, **_call(call_id, ToolCall(call.name, ""))}
        yield chat_chunk(plan, choice, {"tool_calls": [begun]})
        arguments = {"index": index, "function": {"arguments": call.arguments}}
        yield chat_chunk(plan, choice, {"tool_calls": [arguments]})


def _chat_logprobs(
    plan: Plan, choice: Choice, entries: Sequence[TokenLogprob]
) -> dict[str, Any] | None:
    if plan.logprobs is None:
        return None
    return {"content": [_entry(choice.tokeniser, e) for e in entries], "refusal": None}


def _entry(tokeniser: Tokeniser, entry: TokenLogprob) -> dict[str, Any]:
    top = [_token(tokeniser, token, value) for token, value in entry.top]
    return {**_token(tokeniser, entry.token, entry.logprob), "top_logprobs": top}


def _token(tokeniser: Tokeniser, token: int, value: float) -> dict[str, Any]:
    raw = tokeniser.token_bytes(token)
    text = raw.decode("utf-8", "replace") if raw else tokeniser.token_text(token)
    return {"token": text, "logprob": max(value, -9999.0), "bytes": list(raw or text.encode())}


# ------------------------------------------------------------------ completions


def text_completion(plan: Plan, choices: Sequence[Choice]) -> dict[str, Any]:
    """A whole `text_completion`."""
    return {
        "id": plan.id,
        "object": "text_completion",
        "created": plan.created,
        "model": plan.model,
        "choices": [
            {
                "index": choice.index,
                "text": echo(plan, choice) + "".join(choice.content),
                "logprobs": _text_logprobs(plan, choice, choice.logprobs, 0),
                "finish_reason": choice.finish_reason,
            }
            for choice in choices
        ],
        "usage": usage(plan, choices),
        "x_spec": statistics(plan, choices),
    }


def echo(plan: Plan, choice: Choice) -> str:
    """The prompt, where it is wanted back."""
    return plan.echoes[choice.index] if plan.echoes else ""


def text_chunk(
    plan: Plan, choice: Choice, text: str, *, finish: str | None = None, **more: Any
) -> dict[str, Any]:
    """One chunk of a `text_completion` stream."""
    one = {
        "index": choice.index,
        "text": text,
        "logprobs": more.pop("logprobs", None),
        "finish_reason": finish,
    }
    return _chunk(plan, "text_completion", [one]) | more


def text_deltas(plan: Plan, choice: Choice, delta: Delta) -> Iterable[dict[str, Any]]:
    """The chunks that carry a delta."""
    if delta.empty:
        return
    before = sum(map(len, choice.content)) - len(delta.content)
    logprobs = _text_logprobs(plan, choice, delta.logprobs, before)
    yield text_chunk(plan, choice, delta.content, logprobs=logprobs)


def _text_logprobs(
    plan: Plan, choice: Choice, entries: Sequence[TokenLogprob], offset: int
) -> dict[str, Any] | None:
    """The older layout: four lists, one entry a token."""
    if plan.logprobs is None:
        return None
    offsets, tokens = [], [_token(choice.tokeniser, e.token, e.logprob) for e in entries]
    for token in tokens:
        offsets.append(offset)
        offset += len(token["token"])
    tops = [[_token(choice.tokeniser, t, v) for t, v in e.top] for e in entries]
    return {
        "tokens": [token["token"] for token in tokens],
        "token_logprobs": [token["logprob"] for token in tokens],
        "top_logprobs": [{t["token"]: t["logprob"] for t in top} for top in tops]
        if plan.logprobs
        else None,
        "text_offset": offsets,
    }


# ------------------------------------------------------------------ both


def _chunk(plan: Plan, object: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {
        "id": plan.id,
        "object": object,
        "created": plan.created,
        "model": plan.model,
        "choices": choices,
    }
    return made | {"usage": None} if plan.include_usage else made


def usage_chunk(plan: Plan, choices: Sequence[Choice], object: str) -> dict[str, Any]:
    """The last chunk of a stream that asked for usage."""
    return _chunk(plan, object, []) | {"usage": usage(plan, choices)}


def usage(plan: Plan, choices: Sequence[Choice]) -> dict[str, Any]:
    """Token counts; drafted tokens appear as accepted and rejected predictions."""
    done = [c.completion for c in choices if c.completion is not None]
    generated = sum(c.completion_tokens for c in done)
    accepted = sum(c.statistics.accepted for c in done)
    drafted = sum(c.statistics.drafted for c in done)
    cached = [c.statistics.cached_tokens for c in done]
    return {
        "prompt_tokens": plan.prompt_tokens,
        "completion_tokens": generated,
        "total_tokens": plan.prompt_tokens + generated,
        "prompt_tokens_details": {"cached_tokens": min(max(cached), plan.prompt_tokens)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
            "reasoning_tokens": sum(c.reasoning_tokens for c in choices),
        },
    }


def statistics(plan: Plan, choices: Sequence[Choice]) -> dict[str, Any]:
    """`x_spec`: how the answer came about; sums over the choices, where there are several."""
    seen = [c.completion.statistics for c in choices if c.completion is not None]
    rounds, accepted = sum(s.rounds for s in seen), sum(s.accepted for s in seen)
    first = seen[0]
    fallbacks = dict.fromkeys(f for s in seen for f in s.fallbacks)
    return {
        "mode": first.mode,
        "drafter": first.drafter,
        "max_draft": first.max_draft,
        "rounds": rounds,
        "drafted": sum(s.drafted for s in seen),
        "accepted": accepted,
        "mean_accept_length": 1.0 + (accepted / rounds if rounds else 0.0),
        "round_accepts": [n for s in seen for n in s.round_accepts],
        "accept_by_position": list(first.accept_by_position)
        if len(seen) == 1
        else _by_position(seen),
        "tokens_per_second": sum(s.tokens_per_second for s in seen),
        "ttft_seconds": min(s.ttft_seconds for s in seen),
        "queue_seconds": max(s.queue_seconds for s in seen),
        "seconds": max(s.seconds for s in seen),
        "cached_tokens": max(s.cached_tokens for s in seen),
        "cache_stopped": first.cache_stopped,
        "cache_stopped_at": first.cache_stopped_at,
        "fallbacks": [*fallbacks, *plan.notes],
    }


def _by_position(seen: Sequence[AnswerStatistics]) -> list[float]:
    """For each draft slot, the mean of the choices that reached it, weighted by their rounds."""
    longest = max(len(s.accept_by_position) for s in seen)
    shares = []
    for slot in range(longest):
        reached = [s for s in seen if len(s.accept_by_position) > slot]
        weight = sum(s.rounds for s in reached) or 1
        shares.append(sum(s.accept_by_position[slot] * s.rounds for s in reached) / weight)
    return shares
