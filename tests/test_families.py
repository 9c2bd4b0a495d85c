"""Drafters of other families and packagings through the engine: in company, and from the prefix
cache."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import spec_cli
from spec_drafters.load import inspect_drafter
from spec_server import Completion, Engine, Prompt
from spec_server.errors import ModelLoadError

MODELS = Path(spec_cli.__file__).parent / "models"
TINY = MODELS / "spec-tiny"
TOKENS = 24
LAYER_KEYS = (
    "model_type hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim "
    "num_hidden_layers vocab_size rms_norm_eps rope_parameters"
)


def written(folder: Path, config: Mapping[str, Any], tensors: dict[str, mx.array]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    return folder


def speculators(folder: Path) -> Path:
    """The bundled DSpark drafter in vLLM's schema."""
    source = MODELS / "spec-tiny-dspark"
    native = json.loads((source / "config.json").read_text())
    kept = ("markov_rank", "markov_head_type", "block_size", "mask_token_id")
    confidence = ("enable_confidence_head", "confidence_head_with_markov")
    config = {
        "architectures": ["DSparkDraftModel"],
        "speculators_model_type": "dspark",
        "speculators_config": {"algorithm": "dspark"},
        "transformer_layer_config": {key: native[key] for key in LAYER_KEYS.split()},
        "draft_vocab_size": native["vocab_size"],
        "aux_hidden_state_layer_ids": [layer + 1 for layer in native["target_layer_ids"]],
        "sample_from_anchor": True,
        **{key: native[key] for key in (*kept, *confidence)},
    }
    return written(folder, config, dict(mx.load(str(source / "model.safetensors"))))


def eagle3(folder: Path) -> Path:
    """An EAGLE3 drafter that knows nothing."""
    target = json.loads((TINY / "config.json").read_text())
    config = {
        **target,
        "architectures": ["Qwen3Eagle3Model"],
        "num_target_layers": target["num_hidden_layers"],
        "num_hidden_layers": 1,
        "layer_types": ["full_attention"],
        "target_layer_ids": [0, 1, 3, 5, 6],
        "ttt_length": 4,
        "tie_word_embeddings": False,
    }
    keys = iter(mx.random.split(mx.random.key(0), 64))
    shapes = eagle_shapes(config)
    tensors = {
        name: mx.ones(shape) if len(shape) == 1 else 0.1 * mx.random.normal(shape, key=next(keys))
        for name, shape in shapes.items()
    }
    return written(folder, config, tensors)


def eagle_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    dim = config["head_dim"]
    heads, pairs = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    layer = {
        "hidden_norm.weight": (hidden,),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (heads, 2 * hidden),
        "self_attn.k_proj.weight": (pairs, 2 * hidden),
        "self_attn.v_proj.weight": (pairs, 2 * hidden),
        "self_attn.o_proj.weight": (hidden, heads),
        "self_attn.q_norm.weight": (dim,),
        "self_attn.k_norm.weight": (dim,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    return {
        "embed_tokens.weight": (config["vocab_size"], hidden),
        "lm_head.weight": (config["vocab_size"], hidden),
        "fc.weight": (hidden, 5 * hidden),
        "norm.weight": (hidden,),
        **{f"layers.0.{name}": shape for name, shape in layer.items()},
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("drafters")
    return {"dspark": speculators(home / "dspark"), "eagle3": eagle3(home / "eagle3")}


def prompts(engine: Engine) -> list[Prompt]:
    """Texts of different length, two of which begin alike for more than a block of the cache."""
    common = "Write a Python function that adds two numbers and returns their sum. " * 12
    texts = ["def add(a, b):", common, common + "Then call it.", "What is the capital?"]
    return [engine.tokeniser.encode(text) for text in texts]


@pytest.fixture(scope="module")
def plain() -> Iterator[list[tuple[int, ...]]]:
    with Engine.load(TINY, mode="baseline", dtype="float32", prefix_cache=None) as engine:
        yield [engine.generate(p, max_tokens=TOKENS).token_ids for p in prompts(engine)]


@pytest.mark.parametrize("mode", ["dspark", "eagle3"])
def test_the_same_tokens_in_company_and_from_the_cache(
    mode: str, folders: dict[str, Path], plain: list[tuple[int, ...]]
) -> None:
    with Engine.load(
        TINY, drafter=folders[mode], mode=mode, dtype="float32", max_draft=None
    ) as engine:
        assert engine.facts.labels.mode == mode
        asked = prompts(engine)

        def answer(prompt: Prompt) -> Completion:
            return engine.generate(prompt, max_tokens=TOKENS)

        with ThreadPoolExecutor(len(asked)) as pool:
            together = list(pool.map(answer, asked))
        again = [answer(prompt) for prompt in asked]
    assert [one.token_ids for one in together] == plain
    assert [one.token_ids for one in again] == plain
    assert again[1].statistics.cached_tokens > 0
    for cold, warm in zip(together, again, strict=True):
        assert warm.statistics.round_accepts == cold.statistics.round_accepts


def test_vllms_schema_of_the_bundled_drafter_is_the_bundled_drafter(
    folders: dict[str, Path],
) -> None:
    spec = inspect_drafter(folders["dspark"])
    bundled = inspect_drafter(MODELS / "spec-tiny-dspark")
    assert spec.packaging == "speculators"
    assert (spec.taps, spec.tensors()) == (bundled.taps, bundled.tensors())


def test_a_mode_that_the_drafter_is_not_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(ModelLoadError, match="is a eagle3 drafter, but the mode is dspark"):
        Engine.load(TINY, drafter=folders["eagle3"], mode="dspark")
