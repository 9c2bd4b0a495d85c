"""Our drafters against the reference implementations', on the same weights and inputs.

Every golden runs three rounds over one context; see the README in its folder.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from spec_drafters.block import BlockDrafter
from spec_drafters.block_state import BlockState

from .helpers import Forced, Golden, Greedy, InverseCdf

TOLERANCE = 2e-4
DSPARK = [
    "dspark_qwen3",
    "dspark_qwen3_gated",
    "dspark_qwen3_rnn",
    "deepspec_dflash_qwen3",
    "dspark_gemma4",
    "dspark_gemma4_separate_v",
]
DFLASH = ["dflash_qwen3", "dflash_gemma4"]


def close(got: mx.array, wanted: mx.array, tolerance: float = TOLERANCE) -> None:
    np.testing.assert_allclose(np.array(got), np.array(wanted), rtol=0, atol=tolerance)


class Round:
    """One round of a golden, up to the drafter's proposal."""

    def __init__(self, golden: Golden, drafter: BlockDrafter, state: BlockState, index: int):
        self.golden, self.drafter, self.state, self.index = golden, drafter, state, index
        self.anchor = golden.inputs[f"anchor_{index}"]
        taps = golden.taps(index, len(drafter.taps))
        rows = taps[0].shape[1]
        self.fused = drafter.backbone.fuse(taps)
        drafter.extend(state, mx.zeros((1, rows), dtype=mx.int32), taps, [rows])
        assert state.lengths == [golden.inputs[f"start_{index}"].item()]

    def wanted(self, name: str) -> mx.array:
        return self.golden.outputs[f"{name}_{self.index}"]

    def propose(self, chooser: Greedy):
        return self.drafter.propose(self.state, self.anchor, self.drafter.max_block, chooser)


def rounds(name: str):
    golden = Golden.named(name)
    drafter = golden.drafter()
    state = drafter.new_state(1)
    for index in range(golden.rounds):
        yield Round(golden, drafter, state, index)


@pytest.mark.parametrize("name", DSPARK + DFLASH)
def test_context_rows_and_block_hidden_states(name: str) -> None:
    for step in rounds(name):
        close(step.fused, step.wanted("fused_context"))
        hidden = step.drafter.hidden(step.state, step.anchor, step.drafter.max_block)
        close(hidden, step.wanted("block_hidden")[:, step.drafter.spec.first_slot :])


@pytest.mark.parametrize("name", DSPARK + DFLASH)
def test_greedy_tokens_and_logits(name: str) -> None:
    for step in rounds(name):
        chooser = Greedy()
        proposal = step.propose(chooser)
        assert proposal.tokens.tolist() == step.wanted("greedy_tokens").tolist()
        assert proposal.log_q is None
        logits = "draft_logits" if name in DFLASH else "greedy_logits"
        close(chooser.logits, step.wanted(logits))


@pytest.mark.parametrize("name", DSPARK)
def test_base_logits_before_the_markov_bias(name: str) -> None:
    for step in rounds(name):
        hidden = step.drafter.hidden(step.state, step.anchor, step.drafter.max_block)
        close(step.drafter.head(hidden), step.wanted("base_logits"))


@pytest.mark.parametrize("name", DSPARK + DFLASH)
def test_sampled_tokens_and_their_distributions(name: str) -> None:
    for step in rounds(name):
        temperature = float(step.golden.inputs["temperature"].item())
        uniforms = np.array(step.golden.inputs[f"uniforms_{step.index}"])
        chooser = InverseCdf(temperature, uniforms)
        proposal = step.propose(chooser)
        assert proposal.tokens.tolist() == step.wanted("sampled_tokens").tolist()
        close(mx.array(np.concatenate(chooser.probabilities, axis=1)), step.wanted("sampled_probs"))


@pytest.mark.parametrize("name", [n for n in DSPARK if "dflash" not in n])
def test_confidence_along_the_greedy_chain(name: str) -> None:
    for step in rounds(name):
        confidence = step.propose(Greedy()).confidence
        assert confidence is not None
        close(confidence, step.wanted("confidence_probs"))
        for threshold, kept in zip(
            step.golden.inputs["confidence_thresholds"].tolist(),
            step.wanted("confident_prefix").tolist(),
            strict=True,
        ):
            low = [value < threshold for value in confidence[0].tolist()]
            assert (low.index(True) if any(low) else len(low)) == kept


@pytest.mark.parametrize("name", [n for n in DSPARK if "dflash" not in n])
def test_logits_behind_forced_previous_tokens(name: str) -> None:
    for step in rounds(name):
        previous = step.golden.inputs[f"forced_prev_{step.index}"]
        hidden = step.drafter.hidden(step.state, step.anchor, step.drafter.max_block)
        chooser = Forced(mx.concatenate([previous[:, 1:], previous[:, :1]], axis=1))
        step.drafter.guess(hidden, previous[:, 0], chooser)
        close(chooser.logits, step.wanted("forced_logits"))


@pytest.mark.parametrize("name", DSPARK + DFLASH)
def test_context_keys_and_values_after_all_rounds(name: str) -> None:
    for step in rounds(name):
        step.propose(Greedy())
    image = step.state.image(0)
    for layer in range(step.drafter.spec.num_layers):
        for ours, theirs in (("keys", "k"), ("values", "v")):
            wanted = step.golden.outputs[f"cache_{theirs}_layer{layer}"]
            close(image.per_token[f"{layer}.{ours}"].array, wanted[0].transpose(1, 0, 2))
