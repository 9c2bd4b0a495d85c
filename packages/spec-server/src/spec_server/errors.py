"""The errors of spec-server: what failed, the value seen, what to do."""

from __future__ import annotations

from spec_core.errors import SpecError


class EngineError(SpecError):
    """The engine cannot do what was asked."""


class ModelLoadError(EngineError):
    """A target, a drafter or a tokenizer could not be loaded as asked."""


class EngineClosedError(EngineError):
    """The engine was closed, or its worker ended."""


class EngineBusyError(EngineError):
    """As many requests wait as may; try again later.

    Attributes:
        running: requests that have a row.
        waiting: requests that wait for one.
    """

    def __init__(self, running: int, waiting: int) -> None:
        super().__init__(
            f"{running} requests are running and {waiting} are waiting, as many as this engine "
            "takes; try again in a moment"
        )
        self.running = running
        self.waiting = waiting


class MemoryLimitError(EngineError):
    """A request needs more memory than the limit leaves, even alone; or every request would."""


class PromptError(EngineError):
    """A prompt cannot be turned into tokens."""


class TemplateError(PromptError):
    """The chat template is missing, or refused the messages; the message quotes its sentence."""


class ContextLengthError(PromptError):
    """A prompt leaves no room for an answer.

    Attributes:
        prompt_tokens: the prompt's length.
        limit: the most positions a request may use.
        requested: the answer tokens asked for, or None.
    """

    def __init__(
        self, prompt_tokens: int, limit: int, requested: int | None, *, at_least: bool = False
    ) -> None:
        asked = "" if requested is None else f" and {requested} more were requested"
        count = f"at least {prompt_tokens}" if at_least else str(prompt_tokens)
        super().__init__(
            f"the prompt has {count} tokens{asked}, but the context holds {limit} "
            "positions in all; shorten the prompt so that at least one position is left"
        )
        self.prompt_tokens = prompt_tokens
        self.limit = limit
        self.requested = requested


class GrammarError(EngineError):
    """A schema or grammar is invalid, too large, or would not be enforced; names the place."""
