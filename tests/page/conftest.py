"""A browser for all tests of the page, and the server that it really talks to."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def _module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        f"spec_page_tests_{name}", Path(__file__).with_name(f"{name}.py")
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


browser, canned = _module("browser"), _module("canned")


@pytest.fixture(scope="session")
def program() -> str:
    found: str | None = browser.chromium()
    if found is None:
        pytest.skip("there is no Chromium on this machine (Debian: apt-get install chromium)")
    return found


@pytest.fixture(scope="module")
def tab(program: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with browser.tab(program, tmp_path_factory.mktemp("profile")) as made:
        yield made


@pytest.fixture
def server() -> Iterator[Any]:
    """A server that says what the test puts into it."""
    with canned.serving() as made:
        yield made


class Served:
    """`spec serve` of the bundled pair, and what its API answers."""

    def __init__(self, address: str) -> None:
        self.address = address

    def ask(self, question: str, **more: Any) -> Any:
        connection = HTTPConnection(self.address.removeprefix("http://"), timeout=60)
        messages = [{"role": "user", "content": question}]
        kind = {"content-type": "application/json"}
        body = json.dumps({"messages": messages, **more})
        connection.request("POST", "/v1/chat/completions", body, kind)
        answer = json.loads(connection.getresponse().read())
        connection.close()
        return answer


@pytest.fixture(scope="module")
def served(program: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    process = subprocess.Popen(
        [sys.executable, "-m", "spec_cli", "serve", "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ
        | {"SPEC_MAX_DRAFT": "full", "SPEC_CURVES_DIR": str(tmp_path_factory.mktemp("curves"))},
    )
    assert process.stderr is not None
    try:
        found = None
        while found is None:
            line = process.stderr.readline()
            assert line, "the server ended"
            found = re.search(r"(http://127\.0\.0\.1:\d+)/v1 \(", line)
        yield Served(found[1])
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
