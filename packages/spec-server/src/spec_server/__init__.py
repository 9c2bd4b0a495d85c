"""An engine for lossless speculative decoding on MLX: text in, text out, from any thread."""

from spec_server.answer import Answer, AsyncAnswer
from spec_server.engine import AnswerOptions, Ask, CacheOptions, Engine
from spec_server.errors import (
    ContextLengthError,
    EngineBusyError,
    EngineClosedError,
    EngineError,
    GrammarError,
    MemoryLimitError,
    ModelLoadError,
    PromptError,
    TemplateError,
)
from spec_server.grammar import CallsAnswer, Function, JsonAnswer
from spec_server.limits import Limits
from spec_server.loading import Facts, LoadOptions
from spec_server.results import AnswerStatistics, Chunk, Completion, FinishReason
from spec_server.text import Message, Prompt, Tokeniser

__all__ = [
    "Answer",
    "AnswerOptions",
    "AnswerStatistics",
    "Ask",
    "AsyncAnswer",
    "CacheOptions",
    "CallsAnswer",
    "Chunk",
    "Completion",
    "ContextLengthError",
    "Engine",
    "EngineBusyError",
    "EngineClosedError",
    "EngineError",
    "Facts",
    "FinishReason",
    "Function",
    "GrammarError",
    "JsonAnswer",
    "Limits",
    "LoadOptions",
    "MemoryLimitError",
    "Message",
    "ModelLoadError",
    "Prompt",
    "PromptError",
    "TemplateError",
    "Tokeniser",
]
