"""The acceptance rules against the reference implementation's own inputs and outputs."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from spec_core import accept
from spec_core.request import Request
from spec_core.round import Row

GOLDEN = Path(__file__).parent / "golden" / "accept_reject"


def load(name: str) -> dict[str, np.ndarray]:
    arrays = mx.load(str(GOLDEN / name))
    return {key: np.array(value) for key, value in arrays.items()}


INPUTS, OUTPUTS = load("inputs.safetensors"), load("outputs.safetensors")
CASES = range(32)


def log_target(case: int) -> np.ndarray:
    """[8, V] log-probabilities under the case's temperature."""
    logits, temperature = INPUTS["target_logits"][case], INPUTS["temperature"][case]
    with np.errstate(divide="ignore"):
        if temperature < 1e-5:
            return np.log(np.eye(19)[logits.argmax(-1)]).astype(np.float32)
        x = logits.astype(np.float64) / temperature
        x -= x.max(-1, keepdims=True)
        return (x - np.log(np.exp(x).sum(-1, keepdims=True))).astype(np.float32)


def log_draft(case: int) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(INPUTS["draft_probs"][case])


def stop_tokens(case: int) -> frozenset[int]:
    return frozenset(int(t) for t in INPUTS["stop_tokens"][case] if t >= 0)


def in_one_batch() -> tuple[np.ndarray, np.ndarray]:
    accepted, following = accept.rejection(
        mx.array(np.stack([log_target(c) for c in CASES])),
        mx.array(np.stack([log_draft(c) for c in CASES])),
        mx.array(INPUTS["draft_tokens"]),
        mx.array(INPUTS["num_draft"]),
        mx.array(INPUTS["uniforms"]),
    )
    return np.array(accepted), np.exp(np.array(following))


def test_accepted_counts() -> None:
    """In one ragged batch; a stop token inside the prefix cuts it, as the round's own cut does."""
    accepted, _ = in_one_batch()
    for case in CASES:
        row = Row(0, Request((1,), max_tokens=100, end_tokens=stop_tokens(case)))
        drafts = INPUTS["draft_tokens"][case][: accepted[case]].tolist()
        kept = row.cut([*drafts, 18])
        if OUTPUTS["terminated"][case]:
            assert row.finish == "stop"
            assert len(kept) == OUTPUTS["effective_proposal_length"][case]
        else:
            assert row.finish is None
            assert accepted[case] == OUTPUTS["accepted"][case]


def test_next_distributions() -> None:
    accepted, following = in_one_batch()
    for case in CASES:
        if not OUTPUTS["terminated"][case]:
            np.testing.assert_allclose(
                following[case], OUTPUTS["next_dist"][case], atol=2e-6, err_msg=f"case {case}"
            )
    assert (accepted <= INPUTS["num_draft"]).all()


@pytest.mark.parametrize("case", CASES)
def test_alone_as_in_the_batch(case: int) -> None:
    length = int(INPUTS["num_draft"][case])
    if length == 0:
        return
    accepted, following = accept.rejection(
        mx.array(log_target(case)[None, : length + 1]),
        mx.array(log_draft(case)[None, :length]),
        mx.array(INPUTS["draft_tokens"][None, case, :length]),
        mx.array([length]),
        mx.array(INPUTS["uniforms"][None, case, :length]),
    )
    whole_accepted, whole_following = in_one_batch()
    assert accepted.item() == whole_accepted[case]
    np.testing.assert_allclose(np.exp(np.array(following[0])), whole_following[case], atol=1e-6)


def test_accept_probabilities() -> None:
    """Each slot alone passes just below its accept probability, and fails just above it."""
    for case in CASES:
        length = int(INPUTS["num_draft"][case])
        log_p, log_q = log_target(case), log_draft(case)
        for slot in range(length):
            probability = float(OUTPUTS["accept_prob"][case, slot])
            for uniform, passes in ((probability - 1e-5, True), (probability + 1e-5, False)):
                if not 0.0 <= uniform < 1.0:
                    continue
                accepted, _ = accept.rejection(
                    mx.array(log_p[None, slot : slot + 2]),
                    mx.array(log_q[None, slot : slot + 1]),
                    mx.array(INPUTS["draft_tokens"][None, case, slot : slot + 1]),
                    mx.array([1]),
                    mx.array([[uniform]], dtype=mx.float32),
                )
                assert accepted.item() == passes, (case, slot, uniform)


def test_a_deterministic_guess_is_a_one_hot_distribution() -> None:
    """log_q = None is the same as stating a distribution with all mass on the guess."""
    drafts = mx.array(INPUTS["draft_tokens"])
    one_hot = mx.log((mx.arange(19) == drafts[..., None]).astype(mx.float32))
    log_p = mx.array(np.stack([log_target(c) for c in CASES]))
    rest = (drafts, mx.array(INPUTS["num_draft"]), mx.array(INPUTS["uniforms"]))
    accepted, following = accept.rejection(log_p, None, *rest)
    expected, distribution = accept.rejection(log_p, one_hot, *rest)
    assert accepted.tolist() == expected.tolist()
    np.testing.assert_allclose(
        np.exp(np.array(following)), np.exp(np.array(distribution)), atol=1e-6
    )


def test_match_takes_the_longest_equal_prefix_within_the_length() -> None:
    chosen = mx.array([[5, 6, 7, 8]] * 6)
    drafts = mx.array([[5, 6, 7], [5, 6, 7], [5, 0, 7], [0, 6, 7], [5, 6, 0], [5, 6, 7]])
    lengths = mx.array([3, 2, 3, 3, 3, 0])
    assert accept.match(drafts, lengths, chosen).tolist() == [3, 2, 1, 0, 2, 0]
