"""vLLM's schema: goldens in it draft the same, and what it adds is held against NumPy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from spec_drafters.config import Config
from spec_drafters.errors import CheckpointError, MisfitError, PackagingError
from spec_drafters.fit import default_taps
from spec_drafters.load import inspect_drafter, load_drafter
from spec_drafters.spec import BlockSpec, EagleSpec, LayerAttention
from spec_drafters.speculators import first_slot

from . import reference
from .checkpoints import Edit, both, copy, first_drafts
from .helpers import Golden, Greedy

LAYER_KEYS = {
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "num_hidden_layers",
    "rms_norm_eps",
    "rope_parameters",
    "rope_theta",
    "layer_types",
    "sliding_window",
    "hidden_act",
}
DROPPED = ("model_type", "num_target_layers", "dflash_config", "ttt_length", "architectures")


def speculators(algorithm: str, tokens: int | None = None, **changes: Any) -> Edit:
    """The native checkpoint in vLLM's schema, with these keys set; None removes one."""

    def edit(config: dict[str, Any], tensors: dict[str, mx.array]) -> None:
        nested = config.get("dflash_config", {})
        taps = nested.get("target_layer_ids") or config.pop("target_layer_ids")
        key = "eagle_" * (algorithm == "eagle3") + "aux_hidden_state_layer_ids"
        config["mask_token_id"] = nested.get("mask_token_id", config.get("mask_token_id"))
        config["transformer_layer_config"] = {
            "model_type": "qwen3",
            **{k: config.pop(k) for k in LAYER_KEYS if k in config},
        }
        for name in DROPPED:
            config.pop(name, None)
        methods = [{"proposal_type": "greedy", "speculative_tokens": tokens}]
        config |= {
            "architectures": [f"{algorithm}DraftModel"],
            "speculators_model_type": algorithm,
            "speculators_config": {
                "algorithm": algorithm,
                "default_proposal_method": "greedy",
                "proposal_methods": methods if tokens else [],
                "verifier": {"name_or_path": "x", "architectures": ["y"]},
            },
            "draft_vocab_size": config["transformer_layer_config"]["vocab_size"],
            key: [layer + 1 for layer in taps],
            **changes,
        }
        for name in [name for name, value in changes.items() if value is None]:
            del config[name]

    return edit


def layered(**changes: Any) -> Edit:
    """Keys of the nested layer config."""

    def edit(config: dict[str, Any], tensors: dict[str, mx.array]) -> None:
        config["transformer_layer_config"].update(changes)

    return edit


# --- the same drafts ----------------------------------------------------------------------------


def test_dspark_drafts_the_same(tmp_path: Path) -> None:
    golden = Golden.named("dspark_qwen3")
    edit = speculators("dspark", tokens=7)
    drafter = load_drafter(copy(tmp_path, "dspark_qwen3", edit), golden.target())
    assert (drafter.spec.packaging, drafter.name) == ("speculators", "dspark")
    assert drafter.taps == golden.drafter().taps
    got = first_drafts(drafter, golden, Greedy())
    assert got.tolist() == golden.outputs["greedy_tokens_0"].tolist()


def test_dflash_borrows_and_drafts_the_same(tmp_path: Path) -> None:
    golden = Golden.named("dflash_qwen3")
    edit = speculators("dflash", tokens=15, block_size=16)
    drafter = load_drafter(copy(tmp_path, "dflash_qwen3", edit), golden.target())
    assert (drafter.name, drafter.max_block) == ("dflash", 15)
    assert not drafter.spec.own_embedding
    got = first_drafts(drafter, golden, Greedy())
    assert got.tolist() == golden.outputs["greedy_tokens_0"].tolist()


def test_eagle3_drafts_the_same(tmp_path: Path) -> None:
    golden = Golden.named("eagle3_qwen3")
    edit = speculators("eagle3", tokens=7, norm_before_residual=False)
    drafter = load_drafter(copy(tmp_path, "eagle3_qwen3", edit), golden.target())
    assert (drafter.name, drafter.max_block, list(drafter.taps)) == ("eagle3", 7, [1, 3, 5, 7, 9])
    committed = golden.inputs["committed_tokens_0"]
    taps = list(mx.split(golden.inputs["target_hidden_0"], 5, axis=-1))
    tokens = mx.concatenate([mx.zeros((1,), dtype=mx.int32), committed[:-1]])[None]
    state = drafter.new_state(1)
    drafter.extend(state, tokens, taps, [15])
    proposal = drafter.propose(state, committed[-1:], 7, Greedy())
    assert proposal.tokens.tolist() == golden.outputs["greedy_tokens_0"].tolist()


# --- what the schema adds to EAGLE3 -------------------------------------------------------------


def reduce(allowed: mx.array) -> Edit:
    def edit(config: dict[str, Any], tensors: dict[str, mx.array]) -> None:
        tensors["lm_head.weight"] = tensors["lm_head.weight"][allowed]
        tensors["d2t"] = (allowed - mx.arange(allowed.size)).astype(mx.int64)
        tensors["t2d"] = mx.zeros((config["transformer_layer_config"]["vocab_size"],), mx.bool_)
        config["draft_vocab_size"] = allowed.size

    return edit


def llama(config: dict[str, Any], tensors: dict[str, mx.array]) -> None:
    config["transformer_layer_config"]["model_type"] = "llama"
    for name in ("q_norm", "k_norm"):
        del tensors[f"layers.0.self_attn.{name}.weight"]


def biased(config: dict[str, Any], tensors: dict[str, mx.array]) -> None:
    config["transformer_layer_config"]["attention_bias"] = True
    for index, name in enumerate(("q_proj", "k_proj", "v_proj", "o_proj")):
        rows = tensors[f"layers.0.self_attn.{name}.weight"].shape[0]
        bias = mx.random.normal((rows,), key=mx.random.key(index))
        tensors[f"layers.0.self_attn.{name}.bias"] = bias


def tap_normed(name: str, count: int) -> Edit:
    def edit(config: dict[str, Any], tensors: dict[str, mx.array]) -> None:
        for tap in range(count):
            weight = 1 + mx.random.normal((240 // count,), key=mx.random.key(tap))
            tensors[name.format(tap)] = weight

    return edit


ADDED: dict[str, tuple[Edit, dict[str, Any]]] = {
    "norm_before_residual": (lambda c, t: None, {"norm_before_residual": True}),
    "norm_output": (lambda c, t: None, {"norm_output": True}),
    "norm_before_fc": (tap_normed("input_norm.weight", 1), {"norm_before_fc": True}),
    "fc_norm": (tap_normed("fc_norm.{}.weight", 5), {"fc_norm": True}),
    "llama": (llama, {}),
    "biases": (biased, {}),
    "reduced vocabulary": (reduce(mx.arange(3, 240, 4, dtype=mx.int32)), {}),
}


@pytest.mark.parametrize("case", ADDED)
def test_eagle3_against_numpy(tmp_path: Path, case: str) -> None:
    """What the schema adds, each alone; the reference itself agrees with the golden."""
    golden = Golden.named("eagle3_qwen3")
    more, options = ADDED[case]
    options = {"norm_before_residual": False, **options}
    native = load_drafter(golden.path, golden.target())
    folder = copy(tmp_path, "eagle3_qwen3", both(speculators("eagle3", 7, **options), more))
    drafter = load_drafter(folder, golden.target())
    following = golden.inputs["committed_tokens_0"].tolist()
    hidden = golden.inputs["target_hidden_0"]
    config = inspect_config(golden.path)
    tensors = dict(mx.load(str(folder / "model.safetensors")))
    reduced = drafter.spec.draft_vocab_size
    ids = None if reduced is None else np.array(tensors["d2t"]) + np.arange(reduced)
    known = {k: options[k] for k in ("norm_before_residual", "norm_output") if k in options}
    wanted, numbers = reference.Drafter.of(tensors, config).eagle(
        np.array(hidden[0], dtype=np.float64), following, 7, ids=ids, **known
    )
    got, shown = told(drafter, hidden, following)
    assert got == wanted
    np.testing.assert_allclose(shown, numbers, atol=2e-4)
    assert told(native, hidden, following)[0] != got


def inspect_config(path: Path) -> dict[str, Any]:
    return json.loads((path / "config.json").read_text())  # type: ignore[no-any-return]


class Named(Greedy):
    """argmax, mapped to target ids."""

    def draft(self, logits, slot, prefix, token_ids=None):  # type: ignore[no-untyped-def]
        choice = super().draft(logits, slot, prefix, token_ids)
        if token_ids is None:
            return choice
        return type(choice)(token_ids[choice.tokens], None)


def told(
    drafter: Any, hidden: mx.array, following: list[int], taps: int = 5
) -> tuple[list[int], Any]:
    state, chooser = drafter.new_state(1), Named()
    tokens = mx.array([[0, *following[:-1]]], dtype=mx.int32)
    drafter.extend(state, tokens, list(mx.split(hidden, taps, axis=-1)), [len(following)])
    anchor = mx.array(following[-1:], dtype=mx.int32)
    proposal = drafter.propose(state, anchor, 7, chooser)
    return proposal.tokens[0].tolist(), np.array(chooser.logits[0])


def test_the_reference_agrees_with_the_golden() -> None:
    golden = Golden.named("eagle3_qwen3")
    tensors = dict(mx.load(str(golden.path / "model.safetensors")))
    tokens, numbers = reference.Drafter.of(tensors, inspect_config(golden.path)).eagle(
        np.array(golden.inputs["target_hidden_0"][0], dtype=np.float64),
        golden.inputs["committed_tokens_0"].tolist(),
        7,
    )
    assert [tokens] == golden.outputs["greedy_tokens_0"].tolist()
    np.testing.assert_allclose(numbers, golden.outputs["draft_logits_0"][0], atol=2e-4)


def test_the_original_layout_is_the_same_drafter(tmp_path: Path) -> None:
    """One Llama layer called `midlayer`, a flat config, a reduced head, the target's own taps."""

    def three(config: dict[str, Any], tensors: dict[str, mx.array]) -> None:
        tensors["fc.weight"] = tensors["fc.weight"][:, : 3 * 48]
        config.pop("eagle_aux_hidden_state_layer_ids")

    def original(config: dict[str, Any], tensors: dict[str, mx.array]) -> None:
        config |= config.pop("transformer_layer_config")
        for key in ("speculators_config", "speculators_model_type", "norm_before_residual"):
            config.pop(key)
        config["architectures"] = ["LlamaForCausalLMEagle3"]
        for name in [name for name in tensors if name.startswith("layers.0.")]:
            tensors[name.replace("layers.0", "midlayer")] = tensors.pop(name)

    golden, part = Golden.named("eagle3_qwen3"), mx.arange(3, 240, 4, dtype=mx.int32)
    ours = both(speculators("eagle3", 7, norm_before_residual=False), llama, reduce(part), three)
    (tmp_path / "ours").mkdir()
    (tmp_path / "original").mkdir()
    folders = [
        copy(tmp_path / "ours", "eagle3_qwen3", ours),
        copy(tmp_path / "original", "eagle3_qwen3", both(ours, original)),
    ]
    drafters = [load_drafter(folder, golden.target()) for folder in folders]
    assert drafters[1].spec.packaging == "original EAGLE3"
    assert drafters[1].taps == drafters[0].taps == (1, 5, 8)
    hidden = golden.inputs["target_hidden_0"][..., : 3 * 48]
    following = golden.inputs["committed_tokens_0"].tolist()
    one, other = (told(d, hidden, following, 3) for d in drafters)
    assert one[0] == other[0]
    assert (one[1] == other[1]).all()


# --- how the schema is read ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "keys", "slot"),
    [
        (8, {}, 0),
        (7, {}, 1),
        (7, {"sample_from_anchor": True}, 1),
        (5, {"sample_from_anchor": True}, 0),
        (5, {"sample_from_anchor": False}, 1),
        (5, {}, 1),
        (None, {}, 1),
        (None, {"sample_from_anchor": True}, 0),
    ],
)
def test_which_slot_predicts_first(tokens: int | None, keys: dict[str, bool], slot: int) -> None:
    config: dict[str, Any] = {"draft_vocab_size": 1, **keys}
    if tokens is not None:
        config["speculators_config"] = {"proposal_methods": [{"speculative_tokens": tokens}]}
    assert first_slot(Config(config, "config"), 8) == slot


def test_the_default_method_says_how_many_tokens() -> None:
    methods = [
        {"proposal_type": "tree", "speculative_tokens": 8},
        {"proposal_type": "greedy", "speculative_tokens": 7},
    ]
    own = {"default_proposal_method": "greedy", "proposal_methods": methods}
    assert first_slot(Config({"speculators_config": own}, "config"), 8) == 1


def read(tmp_path: Path, algorithm: str, *edits: Edit, **changes: Any) -> Any:
    name = {"dspark": "dspark_qwen3", "dflash": "dflash_qwen3", "eagle3": "eagle3_qwen3"}[algorithm]
    return inspect_drafter(copy(tmp_path, name, both(speculators(algorithm, **changes), *edits)))


def test_windows_are_causal_unless_told_otherwise(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    sliding = layered(layer_types=kinds, sliding_window=9)
    for free in (False, True):
        spec = read(tmp_path, "dspark", sliding, sliding_window_non_causal=free)
        assert isinstance(spec, BlockSpec)
        window = LayerAttention(causal=not free, window=9)
        assert spec.attention == (window, LayerAttention(), window)


def test_rope_of_every_layer_is_the_sliding_one_where_there_are_two(tmp_path: Path) -> None:
    two = {
        "full_attention": {"rope_theta": 1e6, "rope_type": "default"},
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
    }
    assert read(tmp_path, "dspark", layered(rope_parameters=two)).rope.theta == 1e4


def test_taps_that_no_file_names_are_the_targets(tmp_path: Path) -> None:
    def three(config: dict[str, Any], tensors: dict[str, mx.array]) -> None:
        tensors["fc.weight"] = tensors["fc.weight"][:, : 3 * 48]

    golden = Golden.named("eagle3_qwen3")
    unnamed = both(speculators("eagle3", eagle_aux_hidden_state_layer_ids=None), three)
    drafter = load_drafter(copy(tmp_path, "eagle3_qwen3", unnamed), golden.target())
    assert list(drafter.taps) == [1, 5, 8] == list(default_taps(12))


def test_the_targets_last_layer_is_not_tapped(tmp_path: Path) -> None:
    spec = read(tmp_path, "eagle3", eagle_aux_hidden_state_layer_ids=[2, 4, 6, 8, 10, 12])
    assert isinstance(spec, EagleSpec)
    assert spec.taps == (1, 3, 5, 7, 9)


@pytest.mark.parametrize(
    ("algorithm", "edit", "changes", "message"),
    [
        ("dspark", None, {"speculators_config": {"algorithm": "peagle"}}, "algorithm 'peagle'"),
        ("dflash", None, {"projector_type": "domino"}, "projector_type 'domino'"),
        ("dflash", None, {"shift_label": True}, "shift_label"),
        ("dspark", None, {"target_logit_scale": 2.0}, "target_logit_scale"),
        ("dspark", None, {"target_hidden_size": 99}, "another hidden size, 99"),
        ("eagle3", layered(num_hidden_layers=2), {}, "EAGLE3 of 2 layers"),
        ("eagle3", layered(model_type="gpt_oss"), {}, "layers of type 'gpt_oss'"),
        ("eagle3", layered(mlp_bias=True), {}, "biases in the MLP"),
        ("eagle3", layered(layer_types=["sliding_attention"]), {}, "EAGLE3 with a window"),
        ("eagle3", None, {"fc_norm": True, "norm_before_fc": True}, "both norm_before_fc"),
        ("dspark", layered(hidden_act="gelu"), {}, "activation gelu"),
        ("dspark", layered(layer_types=["linear_attention"] * 3), {}, "linear_attention"),
    ],
)
def test_refused_by_name(
    tmp_path: Path, algorithm: str, edit: Edit | None, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(PackagingError, match=f"^speculators: .*{message}"):
        read(tmp_path, algorithm, *([edit] if edit else []), **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"draft_vocab_size": 400}, "draft_vocab_size is 400; the target's vocabulary has 300"),
        ({"draft_vocab_size": 40}, "lacks d2t, which its config implies"),
        ({"mask_token_id": None}, "mask_token_id is missing"),
        ({"speculators_config": {"proposal_methods": 3}}, "proposal_methods is 3"),
    ],
)
def test_contradictions_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, "dspark", **changes)


def test_a_reduced_head_is_never_borrowed(tmp_path: Path) -> None:
    def edit(config: dict[str, Any], tensors: dict[str, mx.array]) -> None:
        tensors["d2t"] = mx.zeros((40,), dtype=mx.int64)

    with pytest.raises(CheckpointError, match=r"lacks lm_head\.weight"):
        read(tmp_path, "dflash", edit, draft_vocab_size=40)


def test_taps_beyond_the_target_are_refused(tmp_path: Path) -> None:
    folder = copy(tmp_path, "dspark_qwen3", speculators("dspark", 7))
    with pytest.raises(MisfitError, match=r"taps layers \[9\]"):
        load_drafter(folder, Golden.named("dspark_qwen3").target(num_layers=9))
