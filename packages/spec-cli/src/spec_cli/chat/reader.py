"""Where the user's messages come from: a terminal with line editing, or plain lines."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Protocol

import click

from spec_cli.chat.history import history_file, private_file

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

FENCE = '"""'
"""Opens and closes a message of several lines."""

ReadLine = Callable[[bool], str]
"""The next line; told whether it continues the last one. Raises EOFError."""


class Reader(Protocol):
    """Messages and commands, until there are no more."""

    def __iter__(self) -> Iterator[str]: ...


class PlainReader:
    """Lines of a stream, for scripts.

    Args:
        lines: what is read.
    """

    def __init__(self, lines: Iterable[str]) -> None:
        self._lines = iter(lines)

    def __iter__(self) -> Iterator[str]:
        while True:
            try:
                yield message(self._read)
            except EOFError:
                return

    def _read(self, continued: bool) -> str:
        try:
            return next(self._lines).rstrip("\n")
        except StopIteration:
            raise EOFError from None


class TerminalReader:
    """A prompt with editing, history and completion. Ctrl-C clears the line, Ctrl-D leaves.

    Args:
        words: what Tab completes at the beginning of a line.
        keep: remember what was typed for the next time.
    """

    def __init__(self, words: Iterable[str], *, keep: bool) -> None:
        self._session = _session(tuple(words), keep)

    def __iter__(self) -> Iterator[str]:
        while True:
            try:
                yield message(self._read)
            except KeyboardInterrupt:
                click.secho("(Ctrl-D leaves)", err=True, dim=True)
            except EOFError:
                return

    def _read(self, continued: bool) -> str:
        return self._session.prompt("... " if continued else "> ")


def message(read: ReadLine) -> str:
    r"""The next message: one line, or several that end in a backslash or stand between two \"\"\".

    Raises:
        EOFError: there is none.
    """
    line = read(False)
    if line.strip().startswith(FENCE):
        return _fenced(line.strip()[len(FENCE) :], read)
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(_rest(read))
    return "\n".join(lines)


def _fenced(first: str, read: ReadLine) -> str:
    lines = [first]
    while not lines[-1].rstrip().endswith(FENCE):
        try:
            lines.append(read(True))
        except EOFError:
            return "\n".join(lines).strip("\n")
    lines[-1] = lines[-1].rstrip()[: -len(FENCE)]
    return "\n".join(lines).strip("\n")


def _rest(read: ReadLine) -> str:
    """The next line of a message, "" at the end."""
    try:
        return read(True)
    except EOFError:
        return ""


def open_reader(words: Iterable[str], *, keep: bool) -> Reader:
    """A terminal's reader if a person sits there, plain lines otherwise."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        return TerminalReader(words, keep=keep)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # one bad line is no end of the others
    return PlainReader(sys.stdin)


def _session(words: tuple[str, ...], keep: bool) -> PromptSession[str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter

    return PromptSession(
        history=_history(keep),
        completer=WordCompleter(list(words), sentence=True),
        complete_while_typing=False,
        multiline=True,
        key_bindings=_keys(),
        prompt_continuation="... ",
    )


def _history(keep: bool) -> History:
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    if not keep:
        return InMemoryHistory()
    try:
        return FileHistory(str(private_file(history_file())))
    except OSError as error:
        click.secho(
            f"note: {history_file()} cannot be written ({error.strerror}); what is typed is "
            "forgotten at the end",
            err=True,
            dim=True,
        )
        return InMemoryHistory()


def _keys() -> KeyBindings:
    """Enter sends; Alt-Enter begins a new line."""
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("enter")
    def send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys
