"""The pair that comes with the program, so that everything works offline on first run."""

from __future__ import annotations

from pathlib import Path

NAME = "spec-tiny"
TARGET = Path(__file__).parent / "models" / NAME
"""Its drafters lie beside it, where the table of pairs names them."""


def target(model: str | None) -> str:
    """What to load for --model: the bundled target for nothing, and for its name where no such
    folder is."""
    if model is None or (model == NAME and not Path(model).exists()):
        return str(TARGET)
    return model


def shown(model: str) -> str:
    """A model's name for a reader: a hub id as it is, a folder without those above it."""
    return Path(model).name if Path(model).is_dir() else model
