"""A drafter family that another distribution registers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import mlx.core as mx
import pytest

from spec_core import decode
from spec_core.conformance.drafter import check_drafter
from spec_core.testing import TinyTarget
from spec_drafters.errors import CheckpointError, PackagingError
from spec_drafters.load import inspect_drafter, load_drafter
from spec_drafters.packaging import GROUP, installed_packagings
from spec_drafters.recognize import compatibility

from .helpers import Golden

PLUGIN = Path(__file__).parent / "plugin" / "successor_drafter.py"


def install(
    site: Path, monkeypatch: pytest.MonkeyPatch, value: str = "successor_drafter:PACKAGING"
) -> None:
    """A distribution with one entry point, as an installer would leave it."""
    site.mkdir()
    shutil.copy(PLUGIN, site)
    facts = site / "successor_drafter-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: successor-drafter\nVersion: 1.0\n"
    )
    (facts / "entry_points.txt").write_text(f"[{GROUP}]\nsuccessor = {value}\n")
    monkeypatch.syspath_prepend(site)


def checkpoint(folder: Path, target: TinyTarget, **changes: object) -> Path:
    """A table made from the target's own choices behind single tokens."""
    folder.mkdir()
    vocabulary = target.info.vocab_size
    scores = mx.zeros((vocabulary, vocabulary))
    for token in range(vocabulary):
        scores[token, target.greedy([token], 1)[0]] = 4.0
    mx.save_safetensors(str(folder / "model.safetensors"), {"scores": scores})
    config = {
        "architectures": ["SuccessorModel"],
        "vocab_size": vocabulary,
        "hidden_size": target.info.hidden_size,
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def tiny() -> TinyTarget:
    return TinyTarget(vocab=12)


def test_it_is_recognised_checked_loaded_and_lossless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: TinyTarget
) -> None:
    install(tmp_path / "site", monkeypatch)
    folder = checkpoint(tmp_path / "drafter", tiny)
    assert inspect_drafter(folder).packaging == "successor"
    drafter = load_drafter(folder, tiny)
    check_drafter(drafter, tiny)
    outcomes = list(decode(tiny, drafter, [1, 2], max_tokens=40))
    assert [t for o in outcomes for t in o.tokens] == tiny.greedy([1, 2], 40)
    assert {o.source for o in outcomes if o.accepted} == {"successor"}
    wrong = checkpoint(tmp_path / "wrong", tiny, vocab_size=13)
    with pytest.raises(CheckpointError, match=r"scores has shape \[12, 12\]"):
        load_drafter(wrong, tiny)


def test_without_the_distribution_it_is_unknown(tmp_path: Path, tiny: TinyTarget) -> None:
    folder = checkpoint(tmp_path / "drafter", tiny)
    with pytest.raises(PackagingError, match="names the architecture SuccessorModel"):
        inspect_drafter(folder)


def test_our_own_packagings_are_read_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "site", monkeypatch)
    assert [row.name for row in installed_packagings()] == ["successor"]
    assert inspect_drafter(Golden.named("dspark_qwen3").path).packaging == "DeepSpec"
    assert "successor" not in compatibility()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("successor_drafter:GONE", "successor-drafter registers cannot be loaded: AttributeError"),
        ("no_such_module:X", "successor-drafter registers cannot be loaded: ModuleNotFoundError"),
        ("successor_drafter:read", "successor-drafter registers is a function, not a Packaging"),
    ],
)
def test_a_broken_distribution_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, message: str
) -> None:
    install(tmp_path / "site", monkeypatch, value)
    with pytest.raises(PackagingError, match=message) as refusal:
        inspect_drafter(Golden.named("dspark_qwen3").path)
    assert "\n" not in str(refusal.value)
