"""stdin, stdout and stderr as the process was given them: closed, or full."""

from __future__ import annotations

import io
import logging
import os
import sys
from typing import TYPE_CHECKING, NoReturn, TextIO

import click

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class OutputError(click.ClickException):
    """What goes to stdout cannot be written."""


def prepare() -> None:
    """Give every closed stream a file descriptor of its own, and tell stdout's failures apart.

    Files that are opened later would otherwise get the numbers 0 to 2, where libraries refuse
    them or print into them. A closed stdin is empty, a closed stderr silent; a closed stdout
    fails as soon as something is written.
    """
    for number, flags in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        if not _is_open(number):
            os.open(os.devnull, flags)  # takes the lowest free number, which is this one
            os.set_inheritable(number, True)
    if sys.stdin is None:
        sys.stdin = io.TextIOWrapper(
            io.BufferedReader(io.FileIO(0, "r", closefd=False)), encoding="utf-8"
        )
    if sys.stderr is None:
        sys.stderr = io.TextIOWrapper(
            io.BufferedWriter(io.FileIO(2, "w", closefd=False)), encoding="utf-8"
        )
    sys.stdout = _told_apart(sys.stdout)


def leave(code: int) -> NoReturn:
    """End the process at once, also where a thread is inside a library that would abort it."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


class _Stdout(io.FileIO):
    """File descriptor 1, whose failures say that they are its own."""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            raise  # its reader left: no failure
        except OSError as error:
            raise OutputError(
                f"the output could not be written to stdout: {error.strerror}"
            ) from error


def _told_apart(stdout: TextIO | None) -> io.TextIOWrapper:
    """Like stdout, with failures as `OutputError`."""
    buffer = io.BufferedWriter(_Stdout(1, "w", closefd=False))
    if not isinstance(stdout, io.TextIOWrapper):
        return io.TextIOWrapper(buffer, encoding="utf-8")
    stdout.flush()
    return io.TextIOWrapper(
        buffer,
        encoding=stdout.encoding,
        errors=stdout.errors,
        line_buffering=stdout.line_buffering,
    )


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True
