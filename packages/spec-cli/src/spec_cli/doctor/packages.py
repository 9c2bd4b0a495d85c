"""Whether the installed packages fit together, and what is known to be broken."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

from spec_cli.doctor.finding import Finding

_SECTION = "packages"
_OURS = "spec-"
_OTHERS = ("mlx", "mlx-lm", "transformers", "huggingface-hub", "mlx-vlm")

VersionOf = Callable[[str], str | None]
"""A distribution's installed version, or None."""


@dataclass(frozen=True, slots=True)
class Breakage:
    """Releases that do not work together.

    Attributes:
        together: requirements that all have to hold for it to happen.
        what: what goes wrong.
        advice: what to do.
    """

    together: tuple[str, ...]
    what: str
    advice: str


BREAKAGES = (
    Breakage(
        ("mlx-vlm<=0.6.4", "transformers>=5.12"),
        "mlx-vlm cannot make Gemma 4's processor: it asks transformers for a video processor",
        "upgrade mlx-vlm to 0.7.10 or later (text models that mlx-lm knows are not concerned)",
    ),
    Breakage(
        ("mlx-audio==0.6.2", "mlx!=0.32.4"),
        "mlx-audio 0.6.2 needs MLX 0.32.4, no other",
        "reinstall mlx-audio, or remove it; it comes with mlx-vlm",
    ),
)
"""From reports of others; none of them is repaired here."""


def installed(name: str) -> str | None:
    """A distribution's version, or None if it is not there."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def packages(version_of: VersionOf = installed) -> Iterator[Finding]:
    """What is installed, what does not fit, and what is known to be broken."""
    wanted = list(needs("spec-cli"))
    yield _versions(wanted, version_of)
    yield from misfits(wanted, version_of)
    yield from breakages(version_of)


def _versions(wanted: Iterable[tuple[str, Requirement]], version_of: VersionOf) -> Finding:
    names = dict.fromkeys(["spec-cli", *(requirement.name for _, requirement in wanted)])
    ours = [name for name in names if name.startswith(_OURS)]
    found = [(name, version_of(name)) for name in (*ours, *_OTHERS)]
    return Finding(
        _SECTION, "versions", "ok", ", ".join(f"{name} {seen}" for name, seen in found if seen)
    )


def needs(name: str) -> Iterator[tuple[str, Requirement]]:
    """Who needs what: the requirements of a distribution and of our own ones below it."""
    waiting, seen = [Requirement(name)], set()
    while waiting:
        current = waiting.pop()
        if str(current) in seen:
            continue
        seen.add(str(current))
        for requirement in _direct(current):
            yield current.name, requirement
            if requirement.name.startswith(_OURS):
                waiting.append(requirement)


def _direct(asked: Requirement) -> Iterator[Requirement]:
    """What a distribution needs here, the extras that were asked for included."""
    try:
        texts = requires(asked.name) or []
    except PackageNotFoundError:
        return
    for requirement in map(Requirement, texts):
        extras = ("", *asked.extras)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras):
            yield requirement


def misfits(
    wanted: Iterable[tuple[str, Requirement]], version_of: VersionOf = installed
) -> Iterator[Finding]:
    """Requirements that what is installed does not meet."""
    met = True
    for who, requirement in wanted:
        seen = version_of(requirement.name)
        if seen is not None and requirement.specifier.contains(seen, prereleases=True):
            continue
        met = False
        shown = "is not installed" if seen is None else f"is {seen}"
        yield Finding(
            _SECTION,
            requirement.name,
            "problem",
            f"{who} needs {requirement.name}{requirement.specifier}, which {shown}",
            f'run: pip install "{requirement.name}{requirement.specifier}"',
        )
    if met:
        yield Finding(_SECTION, "ranges", "ok", "every package is in the range that others need")


def breakages(version_of: VersionOf = installed) -> Iterator[Finding]:
    """Known breakages that are installed here."""
    found = [one for one in BREAKAGES if all(_holds(text, version_of) for text in one.together)]
    for one in found:
        yield Finding(_SECTION, "known breakage", "problem", one.what, one.advice)
    if not found:
        seen = f"none of the {len(BREAKAGES)} that this program knows of"
        yield Finding(_SECTION, "known breakages", "ok", seen)


def _holds(text: str, version_of: VersionOf) -> bool:
    requirement = Requirement(text)
    seen = version_of(requirement.name)
    return seen is not None and requirement.specifier.contains(seen, prereleases=True)
