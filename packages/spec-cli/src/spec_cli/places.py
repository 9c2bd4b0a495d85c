"""Where a user wrote a value: on the command line, in a variable, or in a file.

The libraries name what is wrong by their own arguments. A command names it by the option, the
variable or the file's key that it came from.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
from click.core import ParameterSource

_OPTIONS = {
    "default_max_tokens": "max_tokens",
    "disk_bytes": "prefix_cache_disk",
    "max_body_bytes": "max_body",
    "memory_bytes": "memory_limit",
    "ram_bytes": "prefix_cache_ram",
}
"""Arguments whose option has another name."""


class Command(click.Command):
    """A command that names wrong values as the user wrote them."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.BadParameter as error:
            if error.param is not None and _is_elsewhere(ctx, error.param):
                error.param_hint = place(ctx, error.param)
            raise

    def invoke(self, ctx: click.Context) -> Any:
        with users_words(ctx):
            return super().invoke(ctx)


def place(context: click.Context, parameter: click.Parameter) -> str:
    """Where a parameter's value was written, for instance "--max-batch", "SPEC_MAX_BATCH" or
    "max-batch in spec.toml"; the option for one that was left out."""
    assert parameter.name is not None
    source = context.get_parameter_source(parameter.name)
    if source is ParameterSource.ENVIRONMENT:
        return str(parameter.envvar)
    if source is ParameterSource.DEFAULT_MAP:
        return f"{parameter.name.replace('_', '-')} in {context.params['config']}"
    return max(parameter.opts, key=len)


@contextmanager
def users_words(context: click.Context) -> Iterator[None]:
    """Let an `InvalidValueError` about an argument that one of the command's options sets name the
    place of that option's value."""
    try:
        yield
    except ValueError as error:
        from spec_core.errors import InvalidValueError

        if not isinstance(error, InvalidValueError):
            raise
        name, bracket, entry = error.field.partition("[")
        parameter = _sets(context.command, name)
        if parameter is None:
            raise
        written = place(context, parameter) + bracket + entry
        raise InvalidValueError(written, error.value, error.allowed) from error


def _is_elsewhere(context: click.Context, parameter: click.Parameter) -> bool:
    """Whether the value stands in a variable or a file."""
    assert parameter.name is not None
    source = context.get_parameter_source(parameter.name)
    return source in (ParameterSource.ENVIRONMENT, ParameterSource.DEFAULT_MAP)


def _sets(command: click.Command, argument: str) -> click.Option | None:
    """The option that sets an argument of the libraries."""
    option = f"--{_OPTIONS.get(argument, argument).replace('_', '-')}"
    for parameter in command.params:
        if isinstance(parameter, click.Option) and option in parameter.opts:
            return parameter
    return None
