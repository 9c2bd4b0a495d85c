"""A target folder's tokenizer: messages and text to ids, ids to text."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec_server.errors import ContextLengthError, ModelLoadError, PromptError, TemplateError
from spec_server.generation_config import end_tokens
from spec_server.text.thinking import ThinkingMarkers
from spec_server.tools import ToolFormat, detect
from spec_server.tools.parsers import GEMMA_QUOTE

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

Message = Mapping[str, Any]
"""One chat message as templates read it: role, content, tool_calls, reasoning_content, ..."""

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt, ready for the target.

    Attributes:
        ids: its tokens.
        opens_thought: it ends inside a thought that the template opened.
    """

    ids: tuple[int, ...]
    opens_thought: bool = False


class Tokeniser:
    """Wraps mlx-lm's tokenizer; safe to use from any thread.

    Attributes:
        end_tokens: ids that end an answer (generation_config.json, config.json, tokenizer).
        markers: what opens and closes a thought, or None for models that do not think.
        byte_tokens: ids of byte-fallback tokens.
        tool_format: how the model writes tool calls, or None for models that know none.
    """

    def __init__(self, wrapper: TokenizerWrapper, extra_end_tokens: Sequence[int] = ()) -> None:
        self._wrapper = wrapper
        self._lock = threading.Lock()
        self.end_tokens = frozenset(wrapper.eos_token_ids) | frozenset(extra_end_tokens)
        self.markers = (
            ThinkingMarkers(wrapper.think_start, wrapper.think_end)
            if wrapper.has_thinking
            else None
        )
        vocabulary: dict[str, int] = wrapper.get_vocab()
        self.byte_tokens = frozenset(
            i for token, i in vocabulary.items() if _BYTE_TOKEN.fullmatch(token)
        )
        self._longest = max(map(len, vocabulary), default=1)
        self._byte_level = _is_byte_level(wrapper)
        self.tool_format = _tool_format(wrapper, vocabulary)
        self._hidden = _hidden_tokens(wrapper, self.tool_format)

    @classmethod
    def load(cls, folder: Path, *, trust_remote_code: bool = False) -> Tokeniser:
        """Load the tokenizer of a target folder.

        Raises:
            ModelLoadError: the files are missing or damaged, or the folder brings its own code.
        """
        from mlx_lm.utils import load_tokenizer

        from spec_targets.load import missing_tokenizer

        missing = missing_tokenizer(folder)
        if missing:
            raise ModelLoadError(f"{folder} has no tokenizer: {missing}")
        try:
            wrapper = load_tokenizer(  # type: ignore[no-untyped-call]
                folder, {"trust_remote_code": trust_remote_code}
            )
        except Exception as error:  # the libraries below raise a wide range of types
            raise ModelLoadError(
                f"the tokenizer in {folder} could not be loaded: {_sentence(error)}"
            ) from error
        return cls(wrapper, end_tokens(folder))

    @property
    def wrapper(self) -> TokenizerWrapper:
        """mlx-lm's own wrapper, for code that calls mlx-lm."""
        return self._wrapper

    @property
    def has_chat_template(self) -> bool:
        return bool(self._wrapper.has_chat_template)

    def encode(self, text: str, *, limit: int | None = None) -> Prompt:
        """Plain text, with the tokenizer's own beginning-of-text token unless it is there.

        Args:
            text: the text.
            limit: the context; a text that is far beyond it is refused without being tokenised.

        Raises:
            PromptError: the text has no tokens.
            ContextLengthError: it is far beyond the limit.
        """
        bos: str | None = self._wrapper.bos_token
        special = bos is None or not text.startswith(bos)
        self._check_size(text, limit)
        ids = self._encode(text, special)
        if not ids:
            raise PromptError("the prompt is empty; give at least one character")
        return Prompt(ids)

    def render(
        self,
        messages: Sequence[Message],
        *,
        thinking: bool | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
        limit: int | None = None,
    ) -> Prompt:
        """Messages through the model's chat template, up to where the answer begins.

        Args:
            messages: the conversation, oldest first.
            thinking: the template's `enable_thinking`; None leaves the template's own default.
            tools: function descriptions as JSON schemas.
            options: further variables for the template.
            limit: the context, as in `encode`.

        Raises:
            TemplateError: there is no template, or it refused the messages.
            ContextLengthError: the text is far beyond the limit.
        """
        if not self.has_chat_template:
            raise TemplateError(
                "this model has no chat template, so it cannot take messages; "
                "give it plain text instead (in the terminal: --no-chat-template)"
            )
        variables = dict(options or {})
        if thinking is not None:
            variables["enable_thinking"] = thinking
        text = self._apply_template(messages, tools, variables)
        self._check_size(text, limit)
        opened = self.markers is not None and text.rstrip().endswith(self.markers.start)
        return Prompt(self._encode(text, special=False), opened)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids. Special tokens are left out, a model's own markers for thoughts and
        tool calls are not; ids beyond the tokenizer's vocabulary have no text."""
        shown = [i for i in ids if i not in self._hidden]
        text: str = self._wrapper.decode(
            shown, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def token_text(self, token: int) -> str:
        """The text of one token, special tokens included; a part of a character is shown as
        replacement characters."""
        text: str = self._wrapper.decode([token], skip_special_tokens=False)
        return text

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token as they stand in the answer's text; b"" for hidden ones."""
        if token in self._hidden:
            return b""
        piece: str | None = self._wrapper.convert_ids_to_tokens(token)
        if piece is None:
            return b""
        if token in self._wrapper.added_tokens_decoder:
            return piece.encode()
        if _BYTE_TOKEN.fullmatch(piece):
            return bytes([int(piece[3:5], 16)])
        try:
            return bytes(_BYTE_OF[c] for c in piece) if self._byte_level else _spaced(piece)
        except KeyError:
            return piece.encode()

    def backend_json(self) -> str:
        """The tokenizer as tokenizer.json has it, with every added token.

        Raises:
            PromptError: it is not a "fast" tokenizer.
        """
        backend = getattr(self._wrapper._tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise PromptError(
                "this model's tokenizer has no tokenizer.json, which structured output needs"
            )
        text: str = backend.to_str()
        return text

    def marker_ids(self, text: str) -> tuple[int, ...]:
        """The token ids of a marker, without beginning-of-text tokens."""
        return self._encode(text, special=False)

    def _check_size(self, text: str, limit: int | None) -> None:
        """Refuse what cannot fit, even if every token were the longest and half of the text were
        dropped by the tokenizer's normaliser."""
        least = len(text) // (2 * self._longest)
        if limit is not None and least > limit:
            raise ContextLengthError(least, limit, None, at_least=True)

    def _apply_template(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: dict[str, Any],
    ) -> str:
        # The wrapper's method sets `enable_thinking` where the caller did not; a template's own
        # default is kept by going to the tokenizer below it.
        below = self._wrapper._tokenizer
        renderer = self._wrapper if below.chat_template is None else below
        try:
            with self._lock:
                text = renderer.apply_chat_template(
                    [dict(message) for message in messages],
                    tools=[dict(tool) for tool in tools] if tools else None,
                    tokenize=False,
                    add_generation_prompt=True,
                    **variables,
                )
        except Exception as error:  # templates raise whatever their expressions do
            raise TemplateError(
                f"the model's chat template refused the messages: {_sentence(error)}"
            ) from error
        return str(text)

    def _encode(self, text: str, special: bool) -> tuple[int, ...]:
        with self._lock:
            # Not verbose: how long a prompt may be is the engine's to say.
            ids = self._wrapper.encode(text, add_special_tokens=special, verbose=False)
            return tuple(ids)


def _bytes_of_characters() -> dict[str, int]:
    """Byte-level BPE's printable stand-ins: a printable byte is itself, others follow at 256."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    stands = {chr(byte): byte for byte in printable}
    return stands | {chr(256 + order): byte for order, byte in enumerate(others)}


_BYTE_OF = _bytes_of_characters()


def _is_byte_level(wrapper: TokenizerWrapper) -> bool:
    backend = getattr(wrapper._tokenizer, "backend_tokenizer", None)
    return backend is not None and "ByteLevel" in repr(backend.decoder)


def _spaced(piece: str) -> bytes:
    return piece.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()


def _tool_format(wrapper: TokenizerWrapper, vocabulary: Mapping[str, int]) -> ToolFormat | None:
    parse = wrapper.tool_parser
    template = wrapper.chat_template
    return detect(
        template if isinstance(template, str) else None,
        vocabulary,
        mlx_name=None if parse is None else parse.__module__.rpartition(".")[2],
        mlx_start=wrapper.tool_call_start or "",
        mlx_end=wrapper.tool_call_end or "",
        mlx_parse=parse,
    )


def _hidden_tokens(wrapper: TokenizerWrapper, tools: ToolFormat | None) -> frozenset[int]:
    """Special tokens, the markers of thoughts and tool calls aside."""
    shown = {
        token
        for ids in (
            wrapper.think_start_tokens,
            wrapper.think_end_tokens,
            wrapper.tool_call_start_tokens,
            wrapper.tool_call_end_tokens,
        )
        for token in ids or ()
    }
    added = wrapper.added_tokens_decoder
    markup = () if tools is None else (tools.start, tools.end, GEMMA_QUOTE)
    shown |= {i for i, token in added.items() if token.content in markup}
    special = {i for i, token in added.items() if token.special} | set(wrapper.all_special_ids)
    return frozenset(special - shown)


def _sentence(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text or type(error).__name__
