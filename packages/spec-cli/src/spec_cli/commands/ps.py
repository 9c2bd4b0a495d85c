"""`spec ps`: what a running server does."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import urlsplit

import click

from spec_cli.options import json_option
from spec_cli.places import Command
from spec_cli.sizes import in_bytes

DEFAULT_URL = "http://127.0.0.1:8000"


def _url(context: click.Context, parameter: click.Parameter, value: str) -> str:
    """Callback of --url."""
    try:
        parts = urlsplit(value)
        complete = parts.scheme in ("http", "https") and bool(parts.hostname)
        _ = parts.port  # raises where it is no number
    except ValueError:
        complete = False
    if not complete:
        raise click.BadParameter(f"{value!r} is no URL; write it as http://host:port")
    return value


@click.command(cls=Command)
@click.option(
    "--url",
    metavar="URL",
    envvar="SPEC_URL",
    default=DEFAULT_URL,
    show_default=True,
    callback=_url,
    help="Where the server is.",
)
@click.option(
    "--api-key",
    envvar="SPEC_API_KEY",
    help="Its key; better set it as SPEC_API_KEY: other users can see command lines.",
)
@json_option
def ps(url: str, api_key: str | None, as_json: bool) -> None:
    """Show what a server that was started by `spec serve` is doing.

    The exit code is 1 if no server answers.
    """
    from spec_cli.server_status import ask

    seen = ask(url, api_key)
    if as_json:
        click.echo(json.dumps(seen, indent=2))
        return
    for name, value in _lines(seen):
        click.echo(f"{click.style(f'{name:11}', bold=True)} {value}")


def _lines(seen: dict[str, Any]) -> list[tuple[str, str]]:
    """What is shown, by name."""
    queue = f"{seen['running']} running, {seen['waiting']} waiting"
    lines = [("server", f"{seen['url']}, {seen['status']}")]
    if seen["model"] is None:
        return lines
    accepted = seen["mean_accept_length"]
    per_round = "nothing was drafted yet" if accepted is None else f"{accepted:.2f} tokens a round"
    slots = " ".join(f"{share:.2f}" for share in seen["accept_by_position"])
    return [
        *lines,
        ("model", f"{seen['model']}, {seen['dtype']}, context {seen['context_window']}"),
        ("mode", f"{seen['mode']}, drafter {seen['drafter'] or 'none'}"),
        *(("note", fallback) for fallback in seen["fallbacks"]),
        ("requests", f"{queue}; {seen['memory_share']:.0%} of the memory for them in use"),
        ("acceptance", per_round + (f"; by slot {slots}" if slots else "")),
        ("tokens", f"{seen['prompt_tokens']} read, {seen['generation_tokens']} written"),
        ("cache", _cache(seen["cache"])),
    ]


def _cache(seen: dict[str, Any] | None) -> str:
    if seen is None:
        return "off"
    text = f"{seen['hit_tokens']} of {seen['query_tokens']} prompt tokens reused"
    held = f"{in_bytes(seen['ram_bytes'])} of {in_bytes(seen['ram_limit_bytes'])} in memory"
    disk = f", {in_bytes(seen['disk_bytes'])} on disk" if seen["disk_limit_bytes"] else ""
    return f"{text}; {held}{disk}"
