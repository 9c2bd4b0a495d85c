"""Stored curves: found again by content, never believed when they do not fit."""

from __future__ import annotations

import json
import multiprocessing
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from spec_core import (
    AdaptiveLength,
    CostCurves,
    FixedLength,
    InvalidValueError,
    RoundCost,
    WithCopies,
)
from spec_core.testing import TinyDrafter, TinyTarget
from spec_drafters.combined import with_lookup
from spec_drafters.lookup import Lookup
from spec_server import Engine, LoadOptions
from spec_server.calibration import (
    CurveStore,
    Subject,
    curves_directory,
    measure,
    read,
    subject_of,
    weights_digest,
    write,
)

SUBJECT = Subject({"device": "a machine", "dtype": "float32"})


def curves(scale: float = 1.0) -> CostCurves:
    points = (RoundCost(1, n, 64, scale * (1 + n / 10)) for n in range(4))
    return CostCurves(points, cut=scale / 7)


def unmeasured() -> CostCurves:
    raise AssertionError("measured again")


@pytest.fixture
def store(tmp_path: Path) -> CurveStore:
    return CurveStore(tmp_path / "curves")


def test_what_was_measured_once_is_found_again(store: CurveStore) -> None:
    first, note = store.curves(SUBJECT, curves)
    assert note is None
    again, note = CurveStore(store.directory).curves(SUBJECT, unmeasured)
    assert note is None
    assert again.points == first.points == curves().points
    assert again.cut == first.cut == curves().cut


def test_every_fact_counts(store: CurveStore) -> None:
    store.curves(SUBJECT, curves)
    for changed in ({"device": "another"}, {"dtype": "bfloat16"}, {"drafter_bits": "4"}):
        other, _ = store.curves(SUBJECT.with_facts(**changed), lambda: curves(2.0))
        assert other.points == curves(2.0).points
    assert len(list(store.directory.iterdir())) == 4


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "truncated": lambda data: data[: len(data) // 2],
    "not JSON": lambda data: b"\x00" * 100,
    "another JSON": lambda data: b'[1, "two"]',
    "a digit": lambda data: data.replace(b"1.2", b"1.3"),
    "nested": lambda data: b"[" * 200_000,
    "no costs": lambda data: json.dumps({**json.loads(data), "costs": {}}).encode(),
    "another format": lambda data: json.dumps({**json.loads(data), "format": 0}).encode(),
    "another subject": lambda data: data.replace(b"a machine", b"my machine"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_file_that_does_not_fit_is_replaced_and_reported(store: CurveStore, kind: str) -> None:
    store.curves(SUBJECT, curves)
    path = store.path(SUBJECT)
    path.write_bytes(DAMAGE[kind](path.read_bytes()))
    found, note = store.curves(SUBJECT, lambda: curves(3.0))
    assert found.points == curves(3.0).points
    assert note is not None
    assert str(path) in note
    assert "measured anew" in note
    assert store.curves(SUBJECT, unmeasured)[1] is None


def test_points_that_cannot_be_curves_are_refused_even_with_a_fitting_checksum(
    store: CurveStore,
) -> None:
    from spec_server.calibration import _checksum

    path = store.path(SUBJECT)
    write(path, SUBJECT, curves())
    good = [[1, 0, 64, 1.0], [1, 1, 64, 1.0]]
    negative = [[1, 0, 64, -1.0], [1, 1, 64, 1.0]]
    few: list[Any] = [{"points": p, "cut": 0} for p in (negative, [[1, 0]], good[:1], ["abcd"])]
    for costs in (*few, {"points": good}, {"points": good, "cut": -1}, {"cut": 0}, [], 7):
        held = {**json.loads(path.read_text()), "costs": costs, "sha256": _checksum(costs)}
        path.write_text(json.dumps(held))
        with pytest.raises(ValueError, match="damaged"):
            read(path, SUBJECT)


def test_a_directory_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    store = CurveStore(tmp_path / "file" / "curves")
    found, note = store.curves(SUBJECT, curves)
    assert found.points == curves().points
    assert note is not None
    assert "cannot be" in note


def test_a_failed_write_leaves_nothing_behind(store: CurveStore) -> None:
    path = store.path(SUBJECT)
    path.mkdir(parents=True)
    with pytest.raises(OSError, match=path.name):
        write(path, SUBJECT, curves())
    assert [p.name for p in store.directory.iterdir()] == [path.name]


def _write_many(directory: Path, scale: float) -> None:
    store = CurveStore(directory)
    for _ in range(60):
        write(store.path(SUBJECT), SUBJECT, curves(scale))


def test_of_concurrent_writers_and_readers_each_sees_a_whole_file(store: CurveStore) -> None:
    context = multiprocessing.get_context("spawn")
    store.curves(SUBJECT, lambda: curves(1.0))
    writers = [
        context.Process(target=_write_many, args=(store.directory, float(n))) for n in (1, 2)
    ]
    for writer in writers:
        writer.start()
    whole = {curves(1.0).points, curves(2.0).points}
    while any(writer.is_alive() for writer in writers):
        assert read(store.path(SUBJECT), SUBJECT).points in whole
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert [p.name for p in store.directory.iterdir()] == [store.path(SUBJECT).name]


def test_a_home_that_does_not_exist_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEC_CURVES_DIR", "~nobody-of-this-name/curves")
    with pytest.raises(InvalidValueError, match="SPEC_CURVES_DIR"):
        curves_directory()


def test_the_directory_can_be_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPEC_CURVES_DIR", str(tmp_path))
    assert curves_directory() == tmp_path
    monkeypatch.delenv("SPEC_CURVES_DIR")
    assert curves_directory().name == "curves"


# ---------------------------------------------------------------------- fingerprints


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    weights = {"a": mx.arange(200_000, dtype=mx.float32), "b": mx.zeros((3, 5), dtype=mx.bfloat16)}
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


def test_names_and_times_of_files_do_not_matter(checkpoint: Path, tmp_path: Path) -> None:
    copy = tmp_path / "another name"
    shutil.copytree(checkpoint, copy)
    (copy / "model.safetensors").rename(copy / "model-00001-of-00001.safetensors")
    (copy / "README.md").write_text("unrelated")
    assert weights_digest(copy) == weights_digest(checkpoint)


def test_weights_types_and_configuration_matter(checkpoint: Path) -> None:
    file, seen = checkpoint / "model.safetensors", {weights_digest(checkpoint)}
    for weights in (
        {"a": mx.arange(200_000, dtype=mx.float32) + 1, "b": mx.zeros((3, 5), dtype=mx.bfloat16)},
        {"a": mx.arange(200_000, dtype=mx.float32), "b": mx.zeros((5, 3), dtype=mx.bfloat16)},
        {"a": mx.arange(200_000, dtype=mx.int32), "b": mx.zeros((3, 5), dtype=mx.bfloat16)},
        {"a": mx.arange(200_001, dtype=mx.float32), "b": mx.zeros((3, 5), dtype=mx.bfloat16)},
    ):
        mx.save_safetensors(str(file), weights)
        seen.add(weights_digest(checkpoint))
    (checkpoint / "config.json").write_text('{"model_type": "qwen2"}')
    seen.add(weights_digest(checkpoint))
    assert len(seen) == 6


def test_a_single_file_is_a_checkpoint_too(checkpoint: Path, tmp_path: Path) -> None:
    for content in (b"", b"x", b"GGUF" * 10_000):
        (tmp_path / "drafter.gguf").write_bytes(content)
        assert len(weights_digest(tmp_path / "drafter.gguf")) == 64


def test_the_subject_names_device_software_and_options(checkpoint: Path) -> None:
    plain = subject_of(checkpoint, None, {"dtype": "float32", "kv_bits": None})
    software = {"mlx", "spec-core", "spec-drafters", "spec-targets"}
    assert {"device", "target", "drafter", "dtype", "kv_bits"} | software == set(plain.facts)
    drafted = subject_of(checkpoint, checkpoint, {"dtype": "float32", "kv_bits": None})
    assert drafted.fingerprint != plain.fingerprint


# ---------------------------------------------------------------------- measuring


@pytest.mark.parametrize("kind", ["trained", "lookup", "combined", "none"])
def test_each_kind_of_drafter_gets_its_curves(
    store: CurveStore, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spec_server.calibration.BUDGET_SECONDS", 0.01)
    target = TinyTarget()
    trained = TinyDrafter(target, max_block=3)
    drafters = {
        "trained": trained,
        "lookup": Lookup(),
        "combined": with_lookup(trained),
        "none": None,
    }
    said: list[str] = []
    for _ in range(2):
        found = measure(target, drafters[kind], SUBJECT, store=store, announce=said.append)
        assert (found.drafts is not None) == (kind in ("trained", "combined"))
        assert (found.copies is not None) == (kind in ("lookup", "combined"))
        assert found.notes == ()
    assert len(said) == {"trained": 1, "lookup": 1, "combined": 2, "none": 0}[kind]
    policy = found.policy()
    expected = {"trained": AdaptiveLength, "none": FixedLength}
    assert isinstance(policy, expected.get(kind, WithCopies))
    assert policy is not found.policy()
    if found.drafts is not None:
        assert found.drafts.max_length == 3
    if found.copies is not None:
        assert found.copies.max_length == 32


def test_an_engine_chooses_lengths_and_reports_curves_that_did_not_fit(
    chain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spec_server.calibration.BUDGET_SECONDS", 0.01)
    monkeypatch.setenv("SPEC_CURVES_DIR", str(tmp_path))
    prompt = [{"role": "user", "content": "a"}]
    with Engine.load(chain, mode="baseline") as plain:
        expected = plain.generate(prompt, max_tokens=20)
    assert expected.statistics.max_draft == "0"
    said: list[str] = []
    for attempt in range(3):
        with Engine.load(chain, mode="lookup", max_draft="auto", announce=said.append) as engine:
            answer = engine.generate(prompt, max_tokens=20)
            capped = engine.generate(prompt, max_tokens=20, max_draft=1)
        assert answer.token_ids == capped.token_ids == expected.token_ids
        assert answer.statistics.max_draft == "auto"
        assert capped.statistics.max_draft == "auto, at most 1"
        assert len(answer.statistics.fallbacks) == (attempt == 2)
        if attempt == 1:
            (file,) = tmp_path.iterdir()
            file.write_bytes(file.read_bytes()[:100])
    assert "measured anew" in answer.statistics.fallbacks[0]
    assert len(said) == 2


@pytest.mark.parametrize(
    "options",
    [{"max_draft": "often"}, {"max_draft": -1}, {"max_draft": "auto", "confidence_threshold": 0.5}],
)
def test_lengths_that_make_no_sense_are_refused(chain: Path, options: dict[str, object]) -> None:
    with pytest.raises(InvalidValueError):
        LoadOptions(str(chain), **options)  # type: ignore[arg-type]
