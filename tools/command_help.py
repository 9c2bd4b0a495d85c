"""Write docs/commands.md from the help texts of the `spec` command.

    uv run python tools/command_help.py

Run it whenever a command or an option has changed; a test compares.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from spec_cli.main import cli

PAGE = Path(__file__).parents[1] / "docs" / "commands.md"
WIDTH = 100

HEAD = """\
# Commands

Made from the commands' own help by `uv run python tools/command_help.py`; do not edit it here.
"""


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *(section(context) for context in walk(cli, None))])


def walk(command: click.Command, above: click.Context | None) -> Iterator[click.Context]:
    """A command and all that is below it, each in a context of its own."""
    name = "spec" if above is None else command.name
    settings = {**command.context_settings, "terminal_width": WIDTH, "color": False}
    context = click.Context(command, parent=above, info_name=name, **settings)
    yield context
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            if below is not None and not below.hidden:
                yield from walk(below, context)


def section(context: click.Context) -> str:
    """One command's heading and help."""
    depth = "#" * min(2 + context.command_path.count(" "), 4)
    help_text = click.unstyle(context.get_help())
    return f"{depth} {context.command_path}\n\n```text\n{help_text}\n```\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
