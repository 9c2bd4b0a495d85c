"""What no golden covers, against the equations in NumPy: see reference.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from spec_drafters.block import BlockDrafter
from spec_drafters.errors import CheckpointError
from spec_drafters.load import inspect_drafter, load_drafter
from spec_drafters.spec import BlockSpec

from . import reference
from .checkpoints import Edit, both, configured, copy, without_tensor
from .helpers import Golden, Greedy
from .test_speculators import speculators

Config = dict[str, Any]
Tensors = dict[str, mx.array]
TOLERANCE = 2e-4


def config_of(name: str) -> Config:
    return json.loads((Golden.named(name).path / "config.json").read_text())  # type: ignore[no-any-return]


def noise(seed: int, *shape: int) -> mx.array:
    return 0.3 * mx.random.normal(shape, key=mx.random.key(seed))


class Pair:
    """dflash_qwen3 with its checkpoint edited: our drafter and NumPy's on the first round."""

    def __init__(self, folder: Path, edit: Edit, **options: Any) -> None:
        golden = Golden.named("dflash_qwen3")
        path = copy(folder, "dflash_qwen3", edit)
        loaded = load_drafter(path, golden.target())
        assert isinstance(loaded, BlockDrafter)
        self.drafter, self.spec = loaded, loaded.spec
        self.anchor = golden.inputs["anchor_0"]
        self.taps = golden.inputs["target_hidden_0"]
        config = config_of("dflash_qwen3")
        config["rope_parameters"] = {"rope_theta": config["rope_theta"]}
        tensors = dict(mx.load(str(path / "model.safetensors")))
        tensors["lm_head.weight"] = golden.inputs["target_lm_head_weight"]
        self.reference = reference.Drafter.of(tensors, config, **options)
        self.embedding = np.array(golden.inputs["target_embed_weight"], dtype=np.float64)

    def slots(self, mask: np.ndarray | None = None) -> np.ndarray:
        masks = self.embedding[self.spec.mask_token] if mask is None else mask
        count = self.spec.block_size - 1
        return np.stack([self.embedding[self.anchor.item()], *[masks] * count])

    def wanted(self, mask: np.ndarray | None = None) -> np.ndarray:
        taps = np.array(self.taps[0], dtype=np.float64)
        return self.reference.block(taps, self.slots(mask))[1:]

    def state(self):  # type: ignore[no-untyped-def]
        state, rows = self.drafter.new_state(1), self.taps.shape[1]
        taps = list(mx.split(self.taps, len(self.drafter.taps), axis=-1))
        self.drafter.extend(state, mx.zeros((1, rows), dtype=mx.int32), taps, [rows])
        return state

    def got(self) -> np.ndarray:
        return np.array(self.drafter.hidden(self.state(), self.anchor, self.drafter.max_block)[0])


def differs(one: np.ndarray, other: np.ndarray) -> bool:
    return bool(np.abs(one - other).max() > 100 * TOLERANCE)


def plain(folder: Path) -> np.ndarray:
    return Pair(folder, lambda c, t: None).got()


def test_the_reference_agrees_with_the_golden(tmp_path: Path) -> None:
    pair = Pair(tmp_path, lambda c, t: None)
    golden = Golden.named("dflash_qwen3").outputs["block_hidden_0"][0, 1:]
    np.testing.assert_allclose(pair.wanted(), np.array(golden), atol=TOLERANCE)


# --- rotary positions ---------------------------------------------------------------------------


def yarn(dim: int, theta: float, factor: float, original: int, fast: float, slow: float):
    """Frequencies and stretch of YaRN, pair by pair. (Peng et al. 2023, as transformers has it.)"""
    frequencies = []
    for pair in range(dim // 2):
        turning = theta ** (-2 * pair / dim)

        def where(turns: float) -> float:
            return dim * np.log(original / (turns * 2 * np.pi)) / (2 * np.log(theta))

        low, high = max(np.floor(where(fast)), 0), min(np.ceil(where(slow)), dim - 1)
        slowed = min(max((pair - low) / max(high - low, 0.001), 0.0), 1.0)
        frequencies.append(turning * (1 - slowed) + turning / factor * slowed)
    return np.array(frequencies), 0.1 * np.log(factor) + 1


YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 24,
    "beta_fast": 2.0,
    "beta_slow": 0.25,
}


@pytest.mark.parametrize("old", [True, False])
def test_yarn(tmp_path: Path, old: bool) -> None:
    """In either spelling: `rope_scaling` beside `rope_theta`, or all in `rope_parameters`."""
    config = config_of("dflash_qwen3")
    frequencies, stretch = yarn(config["head_dim"], config["rope_theta"], 4.0, 24, 2.0, 0.25)
    changes: Config = {"rope_scaling": YARN}
    if not old:
        theta = config["rope_theta"]
        changes = {"rope_theta": None, "rope_parameters": {"rope_theta": theta, **YARN}}
    pair = Pair(tmp_path, configured(**changes), frequencies=frequencies, stretch=stretch)
    np.testing.assert_allclose(pair.got(), pair.wanted(), atol=TOLERANCE)
    assert differs(pair.got(), plain(tmp_path))


def test_linear_and_llama3_scaling(tmp_path: Path) -> None:
    config = config_of("dflash_qwen3")
    theta, dim = config["rope_theta"], config["head_dim"]
    turning = theta ** -(np.arange(0, dim, 2) / dim)
    linear = {"type": "linear", "factor": 3.0}
    pair = Pair(tmp_path, configured(rope_scaling=linear), frequencies=turning / 3)
    np.testing.assert_allclose(pair.got(), pair.wanted(), atol=TOLERANCE)
    llama = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    turns = 64 * turning / (2 * np.pi)
    blend = (turns - 1) / (4 - 1)
    between = blend * turning + (1 - blend) * turning / 8
    expected = np.where(turns < 1, turning / 8, np.where(turns > 4, turning, between))
    pair = Pair(tmp_path, configured(rope_scaling=llama), frequencies=expected)
    np.testing.assert_allclose(pair.got(), pair.wanted(), atol=TOLERANCE)
    assert differs(pair.got(), plain(tmp_path))


@pytest.mark.parametrize(
    ("keys", "factor"),
    [
        ({}, 0.1 * np.log(4) + 1),
        ({"attention_factor": 1.7}, 1.7),
        ({"mscale": 0.7, "mscale_all_dim": 0.3}, (0.07 * np.log(4) + 1) / (0.03 * np.log(4) + 1)),
    ],
)
def test_how_far_yarn_stretches(tmp_path: Path, keys: Config, factor: float) -> None:
    edit = configured(rope_scaling={**YARN, **keys})
    scaling = inspect_drafter(copy(tmp_path, "dflash_qwen3", edit)).rope.scaling
    assert scaling.attention_factor == pytest.approx(factor)  # type: ignore[union-attr]


# --- biases, mask embedding ---------------------------------------------------------------------


def biased(config: Config, tensors: Tensors) -> None:
    config["attention_bias"] = True
    for layer in range(config["num_hidden_layers"]):
        for index, name in enumerate(("q_proj", "k_proj", "v_proj", "o_proj")):
            at = f"layers.{layer}.self_attn.{name}"
            tensors[f"{at}.bias"] = noise(10 * layer + index, tensors[f"{at}.weight"].shape[0])


def test_attention_biases(tmp_path: Path) -> None:
    pair = Pair(tmp_path, biased)
    np.testing.assert_allclose(pair.got(), pair.wanted(), atol=TOLERANCE)
    assert differs(pair.got(), plain(tmp_path))


def test_a_mask_embedding_of_its_own(tmp_path: Path) -> None:
    """It stands in for the mask token's row, which need not exist."""
    own = noise(5, 48)

    def edit(config: Config, tensors: Tensors) -> None:
        config["dflash_config"]["mask_token_id"] = 10**6
        tensors["mask_embedding"] = own

    pair = Pair(tmp_path, edit)
    wanted = pair.wanted(np.array(own, dtype=np.float64))
    np.testing.assert_allclose(pair.got(), wanted, atol=TOLERANCE)
    assert differs(pair.got(), plain(tmp_path))


# --- DFlash 2 -----------------------------------------------------------------------------------

SELECTOR = {
    "selector_rank": 8,
    "selector_top_k": 5,
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "output_multiplier": 0.4,
    "final_logit_softcapping": 3.0,
}


def dflash2(**changes: Any) -> Edit:
    def edit(config: Config, tensors: Tensors) -> None:
        config["architectures"] = ["DFlash2DraftModel"]
        own = config["dflash_config"]
        own |= SELECTOR | changes
        width, groups = own["conv_kernel_size"], 48 // own["conv_group_size"]
        vocabulary, rank = config["vocab_size"], own["selector_rank"]
        for layer in range(config["num_hidden_layers"]):
            for number, name in enumerate(("attention_conv", "mlp_conv")):
                at, seed = f"layers.{layer}.{name}", 100 + 10 * layer + number
                kernel = noise(seed, 2, width, 48)
                tensors[f"{at}.base_kernel"] = kernel.at[:, 0].add(1.0)
                correction = noise(seed + 50, 2 * width * groups, 48)
                tensors[f"{at}.kernel_projection.weight"] = correction
        at = "candidate_selector"
        tensors[f"{at}.hidden_projection.weight"] = noise(1, rank, 48)
        tensors[f"{at}.predecessor_codebook"] = 3 * noise(2, vocabulary, rank)
        tensors[f"{at}.successor_codebook"] = 3 * noise(3, vocabulary, rank)

    return edit


@pytest.mark.parametrize("width", [1, 2, 3])
def test_dflash2_convolves_around_each_sublayer(tmp_path: Path, width: int) -> None:
    pair = Pair(tmp_path, dflash2(conv_kernel_size=width), conv_group=16)
    np.testing.assert_allclose(pair.got(), pair.wanted(), atol=TOLERANCE)
    assert differs(pair.got(), plain(tmp_path))


def test_dflash2_walks_through_candidates(tmp_path: Path) -> None:
    pair = Pair(tmp_path, dflash2(), conv_group=16)
    assert (pair.spec.packaging, pair.drafter.name) == ("DFlash 2", "dflash")
    hidden = pair.wanted()
    logits = pair.reference.head(hidden, softcap=3.0, factor=0.4)
    wanted = pair.reference.select(hidden, logits, pair.anchor.item(), 5)  # type: ignore[arg-type]
    chooser = Greedy()
    proposal = pair.drafter.propose(pair.state(), pair.anchor, pair.drafter.max_block, chooser)
    assert proposal.tokens.tolist() == [wanted]
    assert wanted != logits.argmax(-1).tolist()
    seen = np.array(chooser.logits[0])
    assert (np.isfinite(seen).sum(axis=-1) == 5).all()


def test_fewer_guesses_of_dflash2_are_the_first_of_all(tmp_path: Path) -> None:
    pair = Pair(tmp_path, dflash2())
    whole = pair.drafter.propose(pair.state(), pair.anchor, 15, Greedy()).tokens.tolist()
    fewer = pair.drafter.propose(pair.state(), pair.anchor, 4, Greedy()).tokens.tolist()
    assert fewer[0] == whole[0][:4]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"conv_group_size": 7}, "conv_group_size is 7; it must divide hidden_size, 48"),
        ({"selector_top_k": 10**6}, "selector_top_k is 1000000, above the vocabulary"),
        ({"selector_rank": 0}, "selector_rank is 0; it must be an integer of at least 1"),
    ],
)
def test_contradictions_of_dflash2_are_named(tmp_path: Path, changes: Config, message: str) -> None:
    def edit(config: Config, tensors: Tensors) -> None:
        dflash2()(config, tensors)
        config["dflash_config"] |= changes

    with pytest.raises(CheckpointError, match=message):
        inspect_drafter(copy(tmp_path, "dflash_qwen3", edit))


# --- an rnn head behind a silent anchor ---------------------------------------------------------


def rnn(drafter: reference.Drafter, hidden: np.ndarray, anchor: int) -> tuple[list[int], Any]:
    """Slot 0 moves the state and says nothing; slots 0 and 1 both come after the anchor."""
    weights = drafter.weights
    first, second = (weights[f"markov_head.markov_w{i}.weight"] for i in (1, 2))
    state, before, drafts, shown = np.zeros(first.shape[1]), anchor, [], []
    for slot, row in enumerate(hidden):
        joint = np.concatenate([state, first[before], row])
        parts = drafter.linear(joint, "markov_head.joint_proj")
        keep, candidate, out = np.split(parts, 3)
        keep = reference.sigmoid(keep)
        state = keep * state + (1 - keep) * np.tanh(candidate)
        if slot:
            shown.append(drafter.linear(row, "lm_head") + second @ np.tanh(out))
            before = int(shown[-1].argmax())
            drafts.append(before)
    return drafts, np.stack(shown)


def test_an_rnn_head_behind_a_silent_anchor(tmp_path: Path) -> None:
    name = "dspark_qwen3_rnn"
    golden = Golden.named(name)
    drafter = load_drafter(copy(tmp_path, name, speculators("dspark", 6)), golden.target())
    assert isinstance(drafter, BlockDrafter)
    assert (drafter.spec.first_slot, drafter.max_block) == (1, 6)
    config = config_of(name)
    tensors = dict(mx.load(str(golden.path / "model.safetensors")))
    plain = reference.Drafter.of(tensors, config)
    anchor = int(golden.inputs["anchor_0"].item())
    embedding = plain.weights["embed_tokens.weight"]
    slots = np.stack([embedding[anchor], *[embedding[config["mask_token_id"]]] * 6])
    taps = golden.inputs["target_hidden_0"]
    hidden = plain.block(np.array(taps[0], dtype=np.float64), slots)
    wanted, numbers = rnn(plain, hidden, anchor)
    state, chooser = drafter.new_state(1), Greedy()
    rows = taps.shape[1]
    parts = list(mx.split(taps, len(drafter.taps), axis=-1))
    drafter.extend(state, mx.zeros((1, rows), dtype=mx.int32), parts, [rows])
    proposal = drafter.propose(state, golden.inputs["anchor_0"], 6, chooser)
    assert proposal.tokens.tolist() == [wanted]
    np.testing.assert_allclose(np.array(chooser.logits[0]), numbers, atol=TOLERANCE)
    assert proposal.confidence is None or proposal.confidence.shape == (1, 6)


def test_deepspec_reads_attention_biases_too(tmp_path: Path) -> None:
    spec = inspect_drafter(copy(tmp_path, "dspark_qwen3", biased))
    assert isinstance(spec, BlockSpec)
    assert spec.attention_biases
    edit = both(biased, without_tensor("layers.0.self_attn.q_proj.bias"))
    with pytest.raises(CheckpointError, match=r"lacks layers\.0\.self_attn\.q_proj\.bias"):
        inspect_drafter(copy(tmp_path, "dspark_qwen3", edit))
