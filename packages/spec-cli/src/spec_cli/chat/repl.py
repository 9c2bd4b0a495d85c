"""The loop of `spec chat`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import click

from spec_cli.chat import slash
from spec_cli.chat.conversation import Conversation
from spec_cli.chat.live import LiveLine, Pace, figures, terminal_has_rows
from spec_cli.chat.reader import Reader
from spec_cli.chat.settings import Settings
from spec_cli.options import utf8
from spec_cli.places import users_words
from spec_cli.screen import Output, Screen, show
from spec_core.errors import SpecError

if TYPE_CHECKING:
    from spec_server import Chunk, Completion, Engine


@dataclass(slots=True)
class Chat:
    """One conversation at a terminal.

    Attributes:
        engine: what answers.
        settings: how it answers.
        conversation: what was said.
        output: how answers are shown.
        completions: every answer since the start.
        failures: messages and commands that could not be done.
    """

    engine: Engine
    settings: Settings
    conversation: Conversation
    output: Output
    completions: list[Completion] = field(default_factory=list)
    failures: int = 0

    def run(self, reader: Reader) -> None:
        """Answer until the user leaves."""
        for text in reader:
            try:
                self._take(text)
            except slash.Leave:
                return
            except KeyboardInterrupt:  # between two chunks of an answer, or in a command
                click.echo(err=True)
            except (SpecError, click.UsageError) as error:
                self.failures += 1
                sentence = error.message if isinstance(error, click.UsageError) else str(error)
                click.secho(f"spec: {sentence}", err=True, fg="red")

    def remark(self, text: str) -> None:
        """Say something that is no answer."""
        click.secho(text, err=True, dim=True)

    def _take(self, text: str) -> None:
        if not text.strip():
            return
        text = utf8(text, "the prompt")
        if slash.is_command(text):
            slash.run(self, text)
        else:
            self._ask(slash.unescaped(text))

    def _ask(self, text: str) -> None:
        """One message and its answer; a message that is not answered is forgotten."""
        self.conversation.asked(text)
        try:
            completion = self._answer()
        except BaseException:
            self.conversation.take_back()
            raise
        self.conversation.answered(completion.text, completion.reasoning)
        self.completions.append(completion)
        if not self.output.quiet:
            self._tell(completion)

    def _answer(self) -> Completion:
        screen, pace = Screen(self.output), Pace(self.engine)
        shown = terminal_has_rows() and not self.output.quiet
        with users_words(click.get_current_context()):
            answer = self.engine.stream(
                self.conversation.messages(), **self.settings.answer_options()
            )
        with LiveLine(lambda: str(pace), shown=shown) as line, answer:

            def watch(chunk: Chunk) -> None:
                pace.count(chunk)
                line.update()

            completion = show(answer, screen, watch)
        screen.end(completion)
        return completion

    def _tell(self, completion: Completion) -> None:
        """The answer's figures, and what the user should know about its end."""
        known = self.engine.facts.labels.fallbacks
        for note in completion.statistics.fallbacks:
            if note not in known:
                self.remark(f"note: {note}")
        ending = {
            "length": "; the token limit ended it (/set max_tokens raises that)",
            "cancelled": "; Ctrl-C ended it",
        }.get(completion.finish_reason, "")
        self.remark(f"[{figures(completion)}{ending}]")
