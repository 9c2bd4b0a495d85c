"""`spec doctor`: what it sees is what an engine meets, and every problem says what to do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from spec_cli import bundled
from spec_cli.doctor import cost
from spec_cli.doctor.finding import Finding
from spec_cli.doctor.packages import BREAKAGES, breakages, misfits, needs

from .command import Spec


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings but those of a test, and an empty hub cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    for name in [name for name in os.environ if name.startswith("SPEC_")]:
        if name != "SPEC_CPU_BLAS":
            monkeypatch.delenv(name)
    monkeypatch.setenv("SPEC_CURVES_DIR", str(tmp_path / "curves"))


def looked(spec: Spec, *arguments: str, code: int = 0) -> dict[str, dict[str, Any]]:
    """The findings by name."""
    ran = spec("doctor", "--json", *arguments)
    assert ran.code == code, ran.out + ran.err
    record = json.loads(ran.out)
    assert record["ok"] == (code == 0)
    return {finding["name"]: finding for finding in record["findings"]}


def test_it_loads_no_model_and_imports_no_model_library() -> None:
    code = (
        "import sys; from spec_cli.main import run; code = run(sys.argv[1:]); "
        "heavy = {'mlx_lm', 'transformers', 'starlette', 'torch'}; "
        "sys.exit(code or ', '.join(heavy & set(sys.modules)) or 0)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, "doctor", "--model", "spec-tiny"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "qwen3, which mlx-lm runs" in ran.stdout


def test_a_sound_machine_and_model_have_no_problem(spec: Spec) -> None:
    found = looked(spec, "--model", "spec-tiny")
    assert {"Python", "MLX", "memory", "disk", "versions", "ranges", "files", "drafter"} <= set(
        found
    )
    assert "dspark" in found["drafter"]["seen"]
    shown = spec("doctor", "--model", "spec-tiny")
    assert shown.code == 0
    for finding in found.values():
        assert finding["seen"] in shown.out


def test_what_it_expects_in_memory_is_what_an_engine_measures() -> None:
    from spec_drafters.load import inspect_drafter, load_drafter
    from spec_server.memory import measure, total
    from spec_targets import load_target

    config = json.loads((bundled.TARGET / "config.json").read_text())
    folder = bundled.TARGET.with_name("spec-tiny-dspark")
    spec = inspect_drafter(folder)
    for kv_bits in (None, 8):
        target = load_target(bundled.TARGET, dtype="float32", kv_bits=kv_bits).target
        measured = measure(target, load_drafter(folder, target, dtype="float32"), None).cost
        assert measured == total([cost.target_row(config, 4, kv_bits), cost.drafter_row(spec, 4)])
    parameters = cost.weight_bytes(bundled.TARGET, 4) // 4
    assert parameters == cost.weight_bytes(bundled.TARGET, 2) // 2
    assert 8.5e6 < parameters < 9.5e6


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({"num_hidden_layers": 4}, (4, 0, 0)),
        ({"text_config": {"num_hidden_layers": 4, "full_attention_interval": 4}}, (1, 0, 3)),
        (
            {"num_hidden_layers": 4, "sliding_window": 8, "sliding_window_pattern": 2},
            (2, 2, 0),
        ),
        (
            {
                "num_hidden_layers": 3,
                "layer_types": ["sliding_attention", "full_attention", "full_attention"],
                "num_kv_shared_layers": 1,
            },
            (1, 1, 0),
        ),
    ],
)
def test_layers_are_counted_by_what_they_keep(
    config: dict[str, Any], layers: tuple[int, int, int]
) -> None:
    assert cost.layers_of(config) == cost.Layers(*layers)


def with_memory(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    monkeypatch.setattr("spec_server.memory.default_limit", lambda: nbytes)


def test_too_little_memory_is_a_problem_or_says_what_still_fits(
    spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_memory(monkeypatch, 40 * 2**20)
    assert looked(spec, "--model", "spec-tiny", code=1)["memory"]["status"] == "problem"
    with_memory(monkeypatch, 80 * 2**20)
    advice = looked(spec, "--model", "spec-tiny")["memory"]["advice"]
    longest = int(advice.split()[4])
    assert 256 <= longest < 4096
    for context, status in ((longest, "ok"), (longest + 257, "note")):
        found = looked(spec, "--model", "spec-tiny", "--context", str(context))
        assert found["memory"]["status"] == status


def copy_of_target(tmp_path: Path) -> Path:
    return Path(shutil.copytree(bundled.TARGET, tmp_path / "mine"))


def broken(tmp_path: Path, how: str) -> Path:
    folder = copy_of_target(tmp_path)
    if how == "truncated":
        with (folder / "model.safetensors").open("r+b") as file:
            file.truncate(1_000_000)
    elif how == "shard":
        index = {"weight_map": {"a": "model.safetensors", "b": "model-00002.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    elif how == "tokenizer":
        (folder / "tokenizer.json").unlink()
    elif how == "damaged":
        (folder / "tokenizer.json").write_text("nope")
    else:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "model_type": "mysterious"}))
    return folder


@pytest.mark.parametrize(
    ("how", "name", "sentence"),
    [
        ("truncated", "files", "model.safetensors is truncated"),
        ("shard", "files", "model-00002.safetensors"),
        ("tokenizer", "tokenizer", "tokenizer.json"),
        ("damaged", "tokenizer", "tokenizer.json is damaged"),
        ("family", "files", "'mysterious'"),
    ],
)
def test_files_that_would_not_load_are_named(
    spec: Spec, tmp_path: Path, how: str, name: str, sentence: str
) -> None:
    found = looked(spec, "--model", str(broken(tmp_path, how)), code=1)
    assert found[name]["status"] == "problem"
    assert sentence in found[name]["seen"]


def test_a_drafter_named_as_the_model_is_explained(spec: Spec) -> None:
    folder = str(bundled.TARGET.with_name("spec-tiny-dflash"))
    family = looked(spec, "--model", folder, code=1)["family"]
    assert "dflash drafter, not a target" in family["seen"]
    assert "--drafter" in family["advice"]


def test_a_name_that_is_not_here_is_explained_without_the_network(
    spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("asked the network"))
    found = looked(spec, "--model", "Qwen/Qwen3-4", code=1)["folder"]
    assert "did you mean Qwen/Qwen3-4B" in found["advice"]
    known = looked(spec, "--model", "Qwen/Qwen3-4B", code=1)["folder"]
    assert known["advice"] == "`spec pull Qwen/Qwen3-4B` fetches it"
    drafter = looked(spec, "--model", "spec-tiny", "--drafter", "z-lab/nothing", code=1)["drafter"]
    assert "spec pull z-lab/nothing" in drafter["advice"]


def test_a_drafter_for_another_target_is_a_problem(spec: Spec, tmp_path: Path) -> None:
    folder = copy_of_target(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 9}))
    dspark = str(bundled.TARGET.with_name("spec-tiny-dspark"))
    found = looked(spec, "--model", str(folder), "--drafter", dspark, code=1)["drafter"]
    assert "target layer count of 8; the target's is 9" in found["seen"]
    alone = looked(spec, "--model", str(folder))["drafter"]
    assert alone["status"] == "note"
    assert "lookup" in alone["seen"]


def test_options_for_a_model_need_one(spec: Spec) -> None:
    ran = spec("doctor", "--context", "100")
    assert ran.code == 2
    assert "--context needs --model" in ran.err


# ---------------------------------------------------------------------- packages


def statuses(found: Iterable[Finding]) -> list[str]:
    return [finding.status for finding in found]


def test_siblings_are_among_what_is_checked() -> None:
    wanted = {(who, requirement.name) for who, requirement in needs("spec-cli")}
    assert ("spec-server", "spec-targets") in wanted
    assert ("spec-targets", "mlx-lm") in wanted
    assert ("spec-server", "uvicorn") in wanted  # of the extra that spec-cli asks for


def test_a_sibling_outside_its_range_is_named() -> None:
    wanted = [("spec-server", Requirement("spec-core>=0.1,<0.2"))]
    assert statuses(misfits(wanted, lambda _: "0.1.7")) == ["ok"]
    for version in ("0.2.0", None):
        (found,) = misfits(wanted, lambda _, version=version: version)  # type: ignore[misc]
        assert found.status == "problem"
        assert "spec-server needs spec-core" in found.seen


def test_a_known_breakage_is_seen_where_all_of_it_is_installed() -> None:
    for breakage in BREAKAGES:
        versions = {
            requirement.name: {"<=": "0.6.0", ">=": "99", "==": "0.6.2", "!=": "99"}[
                next(iter(requirement.specifier)).operator
            ]
            for requirement in map(Requirement, breakage.together)
        }
        assert [found.seen for found in breakages(versions.get)] == [breakage.what]
        for name in versions:
            assert statuses(breakages({**versions, name: None}.get)) == ["ok"]


# ---------------------------------------------------------------------- settings


def test_settings_are_listed_and_slips_are_noticed(
    spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPEC_MAX_BATCH", "4")
    monkeypatch.setenv("SPEC_MAX_QEUE", "4")
    monkeypatch.setenv("SPEC_API_KEY", "a-secret")
    found = looked(spec)
    assert (found["SPEC_MAX_BATCH"]["status"], found["SPEC_MAX_BATCH"]["seen"]) == (
        "ok",
        "4 (for spec serve alone)",
    )
    assert found["SPEC_MAX_QEUE"]["status"] == "note"
    assert "SPEC_MAX_QUEUE" in found["SPEC_MAX_QEUE"]["advice"]
    assert "a-secret" not in json.dumps(found)


def test_a_settings_file_is_read(spec: Spec, tmp_path: Path) -> None:
    file = tmp_path / "spec.toml"
    file.write_text("max-batch = 4\n")
    assert looked(spec, "--config", str(file))[str(file)]["seen"] == "sets max-batch"
    file.write_text("max-bach = 4\n")
    assert "max-bach" in looked(spec, "--config", str(file), code=1)[str(file)]["seen"]


def test_a_folder_that_cannot_be_written_is_a_problem(
    spec: Spec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SPEC_CURVES_DIR", str(tmp_path / "locked" / "curves"))
    own = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path and own(path, mode))
    found = looked(spec, code=1)["round times"]
    assert str(tmp_path) in found["advice"]


def test_a_file_in_a_folders_place_is_a_problem(
    spec: Spec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "curves").write_text("")
    monkeypatch.setenv("SPEC_CURVES_DIR", str(tmp_path / "curves"))
    assert "is not a folder" in looked(spec, code=1)["round times"]["seen"]
