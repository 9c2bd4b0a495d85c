"""The errors of spec-drafters: what failed, the value seen, what to do."""

from spec_core.errors import SpecError


class DrafterError(SpecError):
    """Base of every error about a drafter."""


class CheckpointError(DrafterError):
    """A drafter's files are missing, damaged or not what their config says."""


class PackagingError(DrafterError):
    """A packaging was recognised (or none was) and is refused.

    Attributes:
        packaging: its name, for instance "speculators".
        reason: why, in one sentence.
    """

    def __init__(self, packaging: str, reason: str) -> None:
        super().__init__(f"{packaging}: {reason}")
        self.packaging = packaging
        self.reason = reason


class MisfitError(DrafterError):
    """A sound drafter does not fit the target it was to draft for."""
