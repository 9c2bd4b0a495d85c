"""What the cache answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from spec_core.seams import StateImage


class Stopped(StrEnum):
    """Why a prompt is not reused any further."""

    END = "end"
    """All but the last token is reused: that one is always computed anew."""
    UNSEEN = "unseen"
    """Nothing is stored after this position."""
    DIVERGED = "diverged"
    """Other tokens are stored after this position."""
    CHECKPOINT = "checkpoint"
    """More is stored, but no checkpoint of the recurrent state after the hit."""
    WINDOW = "window"
    """More is stored, but not all that a sliding window needs after the hit."""
    DAMAGED = "damaged"
    """What followed could not be read."""


@dataclass(frozen=True, slots=True)
class Hit:
    """The longest reusable prefix of a prompt.

    Attributes:
        length: positions to restore, at most the prompt's length - 1; 0 is a miss.
        parts: one image a part, all of this length and ready for `restore`; empty for a miss.
        stopped: why it ends.
        stopped_at: how many leading tokens of the prompt are stored at all; at least `length`. The
            first token that was never seen here, or differs from what was, has this position.
        pending: what `length` may grow to once the requests that hold a reservation have stored
            what they compute; equals `length` where nobody computes more of this prompt.
    """

    length: int
    parts: Mapping[str, StateImage] = field(default_factory=lambda: MappingProxyType({}))
    stopped: Stopped = Stopped.UNSEEN
    stopped_at: int = 0
    pending: int = 0


@dataclass(frozen=True, slots=True)
class Stored:
    """What a call of `store` did.

    Attributes:
        blocks: full blocks added or completed.
        resumable: whether exactly the images' length can be resumed at (never without
            `checkpoint`).
        nbytes: bytes of RAM taken.
        refused: entries that were not kept: there was no room, what they continue is gone, or
            positions of a dense layer are missing.
    """

    blocks: int = 0
    resumable: bool = False
    nbytes: int = 0
    refused: int = 0


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counters since the cache was made, and what it holds now.

    Attributes:
        ram_bytes, ram_limit, ram_entries: blocks, tails and checkpoints in memory.
        disk_bytes, disk_limit, disk_entries: the same in the directory, other processes' and
            namespaces' files included.
        disk_waiting: entries that are not written yet.
        disk_off: why nothing is written; empty while all is well, or without a directory.
        lookups, hits: calls of `match`, and those that found something.
        asked_tokens, hit_tokens: tokens of all prompts, and how many of them were found.
        stored_entries, refused_entries: as in `Stored`, summed up.
        evicted_ram, evicted_disk: entries that made room for others.
        loaded, written: files read into memory, and written.
        damaged: files that could not be used.
    """

    ram_bytes: int
    ram_limit: int
    ram_entries: int
    disk_bytes: int
    disk_limit: int
    disk_entries: int
    disk_waiting: int
    disk_off: str
    lookups: int
    hits: int
    asked_tokens: int
    hit_tokens: int
    stored_entries: int
    refused_entries: int
    evicted_ram: int
    evicted_disk: int
    loaded: int
    written: int
    damaged: int
