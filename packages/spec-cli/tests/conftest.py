"""The command, as a function."""

from __future__ import annotations

from collections.abc import Iterator
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


@pytest.fixture(scope="session", autouse=True)
def same_everywhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No BLAS but MLX's own, whose sums do not depend on the number of rows; the whole
    block, whose counts do not depend on the machine; no curves but those that these tests measure,
    in a hurry."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPEC_CPU_BLAS", "bundled")
        patch.setenv("SPEC_MAX_DRAFT", "full")
        patch.setenv("SPEC_CURVES_DIR", str(tmp_path_factory.mktemp("curves")))
        patch.setattr("spec_server.calibration.BUDGET_SECONDS", 0.5)
        yield


@pytest.fixture(scope="session")
def spec() -> Spec:
    return Spec()
