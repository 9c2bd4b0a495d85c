"""What a checkpoint says of answers: generation_config.json, and the end tokens of config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from spec_core import InvalidValueError, SamplingParams
from spec_server.errors import ModelLoadError

_FILE = "generation_config.json"
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def recommended_sampling(folder: Path) -> SamplingParams:
    """What the model's makers recommend, where the file says that the model samples; greedy
    otherwise.

    Raises:
        ModelLoadError: the file is damaged, or a value is out of range.
    """
    found = _read(folder / _FILE)
    samples = found.get("do_sample")
    if samples not in (None, False, True):
        raise _wrong(folder / _FILE, "do_sample", samples, "true or false")
    if not samples:
        return SamplingParams()
    given = {name: found[name] for name in _SAMPLING if found.get(name) is not None}
    try:
        return SamplingParams(**{"temperature": 1.0, **given})
    except InvalidValueError as error:
        raise ModelLoadError(f"{folder / _FILE}: {error}") from error


def end_tokens(folder: Path) -> tuple[int, ...]:
    """Ids that end an answer, from both files.

    Raises:
        ModelLoadError: a file is damaged, or they are no token ids.
    """
    found: set[int] = set()
    for path in (folder / _FILE, folder / "config.json"):
        value = _read(path).get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token) is int and token >= 0 for token in ids):
            raise _wrong(path, "eos_token_id", value, "a token id or a list of them")
        found.update(ids)
    return tuple(found)


def _read(path: Path) -> dict[str, Any]:
    """The object in a file, empty if there is no file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} holds {type(value).__name__}, not a JSON object")
    return value


def _wrong(path: Path, name: str, value: object, expected: str) -> ModelLoadError:
    return ModelLoadError(f"{path}: {name} is {value!r}; it must be {expected}")
