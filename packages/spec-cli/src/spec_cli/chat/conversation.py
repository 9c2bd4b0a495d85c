"""What was said, and its file."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spec_cli.sizes import counted
from spec_core.errors import SpecError

_FORM = "spec chat 1"


class ConversationError(SpecError):
    """A conversation's file cannot be read or written."""


@dataclass(slots=True)
class Conversation:
    """A system message and the turns so far.

    Attributes:
        system: what the model is told beforehand; None for nothing.
        turns: user and assistant messages, oldest first.
    """

    system: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list)

    def messages(self) -> list[dict[str, str]]:
        """As a chat template reads it."""
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*first, *self.turns]

    def asked(self, text: str) -> None:
        """The user said something."""
        self.turns.append({"role": "user", "content": text})

    def answered(self, text: str, thought: str) -> None:
        """The model said something."""
        turn = {"role": "assistant", "content": text}
        self.turns.append({**turn, "reasoning_content": thought} if thought else turn)

    def take_back(self) -> None:
        """Forget the newest message, which was not answered."""
        self.turns.pop()


def save(conversation: Conversation, path: Path) -> None:
    """Write a conversation into a file that its owner alone may read.

    Raises:
        ConversationError: it cannot be written, or would replace something else.
    """
    if path.exists() and not _is_conversation(path):
        raise ConversationError(f"{path} exists and is no saved conversation; choose another name")
    held = {"form": _FORM, "system": conversation.system, "messages": conversation.turns}
    text = json.dumps(held, indent=1, ensure_ascii=False) + "\n"
    try:
        handle = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConversationError(f"{path} cannot be written: {error.strerror}") from error


def load(path: Path) -> Conversation:
    """A conversation from a file.

    Raises:
        ConversationError: it cannot be read, or holds something else.
    """
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConversationError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConversationError(f"{path} is no saved conversation; `/save` writes them") from error
    if not isinstance(held, dict) or held.get("form") != _FORM or not _sound(held):
        raise ConversationError(f"{path} is no saved conversation; `/save` writes them")
    return Conversation(held["system"], held["messages"])


def _is_conversation(path: Path) -> bool:
    try:
        load(path)
    except ConversationError:
        return False
    return True


def _sound(held: dict[str, Any]) -> bool:
    turns, system = held.get("messages"), held.get("system")
    if not isinstance(turns, list) or not isinstance(system, str | None):
        return False
    roles = [turn.get("role") if _is_texts(turn) else None for turn in turns]
    return roles == ["user", "assistant"] * (len(roles) // 2)


def _is_texts(turn: object) -> bool:
    return (
        isinstance(turn, dict)
        and isinstance(turn.get("content"), str)
        and all(isinstance(value, str) for value in turn.values())
    )


def shown(turns: Sequence[dict[str, str]]) -> str:
    """How long a conversation is, for a reader."""
    count = len(turns) // 2
    return f"{counted(count, 'question')} and answer{'' if count == 1 else 's'}"
