"""What the end-to-end tests share: the bundled pair, loaded once in float32."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import mlx.core as mx
import pytest

import spec_cli
from spec_core import Drafter, Target
from spec_drafters.load import load_drafter
from spec_drafters.lookup import Lookup
from spec_targets import load_target

MODELS = Path(spec_cli.__file__).parent / "models"

DrafterOf = Callable[[str], Drafter | None]
"""The drafter of a mode; None for the baseline."""


def drafters(target: Target, folders: dict[str, Path]) -> DrafterOf:
    @cache
    def of(mode: str) -> Drafter | None:
        if mode == "baseline":
            return None
        if mode == "lookup":
            return Lookup()
        return load_drafter(folders[mode], target, dtype=mx.float32)

    return of


@pytest.fixture(scope="session")
def drafters_of() -> Callable[[Target, dict[str, Path]], DrafterOf]:
    return drafters


@pytest.fixture(scope="session")
def tiny() -> Target:
    return load_target(MODELS / "spec-tiny", dtype="float32").target


@pytest.fixture(scope="session")
def tiny_drafter(tiny: Target) -> DrafterOf:
    kinds = ("dspark", "dflash")
    return drafters(tiny, {kind: MODELS / f"spec-tiny-{kind}" for kind in kinds})
