"""The engine: text in, text out, from any thread, without HTTP."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypedDict, Unpack

from spec_cache import Namespace, PrefixCache
from spec_core import Request, SamplingParams
from spec_core.errors import InvalidValueError
from spec_server.activity import Snapshot
from spec_server.answer import Answer, AsyncAnswer
from spec_server.errors import ContextLengthError, GrammarError, MemoryLimitError
from spec_server.grammar import (
    AnswerGrammar,
    GrammarCompiler,
    GrammarConstraint,
    thought_switch,
)
from spec_server.job import Job, Sink
from spec_server.limits import Limits
from spec_server.loading import (
    DEFAULT_MAX_DRAFT,
    Bits,
    DType,
    Facts,
    Loaded,
    LoadOptions,
    MaxDraft,
    Mode,
    load,
)
from spec_server.memory import MemoryBudget
from spec_server.results import Completion
from spec_server.scheduler import Models
from spec_server.text import AnswerText, Message, Prompt, Tokeniser
from spec_server.worker import Worker

PromptLike = str | Sequence[Message] | Prompt
"""A user's message, a conversation, or a prompt that is tokenised already."""

_CACHE_RAM, _MOST_CACHE_RAM = 2**30, 4 * 2**30


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
    grammar: AnswerGrammar | None
    cache_salt: str


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """Where prefixes are kept for reuse.

    Attributes:
        ram_bytes: the most they may take in memory; None: an eighth of what the memory limit
            leaves for requests, at most 4 GiB (1 GiB where nothing limits it).
        disk_bytes: the most that `directory` may hold; 0 without one.
        directory: where they outlive the process; None keeps them in memory only.
    """

    ram_bytes: int | None = None
    disk_bytes: int = 0
    directory: Path | None = None


@dataclass(frozen=True, slots=True)
class Ask:
    """A request for one answer.

    Attributes:
        prompt: tokenised.
        sampling: greedy by default.
        max_tokens: the answer's budget; None: what context and memory have room for.
        stop: strings that end the answer right before them.
        max_draft: cap on guesses a round.
        split_thought: take the model's thought out of the text.
        one_thought: only a thought at the answer's beginning is one; markers behind it are text.
        grammar: what the answer must be, or None.
        thinking: whether an answer with a grammar may begin with a thought; None: no, unless the
            grammar leaves room for free text.
        cache_salt: its tenant's; prefixes are shared between equal salts only.
    """

    prompt: Prompt
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    max_draft: int | None = None
    split_thought: bool = True
    one_thought: bool = False
    grammar: AnswerGrammar | None = None
    thinking: bool | None = None
    cache_salt: str = field(default="", repr=False)


class Engine:
    """A target, its drafter and a tokenizer, ready to answer; made by `Engine.load`.

    Every method is safe from any thread. Requests that arrive together are decoded together.
    """

    def __init__(
        self,
        worker: Worker,
        tokeniser: Tokeniser,
        facts: Facts,
        cache: PrefixCache | None = None,
    ) -> None:
        self._worker = worker
        self.tokeniser = tokeniser
        self.facts = facts
        self.cache = cache
        self._grammars: GrammarCompiler | None = None
        self._lock = threading.Lock()

    @classmethod
    def load(
        cls,
        model: str | Path,
        *,
        drafter: str | Path | None = None,
        mode: Mode = "auto",
        max_draft: MaxDraft = DEFAULT_MAX_DRAFT,
        lookup_drafts: bool | None = None,
        confidence_threshold: float | None = None,
        dtype: DType | None = None,
        kv_bits: Bits | None = None,
        drafter_bits: Bits | Literal["auto"] | None = "auto",
        trust_remote_code: bool = False,
        limits: Limits | None = None,
        prefix_cache: CacheOptions | None = CacheOptions(),
        announce: Callable[[str], None] | None = None,
    ) -> Engine:
        """Load a target and what drafts for it, on the engine's own thread.

        Args:
            model: a local folder or a hub id.
            drafter: a local folder or a hub id; None: the one that is known for this target.
            mode: what drafts. "auto" takes the drafter that was given or is known, and lookup
                where there is none or it does not fit, which `facts.labels.fallbacks` then says.
            max_draft: cap on guesses a round, 0 being plain decoding; None: the drafter's whole
                block; "auto": the length with the most tokens a second, from round times that are
                measured once on this device (a few seconds) and from live acceptance. (The command
                line takes "auto" where nothing else is asked for.)
            lookup_drafts: let a hit of the lookup replace the drafter's guesses; None: where
                `max_draft` is "auto".
            confidence_threshold: cut a draft before the first guess below it, in (0, 1].
            dtype: of the target's weights and activations; None: see `loading.default_dtype`.
            kv_bits: quantise keys and values.
            drafter_bits: quantise the drafter's matrices; "auto": 4 bits on a GPU, none on a CPU.
            trust_remote_code: import Python code that the checkpoint brings.
            limits: how much runs at once.
            prefix_cache: keep what prompts computed, so that a prompt that begins as an earlier
                one did resumes where the two part (in memory, by default); None computes every
                prompt anew. What it may take in memory is taken off the limit for requests.
            announce: told, in a sentence, what takes a while; called on the engine's thread.

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
        limits = limits or Limits()
        made: list[Loaded] = []

        def on_worker() -> Models:
            made.append(load(options, max_rows=limits.max_batch, announce=announce))
            return made[0].models

        caches: list[PrefixCache] = []

        def keep(memory: MemoryBudget) -> tuple[PrefixCache, Namespace]:
            assert prefix_cache is not None
            caches.append(_open(prefix_cache, memory.room))
            return caches[0], made[0].namespace

        worker = Worker(on_worker, limits, None if prefix_cache is None else keep)
        try:
            worker.start()
            facts = _within(made[0].facts, limits.context_window)
            _check_room(worker.memory, facts.context_window)
            return cls(worker, made[0].tokeniser, facts, caches[0] if caches else None)
        except BaseException:
            worker.close()
            for cache in caches:
                cache.close()
            raise

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
        grammar: AnswerGrammar | None = None,
        cache_salt: str = "",
    ) -> Answer:
        """Begin an answer and return it while it grows, round by round.

        Args:
            prompt: a user's message, a conversation, or a tokenised prompt.
            chat: put a string through the chat template; if false it is continued as it stands.
            system: a system message before the prompt.
            thinking: switch the model's thought on or off; None leaves the template's default,
                or switches it off where there is a grammar.
            tools: function descriptions as JSON schemas.
            sampling: greedy if None.
            max_tokens: the answer's budget; None: what the context has room for.
            stop: strings that end the answer right before them.
            max_draft: cap on guesses a round for this request; 0: plain decoding.
            grammar: what the answer must be (`JsonAnswer`, `CallsAnswer`); it is compiled before
                the request is queued.
            cache_salt: a tenant's secret; prefixes are shared between equal salts only.

        Raises:
            InvalidValueError: a parameter is out of range.
            TemplateError: the chat template is missing or refused the messages.
            ContextLengthError: the prompt leaves no room for an answer.
            MemoryLimitError: the prompt needs more memory than there is.
            GrammarError: the grammar is invalid, too costly, or would not be enforced.
            EngineBusyError: as many requests wait as may.
            EngineClosedError: the engine is closed.
        """
        answer = Answer()
        thinking = thought_switch(grammar, thinking) if chat else thinking
        ask = Ask(
            self._prompt(prompt, chat, system, thinking, tools),
            sampling or SamplingParams(),
            max_tokens,
            (stop,) if isinstance(stop, str) else tuple(stop),
            max_draft,
            split_thought=chat,
            one_thought=grammar is not None or bool(tools),
            grammar=grammar,
            thinking=thinking if chat else False,
            cache_salt=cache_salt,
        )
        return answer.started(self.submit(ask, answer.put))

    async def agenerate(self, prompt: PromptLike, **options: Unpack[AnswerOptions]) -> Completion:
        """`generate` for an event loop: nothing blocks it."""
        async with self.astream(prompt, **options) as answer:
            return await answer.result()

    def astream(self, prompt: PromptLike, **options: Unpack[AnswerOptions]) -> AsyncAnswer:
        """`stream` for an event loop; the request is queued when iteration begins, and taken back
        when the loop's task ends early or the `async with` block does."""
        return AsyncAnswer(lambda: self.stream(prompt, **options))

    def submit(self, ask: Ask, sink: Sink) -> Job:
        """Queue a request; its events go to `sink` on the engine's thread. Errors as in `stream`.
        `cancel` takes it back."""
        return self.submit_all([(ask, sink)])[0]

    def submit_all(self, asked: Sequence[tuple[Ask, Sink]]) -> list[Job]:
        """Queue all of these requests, or none; as `submit`."""
        jobs = [self._job(ask, sink) for ask, sink in asked]
        self._worker.submit_all(jobs)
        return jobs

    def cancel(self, job: Job) -> None:
        """Take a request back before its next forward, from any thread: its row is freed, and its
        sink gets a last chunk with what there is, which ended as "cancelled". After the answer's
        end this does nothing."""
        job.cancelled.set()

    @property
    def activity(self) -> Snapshot:
        """What the engine is doing and has done."""
        return self._worker.activity.snapshot()

    @property
    def alive(self) -> bool:
        """It takes requests."""
        return self._worker.alive

    def _job(self, ask: Ask, sink: Sink) -> Job:
        self._check_ids(ask)
        text = AnswerText(
            self.tokeniser,
            stops=ask.stop,
            markers=self.tokeniser.markers if ask.split_thought else None,
            opens_thought=ask.prompt.opens_thought,
            one_thought=ask.one_thought,
        )
        request = Request(
            prompt=ask.prompt.ids,
            sampling=ask.sampling,
            max_tokens=self._budget(len(ask.prompt.ids), ask.max_tokens),
            end_tokens=self.tokeniser.end_tokens,
            max_draft=self._cap(ask.max_draft),
            constraint=self._constraint(ask),
        )
        return Job(request, text, sink, self.facts.labels, ask.cache_salt)

    def _cap(self, max_draft: int | None) -> int | None:
        """A request's cap as far as it is one: drafts are never longer than a block."""
        if max_draft is None or max_draft < self.facts.max_block:
            return max_draft
        return None

    def _check_ids(self, ask: Ask) -> None:
        size = self.facts.vocab_size
        if size is None:
            return
        for name, ids in (("prompt", ask.prompt.ids), ("logit_bias", ask.sampling.logit_bias)):
            wrong = next((i for i in ids if not 0 <= i < size), None)
            if wrong is not None:
                raise InvalidValueError(name, wrong, f"a token id from 0 to {size - 1}")

    def _constraint(self, ask: Ask) -> GrammarConstraint | None:
        if ask.grammar is None:
            return None
        return self._compiler().compile(
            ask.grammar, thinking=ask.thinking, opens_thought=ask.prompt.opens_thought
        )

    def _compiler(self) -> GrammarCompiler:
        with self._lock:
            if self._grammars is None:
                if self.facts.vocab_size is None:
                    raise GrammarError("this engine's vocabulary is not known")
                self._grammars = GrammarCompiler(self.tokeniser, self.facts.vocab_size)
            return self._grammars

    def close(self) -> None:
        """End the engine and free its models; answers that still run fail. Idempotent."""
        self._worker.close()
        if self._grammars is not None:
            self._grammars.close()
        if self.cache is not None:
            self.cache.close()

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
            return self.tokeniser.encode(prompt, limit=self.facts.context_window)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        return self.tokeniser.render(
            messages, thinking=thinking, tools=tools, limit=self.facts.context_window
        )

    def _budget(self, prompt_tokens: int, requested: int | None) -> int:
        """Answer tokens: what was asked for, as far as context and memory reach."""
        window = self.facts.context_window
        if prompt_tokens >= window:
            raise ContextLengthError(prompt_tokens, window, requested)
        memory = self._worker.memory
        longest = window if memory is None else memory.longest(window)
        if memory is not None and prompt_tokens >= longest:
            raise _too_large(memory, prompt_tokens)
        room = longest - prompt_tokens
        return room if requested is None else min(requested, room)


def _open(options: CacheOptions, room: float | None) -> PrefixCache:
    """The prefix cache, in the room that the memory limit leaves."""
    ram = options.ram_bytes
    if ram is None:
        ram = _CACHE_RAM if room is None else max(1, min(int(room) // 8, _MOST_CACHE_RAM))
    elif room is not None and ram >= room:
        raise InvalidValueError(
            "ram_bytes",
            ram,
            f"less than the {room / 2**20:.0f} MiB that the memory limit leaves for requests",
        )
    return PrefixCache(ram, options.disk_bytes, options.directory)


def _within(facts: Facts, context_window: int | None) -> Facts:
    """The facts with a smaller context window."""
    if context_window is None:
        return facts
    if context_window > facts.context_window:
        raise InvalidValueError(
            "context_window",
            context_window,
            f"at most {facts.context_window}, which the model was made for",
        )
    return replace(facts, context_window=context_window)


def _check_room(memory: MemoryBudget | None, window: int) -> None:
    """Raise MemoryLimitError where no request could ever be answered."""
    if memory is None or memory.longest(window) > 1:
        return
    need, have = memory.need(1, 2) / 2**20, (memory.room or 0.0) / 2**20
    raise MemoryLimitError(
        f"the memory limit leaves {have:.0f} MiB for requests beside the model, and the smallest "
        f"needs about {need:.0f} MiB; raise that limit"
    )


def _too_large(memory: MemoryBudget, prompt_tokens: int) -> MemoryLimitError:
    need, have = memory.need(1, prompt_tokens + 1) / 2**20, (memory.room or 0.0) / 2**20
    return MemoryLimitError(
        f"a prompt of {prompt_tokens} tokens needs about {need:.0f} MiB, but the memory limit "
        f"leaves {have:.0f} MiB for requests; shorten it, or raise that limit"
    )
