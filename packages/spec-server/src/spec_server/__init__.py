"""An engine for lossless speculative decoding on MLX: text in, text out, from any thread."""

from spec_server.engine import Answer, AnswerOptions, Engine
from spec_server.errors import (
    ContextLengthError,
    EngineClosedError,
    EngineError,
    ModelLoadError,
    PromptError,
    TemplateError,
)
from spec_server.loading import Facts, LoadOptions
from spec_server.results import AnswerStatistics, Chunk, Completion, FinishReason
from spec_server.text import Message, Prompt, Tokeniser
from spec_server.worker import Limits

__all__ = [
    "Answer",
    "AnswerOptions",
    "AnswerStatistics",
    "Chunk",
    "Completion",
    "ContextLengthError",
    "Engine",
    "EngineClosedError",
    "EngineError",
    "Facts",
    "FinishReason",
    "Limits",
    "LoadOptions",
    "Message",
    "ModelLoadError",
    "Prompt",
    "PromptError",
    "TemplateError",
    "Tokeniser",
]
