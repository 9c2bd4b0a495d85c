"""`spec convert`: files in, files out, and what trying them tells."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .command import Spec


def weights(folder: Path) -> dict[str, Any]:
    import mlx.core as mx

    return {k: v.tolist() for k, v in dict(mx.load(str(folder / "model.safetensors"))).items()}


def bundled_folder(name: str) -> Path:
    import spec_cli

    return Path(spec_cli.__file__).parent / "models" / name


def test_a_bundled_drafter_is_written_as_it_is(spec: Spec, tmp_path: Path) -> None:
    dest = tmp_path / "new" / "drafter"
    ran = spec("convert", "spec-tiny-dspark", str(dest), "--json")
    assert ran.code == 0
    record = json.loads(ran.out)
    assert record["layout"] == record["packaging"] == "DeepSpec"
    assert (record["mode"], record["max_block"], record["readings"]) == ("dspark", 7, [])
    assert weights(dest) == weights(bundled_folder("spec-tiny-dspark"))


def test_trying_a_drafter_shows_the_convention_it_was_trained_with(
    spec: Spec, tmp_path: Path
) -> None:
    """Read with the wrong slots, less than half as much is accepted; the other layers are no
    better."""
    dest = tmp_path / "drafter"
    ran = spec(
        *("convert", "spec-tiny-dspark", str(dest), "--json", "--probe"),
        *("--slot-convention", "shifted", "--max-tokens", "16"),
    )
    assert ran.code == 0
    record = json.loads(ran.out)
    first, other, *moved = record["readings"]
    assert [r["slot_convention"] for r in (first, other)] == ["shifted", "anchor"]
    assert first["accepted"] < 0.7 * other["accepted"]
    assert {r["tap_shift"] for r in moved} <= {-1, 1}
    assert "with --slot-convention anchor" in record["hint"]
    assert record["hint"] in ran.err
    config = json.loads((dest / "config.json").read_text())
    assert config["dflash_config"]["sample_from_anchor"] is False


def test_options_of_trying_need_it(spec: Spec, tmp_path: Path) -> None:
    ran = spec(
        "convert", "spec-tiny-dspark", str(tmp_path / "x"), "--model", "m", "--dtype", "float32"
    )
    assert ran.code == 2
    assert "--model and --dtype need --probe" in ran.err


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere", "nowhere: not found"),
        ("{tmp}/empty", "has no config.json"),
        ("spec-tiny", "not a drafter that is known here"),
    ],
)
def test_what_cannot_be_converted_is_one_sentence(
    spec: Spec, tmp_path: Path, source: str, message: str
) -> None:
    (tmp_path / "empty").mkdir()
    if source == "spec-tiny":
        source = str(bundled_folder("spec-tiny"))
    ran = spec("convert", source.format(tmp=tmp_path), str(tmp_path / "out"))
    assert (ran.code, ran.out) == (1, "")
    assert message in ran.err
    assert ran.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten(spec: Spec, tmp_path: Path) -> None:
    ran = spec("convert", "spec-tiny-dspark", str(tmp_path))
    assert ran.code == 1
    assert "is there already" in ran.err
