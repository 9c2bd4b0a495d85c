"""Fixtures: scripted checkpoints, built once a session."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

EMOJI, HAN = list("😀".encode()), list("漢".encode())

SCRIPT_S = ["al", "pha ", "be", "ta ga", "mma ", "del", "ta2"]
SCRIPT_K = ["<think>", "\nadd ", "them\n", "</think>", "\n\n4", "2."]


def _module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Scripts: S (stop strings), U (characters over several tokens), K (a thought)."""
    folder: Path = _module("chain_checkpoint").build(
        tmp_path_factory.mktemp("models") / "chain",
        {"S": SCRIPT_S, "U": ["h", "i", " ", *EMOJI, *HAN, "!"], "K": SCRIPT_K},
        extra_tokens=[*SCRIPT_S, *SCRIPT_K],
    )
    return folder
