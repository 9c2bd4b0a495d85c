"""Checkpoints through mlx-vlm: the same logits as through mlx-lm, and types that only it has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten, tree_map_with_path

from spec_core import decode
from spec_core.conformance import check_target
from spec_core.testing import ScriptedDrafter
from spec_targets import LoadedTarget, UnsupportedTargetError, load_target

pytestmark = pytest.mark.vlm

VOCAB = 97
TEXT = [(17 * i * i + 5 * i + 3) % 97 for i in range(140)]
OTHER = [(11 * i + 40) % 97 for i in range(140)]

_TEXT = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
}
_GEMMA4_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "patch_size": 4,
    "position_embedding_size": 16,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "gemma4": {
        "model_type": "gemma4",
        "vocab_size": VOCAB,
        "text_config": {
            **_TEXT,
            "model_type": "gemma4_text",
            "global_head_dim": 64,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 32,
            "vocab_size_per_layer_input": VOCAB,
            "rope_parameters": {
                "full_attention": {
                    "partial_rotary_factor": 0.25,
                    "rope_theta": 1000000.0,
                    "rope_type": "proportional",
                },
                "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
            },
        },
        "vision_config": {**_GEMMA4_VISION, "model_type": "gemma4_vision"},
        "audio_config": None,
    },
    "idefics3": {
        "model_type": "idefics3",
        "vocab_size": VOCAB,
        "text_config": {**_TEXT, "model_type": "llama", "rope_theta": 10000.0},
        "vision_config": {
            "model_type": "idefics3",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "patch_size": 4,
            "image_size": 16,
        },
    },
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makes the folder of a tiny random multimodal checkpoint, pictures included."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            _write(made[name], CONFIGS[name])
        return made[name]

    return make


def _write(folder: Path, config: dict[str, Any]) -> None:
    from mlx_vlm.utils import get_model_and_args, update_module_configs

    parts, _ = get_model_and_args(json.loads(json.dumps(config)))
    whole = parts.ModelConfig.from_dict(json.loads(json.dumps(config)))
    names = ["text", "vision", "perceiver", "projector", "audio"]
    model = parts.Model(update_module_configs(whole, parts, config, names))
    mx.random.seed(7)
    weights = dict(tree_flatten(tree_map_with_path(_random, model.parameters())))
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})


def _random(path: str, parameter: mx.array) -> mx.array:
    noise = mx.random.normal(parameter.shape)
    return 1 + 0.1 * noise if parameter.ndim == 1 else noise * parameter.shape[-1] ** -0.5 * 1.5


def _logits(loaded: LoadedTarget, tokens: list[int]) -> mx.array:
    target = loaded.target
    logits = target.forward(mx.array([tokens]), target.new_state(1)).logits
    assert logits is not None
    return logits[0]


def test_gemma4_gives_the_same_logits_through_both(checkpoint: Any) -> None:
    both = [load_target(checkpoint("gemma4"), through=through) for through in ("lm", "vlm")]
    ours, theirs = (_logits(loaded, TEXT) for loaded in both)
    assert mx.abs(ours - theirs).max().item() == 0
    assert both[0].target.info == both[1].target.info
    assert type(both[1].model).__module__ == "spec_targets.vlm"


def test_gemma4_through_mlx_vlm_conforms(checkpoint: Any) -> None:
    target = load_target(checkpoint("gemma4"), through="vlm").target
    assert target.info.tappable
    assert target.batch_refused == ""
    assert target.lender is not None
    check_target(target, prompt_length=66)


def test_a_type_that_only_mlx_vlm_has_is_loaded_through_it(checkpoint: Any) -> None:
    loaded = load_target(checkpoint("idefics3"))
    assert type(loaded.model).__module__ == "spec_targets.vlm"
    assert loaded.target.info.num_layers == 4
    check_target(loaded.target)
    with pytest.raises(UnsupportedTargetError, match=r"'idefics3' .* installed mlx-lm knows"):
        load_target(checkpoint("idefics3"), through="lm")


@pytest.mark.parametrize("name", ["gemma4", "idefics3"])
def test_drafts_do_not_change_greedy_tokens(checkpoint: Any, name: str) -> None:
    target = load_target(checkpoint(name), through="vlm").target
    plain = [t for o in decode(target, None, TEXT[:9], max_tokens=90) for t in o.tokens]
    known = TEXT[:9] + plain

    def guesses(text: tuple[int, ...]) -> list[int]:
        return [(t + (i % 5 == 1)) % VOCAB for i, t in enumerate(known)][len(text) :]

    drafter = ScriptedDrafter(guesses, max_block=6)
    drafted = [t for o in decode(target, drafter, TEXT[:9], max_tokens=90) for t in o.tokens]
    assert drafted == plain


def test_types_that_decode_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_model"}))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {"a": mx.zeros((1,))})
    with pytest.raises(UnsupportedTargetError, match="installed mlx-lm or mlx-vlm knows"):
        load_target(tmp_path)
    with pytest.raises(UnsupportedTargetError, match="installed mlx-vlm knows"):
        load_target(tmp_path, through="vlm")
