"""EAGLE3: the reference's own numbers, and what an autoregressive drafter promises its round."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_core.conformance.drafter import check_drafter
from spec_core.errors import SeamError, UnsupportedError
from spec_core.testing import TinyTarget
from spec_drafters.eagle import EagleDrafter
from spec_drafters.eagle_state import EagleState
from spec_drafters.load import load_drafter

from .helpers import Golden, Greedy
from .test_block_drafter import rounded

GOLDENS = ["eagle3_qwen3", "eagle3_gemma4"]
TOLERANCE = 2e-4


def close(got: mx.array, wanted: mx.array, tolerance: float = TOLERANCE) -> None:
    one, other = (np.array(array.astype(mx.float32)) for array in (got, wanted))
    np.testing.assert_allclose(one, other, rtol=0, atol=tolerance)


def tell(
    drafter: EagleDrafter, state: EagleState, tokens: list[int], taps: list[mx.array]
) -> EagleState:
    """Tell a state of one row these tokens at once."""
    drafter.extend(state, mx.array([tokens], dtype=mx.int32), taps, [len(tokens)])
    return state


def text(drafter: EagleDrafter, length: int, seed: int) -> tuple[list[int], list[mx.array]]:
    """Random tokens, and taps [1, length, H] for each tap."""
    spec, keys = drafter.spec, mx.random.split(mx.random.key(seed), len(drafter.taps) + 1)
    tokens = mx.random.randint(0, spec.vocab_size, (length,), key=keys[-1]).tolist()
    taps = [mx.random.normal((1, length, spec.hidden_size), key=key) for key in keys[:-1]]
    return tokens, taps  # type: ignore[return-value]


def told(drafter: EagleDrafter, length: int, seed: int = 0, start: int = 0) -> EagleState:
    return tell(drafter, drafter.new_state(1, start), *text(drafter, length, seed))


def logits(drafter: EagleDrafter, state: EagleState, anchors: list[int], count: int = 0):
    """(tokens, logits) of a greedy proposal."""
    chooser, anchor = Greedy(), mx.array(anchors, dtype=mx.int32)
    proposal = drafter.propose(state, anchor, count or drafter.max_block, chooser)
    return proposal.tokens, chooser.logits


# --- the reference's numbers --------------------------------------------------------------------


def rounds(name: str):
    """(golden, drafter, state, anchor, index) before each round's proposal.

    The golden pairs tap row i with the token at i + 1: its last committed token is the anchor,
    and the first token of all reaches no row.
    """
    golden = Golden.named(name)
    drafter = golden.eagle()
    state, before = drafter.new_state(1), 0
    for index in range(2):
        committed = golden.inputs[f"committed_tokens_{index}"].tolist()
        taps = list(mx.split(golden.inputs[f"target_hidden_{index}"], 5, axis=-1))
        tell(drafter, state, [before, *committed[:-1]], taps)
        before = committed[-1]
        yield golden, drafter, state, before, index


@pytest.mark.parametrize("name", GOLDENS)
def test_fused_taps(name: str) -> None:
    golden = Golden.named(name)
    drafter = golden.eagle()
    for index in range(2):
        taps = list(mx.split(golden.inputs[f"target_hidden_{index}"], 5, axis=-1))
        close(drafter.fuse(taps), golden.outputs[f"projected_{index}"])


@pytest.mark.parametrize("name", GOLDENS)
def test_greedy_tokens_and_logits(name: str) -> None:
    for golden, drafter, state, anchor, index in rounds(name):
        tokens, got = logits(drafter, state, [anchor])
        assert tokens.tolist() == golden.outputs[f"greedy_tokens_{index}"].tolist()
        close(got, golden.outputs[f"draft_logits_{index}"])


@pytest.mark.parametrize("name", GOLDENS)
def test_the_cache_holds_a_row_for_every_token_that_is_known(name: str) -> None:
    """The reference counts the anchor's row too; here it is made anew when its token is told."""
    for golden, _, state, _, index in rounds(name):
        assert state.depths == [golden.outputs[f"cache_len_{index}"].item() - 1]


# --- the contract -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GOLDENS)
def test_keeps_the_contract_of_a_drafter(name: str) -> None:
    golden = Golden.named(name)
    info = golden.target().info
    target = TinyTarget(info.vocab_size, info.hidden_size, info.num_layers)
    drafter = load_drafter(golden.path, target)
    assert drafter.name == "eagle3"
    check_drafter(drafter, target, tolerance=TOLERANCE, prompt_length=20)


@settings(max_examples=10, deadline=None)
@given(name=st.sampled_from(GOLDENS), keeps=st.lists(st.integers(0, 4), min_size=1, max_size=6))
def test_text_may_come_in_any_pieces(name: str, keeps: list[int]) -> None:
    """Columns beyond `keep` leave no trace, an empty piece does nothing."""
    drafter = Golden.named(name).eagle()
    tokens, taps = text(drafter, max(sum(keeps), 1) + 4, 3)
    state, at = drafter.new_state(1), 0
    for keep in keeps:
        cut = [tap[:, at : at + 4] for tap in taps]
        drafter.extend(state, mx.array([tokens[at : at + 4]], dtype=mx.int32), cut, [keep])
        at += keep
    assert state.lengths == [at]
    if at == 0:
        return
    whole = tell(drafter, drafter.new_state(1), tokens[:at], [tap[:, :at] for tap in taps])
    close(logits(drafter, state, [9])[1], logits(drafter, whole, [9])[1], 1e-5)


@pytest.mark.parametrize("name", GOLDENS)
def test_ragged_rows_draft_what_they_draft_alone(name: str) -> None:
    """Rows of different length, one of which began in the middle of its text."""
    drafter = Golden.named(name).eagle()
    shapes = [(31, 0), (1, 0), (17, 40), (12, 0)]
    alone = [told(drafter, length, i, start) for i, (length, start) in enumerate(shapes)]
    wanted = [logits(drafter, state, [i + 5]) for i, state in enumerate(alone)]
    batch = alone[0]
    for state in alone[1:]:
        batch.join(state)
    assert batch.lengths == [start + length for length, start in shapes]
    tokens, got = logits(drafter, batch, [5, 6, 7, 8])
    for index, (alone_tokens, alone_logits) in enumerate(wanted):
        close(got[index], alone_logits[0])
        assert tokens[index].tolist() == alone_tokens[0].tolist()


@pytest.mark.parametrize("name", GOLDENS)
def test_a_row_that_begins_beside_others_misses_only_its_first_token(name: str) -> None:
    """One `extend` where some rows have a tap row that waits, and others have none."""
    drafter = Golden.named(name).eagle()
    first, second = text(drafter, 9, 1), text(drafter, 4, 2)
    batch = tell(drafter, drafter.new_state(1), first[0][:5], [tap[:, :5] for tap in first[1]])
    batch.join(drafter.new_state(1))
    columns = mx.array([first[0][5:], second[0]], dtype=mx.int32)
    taps = [mx.concatenate([a[:, 5:], b]) for a, b in zip(first[1], second[1], strict=True)]
    drafter.extend(batch, columns, taps, [4, 3])
    got = logits(drafter, batch, [8, 9])[1]
    close(got[:1], logits(drafter, tell(drafter, drafter.new_state(1), *first), [8])[1])
    shorter = (second[0][:3], [tap[:, :3] for tap in second[1]])
    close(got[1:], logits(drafter, tell(drafter, drafter.new_state(1), *shorter), [9])[1])


def test_a_text_without_taps_gets_no_guess() -> None:
    drafter = Golden.named("eagle3_qwen3").eagle()
    batch = drafter.new_state(1, start=7)
    batch.join(told(drafter, 5))
    proposal = drafter.propose(batch, mx.array([1, 2], dtype=mx.int32), 3, Greedy())
    assert proposal.lengths == (0, 3)


def test_fewer_guesses_are_the_first_of_all() -> None:
    drafter = Golden.named("eagle3_gemma4").eagle()
    state = told(drafter, 20)
    tokens, whole = logits(drafter, state, [9])
    for count in (1, 4):
        fewer, some = logits(drafter, state, [9], count)
        assert fewer.tolist() == tokens[:, :count].tolist()
        close(some, whole[:, :count], 1e-5)


# --- images -------------------------------------------------------------------------------------


def test_an_entry_of_an_image_depends_on_the_text_up_to_it() -> None:
    """Two texts that part after position 7 share every entry of positions 0 to 7."""
    drafter = Golden.named("eagle3_qwen3").eagle()
    tokens, taps = text(drafter, 12, 5)
    other = [*tokens[:8], *[(t + 1) % 200 for t in tokens[8:]]]
    images = [tell(drafter, drafter.new_state(1), t, taps).image(0) for t in (tokens, other)]
    for name in ("keys", "values"):
        one, two = (np.array(image.per_token[name].array) for image in images)
        assert (one[:8] == two[:8]).all()
        assert (one[8] != two[8]).any()


def test_a_prompt_can_be_resumed_anywhere_in_its_last_piece() -> None:
    drafter = Golden.named("eagle3_qwen3").eagle()
    tokens, taps = text(drafter, 12, 5)
    image = tell(drafter, drafter.new_state(1), tokens, taps).image(0)
    held = image.per_token["fused"].array.shape[0]
    assert held == 12
    assert image.per_token["fused"].reach == 1


def test_unfit_images_are_refused() -> None:
    drafter = Golden.named("eagle3_qwen3").eagle()
    state = told(drafter, 12)
    with pytest.raises(SeamError, match="starts at position 5"):
        drafter.new_state(1).restore(0, state.image(0, 5))
    with pytest.raises(SeamError, match="restore needs none"):
        state.restore(0, state.image(0))
    with pytest.raises(UnsupportedError, match="began at position 7"):
        told(drafter, 4, start=7).image(0, 6)
    with pytest.raises(SeamError, match="no image from 13"):
        state.image(0, 13)


def test_misuse_is_refused() -> None:
    drafter = Golden.named("eagle3_qwen3").eagle()
    other = Golden.named("eagle3_gemma4").eagle()
    state, (tokens, taps) = drafter.new_state(1), text(drafter, 2, 0)
    columns = mx.array([tokens], dtype=mx.int32)
    with pytest.raises(SeamError, match="reads 5 taps; it was given 3"):
        drafter.extend(state, columns, taps[:3], [2])
    with pytest.raises(SeamError, match=r"keep is \[3\]"):
        drafter.extend(state, columns, taps, [3])
    with pytest.raises(SeamError, match="another drafter"):
        told(drafter, 3).join(told(other, 3))
    with pytest.raises(SeamError, match="its own state, not a dict"):
        drafter.propose({}, columns[:, 0], 1, Greedy())  # type: ignore[arg-type]


# --- cost ---------------------------------------------------------------------------------------


def test_a_round_costs_the_same_memory_at_any_context() -> None:
    """Nothing is copied whose size grows with the context; scores aside, which are computed."""
    drafter = Golden.named("eagle3_qwen3").eagle()
    spec = drafter.spec
    extra = {}
    for context in (500, 8000):
        state = told(drafter, context)
        mx.eval(*state.pending())
        tokens, taps = text(drafter, 3, 1)
        tell(drafter, state, tokens, taps)
        mx.eval(logits(drafter, state, [9])[0], *state.pending())
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        for _ in range(3):
            tell(drafter, state, tokens, taps)
            mx.eval(logits(drafter, state, [9])[0], *state.pending())
        extra[context] = mx.get_peak_memory() - before
    plane = 8000 * spec.num_kv_heads * spec.head_dim * 4
    assert extra[8000] - extra[500] < plane


def test_a_chain_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = Golden.named("eagle3_qwen3").eagle()
    state = told(drafter, 6)
    mx.eval(*state.pending())

    def fail(*args: object) -> None:
        raise AssertionError("a proposal was waited for")

    with monkeypatch.context() as patch:
        patch.setattr(mx, "eval", fail)
        patch.setattr(mx, "async_eval", fail)
        patch.setattr("spec_drafters.eagle.start_layer", lambda hidden: None)  # it only begins
        proposal = drafter.propose(state, mx.array([3], dtype=mx.int32), 7, Greedy())
    assert proposal.tokens.shape == (1, 7)


# --- precision ----------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantised_drafter_is_one_of_rounded_matrices(tmp_path: Path, bits: int) -> None:
    golden = Golden.named("eagle3_gemma4")
    small = golden.eagle(bits=bits)
    dense = load_drafter(rounded(tmp_path, golden, bits), golden.target())
    wanted, got = (logits(d, told(d, 9), [7])[1] for d in (dense, small))
    close(got, wanted)
    assert mx.abs(got - logits(golden.eagle(), told(golden.eagle(), 9), [7])[1]).max() > 1e-2


def test_half_precision_drafts_nearly_the_same() -> None:
    golden = Golden.named("eagle3_qwen3")
    half, full = golden.eagle(dtype="bfloat16"), golden.eagle()
    state = told(half, 9)
    assert {array.dtype for array in state.pending()} == {mx.bfloat16}
    close(logits(half, state, [7], 1)[1], logits(full, told(full, 9), [7], 1)[1], 0.2)
