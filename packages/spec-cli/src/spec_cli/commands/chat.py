"""`spec chat`: a conversation at the terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from spec_cli import bundled, loading
from spec_cli.options import (
    answer_options,
    cache_options,
    drafting_options,
    kept_prefixes,
    loading_options,
    log_level_option,
    model_option,
    sampling_options,
)
from spec_cli.places import Command
from spec_cli.screen import Output

if TYPE_CHECKING:
    from spec_server import Engine


@click.command(cls=Command)
@model_option
@drafting_options
@loading_options
@answer_options
@sampling_options(shown=False)
@cache_options
@click.option("--no-history", is_flag=True, help="Do not keep what is typed for the next time.")
@click.option("-q", "--quiet", is_flag=True, help="No thought and no figures on stderr.")
@log_level_option("warning")
@click.pass_context
def chat(context: click.Context, /, **options: Any) -> None:
    """Talk with a model.

    /help lists the commands: settings, the system message, saving and loading. Ctrl-C stops an
    answer, Ctrl-D leaves. What the sampling options leave open is as the model's makers
    recommend (greedy where they say nothing).

    Where stdin is not a terminal, each of its lines is a message or a command; answers go to
    stdout, all else to stderr, and the exit code is 1 if something could not be done.
    """
    from spec_cli.chat.conversation import Conversation
    from spec_cli.chat.reader import open_reader
    from spec_cli.chat.repl import Chat
    from spec_cli.chat.settings import Settings
    from spec_cli.chat.slash import completions

    loading.refuse_idle_options(context)
    loading.sampling(options)  # refused before a model is loaded
    with _engine(options) as engine:
        settings = Settings(context.command, options, engine.facts.sampling)
        running = Chat(
            engine, settings, Conversation(options["system"]), Output(quiet=options["quiet"])
        )
        _greet(running)
        note = loading.idle_sampling(context, settings.sampling().temperature)
        if note is not None and not options["quiet"]:
            running.remark(f"note: {note}")
        running.run(open_reader(completions(), keep=not options["no_history"]))
    if running.failures and not sys.stdin.isatty():
        context.exit(1)


def _engine(options: dict[str, Any]) -> Engine:
    from spec_server import Limits

    talkative = sys.stderr.isatty() and not options["quiet"]
    if talkative and options["model"] is not None:
        loading.announce(f"loading {options['model']}")
    return loading.load_engine(
        options,
        limits=Limits(max_batch=1),
        prefix_cache=kept_prefixes(options),
        announce=None if options["quiet"] else loading.announce,
    )


def _greet(running: Any) -> None:
    if running.output.quiet:
        return
    facts = running.engine.facts
    for fallback in facts.labels.fallbacks:
        running.remark(f"note: {fallback}")
    if sys.stdin.isatty():
        running.remark(
            f"{bundled.shown(facts.model)}, {facts.labels.mode}, context {facts.context_window}. "
            "/help lists the commands, Ctrl-D leaves."
        )
