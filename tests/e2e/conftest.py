"""Servers on loopback: each target in each mode, started when a test first asks for it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import pytest

from spec_cli import bundled
from spec_server import CacheOptions, Engine, Limits
from spec_server.http import ServerSettings

from .checkpoints import build_drafter, build_target

SERVER_TESTS = Path(__file__).parents[2] / "packages" / "spec-server" / "tests"
MODES = ("baseline", "lookup", "dspark", "dflash")
TARGETS = ("dense", "window", "hybrid", "scripted", "trained")

EMOJI, HAN = list("😀".encode()), list("漢".encode())
SCRIPT_S = ["al", "pha ", "be", "ta ga", "mma ", "del", "ta2"]
SCRIPT_T = [
    "<tool_call>",
    '\n{"na',
    'me": "get_we',
    'ather", "argu',
    'ments": {"city": "Pa',
    'ris"}}\n',
    "</tool_call>",
]
TOOLS_TEMPLATE = (
    "{% if tools %}<tools>{{ tools | length }}</tools><tool_call>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ messages[-1].content[-1:] }}"
    "{% endif %}"
)

Serve = Callable[..., Any]
"""(target, mode, limits=None, max_draft=None) to a running `live.Live`."""


def shared(name: str) -> ModuleType:
    """A helper module of spec-server's own tests."""
    known = sys.modules.get(f"spec_server_tests_{name}")
    if known is not None:
        return known
    path = SERVER_TESTS / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"spec_server_tests_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a target by its name, or of a random drafter as `target:mode`."""
    root = tmp_path_factory.mktemp("checkpoints")

    @cache
    def folder(name: str) -> Path:
        target, _, mode = name.partition(":")
        if target == "trained":
            return bundled.TARGET.with_name(f"{bundled.NAME}-{mode}") if mode else bundled.TARGET
        if mode:
            return build_drafter(root / name.replace(":", "-"), folder(target), mode)
        if target == "scripted":
            made: Path = shared("chain_checkpoint").build(
                root / target,
                {"S": SCRIPT_S, "U": ["h", "i", " ", *EMOJI, *HAN, "!"], "T": SCRIPT_T},
                extra_tokens=[*SCRIPT_S, *SCRIPT_T],
                template=TOOLS_TEMPLATE,
            )
            return made
        return build_target(root / target, target)

    return folder


@pytest.fixture(scope="session", autouse=True)
def own_curves(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What rounds cost is measured here, in a hurry, and kept nowhere else; commands draft the
    whole block, whose counts do not depend on it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPEC_MAX_DRAFT", "full")
        patch.setenv("SPEC_CURVES_DIR", str(tmp_path_factory.mktemp("curves")))
        patch.setattr("spec_server.calibration.BUDGET_SECONDS", 0.5)
        yield


@pytest.fixture(scope="session")
def serve(folders: Callable[[str], Path]) -> Iterator[Serve]:
    """Start a server, or give the one that runs."""
    with ExitStack() as stack:

        @cache
        def start(
            target: str,
            mode: str,
            limits: Limits | None = None,
            max_draft: Literal["auto"] | None = None,
        ) -> Any:
            trained = mode in ("dspark", "dflash")
            engine = stack.enter_context(
                Engine.load(
                    folders(target),
                    mode=mode,  # type: ignore[arg-type]
                    drafter=folders(f"{target}:{mode}") if trained else None,
                    max_draft=max_draft,
                    dtype="float32",
                    limits=limits or Limits(max_batch=4),
                    prefix_cache=CacheOptions(64 << 20),
                )
            )
            return stack.enter_context(shared("live").live(engine, ServerSettings()))

        yield start


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name
