"""Compiles grammars off the engine's thread, within limits, and remembers them."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from threading import Lock
from typing import Any, Protocol

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from spec_server.errors import GrammarError
from spec_server.grammar import lark
from spec_server.grammar.constraint import GrammarConstraint, Phase, Thoughts
from spec_server.grammar.lark import Function
from spec_server.grammar.schema import check_schema
from spec_server.text.thinking import ThinkingMarkers
from spec_server.tools import ToolFormat


class Vocabulary(Protocol):
    """What a compiler asks of a tokenizer."""

    @property
    def end_tokens(self) -> frozenset[int]: ...

    @property
    def markers(self) -> ThinkingMarkers | None: ...

    def backend_json(self) -> str:
        """tokenizer.json's text, with every added token."""

    def marker_ids(self, text: str) -> tuple[int, ...]:
        """The token ids of a marker."""


@dataclass(frozen=True, slots=True)
class JsonAnswer:
    """The answer is one JSON value.

    Attributes:
        schema: what describes it; the default is any object.
        field: where it came from, for messages.
    """

    schema: Mapping[str, Any] | bool
    field: str = "schema"


ANY_OBJECT = JsonAnswer({"type": "object"})


@dataclass(frozen=True, slots=True)
class CallsAnswer:
    """The answer is one tool call, or several; or a JSON value where `instead` is given.

    Attributes:
        format: how the model writes calls.
        functions: those that may be called.
        parallel: whether several calls may follow each other.
        free: any text may stand around the calls, and there need not be one.
        instead: a JSON answer that may stand in the calls' place.
    """

    format: ToolFormat
    functions: Sequence[Function]
    parallel: bool = True
    free: bool = False
    instead: JsonAnswer | None = None


AnswerGrammar = JsonAnswer | CallsAnswer


def thought_switch(grammar: AnswerGrammar | None, thinking: bool | None) -> bool | None:
    """The thinking switch of an answer: off under a grammar, unless it was asked for.

    A mask that leaves a choice between a thought and the grammar's first tokens would push models
    into thoughts that they never meant to have.
    """
    if thinking is None and grammar is not None and not _is_free(grammar):
        return False
    return thinking


def _is_free(grammar: AnswerGrammar) -> bool:
    return isinstance(grammar, CallsAnswer) and grammar.free


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """What a grammar may cost.

    Attributes:
        max_bytes: of a schema as JSON text.
        seconds: to compile it.
        remembered: compiled grammars that are kept.
    """

    max_bytes: int = 131_072
    seconds: float = 10.0
    remembered: int = 64


class GrammarCompiler:
    """Makes constraints for one target; safe from any thread.

    Args:
        vocabulary: the target's tokenizer.
        vocab_size: V, the number of columns of the target's logits.
        limits: what a grammar may cost.
    """

    def __init__(
        self, vocabulary: Vocabulary, vocab_size: int, limits: GrammarLimits | None = None
    ) -> None:
        self._vocabulary = vocabulary
        self._vocab_size = vocab_size
        self._limits = limits or GrammarLimits()
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="spec-grammar")
        self._lock = Lock()
        self._tokenizer: LLTokenizer | None = None
        self._known: OrderedDict[str, LLMatcher] = OrderedDict()
        self._thoughts = _thoughts(vocabulary)

    def compile(
        self, grammar: AnswerGrammar, *, thinking: bool | None, opens_thought: bool
    ) -> GrammarConstraint:
        """A fresh constraint; waits for the compiler's own thread.

        Args:
            grammar: what the answer must be.
            thinking: whether the answer may begin with a thought; None: as `thought_switch`.
            opens_thought: whether the prompt ends inside a thought.

        Raises:
            GrammarError: the grammar is invalid, too costly, or would not be enforced.
        """
        text = self._text(grammar)
        matcher = self._remembered(text) or self._wait(self._pool.submit(self._matcher, text))
        if opens_thought and self._thoughts is None:
            raise GrammarError(
                "the prompt opens a thought whose markers are not single tokens, so the answer "
                "cannot be held to a grammar; switch thinking off"
            )
        may_think = thought_switch(grammar, thinking) is not False
        phase = Phase.OPEN if self._thoughts is not None and may_think else None
        return GrammarConstraint(
            matcher,
            self._vocab_size,
            self._vocabulary.end_tokens,
            self._thoughts,
            Phase.THOUGHT if opens_thought else phase or Phase.GRAMMAR,
        )

    def close(self) -> None:
        """Give the threads back; what still compiles is left to end by itself."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _wait(self, future: Future[LLMatcher]) -> LLMatcher:
        try:
            return future.result(self._limits.seconds)
        except FutureTimeoutError:
            future.cancel()
            raise GrammarError(
                f"the grammar took more than {self._limits.seconds:g} s to compile; simplify it"
            ) from None

    def _text(self, grammar: AnswerGrammar) -> str:
        if isinstance(grammar, JsonAnswer):
            check_schema(grammar.schema, grammar.field, max_bytes=self._limits.max_bytes)
            return lark.json_answer(grammar.schema)
        for function in grammar.functions:
            name = f"parameters of {function.name}"
            check_schema(function.parameters, name, max_bytes=self._limits.max_bytes)
        if grammar.instead is not None:
            check_schema(grammar.instead.schema, grammar.instead.field)
        return lark.tool_calls(
            grammar.format,
            grammar.functions,
            self._vocabulary.marker_ids,
            parallel=grammar.parallel,
            free=grammar.free,
            answer=None if grammar.instead is None else grammar.instead.schema,
        )

    def _remembered(self, text: str) -> LLMatcher | None:
        """A copy of a matcher that was compiled before."""
        with self._lock:
            known = self._known.get(text)
            if known is None:
                return None
            self._known.move_to_end(text)
            return known.deep_copy()

    def _matcher(self, text: str) -> LLMatcher:
        """Compile; the result is a copy of what is remembered."""
        fresh = LLMatcher(
            self._tokens(), text, log_level=0, limits=LLParserLimits(verbose_errors=False)
        )
        if fresh.is_error():
            raise GrammarError(f"the schema cannot be enforced: {_sentence(fresh.get_error())}")
        with self._lock:
            self._known[text] = fresh
            while len(self._known) > self._limits.remembered:
                self._known.popitem(last=False)
            return fresh.deep_copy()

    def _tokens(self) -> LLTokenizer:
        """The tokenizer as llguidance has it (a second for a large vocabulary)."""
        with self._lock:
            if self._tokenizer is None:
                ends = sorted(self._vocabulary.end_tokens)
                text = self._vocabulary.backend_json()
                size = max(self._vocab_size, _size(text))
                self._tokenizer = LLTokenizer(text, n_vocab=size, eos_token=ends)
            return self._tokenizer


def _size(tokenizer_json: str) -> int:
    """One more than the highest token id."""
    content = json.loads(tokenizer_json)
    ids: list[int] = [token["id"] for token in content.get("added_tokens", ())]
    vocabulary = content["model"]["vocab"]
    ids.append(len(vocabulary) - 1)
    if isinstance(vocabulary, dict):
        ids.extend(vocabulary.values())
    return max(ids) + 1


def _thoughts(vocabulary: Vocabulary) -> Thoughts | None:
    markers = vocabulary.markers
    if markers is None:
        return None
    start, end = vocabulary.marker_ids(markers.start), vocabulary.marker_ids(markers.end)
    if len(start) != 1 or len(end) != 1:
        return None
    spaces = (vocabulary.marker_ids(space) for space in ("\n\n", "\n", " "))
    return Thoughts(start[0], end[0], frozenset(ids[0] for ids in spaces if len(ids) == 1))


def _sentence(message: str) -> str:
    """llguidance's message without the grammar that it quotes behind it, and its place there."""
    said = re.split(r"\n\s*\d+ \| ", message, maxsplit=1)[0]
    said = re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", said)
    return " ".join(said.split())[:500]
