"""What begins with a slash: commands to the program instead of words to the model."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import click

from spec_cli.bundled import shown as shown_name
from spec_cli.chat.conversation import load, save, shown
from spec_cli.chat.settings import NAMES
from spec_cli.screen import statistics_line
from spec_cli.sizes import counted

if TYPE_CHECKING:
    from spec_cli.chat.repl import Chat


class Leave(Exception):
    """The user wants to leave."""


@dataclass(frozen=True, slots=True)
class Command:
    """One slash command.

    Attributes:
        usage: its argument, for a reader.
        text: what it does.
        run: does it; is given the argument.
    """

    usage: str
    text: str
    run: Callable[[Chat, str], None]


def is_command(text: str) -> bool:
    """Whether a message is meant for the program; two slashes send one to the model."""
    return text.startswith("/") and not text.startswith("//")


def unescaped(text: str) -> str:
    """A message without the slash that protects another."""
    return text[1:] if text.startswith("//") else text


def run(chat: Chat, text: str) -> None:
    """Do what a line that begins with a slash says.

    Raises:
        Leave: it says to leave.
        click.UsageError: there is no such command, or its argument is wrong.
        SpecError: it cannot be done.
    """
    name, _, argument = text[1:].strip().partition(" ")
    if name not in COMMANDS:
        near = get_close_matches(name, COMMANDS, n=1, cutoff=0.5)
        meant = f"did you mean /{near[0]}?" if near else "/help lists the commands."
        raise click.UsageError(
            f"there is no command /{name}; {meant} (// at the beginning sends a / to the model)"
        )
    COMMANDS[name].run(chat, argument.strip())


def _help(chat: Chat, argument: str) -> None:
    width = max(len(f"{name} {command.usage}") for name, command in COMMANDS.items())
    for name, command in COMMANDS.items():
        click.echo(f"/{f'{name} {command.usage}':{width}}  {command.text}", err=True)
    click.echo(
        '\nA message of several lines: end each with \\, or put it between """ and """; in a '
        "terminal\nAlt-Enter begins a new line. Ctrl-C stops an answer, Ctrl-D leaves.",
        err=True,
    )


def _set(chat: Chat, argument: str) -> None:
    name, _, value = argument.replace("=", " ", 1).strip().partition(" ")
    if name and value.strip():
        chat.settings.set(name, value.strip())
    for line in chat.settings.shown():
        if not name or line.startswith(f"{chat.settings.known(name)} "):
            chat.remark(line)


def _system(chat: Chat, argument: str) -> None:
    if argument:
        chat.conversation.system = None if argument == "none" else argument
    held = chat.conversation.system
    chat.remark("there is no system message" if held is None else f"system message: {held}")


def _clear(chat: Chat, argument: str) -> None:
    chat.conversation.turns.clear()
    chat.remark(
        "the conversation begins anew"
        + ("; the system message stays" if chat.conversation.system is not None else "")
    )


def _save(chat: Chat, argument: str) -> None:
    path = _path(argument, "save")
    save(chat.conversation, path)
    chat.remark(f"{shown(chat.conversation.turns)} saved in {path}")


def _load(chat: Chat, argument: str) -> None:
    path = _path(argument, "load")
    chat.conversation = load(path)
    chat.remark(f"{shown(chat.conversation.turns)} loaded from {path}")


def _path(argument: str, name: str) -> Path:
    if not argument:
        raise click.UsageError(f"/{name} needs a file's name")
    return Path(os.path.expanduser(argument))


def _stats(chat: Chat, argument: str) -> None:
    facts, done = chat.engine.facts, chat.completions
    drafting = f"{facts.labels.mode}, drafter {facts.labels.drafter or 'none'}"
    chat.remark(
        f"{shown_name(facts.model)}, {drafting}, {facts.dtype}, context {facts.context_window}"
    )
    if not done:
        chat.remark("nothing was answered yet")
        return
    rounds = sum(one.statistics.rounds for one in done)
    accepted = sum(one.statistics.accepted for one in done)
    prompts, reused = (
        sum(one.prompt_tokens for one in done),
        sum(one.statistics.cached_tokens for one in done),
    )
    written = sum(one.completion_tokens for one in done)
    every = "1 answer" if len(done) == 1 else f"all {len(done)} answers"
    last = done[-1]
    used = last.prompt_tokens + last.completion_tokens
    chat.remark(f"last answer: {statistics_line(last, facts.dtype)}")
    chat.remark(
        f"{every}: {counted(written, 'token')}, "
        f"{1 + accepted / rounds if rounds else 1:.2f} a round over {counted(rounds, 'round')}, "
        f"{reused} of {prompts} prompt tokens reused"
    )
    chat.remark(f"{used} of {facts.context_window} positions of the context were in use")


def _exit(chat: Chat, argument: str) -> None:
    raise Leave


COMMANDS: Mapping[str, Command] = MappingProxyType(
    {
        "help": Command("", "this list", _help),
        "set": Command(
            "[NAME [VALUE]]", "show or change a setting (VALUE default: as at the start)", _set
        ),
        "system": Command("[TEXT|none]", "show or change the system message", _system),
        "clear": Command("", "forget what was said", _clear),
        "save": Command("FILE", "write the conversation into a file", _save),
        "load": Command("FILE", "go on with a saved conversation", _load),
        "stats": Command("", "how fast, how much was accepted and reused", _stats),
        "exit": Command("", "leave", _exit),
    }
)


def completions() -> list[str]:
    """What Tab completes."""
    return [*(f"/{name} " for name in COMMANDS), *(f"/set {name} " for name in NAMES)]
