"""The errors of spec-core: what failed, the value seen, what to do."""


class SpecError(Exception):
    """Base of every error that the `spec` packages raise on purpose."""


class InvalidValueError(SpecError, ValueError):
    """A parameter is outside its range.

    Attributes:
        field: the parameter's name, as the user wrote it.
        value: the value seen.
        allowed: the range or set that is allowed, in words.
    """

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field} is {value!r}; it must be {allowed}")
        self.field = field
        self.value = value
        self.allowed = allowed


class SeamError(SpecError):
    """A Target, Drafter or policy broke the contract of its Protocol."""


class UnsupportedError(SpecError):
    """The operation cannot be done exactly here, and is refused rather than approximated."""
