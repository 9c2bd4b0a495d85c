"""One server for all blocks that need one, and an empty home for what blocks write."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from .blocks import ROOT


@pytest.fixture(scope="session")
def surroundings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a console block: offline, with this Python's programs first, and a draft
    length whose counts do not depend on the machine.

    `uv run` finds the environment made and takes it as it is.
    """
    scripts = str(Path(sys.executable).parent)
    return os.environ | {
        "PATH": os.pathsep.join((scripts, os.environ["PATH"])),
        "SPEC_MAX_DRAFT": "full",
        "SPEC_CURVES_DIR": str(tmp_path_factory.mktemp("curves")),
        "HF_HUB_OFFLINE": "1",
        "NO_COLOR": "1",
        "UV_NO_SYNC": "1",
        "UV_OFFLINE": "1",
        "UV_PROJECT_ENVIRONMENT": sys.prefix,
    }


@pytest.fixture(scope="session")
def server(surroundings: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Host and port of a running `spec serve`."""
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "spec_cli", "serve", "--port", "0"],
            stderr=file,
            cwd=ROOT,
            env=surroundings,
        )
    try:
        yield _address(process, log)
    finally:
        process.terminate()
        assert process.wait(timeout=60) == 0


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    while process.poll() is None:
        found = re.search(r"http://(\S+)/v1 \(", log.read_text())
        if found is not None:
            return found[1]
        time.sleep(0.1)
    raise RuntimeError(f"the server ended: {log.read_text()}")
