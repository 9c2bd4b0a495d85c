"""The errors of spec-targets: what failed, the value seen, what to do."""

from spec_core.errors import SpecError, UnsupportedError


class TargetError(SpecError):
    """Base of every error that spec-targets raises on purpose."""


class TargetNotFoundError(TargetError):
    """There is no such folder, or the hub does not have it or cannot be reached."""


class IncompleteTargetError(TargetError):
    """A checkpoint's files are missing, truncated or unreadable."""


class UnsupportedTargetError(TargetError, UnsupportedError):
    """The checkpoint is whole, but cannot be a target here; the message says why."""
