"""A packaging: how a checkpoint is told, read and made into a drafter.

Other distributions add theirs by an entry point in the group `spec_drafters.packagings` whose
object is a `Packaging`. A family of its own brings a `DrafterSpec` of its own and a `build`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

from spec_core.seams import Drafter, EmbeddingLender
from spec_drafters.checkpoint import Checkpoint
from spec_drafters.errors import PackagingError
from spec_drafters.linear import Weights
from spec_drafters.spec import DrafterSpec

GROUP = "spec_drafters.packagings"

Build = Callable[[DrafterSpec, Weights, EmbeddingLender | None], Drafter]
"""From a spec that was fitted to its target, its tensors, and what the target lends."""


@dataclass(frozen=True, slots=True)
class Packaging:
    """One row of the recognition table.

    Attributes:
        name: what errors and the compatibility table call it.
        sign: how it is told apart, for people.
        matches: whether a checkpoint is one.
        read: the checkpoint's spec, where the packaging is supported.
        refusal: why it is not, in one sentence.
        build: makes the drafter, where its family is not one of ours.
    """

    name: str
    sign: str
    matches: Callable[[Checkpoint], bool]
    read: Callable[[Checkpoint], DrafterSpec] | None = None
    refusal: Callable[[Checkpoint], str] | None = None
    build: Build | None = None

    @property
    def status(self) -> str:
        return "loaded" if self.read else "refused by name"


def installed_packagings() -> tuple[Packaging, ...]:
    """What other distributions registered, in order of their entry points' names.

    Raises:
        PackagingError: one of them cannot be loaded, or is no `Packaging`.
    """
    return tuple(
        _loaded(entry) for entry in sorted(entry_points(group=GROUP), key=lambda e: e.name)
    )


def _loaded(entry: EntryPoint) -> Packaging:
    try:
        row = entry.load()
    except Exception as error:  # whatever a foreign module raises is its distribution's fault
        raise _broken(entry, f"cannot be loaded: {type(error).__name__}: {error}") from error
    if not isinstance(row, Packaging):
        raise _broken(entry, f"is a {type(row).__name__}, not a Packaging")
    return row


def _broken(entry: EntryPoint, what: str) -> PackagingError:
    origin = entry.dist.name if entry.dist else "an unknown distribution"
    first = what.splitlines()[0]
    return PackagingError(
        entry.name, f"the packaging that {origin} registers {first}; repair or uninstall it"
    )
