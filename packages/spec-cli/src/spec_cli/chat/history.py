"""What was typed, kept for the next time, for its owner's eyes only."""

from __future__ import annotations

import os
from pathlib import Path

from platformdirs import user_state_path


def history_file() -> Path:
    """Where lines are kept."""
    return user_state_path("spec", appauthor=False) / "chat-history"


def private_file(path: Path) -> Path:
    """The file, made if need be, readable and writable by its owner alone.

    Raises:
        OSError: it cannot be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))
    path.chmod(0o600)
    return path
