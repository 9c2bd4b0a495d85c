"""What `/set` changes, by the rules of the options of the same names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import click

from spec_cli.loading import max_draft, sampling
from spec_cli.options import draft_length
from spec_core import Request, SamplingParams

if TYPE_CHECKING:
    from spec_server.engine import AnswerOptions

NAMES = (
    *(one.name for one in fields(SamplingParams) if one.name not in ("logit_bias", "logprobs")),
    "max_tokens",
    "max_draft",
    "thinking",
)
"""What can be set."""


@dataclass(slots=True)
class Settings:
    """How answers are made from now on.

    Attributes:
        command: `spec chat`, whose options say what a value may be.
        started: the options that it was started with; None for what was left open.
        recommended: the model's own way to sample, for what was left open.
        changed: what was set since.
    """

    command: click.Command
    started: Mapping[str, Any]
    recommended: SamplingParams
    changed: dict[str, Any] = field(default_factory=dict)

    def set(self, name: str, text: str) -> None:
        """Change one setting.

        Raises:
            click.UsageError: there is no such setting, or the text is no value of it.
            InvalidValueError: the value is out of range.
        """
        name = self.known(name)
        before = dict(self.changed)
        if text == "default":
            self.changed.pop(name, None)
            return
        self.changed[name] = self._value(name, text)
        try:
            self._check()
        except Exception:
            self.changed = before
            raise

    def known(self, name: str) -> str:
        """The setting's own name, however it was spelt.

        Raises:
            click.UsageError: there is no such setting.
        """
        wanted = name.lower().lstrip("-").replace("-", "_")
        if wanted in NAMES:
            return wanted
        near = get_close_matches(wanted, NAMES, n=1)
        meant = f"did you mean {near[0]}?" if near else f"there are {', '.join(NAMES)}"
        raise click.UsageError(f"there is no setting {name!r}; {meant}")

    def shown(self) -> Iterator[str]:
        """Every setting and its value."""
        for name in NAMES:
            word = self._reach() if name == "max_draft" else _word(name, self.value(name))
            yield f"{name} = {word}"

    def value(self, name: str) -> Any:
        """What holds for one setting; of the draft length the cap that was set, or None."""
        if name in self.changed:
            return self.changed[name]
        if name == "max_draft":
            return None
        given = self.started.get(name)
        return getattr(self.recommended, name, None) if given is None else given

    def sampling(self) -> SamplingParams:
        """How tokens are drawn."""
        return sampling({**self.started, **self._changed_sampling()}, self.recommended)

    def answer_options(self) -> AnswerOptions:
        """The arguments of `Engine.stream`."""
        return {
            "thinking": self.value("thinking"),
            "sampling": self.sampling(),
            "max_tokens": self.value("max_tokens"),
            "max_draft": self.value("max_draft"),
            "stop": tuple(self.started["stop"]),
        }

    def _reach(self) -> str:
        """How far it drafts, in the words of an answer's statistics."""
        length, cap = max_draft(self.started), self.value("max_draft")
        if self.started["mode"] == "baseline":
            return "0"
        started = "full" if length is None else str(length)
        return started if cap is None else f"{started}, at most {cap}"

    def _changed_sampling(self) -> dict[str, Any]:
        return {name: value for name, value in self.changed.items() if name != "max_draft"}

    def _value(self, name: str, text: str) -> Any:
        parameter = next(p for p in self.command.params if p.name == name)
        if name != "max_draft":
            return self._converted(name, text, parameter)
        length = draft_length(click.Context(self.command), parameter, text)
        if isinstance(length, int):
            return length
        if length == max_draft(self.started):
            return None
        raise click.UsageError(f"{text} is chosen at the start: spec chat --max-draft {text}")

    def _converted(self, name: str, text: str, parameter: click.Parameter) -> Any:
        try:
            return parameter.type.convert(text, parameter, None)
        except click.BadParameter as error:
            raise click.UsageError(f"{name}: {error.message.rstrip('.')}") from error

    def _check(self) -> None:
        """The same checks that a request meets."""
        Request((0,), self.sampling(), self.value("max_tokens"), max_draft=self.value("max_draft"))


def _word(name: str, value: Any) -> str:
    if value is None:
        return "as the model's template does" if name == "thinking" else "none"
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
