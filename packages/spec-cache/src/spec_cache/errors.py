"""The errors of spec-cache."""

from __future__ import annotations

from spec_core.errors import SpecError


class CacheError(SpecError):
    """The cache was used against its contract; nothing was stored or changed."""


class DamagedError(SpecError):
    """A cache file cannot be trusted. Callers of the cache never see it: it becomes a miss."""
