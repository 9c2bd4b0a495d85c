"""The engine: text in, text out, from any thread, without HTTP."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypedDict, Unpack

from spec_core import Request, SamplingParams
from spec_core.errors import InvalidValueError
from spec_server.errors import ContextLengthError
from spec_server.job import Event, Job, Sink
from spec_server.loading import Bits, DType, Facts, Loaded, LoadOptions, Mode, load
from spec_server.results import Chunk, Completion
from spec_server.text import AnswerText, Message, Prompt, Tokeniser
from spec_server.worker import Limits, Models, Worker

PromptLike = str | Sequence[Message] | Prompt
"""A user's message, a conversation, or a prompt that is tokenised already."""


class AnswerOptions(TypedDict, total=False):
    """Keyword arguments of `Engine.stream` and `Engine.generate`; described at `Engine.stream`."""

    chat: bool
    system: str | None
    thinking: bool | None
    tools: Sequence[Mapping[str, Any]] | None
    sampling: SamplingParams | None
    max_tokens: int | None
    stop: str | Sequence[str]
    max_draft: int | None


class Answer(Iterator[Chunk]):
    """An answer on its way. Iterate for chunks; the last one holds the completion.

    Leaving early (`close`, or the end of a `with` block) takes the request back and frees its
    row; `cancel` does so too, but lets the iteration end with the completion so far.
    """

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._job: Job | None = None
        self._last: Completion | Exception | None = None

    def __next__(self) -> Chunk:
        if self._last is not None:
            raise StopIteration
        event = self._events.get()
        if isinstance(event, Exception):
            self._last = event
            raise event
        self._last = event.completion
        return event

    def result(self) -> Completion:
        """Wait for the end; chunks that were not read by then are skipped.

        Raises:
            SpecError: what the iteration raised, or would have.
        """
        for _ in self:
            pass
        assert self._last is not None
        if isinstance(self._last, Exception):
            raise self._last
        return self._last

    def cancel(self) -> None:
        """Take the request back. Safe from any thread; does nothing after the end."""
        if self._job is not None:
            self._job.cancelled.set()

    close = cancel

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()

    def _started(self, job: Job) -> Self:
        self._job = job
        return self


class Engine:
    """A target, its drafter and a tokenizer, ready to answer; made by `Engine.load`.

    Every method is safe from any thread. Requests that arrive together are decoded together.
    """

    def __init__(self, worker: Worker, tokeniser: Tokeniser, facts: Facts) -> None:
        self._worker = worker
        self.tokeniser = tokeniser
        self.facts = facts

    @classmethod
    def load(
        cls,
        model: str | Path,
        *,
        drafter: str | Path | None = None,
        mode: Mode = "auto",
        max_draft: int | None = None,
        lookup_drafts: bool = False,
        confidence_threshold: float | None = None,
        dtype: DType | None = None,
        kv_bits: Bits | None = None,
        drafter_bits: Bits | Literal["auto"] | None = "auto",
        trust_remote_code: bool = False,
        limits: Limits | None = None,
    ) -> Engine:
        """Load a target and what drafts for it, on the engine's own thread.

        Args:
            model: a local folder or a hub id.
            drafter: a local folder or a hub id; None: the one that is known for this target.
            mode: what drafts. "auto" takes the drafter that was given or is known, and lookup
                where there is none or it does not fit, which `facts.labels.fallbacks` then says.
            max_draft: cap on guesses a round; None: the drafter's whole block.
            lookup_drafts: let a hit of the lookup replace the drafter's guesses.
            confidence_threshold: cut a draft before the first guess below it, in (0, 1].
            dtype: of the target's weights and activations; None: see `loading.default_dtype`.
            kv_bits: quantise keys and values.
            drafter_bits: quantise the drafter's matrices; "auto": 4 bits on a GPU, none on a CPU.
            trust_remote_code: import Python code that the checkpoint brings.
            limits: how much runs at once.

        Raises:
            SpecError: a model or an option is not usable; the message says which and why.
        """
        options = LoadOptions(
            model=str(model),
            drafter=None if drafter is None else str(drafter),
            mode=mode,
            max_draft=max_draft,
            lookup_drafts=lookup_drafts,
            confidence_threshold=confidence_threshold,
            dtype=dtype,
            kv_bits=kv_bits,
            drafter_bits=drafter_bits,
            trust_remote_code=trust_remote_code,
        )
        made: list[Loaded] = []

        def on_worker() -> Models:
            made.append(load(options))
            return made[0].models

        worker = Worker(on_worker, limits or Limits())
        worker.start()
        return cls(worker, made[0].tokeniser, made.pop().facts)

    def generate(self, prompt: PromptLike, **options: Unpack[AnswerOptions]) -> Completion:
        """The whole answer at once; arguments and errors as in `stream`."""
        return self.stream(prompt, **options).result()

    def stream(
        self,
        prompt: PromptLike,
        *,
        chat: bool = True,
        system: str | None = None,
        thinking: bool | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        sampling: SamplingParams | None = None,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        max_draft: int | None = None,
    ) -> Answer:
        """Begin an answer and return it while it grows, round by round.

        Args:
            prompt: a user's message, a conversation, or a tokenised prompt.
            chat: put a string through the chat template; if false it is continued as it stands.
            system: a system message before the prompt.
            thinking: switch the model's thought on or off; None leaves the template's default.
            tools: function descriptions as JSON schemas.
            sampling: greedy if None.
            max_tokens: the answer's budget; None: what the context has room for.
            stop: strings that end the answer right before them.
            max_draft: cap on guesses a round for this request.

        Raises:
            InvalidValueError: a parameter is out of range.
            TemplateError: the chat template is missing or refused the messages.
            ContextLengthError: the prompt leaves no room for an answer.
            EngineClosedError: the engine is closed.
        """
        ready = self._prompt(prompt, chat, system, thinking, tools)
        answer = Answer()
        job = self.submit(
            ready,
            answer._events.put,
            sampling=sampling,
            max_tokens=max_tokens,
            stop=stop,
            max_draft=max_draft,
            split_thought=chat,
        )
        return answer._started(job)

    def submit(
        self,
        prompt: Prompt,
        sink: Sink,
        *,
        sampling: SamplingParams | None = None,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        max_draft: int | None = None,
        split_thought: bool = True,
    ) -> Job:
        """Queue a tokenised prompt; its events go to `sink` on the engine's thread.

        Arguments and errors as in `stream`. Setting the job's `cancelled` takes it back.
        """
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        text = AnswerText(
            self.tokeniser,
            stops=stops,
            markers=self.tokeniser.markers if split_thought else None,
            opens_thought=prompt.opens_thought,
        )
        request = Request(
            prompt=prompt.ids,
            sampling=sampling or SamplingParams(),
            max_tokens=self._budget(len(prompt.ids), max_tokens),
            end_tokens=self.tokeniser.end_tokens,
            max_draft=max_draft,
        )
        job = Job(request, text, sink, self.facts.labels)
        self._worker.submit(job)
        return job

    def close(self) -> None:
        """End the engine and free its models; answers that still run fail. Idempotent."""
        self._worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _prompt(
        self,
        prompt: PromptLike,
        chat: bool,
        system: str | None,
        thinking: bool | None,
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> Prompt:
        if isinstance(prompt, Prompt):
            return prompt
        if isinstance(prompt, str) and not chat:
            if system is not None or thinking is not None or tools:
                raise InvalidValueError(
                    "chat", False, "on where a system message, a thinking switch or tools are given"
                )
            return self.tokeniser.encode(prompt)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        return self.tokeniser.render(messages, thinking=thinking, tools=tools)

    def _budget(self, prompt_tokens: int, requested: int | None) -> int:
        """Answer tokens: what was asked for, as far as the context reaches."""
        room = self.facts.context_window - prompt_tokens
        if room < 1:
            raise ContextLengthError(prompt_tokens, self.facts.context_window, requested)
        return room if requested is None else min(requested, room)
