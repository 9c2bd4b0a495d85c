"""When a parked policy tries a draft."""

from __future__ import annotations

_PROBE_SOON, _PROBE_EVERY, _PROBE_AT_LEAST = 16, 24, 400
"""Plain rounds between two probes: while drafting is promising, after the first failure that makes
it less so, and after many."""
_CONVINCING = 2
"""Probes in a row that pay for themselves before drafting begins again."""
_LOOK_EVERY = 8
"""Plain rounds of which one may be followed by a probe: looking costs the host time."""


class Probes:
    """When a parked policy tries a draft: after ever more plain rounds.

    Tries that have paid for themselves so far cost nothing, so further ones follow at once; what
    they teach decides whether drafting begins again. A try that is due stays due: the round in
    flight, which ends before it can begin, does not call it off.
    """

    def __init__(self) -> None:
        self._interval = _PROBE_EVERY
        self._plain = 0
        self._tries = 0
        self._balance = 0.0
        self._is_due = False

    @property
    def possible(self) -> bool:
        """A probe may be due; cheap to ask."""
        looked_at = self._plain >= _PROBE_SOON and self._plain % _LOOK_EVERY == 0
        return self._is_due or self._tries > 0 or looked_at

    def due(self, most: float) -> bool:
        """Whether to probe now; `most` plain rounds are enough for what a probe costs."""
        wait = min(self._interval, max(_PROBE_EVERY, most))
        self._is_due = self._is_due or self._tries > 0 or self._plain >= wait
        return self._is_due

    @property
    def convincing(self) -> bool:
        return self._tries >= _CONVINCING

    def rest(self) -> None:
        """A plain round while parked."""
        self._plain += 1

    def observe(self, emitted: float, cost: float, promising: bool) -> None:
        """A try while parked: its tokens a row, its cost in plain rounds, and whether what is
        known by now comes close to plain decoding."""
        self._is_due = False
        self._tries += 1
        self._balance += emitted - cost
        if self._balance < 0.0:
            wider = min(2 * self._interval, _PROBE_AT_LEAST)
            self._interval = _PROBE_SOON if promising else wider
            self._plain = self._tries = 0
            self._balance = 0.0
