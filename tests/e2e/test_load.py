"""Many clients at once: every answer is the one that was given alone, and nothing is lost."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from .conftest import Serve, shared

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "serve_load.py"


@pytest.fixture(scope="module")
def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("serve_load", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def check(load: ModuleType, server: object, requests: int, kinds: int) -> None:
    port = server.port  # type: ignore[attr-defined]
    report = load.drive("127.0.0.1", port, requests, 16, kinds=kinds)
    assert report.wrong == []
    assert report.completed + report.left == requests
    assert set(report.statuses) <= {200, 429}
    shared("live").eventually(lambda: load.active("127.0.0.1", port) == 0)


@pytest.mark.parametrize("mode", ["dspark"])
def test_many_clients(serve: Serve, load: ModuleType, mode: str) -> None:
    check(load, serve("trained", mode), 80, 16)


@pytest.mark.slow
def test_very_many_clients(serve: Serve, load: ModuleType, mode: str) -> None:
    check(load, serve("trained", mode), 500, 80)
