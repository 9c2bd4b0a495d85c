"""Prompt sets: those that come with the program, and a user's own file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec_cli.bench.trial import Task
from spec_core.errors import InvalidValueError

if TYPE_CHECKING:
    from spec_core import SamplingParams
    from spec_server.text import Tokeniser


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """One prompt: a user's message, with functions to call if there are any.

    Attributes:
        chat: put it through the chat template; otherwise it is continued as it stands.
    """

    text: str
    tools: tuple[Mapping[str, Any], ...] = ()
    thinking: bool | None = None
    chat: bool = True


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Prompts of one kind; figures are reported for each set.

    Attributes:
        sampling: how they are answered; greedy if None. It has a seed, so that answers can be
            compared.
    """

    name: str
    prompts: tuple[BenchPrompt, ...]
    sampling: SamplingParams | None = None

    def first(self, count: int | None) -> PromptSet:
        """The set with its first prompts only."""
        return replace(self, prompts=self.prompts[:count])

    def tokenised(self, tokeniser: Tokeniser) -> tuple[tuple[int, ...], ...]:
        """Token ids, through the chat template where the model has one."""
        return tuple(_ids(tokeniser, prompt) for prompt in self.prompts)

    def tasks(self, tokeniser: Tokeniser, max_tokens: int) -> tuple[Task, ...]:
        """The prompts as tasks of at most so many tokens."""
        return tuple(Task(ids, max_tokens, self.sampling) for ids in self.tokenised(tokeniser))


def _ids(tokeniser: Tokeniser, prompt: BenchPrompt) -> tuple[int, ...]:
    if not prompt.tools and not (prompt.chat and tokeniser.has_chat_template):
        return tokeniser.encode(prompt.text).ids
    messages = [{"role": "user", "content": prompt.text}]
    return tokeniser.render(messages, thinking=prompt.thinking, tools=prompt.tools).ids


def bundled_set(name: str) -> PromptSet:
    """A set that comes with the program."""
    file = resources.files("spec_cli") / "prompts" / f"{name}.json"
    return _parsed(name, json.loads(file.read_text(encoding="utf-8")))


def prompt_file(path: Path) -> PromptSet:
    """A user's own prompts: JSON, or, in any other file, one prompt a line.

    JSON is a list of strings or of {"text", "tools", "thinking", "chat"} objects, or an object
    {"prompts": that list, "sampling": {"temperature", "seed", ...}}.

    Raises:
        InvalidValueError: the file holds no prompts, or something else.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidValueError("prompts", str(path), f"a file of UTF-8 text ({error})") from error
    if path.suffix != ".json":
        return _parsed(path.stem, [line for line in text.splitlines() if line.strip()])
    try:
        return _parsed(path.stem, json.loads(text))
    except json.JSONDecodeError as error:
        raise InvalidValueError("prompts", str(path), f"a file of valid JSON ({error})") from error


def _parsed(name: str, content: object) -> PromptSet:
    sampling = None
    if isinstance(content, dict):
        sampling = _sampling(content.get("sampling"))
        content = content.get("prompts")
    if not isinstance(content, list) or not content:
        raise InvalidValueError("prompts", name, "a list of at least one prompt")
    return PromptSet(name, tuple(map(_prompt, content)), sampling)


def _sampling(given: object) -> SamplingParams | None:
    from spec_core import SamplingParams

    if given is None:
        return None
    if not isinstance(given, dict):
        raise InvalidValueError("sampling", given, "an object")
    try:
        return SamplingParams(**{"seed": 0, **given})
    except TypeError as error:
        raise InvalidValueError("sampling", given, f"known fields ({error})") from error


def _prompt(entry: object) -> BenchPrompt:
    if isinstance(entry, str) and entry.strip():
        return BenchPrompt(entry)
    if isinstance(entry, dict) and isinstance(entry.get("text"), str):
        tools: Sequence[Mapping[str, Any]] = entry.get("tools") or ()
        chat = entry.get("chat", True) is not False
        return BenchPrompt(entry["text"], tuple(tools), entry.get("thinking"), chat)
    raise InvalidValueError("prompt", entry, 'a string or an object with "text"')
