"""The command, as a function."""

from __future__ import annotations

from dataclasses import dataclass

import click
import pytest
from click.testing import CliRunner

from spec_cli import main


@dataclass(frozen=True, slots=True)
class Ran:
    """What a command did."""

    code: int
    out: str
    err: str


class Spec:
    """Runs `spec` in this process, its handling of errors included."""

    def __call__(self, *arguments: str, stdin: str | bytes | None = None) -> Ran:
        @click.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
        @click.argument("rest", nargs=-1, type=click.UNPROCESSED)
        @click.pass_context
        def command(context: click.Context, rest: tuple[str, ...]) -> None:
            context.exit(main.run(rest))

        result = CliRunner().invoke(command, list(arguments), input=stdin, catch_exceptions=False)
        return Ran(result.exit_code, result.stdout, result.stderr)


@pytest.fixture(scope="session")
def spec() -> Spec:
    return Spec()
