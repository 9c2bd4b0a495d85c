"""The table of known pairs: the drafters published for a target, in whatever quantisation."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import PurePath
from typing import Any

_QUANTISATION = re.compile(
    r"""[-_.](
        \d+(\.\d+)?-?bits?                # 4bit, 2-bit
      | bf16 | fp?(16|32) | fp8
      | int\d | w\d+a\d+ | q\d(_\w+)*     # int4, w4a16, q4_k_m
      | (mx|nv)fp\d
      | g(s|roup)?-?(16|32|64|128)        # group size
      | dwq(-\d+)? | awq | gptq | qat | mlx | quantized
    )$""",
    re.VERBOSE | re.IGNORECASE,
)
_CACHED = "models--"


@dataclass(frozen=True, slots=True)
class KnownDrafter:
    """A published drafter.

    Attributes:
        mode: "dspark", "dflash" or "eagle3".
        source: a hub repository, "gguf:<repository>/<file>", or (no "/") the name of a folder
            beside the target's own.
        packaging: the layout of its files.
        measured: whether we ran it with its target and report the numbers.
    """

    mode: str
    source: str
    packaging: str
    measured: bool

    @property
    def beside_target(self) -> bool:
        """It is a folder next to the target's, not a repository."""
        return "/" not in self.source


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and its drafters, best first.

    Attributes:
        target: its name without owner, quantisation and format.
        repo: where it was published; "" if nowhere.
        aliases: other spellings of the name.
        note: what a user should know; "" if nothing.
    """

    target: str
    drafters: tuple[KnownDrafter, ...]
    repo: str = ""
    aliases: tuple[str, ...] = ()
    note: str = ""

    @property
    def measured(self) -> bool:
        """Whether we measured any of its drafters."""
        return any(drafter.measured for drafter in self.drafters)

    @property
    def modes(self) -> tuple[str, ...]:
        """The modes it has a drafter for, best first."""
        return tuple(dict.fromkeys(drafter.mode for drafter in self.drafters))

    def drafter(self, mode: str = "auto") -> KnownDrafter | None:
        """The best drafter of a mode ("auto": of any), or None."""
        return next((d for d in self.drafters if mode in ("auto", d.mode)), None)


def known_pairs() -> tuple[Pair, ...]:
    """All rows of the table."""
    return _table()


def find_pair(model: str | PurePath) -> Pair | None:
    """The row of a target, given as a hub id, a folder or a bare name in any quantisation.

    A different model of the same family (another size, "-Base", "-Instruct-2507") is not that
    target: a drafter is trained for one set of weights.
    """
    return _by_name().get(base_name(model))


def nearest_names(model: str | PurePath, count: int = 3) -> tuple[str, ...]:
    """Names of the table that look like an unknown one, best first: targets and repositories."""
    given = str(model).casefold()
    close = difflib.get_close_matches(given, _spellings(), n=2 * count, cutoff=0.55)
    close += difflib.get_close_matches(base_name(model), _spellings(), n=2 * count, cutoff=0.55)
    return tuple(dict.fromkeys(_spellings()[spelling] for spelling in close))[:count]


def base_name(model: str | PurePath) -> str:
    """A model's name in lower case without owner, folders, quantisation and format.

    "mlx-community/Qwen3-4B-4bit", "/models/Qwen3-4B-bf16/" and a snapshot folder of the hub's cache
    all give "qwen3-4b".
    """
    parts = [part for part in re.split(r"[/\\]", str(model)) if part]
    cached = [part for part in parts if part.startswith(_CACHED)]
    name = cached[-1].split("--")[-1] if cached else (parts[-1] if parts else "")
    while (shorter := _QUANTISATION.sub("", name)) != name:
        name = shorter
    return name.casefold()


@cache
def _table() -> tuple[Pair, ...]:
    text = resources.files("spec_drafters").joinpath("pairs.toml").read_text(encoding="utf-8")
    return tuple(_pair(row) for row in tomllib.loads(text)["pair"])


def _pair(row: Mapping[str, Any]) -> Pair:
    fields = dict(row)
    fields["drafters"] = tuple(KnownDrafter(**drafter) for drafter in fields["drafters"])
    fields["aliases"] = tuple(fields.get("aliases", ()))
    return Pair(**fields)


@cache
def _by_name() -> Mapping[str, Pair]:
    return {
        base_name(name): pair
        for pair in _table()
        for name in (pair.target, *pair.aliases, *([pair.repo] if pair.repo else []))
    }


@cache
def _spellings() -> Mapping[str, str]:
    """Lower-case spelling to the name as it is written, for every name of the table."""
    names: Iterable[str] = (
        name
        for pair in _table()
        for name in (pair.target, pair.repo, *(drafter.source for drafter in pair.drafters))
        if name
    )
    return {name.casefold(): name for name in names}
