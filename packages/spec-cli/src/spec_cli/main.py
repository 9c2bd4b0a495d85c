"""The `spec` command: which commands there are, and how it ends."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click

from spec_cli import streams
from spec_cli.commands.benchmark import benchmark
from spec_cli.commands.cache import cache
from spec_cli.commands.chat import chat
from spec_cli.commands.completion import completion
from spec_cli.commands.convert import convert
from spec_cli.commands.doctor import doctor
from spec_cli.commands.generate import generate
from spec_cli.commands.models import models
from spec_cli.commands.ps import ps
from spec_cli.commands.pull import pull
from spec_cli.commands.rm import rm
from spec_cli.commands.serve import serve

INTERRUPTED = 130
NO_READER = 141
INTERNAL = 70


PACKAGES = ("spec-cli", "spec-server", "spec-targets", "spec-drafters", "spec-cache", "spec-core")


def show_versions(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    """Print all packages' versions and leave."""
    if not wanted or context.resilient_parsing:
        return
    from importlib.metadata import version

    for name in PACKAGES:
        click.echo(f"{name} {version(name)}")
    context.exit()


class _Commands(click.Group):
    """Lists commands as they were added, and ends with 141 where click would end with 1: nobody
    reads the output any more."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(self.commands)

    def make_context(self, *arguments: Any, **options: Any) -> click.Context:
        with _reader_may_leave():  # --version and --help are answered here
            return super().make_context(*arguments, **options)

    def invoke(self, ctx: click.Context) -> Any:
        with _reader_may_leave():
            return super().invoke(ctx)


@contextmanager
def _reader_may_leave() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError as error:
        _write_nowhere()
        raise click.exceptions.Exit(NO_READER) from error


def _write_nowhere() -> None:
    """What is still buffered would be written at the end, and fail again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(nowhere, number)
    os.close(nowhere)


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=show_versions,
    help="Show the version of every package and exit.",
)
@click.pass_context
def cli(context: click.Context) -> None:
    """Lossless speculative decoding for MLX.

    Without --model, commands use spec-tiny, a small model that comes with this program together
    with its drafters. It has 9 million parameters: good for short code and tool calls, not for
    facts.
    """
    if os.environ.get("NO_COLOR"):
        context.color = False


for _command in (
    *(generate, chat, serve, ps, benchmark),
    *(models, pull, rm, doctor, cache, convert, completion),
):
    cli.add_command(_command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and exit: 0; 1 what was asked cannot be done; 2 wrong usage; 130 Ctrl-C;
    141 nobody reads the output any more (as in `spec generate ... | head -1`)."""
    # transformers advises everyone without PyTorch to install it.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    streams.prepare()
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code; every error is one sentence on stderr."""
    try:
        code = cli.main(args=arguments, prog_name="spec", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except click.UsageError as error:
        error.show()
        return error.exit_code
    except click.ClickException as error:
        code = _failed(error.format_message(), error.exit_code)
        if isinstance(error, streams.OutputError):
            _write_nowhere()
        return code
    except (KeyboardInterrupt, click.Abort):
        return _failed("interrupted", INTERRUPTED)
    except Exception as error:
        return _explain(error)


def _explain(error: Exception) -> int:
    from spec_core.errors import InvalidValueError, SpecError

    if isinstance(error, InvalidValueError):
        return _failed(str(error), 2)
    if isinstance(error, SpecError):
        return _failed(str(error), 1)
    if os.environ.get("SPEC_TRACEBACK"):
        traceback.print_exception(error)
    return _failed(
        f"internal error: {type(error).__name__}: {error} "
        "(set SPEC_TRACEBACK=1 to see where; please report it)",
        INTERNAL,
    )


def _failed(sentence: str, code: int) -> int:
    click.echo(f"spec: {sentence}", err=True)
    return code
