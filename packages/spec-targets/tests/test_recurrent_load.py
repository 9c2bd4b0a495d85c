"""Recurrent checkpoints as they are published: tagged as multimodal, text alone, packed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from spec_core.conformance import check_target
from spec_targets import TargetError, UnsupportedTargetError, load_target

TOKENS = mx.array([[3, 14, 15, 92, 65, 35]])
PACKED = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "linear_attn.in_proj_qkv")


def _saved(folder: Path, config: dict[str, Any], weights: dict[str, mx.array]) -> Path:
    folder.mkdir()
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _weights(model: nn.Module) -> dict[str, mx.array]:
    return dict(tree_flatten(model.parameters()))


def _published(model: nn.Module) -> dict[str, mx.array]:
    """A model's weights as the authors of Qwen3.5 lay them out, without the text model's name."""
    shifted = ("layernorm.weight", "model.norm.weight", "q_norm.weight", "k_norm.weight")
    out = {}
    for name, array in _weights(model).items():
        name = name.removeprefix("language_model.")
        if "conv1d.weight" in name:
            array = array.moveaxis(1, 2)
        out[name] = array - 1 if name.endswith(shifted) else array
    return out


def _logits(target: Any) -> mx.array:
    logits: mx.array = target.forward(TOKENS, target.new_state(1)).logits
    return logits


def _close(a: mx.array, b: mx.array) -> bool:
    return mx.abs(a - b).max().item() < 1e-4  # type: ignore[no-any-return, operator]


def test_a_checkpoint_tagged_as_multimodal_loads_as_text(tiny: Any, tmp_path: Path) -> None:
    model, config = tiny("qwen3_5")
    weights = {
        name.replace("model.", "model.language_model.", 1): array
        for name, array in _published(model).items()
    }
    weights["model.visual.blocks.0.attn.proj.weight"] = mx.zeros((4, 4))
    weights["mtp.fc.weight"] = mx.zeros((4, 4))
    tagged = {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": {**config, "model_type": "qwen3_5_text"},
        "vision_config": {"depth": 1},
    }
    target = load_target(_saved(tmp_path / "vlm", tagged, weights)).target
    assert target.info.context_window == 512
    assert target.info.hidden_size == 64
    assert target.info.tappable
    assert _close(_logits(target), model(TOKENS))


def test_a_text_checkpoint_loads_under_its_own_name(tiny: Any, tmp_path: Path) -> None:
    model, config = tiny("qwen3_5")
    text = {**config, "model_type": "qwen3_5_text"}
    target = load_target(_saved(tmp_path / "text", text, _published(model))).target
    assert target.info.family == "qwen3_5_text"
    assert _close(_logits(target), model(TOKENS))


@pytest.mark.parametrize("bits", [1, 2])
def test_low_bit_packs_load_where_the_device_can_multiply_them(
    tiny: Any, tmp_path: Path, bits: int
) -> None:
    model, config = _packed(tiny, bits)
    target = load_target(_saved(tmp_path / "pack", config, _weights(model))).target
    assert mx.array_equal(_logits(target), model(TOKENS))
    state = target.new_state(1)
    target.forward(TOKENS, state)
    state.commit([4])
    after = target.forward(TOKENS[:, 4:], state).logits
    assert after is not None
    assert mx.array_equal(after, model(TOKENS)[:, 4:])


def test_low_bit_packs_are_refused_where_it_cannot(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, config = _packed(tiny, 1)
    folder = _saved(tmp_path / "pack", config, _weights(model))
    own = mx.quantized_matmul

    def without_one_bit(*args: Any, bits: int = 4, **kwargs: Any) -> mx.array:
        if bits == 1:
            raise ValueError("[quantized_matmul] no kernel for\n1 bit")
        return own(*args, bits=bits, **kwargs)

    monkeypatch.setattr(mx, "quantized_matmul", without_one_bit)
    with pytest.raises(UnsupportedTargetError, match="1-bit weights in groups of 64") as error:
        load_target(folder)
    assert "no kernel for 1 bit" in str(error.value)


def test_a_device_that_multiplies_wrongly_is_refused(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, config = _packed(tiny, 2)
    folder = _saved(tmp_path / "pack", config, _weights(model))
    own = mx.quantized_matmul
    monkeypatch.setattr(mx, "quantized_matmul", lambda *args, **how: own(*args, **how) * 0.5)
    with pytest.raises(UnsupportedTargetError, match=r"2-bit weights .* off by 0\.5"):
        load_target(folder)


def _packed(tiny: Any, bits: int) -> tuple[nn.Module, dict[str, Any]]:
    model, config = tiny("qwen3_5", weight_bits=None)
    nn.quantize(model, group_size=64, bits=bits, class_predicate=_wide)
    mx.eval(model.parameters())
    return model, {**config, "quantization": {"group_size": 64, "bits": bits}}


def _wide(path: str, module: nn.Module) -> bool:
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % 64 == 0


# --- Hadamard packs ----------------------------------------------------------------------------


@pytest.fixture
def hadamard_pack(tiny: Any, tmp_path: Path) -> Callable[[], Path]:
    """A ternary pack: 2 bits, groups of 128, inputs of some layers rotated in blocks of 512."""

    def make() -> Path:
        model, config = tiny(
            "qwen3_5", dtype=mx.float16, hidden_size=128, intermediate_size=512, num_hidden_layers=2
        )
        records, weights = [], {}
        for name, array in _weights(model).items():
            path = name.removeprefix("language_model.").removesuffix(".weight")
            if not path.endswith(PACKED) and path != "model.embed_tokens":
                weights[name] = array
                continue
            block = 512 if array.shape[-1] % 512 == 0 else 0
            packed = mx.quantize(mx.round(mx.clip(array * 8, -1, 1)), group_size=128, bits=2)
            for part, value in zip(("weight", "scales", "biases"), packed, strict=True):
                weights[f"language_model.{path}.{part}"] = value
            if block:
                signs = mx.random.randint(0, 2, (array.shape[-1],)) * 2 - 1
                weights[f"language_model.{path}.signs"] = signs.astype(mx.float32)
            embedding = path == "model.embed_tokens"
            records.append(
                {"path": path, "block": block, "embedding": embedding, "dtype": "float16"}
            )
        pack = {
            "model_type": "prism_hadamard_qwen35",
            "schema_version": 2,
            "tensor_namespace": "mlx-vlm-qwen3_5",
            "gdn_activation_layout": "grouped",
            "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
            "modules": records,
            "text_config": {**config, "model_type": "qwen3_5_text"},
        }
        return _saved(tmp_path / "pack", pack, weights)

    return make


def test_a_hadamard_pack_is_a_target(hadamard_pack: Callable[[], Path]) -> None:
    target = load_target(hadamard_pack()).target
    assert target.info.family == "prism_hadamard_qwen35"
    assert target.info.tappable
    assert target.batch_refused == ""
    state = target.new_state(1)
    for keep, columns in ((4, 4), (1, 3), (0, 2)):
        target.forward(TOKENS[:, :columns], state)
        state.commit([keep])
    ours = target.forward(TOKENS, state).logits
    fresh = target.new_state(1)
    target.forward(mx.array([[3, 14, 15, 92, 3]]), fresh)
    fresh.commit([5])
    theirs = target.forward(TOKENS, fresh).logits
    assert ours is not None
    assert theirs is not None
    assert mx.array_equal(ours, theirs)


@pytest.mark.slow
def test_a_hadamard_pack_conforms(hadamard_pack: Callable[[], Path]) -> None:
    check_target(load_target(hadamard_pack()).target, prompt_length=7, columns=3)


def test_a_damaged_hadamard_pack_is_refused(hadamard_pack: Callable[[], Path]) -> None:
    folder = hadamard_pack()
    config = json.loads((folder / "config.json").read_text())
    config["modules"][0]["path"] = "model.nowhere"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(TargetError, match=r"model\.nowhere"):
        load_target(folder)
