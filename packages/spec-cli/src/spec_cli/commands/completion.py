"""`spec completion`: what a shell needs to complete this program's options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from spec_cli.places import Command

_VARIABLE = "_SPEC_COMPLETE"
"""click's own: set by the script when the shell asks."""


@click.command(cls=Command)
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print a script that teaches a shell to complete `spec`.

    \b
    bash: spec completion bash > ~/.local/share/bash-completion/completions/spec
    zsh:  spec completion zsh > ~/.zfunc/_spec   (a folder of $fpath)
    fish: spec completion fish > ~/.config/fish/completions/spec.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    root = context.find_root()
    click.echo(kind(root.command, {}, "spec", _VARIABLE).source())
