"""What is not read says why: a file of refused/ holds a config, tensor shapes, and the sentence."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from spec_drafters.errors import DrafterError
from spec_drafters.load import inspect_drafter, load_drafter

from .helpers import Golden

REFUSED = Path(__file__).parent / "refused"


def case(name: str) -> dict[str, Any]:
    return json.loads((REFUSED / f"{name}.json").read_text())  # type: ignore[no-any-return]


def checkpoint(folder: Path, case: dict[str, Any]) -> Path:
    """A folder with this config, and weights of these shapes."""
    (folder / "config.json").write_text(json.dumps(case["config"]))
    tensors = {name: mx.zeros(shape) for name, shape in case["tensors"].items()}
    mx.save_safetensors(str(folder / "model.safetensors"), tensors or {"other": mx.zeros((1,))})
    return folder


@pytest.mark.parametrize("name", sorted(path.stem for path in REFUSED.glob("*.json")))
def test_refused_in_one_sentence_from_headers_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = case(name)
    folder = checkpoint(tmp_path, refused)
    target = Golden.named("dspark_qwen3").target()

    def fail(*args: object, **kwargs: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(mx, "load", fail)
    for look in (partial(load_drafter, target=target), inspect_drafter):
        with pytest.raises(DrafterError) as error:
            look(folder)
        sentence = str(error.value)
        assert re.search(refused["says"], sentence), sentence
        assert "\n" not in sentence
        assert not sentence.endswith(".")


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("dspark_qwen3", "block_size"),
        ("dflash_qwen3", "block_size"),
        ("eagle3_qwen3", "ttt_length"),
    ],
)
def test_a_block_beyond_all_reason_is_refused(name: str, key: str, tmp_path: Path) -> None:
    golden = Golden.named(name)
    config = json.loads((golden.path / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes((golden.path / "model.safetensors").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({**config, key: 1_000_000}))
    with pytest.raises(DrafterError, match="is 1000000; it must be at most 256"):
        inspect_drafter(tmp_path)


def test_a_pickled_mask_embedding_is_refused(tmp_path: Path) -> None:
    golden = Golden.named("dflash_qwen3")
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).write_bytes((golden.path / file).read_bytes())
    inspect_drafter(tmp_path)
    (tmp_path / "mask_embedding.pt").touch()
    with pytest.raises(DrafterError, match=r"z-lab DFlash: .* a pickled mask_embedding\.pt"):
        inspect_drafter(tmp_path)
