"""`spec serve`: an OpenAI-compatible server."""

from __future__ import annotations

import logging
import os
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from spec_cli import streams
from spec_cli.config_file import config_option, printed, with_environment
from spec_cli.loading import load_engine, load_options, refuse_idle_options
from spec_cli.options import (
    apply,
    cache_options,
    drafting_options,
    kept_prefixes,
    loading_options,
    log_level_option,
    model_option,
    size,
)
from spec_cli.places import Command, place

if TYPE_CHECKING:
    from spec_server import CacheOptions, Engine, Limits
    from spec_server.http import ServerSettings

_PRIVATE = ("print_config",)
_SECRET = ("api_key",)


engine_options = apply(
    click.option(
        "--max-batch", type=int, default=8, show_default=True, help="Requests at the same time."
    ),
    click.option(
        "--max-queue",
        type=int,
        default=256,
        show_default=True,
        help="Requests that may wait; more are answered 429.",
    ),
    click.option(
        "--context-window", type=int, help="Positions of a request at most. [default: the model's]"
    ),
    click.option(
        "--prefill-chunk",
        type=int,
        default=512,
        show_default=True,
        help="Prompt tokens of one forward at most.",
    ),
    click.option(
        "--step-seconds",
        type=float,
        default=0.1,
        show_default=True,
        help="How long a prompt may hold up running answers at a time.",
    ),
    click.option(
        "--memory-limit",
        metavar="SIZE",
        callback=size,
        help="What the process may use. [default: 4/5 of memory; 9/10 of a GPU's share]",
    ),
    click.option(
        "--no-prefix-cache",
        is_flag=True,
        help="Compute every prompt anew, also where it begins as an earlier one did.",
    ),
    cache_options,
)

http_options = apply(
    click.option(
        "--host",
        default="127.0.0.1",
        show_default=True,
        help="Address to listen on; 0.0.0.0 lets other machines in (then set --api-key).",
    ),
    click.option("--port", type=int, default=8000, show_default=True, help="0 takes a free one."),
    click.option(
        "--served-name", multiple=True, help="A further name of the model; may be given again."
    ),
    click.option(
        "--api-key",
        multiple=True,
        help="Required of clients; may be given again. Better set it "
        "as SPEC_API_KEY: other users can see command lines.",
    ),
    click.option(
        "--cors-origin",
        multiple=True,
        metavar="ORIGIN",
        help="Let pages of this origin use the server; may be given again.",
    ),
    click.option(
        "--allowed-host",
        multiple=True,
        metavar="NAME",
        help="A name under which clients reach the server; may be given again. Addresses and "
        "localhost are always allowed.",
    ),
    click.option(
        "--no-page", is_flag=True, help="Serve no page for people at /; only what programs use."
    ),
    click.option(
        "--max-tokens", type=int, help="Budget where a request names none. [default: the context]"
    ),
    click.option(
        "--max-body",
        metavar="SIZE",
        callback=size,
        default="16M",
        show_default=True,
        help="The largest request body.",
    ),
    click.option(
        "--body-seconds",
        type=float,
        default=30.0,
        show_default=True,
        help="How long a request's body may take to arrive.",
    ),
    click.option(
        "--header-seconds",
        type=float,
        default=15.0,
        show_default=True,
        help="How long a request's head may take to arrive.",
    ),
    click.option(
        "--max-connections", type=int, default=512, show_default=True, help="At the same time."
    ),
    click.option(
        "--max-choices",
        type=int,
        default=16,
        show_default=True,
        help="Answers of one request at most.",
    ),
    click.option(
        "--keepalive-seconds",
        type=float,
        default=10.0,
        show_default=True,
        help="How long a stream may be silent before a comment is sent.",
    ),
    click.option(
        "--stall-seconds",
        type=float,
        default=120.0,
        show_default=True,
        help="Without progress for so long, /readyz says that the server is not ready.",
    ),
    click.option(
        "--grace-seconds",
        type=float,
        default=15.0,
        show_default=True,
        help="How long a shutdown waits for running answers.",
    ),
    log_level_option("info", "info logs one line a request, without its text.", timed=True),
)


@click.command(cls=Command)
@config_option(*_PRIVATE)  # first: eager options after it are read from the file
@model_option
@drafting_options
@loading_options
@engine_options
@http_options
@click.option("--print-config", is_flag=True, help="Show the options in force, and leave.")
@click.pass_context
def serve(context: click.Context, /, **options: Any) -> None:
    """Serve a model to OpenAI-compatible clients.

    Options come from the command line, then from environment variables (SPEC_MAX_BATCH for
    --max-batch; several values are separated by spaces), then from --config.
    """
    refuse_idle_options(context)
    from spec_cli.doctor.settings import unread
    from spec_server.http.serve import Listen
    from spec_server.http.serve import serve as run

    listen = Listen(
        host=options["host"],
        port=options["port"],
        max_connections=options["max_connections"],
        header_seconds=options["header_seconds"],
        grace_seconds=options["grace_seconds"],
    )
    settings, limits, cache = _settings(options), _limits(options), _cache(context)
    load_options(options)  # refused before the server listens
    for sentence in unread(context.command):
        click.echo(f"spec: {sentence}", err=True)
    if options["print_config"]:
        click.echo(printed(context, _SECRET, _PRIVATE))
        return
    _announce(options, settings)
    ready = partial(_ready, page=settings.page)
    loading = run(lambda: _engine(options, limits, cache), settings, listen, ready=ready)
    click.echo("spec: the server has stopped", err=True)
    if loading:
        streams.leave(0)


with_environment(serve, *_PRIVATE)


def _settings(options: dict[str, Any]) -> ServerSettings:
    from spec_server.http import ServerSettings

    return ServerSettings(
        served_names=tuple(options["served_name"]),
        api_keys=tuple(options["api_key"]),
        cors_origins=tuple(options["cors_origin"]),
        allowed_hosts=tuple(name.lower() for name in options["allowed_host"]),
        max_body_bytes=options["max_body"],
        body_seconds=options["body_seconds"],
        keepalive_seconds=options["keepalive_seconds"],
        stall_seconds=options["stall_seconds"],
        max_choices=options["max_choices"],
        default_max_tokens=options["max_tokens"],
        page=not options["no_page"],
    )


def _limits(options: dict[str, Any]) -> Limits:
    from spec_server import Limits

    return Limits(
        max_batch=options["max_batch"],
        max_queue=options["max_queue"],
        context_window=options["context_window"],
        prefill_chunk=options["prefill_chunk"],
        step_seconds=options["step_seconds"],
        memory_bytes=options["memory_limit"],
    )


def _cache(context: click.Context) -> CacheOptions | None:
    if not context.params["no_prefix_cache"]:
        return kept_prefixes(context.params)
    options = {str(option.name): option for option in context.command.params}
    for name in ("prefix_cache_ram", "prefix_cache_dir"):
        if context.params[name] is not None:
            given, against = place(context, options[name]), options["no_prefix_cache"]
            raise click.UsageError(f"{given} needs a cache; drop {place(context, against)}")
    return None


def _engine(options: dict[str, Any], limits: Limits, cache: CacheOptions | None) -> Engine:
    return load_engine(options, limits=limits, prefix_cache=cache)


def _announce(options: dict[str, Any], settings: ServerSettings) -> None:
    """Warn of a server that anyone in the network may use."""
    local = options["host"] in ("127.0.0.1", "::1", "localhost")
    if not local and not settings.api_keys:
        logging.getLogger("spec_server").warning(
            "anyone who reaches %s can use this server; set SPEC_API_KEY", options["host"]
        )


def _ready(engine: Engine, address: str, *, page: bool) -> None:
    """Say on stderr, whatever the log level, what is served, where, and how it ends."""
    facts, labels = engine.facts, engine.facts.labels
    for fallback in labels.fallbacks:
        logging.getLogger("spec_server").warning("%s", fallback)
    drafts = "" if labels.policy is None else f", drafts {labels.policy}"
    click.echo(
        f"spec: serving {facts.model.rstrip('/').rpartition('/')[2]} at {address}/v1 "
        f"(mode {labels.mode}, drafter {labels.drafter or 'none'}{drafts}, "
        f"context {facts.context_window}, {facts.dtype}, "
        f"prefix cache {'off' if engine.cache is None else 'on'}"
        f"{f', page at {address}/' if page else ''}); "
        f"Ctrl-C or `kill {os.getpid()}` stops it",
        err=True,
    )
