"""Prompt sets: those that come with the program, and a user's own file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec_core.errors import InvalidValueError

if TYPE_CHECKING:
    from spec_server.text import Tokeniser

BUNDLED_SETS = ("chat", "tool", "code")


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """One prompt: a user's message, with functions to call if there are any."""

    text: str
    tools: tuple[Mapping[str, Any], ...] = ()
    thinking: bool | None = None


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Prompts of one kind; figures are reported for each set."""

    name: str
    prompts: tuple[BenchPrompt, ...]

    def tokenised(self, tokeniser: Tokeniser) -> tuple[tuple[int, ...], ...]:
        """Token ids, through the chat template where the model has one."""
        return tuple(_ids(tokeniser, prompt) for prompt in self.prompts)


def _ids(tokeniser: Tokeniser, prompt: BenchPrompt) -> tuple[int, ...]:
    if not tokeniser.has_chat_template and not prompt.tools:
        return tokeniser.encode(prompt.text).ids
    messages = [{"role": "user", "content": prompt.text}]
    return tokeniser.render(messages, thinking=prompt.thinking, tools=prompt.tools).ids


def bundled_set(name: str) -> PromptSet:
    """A set that comes with the program."""
    file = resources.files("spec_cli") / "prompts" / f"{name}.json"
    return _parsed(name, json.loads(file.read_text(encoding="utf-8")))


def prompt_file(path: Path) -> PromptSet:
    """A user's own prompts: a JSON list of strings or of {"text", "tools", "thinking"} objects,
    or, in any other file, one prompt a line.

    Raises:
        InvalidValueError: the file holds no prompts, or something else.
    """
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".json":
        return _parsed(path.stem, [line for line in text.splitlines() if line.strip()])
    try:
        return _parsed(path.stem, json.loads(text))
    except json.JSONDecodeError as error:
        raise InvalidValueError("prompts", str(path), f"a file of valid JSON ({error})") from error


def _parsed(name: str, entries: object) -> PromptSet:
    if not isinstance(entries, list) or not entries:
        raise InvalidValueError("prompts", name, "a list of at least one prompt")
    return PromptSet(name, tuple(map(_prompt, entries)))


def _prompt(entry: object) -> BenchPrompt:
    if isinstance(entry, str) and entry.strip():
        return BenchPrompt(entry)
    if isinstance(entry, dict) and isinstance(entry.get("text"), str):
        tools: Sequence[Mapping[str, Any]] = entry.get("tools") or ()
        return BenchPrompt(entry["text"], tuple(tools), entry.get("thinking"))
    raise InvalidValueError("prompt", entry, 'a string or an object with "text"')
