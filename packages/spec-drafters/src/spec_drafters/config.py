"""Reading config.json: every field is checked where it is read, and named where it is wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any

from spec_drafters.errors import CheckpointError


class Config:
    """A JSON object with typed access.

    Args:
        values: the object.
        where: how errors call it, for instance "config.json".
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values = values
        self._where = where

    @classmethod
    def read(cls, path: Path) -> Config:
        """Raises CheckpointError if the file is missing or not a JSON object."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(
                f"{path.parent} has no {path.name}; a drafter needs one"
            ) from None
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from None
        if not isinstance(values, dict):
            raise CheckpointError(f"{path} holds a {type(values).__name__}, not a JSON object")
        return cls(values, str(path))

    def __contains__(self, key: str) -> bool:
        """Whether the key is there with a value other than null."""
        return self._values.get(key) is not None

    def names(self) -> list[str]:
        """Keys with a value other than null."""
        return [key for key in self._values if key in self]

    def plain(self) -> dict[str, Any]:
        """The values that are there, for writing."""
        return {key: self._values[key] for key in self.names()}

    def section(self, key: str) -> Config:
        """A nested object; empty if the key is missing."""
        values = self._values.get(key)
        if values is None:
            return Config({}, f"{self._where}: {key}")
        if not isinstance(values, dict):
            raise self._wrong(key, "an object")
        return Config(values, f"{self._where}: {key}")

    def sections(self, key: str) -> tuple[Config, ...]:
        """A list of objects; empty if the key is missing."""
        values = self._values.get(key)
        if values is None:
            return ()
        if not isinstance(values, list) or not all(isinstance(item, dict) for item in values):
            raise self._wrong(key, "a list of objects")
        return tuple(Config(item, f"{self._where}: {key}") for item in values)

    def over(self, other: Config) -> Config:
        """This object's values where it has them, `other`'s elsewhere."""
        return Config({**other._values, **self.plain()}, other._where)

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        value = self._values.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self._wrong(key, f"an integer of at least {least}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._values.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self._wrong(key, "a positive number")
        return float(value)

    def integer_or_none(self, key: str) -> int | None:
        """A positive integer, or None if the key is missing."""
        return self.integer(key) if key in self else None

    def number_or_none(self, key: str) -> float | None:
        """A positive number, or None if the key is missing."""
        return self.number(key) if key in self else None

    def real(self, key: str) -> float:
        value = self._values.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
            raise self._wrong(key, "a number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def text(self, key: str, default: str = "") -> str:
        value = self._values.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self._wrong(key, "a string")
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        value = self._values.get(key)
        if not isinstance(value, list) or not all(type(item) is int for item in value) or not value:
            raise self._wrong(key, "a list of integers")
        return tuple(value)

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of positive numbers; empty if the key is missing."""
        value = self._values.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(
            type(item) in (int, float) and item > 0 for item in value
        ):
            raise self._wrong(key, "a list of positive numbers")
        return tuple(float(item) for item in value)

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings; empty if the key is missing."""
        value = self._values.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(key, "a list of strings")
        return tuple(value)

    def _wrong(self, key: str, allowed: str) -> CheckpointError:
        value = self._values.get(key)
        seen = "missing" if value is None else f"{value!r}"
        return CheckpointError(f"{self._where}: {key} is {seen}; it must be {allowed}")
