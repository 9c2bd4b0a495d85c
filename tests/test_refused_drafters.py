"""Every drafter that is refused, through the command: one sentence, and no weights are read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from spec_cli import main

REFUSED = Path(__file__).parents[1] / "packages" / "spec-drafters" / "tests" / "refused"
COMMANDS = {
    "convert": ["convert", "{drafter}", "{out}"],
    "generate": ["generate", "hello", "--max-tokens", "1", "--drafter", "{drafter}"],
}


def checkpoint(folder: Path, case: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(case["config"]))
    tensors = {name: mx.zeros(shape) for name, shape in case["tensors"].items()}
    mx.save_safetensors(str(folder / "model.safetensors"), tensors or {"other": mx.zeros((1,))})
    return folder


@pytest.fixture
def headers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(mx, "load", fail)


@pytest.mark.usefixtures("headers_only")
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", sorted(path.stem for path in REFUSED.glob("*.json")))
def test_refused_in_one_sentence(
    name: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = json.loads((REFUSED / f"{name}.json").read_text())
    drafter, out = checkpoint(tmp_path / "drafter", case), tmp_path / "out"
    arguments = [part.format(drafter=drafter, out=out) for part in COMMANDS[command]]
    code = main.run(arguments)
    seen = capsys.readouterr()
    assert code == 1
    assert seen.out == ""
    (sentence,) = seen.err.splitlines()
    says = case["says"].removeprefix("^").removesuffix("$")
    assert re.search(f"^spec: .*{says}", sentence), seen.err
    assert not out.exists()
