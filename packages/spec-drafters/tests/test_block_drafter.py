"""What a block drafter promises its round, whatever it is built from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_core.conformance.drafter import check_drafter
from spec_core.errors import InvalidValueError, SeamError, UnsupportedError
from spec_core.testing import TinyTarget
from spec_drafters import block_state
from spec_drafters.block import BlockDrafter
from spec_drafters.block_state import BlockState
from spec_drafters.load import load_drafter

from .helpers import Golden, Greedy

TOLERANCE = 2e-4
ALL = [
    "dspark_qwen3",
    "dspark_qwen3_gated",
    "dspark_qwen3_rnn",
    "deepspec_dflash_qwen3",
    "dspark_gemma4",
    "dspark_gemma4_separate_v",
    "dflash_qwen3",
    "dflash_gemma4",
]


def close(got: mx.array, wanted: mx.array, tolerance: float = TOLERANCE) -> None:
    np.testing.assert_allclose(np.array(got), np.array(wanted), rtol=0, atol=tolerance)


def told(
    drafter: BlockDrafter, taps: list[mx.array], sizes: list[int] | None = None, start: int = 0
) -> BlockState:
    """A state of one row that was told these taps, in chunks of these sizes and the rest."""
    state, at, end = drafter.new_state(1, start), 0, taps[0].shape[1]
    for size in [*(sizes or []), end]:
        size = min(size, end - at)
        if size:
            chunk = [tap[:, at : at + size] for tap in taps]
            drafter.extend(state, mx.zeros((1, size), dtype=mx.int32), chunk, [size])
        at += size
    return state


def random_taps(drafter: BlockDrafter, rows: int, columns: int, seed: int = 0) -> list[mx.array]:
    keys = mx.random.split(mx.random.key(seed), len(drafter.taps))
    return [mx.random.normal((rows, columns, drafter.spec.hidden_size), key=key) for key in keys]


def logits(drafter: BlockDrafter, state: BlockState, anchors: list[int], count: int = 0):
    """(tokens, logits) of a greedy proposal."""
    chooser = Greedy()
    anchor = mx.array(anchors, dtype=mx.int32)
    proposal = drafter.propose(state, anchor, count or drafter.max_block, chooser)
    return proposal.tokens, chooser.logits


def all_windows(folder: Path) -> Path:
    """dflash_gemma4 with a window in every layer."""
    golden = Golden.named("dflash_gemma4")
    shutil.copytree(golden.path, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    config["layer_types"] = ["sliding_attention"] * len(config["layer_types"])
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", ["dspark_qwen3_rnn", "dspark_gemma4", "dflash_gemma4"])
def test_keeps_the_contract_of_a_drafter(name: str) -> None:
    golden = Golden.named(name)
    info = golden.target().info
    target = TinyTarget(info.vocab_size, info.hidden_size, info.num_layers)
    check_drafter(load_drafter(golden.path, target), target, tolerance=TOLERANCE, prompt_length=30)


@settings(max_examples=8, deadline=None)
@given(name=st.sampled_from(ALL), sizes=st.lists(st.integers(1, 9), max_size=6))
def test_context_does_not_depend_on_its_chunks(name: str, sizes: list[int]) -> None:
    golden = Golden.named(name)
    drafter = golden.drafter()
    taps = golden.all_taps(len(drafter.taps))
    whole, parts = told(drafter, taps).image(0), told(drafter, taps, sizes).image(0)
    assert whole.length == parts.length == taps[0].shape[1]
    for key, entry in whole.per_token.items():
        close(parts.per_token[key].array, entry.array, 1e-5)


@pytest.mark.parametrize("beside_host", [False, True])
@pytest.mark.parametrize("name", ["dspark_qwen3", "dflash_gemma4"])
def test_columns_that_come_one_by_one_count_at_once_and_draft_alike(
    name: str, beside_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait to be projected together; nobody can tell, whatever interrupts them."""
    monkeypatch.setattr(block_state, "runs_beside_host", lambda: beside_host)
    drafter = Golden.named(name).drafter()
    taps = random_taps(drafter, 2, 41)
    wanted, state = told(drafter, taps), drafter.new_state(2)
    for column in range(41):
        one = [tap[:, column : column + 1] for tap in taps]
        drafter.extend(state, mx.zeros((2, 1), dtype=mx.int32), one, [1, 1])
        assert state.lengths == [column + 1] * 2
        if column == 20:
            drafter.extend(state, mx.zeros((2, 1), dtype=mx.int32), one, [0, 0])
            logits(drafter, state, [4, 4])
    tokens, got = logits(drafter, state, [9, 9])
    other, expected = logits(drafter, wanted, [9, 9])
    close(got, expected, 1e-5)
    assert tokens.tolist() == other.tolist()


@pytest.mark.parametrize("beside_host", [False, True])
def test_columns_that_are_not_kept_leave_no_trace(
    beside_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_state, "runs_beside_host", lambda: beside_host)
    drafter = Golden.named("dspark_qwen3").drafter()
    taps = random_taps(drafter, 1, 48)
    kept, state = [3, 1, 1, 7, 1], drafter.new_state(1)
    at = 0
    for keep in kept:
        columns = [tap[:, at : at + 8] for tap in taps]
        drafter.extend(state, mx.zeros((1, 8), dtype=mx.int32), columns, [keep])
        at += keep
        assert state.lengths == [at]
    _, got = logits(drafter, state, [9])
    _, expected = logits(drafter, told(drafter, [tap[:, :at] for tap in taps]), [9])
    close(got, expected, 1e-5)


@pytest.mark.parametrize("name", ALL)
def test_ragged_rows_draft_what_they_draft_alone(name: str) -> None:
    """Rows of different length, one of which began in the middle of its text."""
    drafter = Golden.named(name).drafter()
    rows = [(31, 0), (3, 0), (17, 40), (12, 0)]
    alone = [
        told(drafter, random_taps(drafter, 1, length, seed=index), start=start)
        for index, (length, start) in enumerate(rows)
    ]
    wanted = [logits(drafter, state, [index + 5]) for index, state in enumerate(alone)]
    batch = alone[0]
    for state in alone[1:]:
        batch.join(state)
    assert batch.lengths == [start + length for length, start in rows]
    tokens, got = logits(drafter, batch, [index + 5 for index in range(len(rows))])
    for index, (alone_tokens, alone_logits) in enumerate(wanted):
        close(got[index], alone_logits[0])
        assert tokens[index].tolist() == alone_tokens[0].tolist()


@pytest.mark.parametrize("name", ["dspark_qwen3", "dflash_gemma4"])
def test_fewer_guesses_are_the_first_of_the_whole_block(name: str) -> None:
    drafter = Golden.named(name).drafter()
    state = told(drafter, random_taps(drafter, 1, 20))
    tokens, whole = logits(drafter, state, [9])
    for count in (1, 4):
        fewer, some = logits(drafter, state, [9], count)
        assert fewer.tolist() == tokens[:, :count].tolist()
        close(some, whole[:, :count], 1e-5)


def test_a_window_forgets_what_lies_before_it(tmp_path: Path) -> None:
    golden = Golden.named("dflash_gemma4")
    drafter = load_drafter(all_windows(tmp_path), golden.target())
    window = drafter.spec.attention[0].window
    assert window == 12
    taps = random_taps(drafter, 1, 40)
    wanted = logits(drafter, told(drafter, taps), [9])[1]
    newest = [tap[:, 40 - window + 1 :] for tap in taps]
    close(logits(drafter, told(drafter, newest, start=40 - window + 1), [9])[1], wanted, 1e-5)
    fewer = [tap[:, 40 - window + 2 :] for tap in taps]
    other = logits(drafter, told(drafter, fewer, start=40 - window + 2), [9])[1]
    assert mx.abs(other - wanted).max().item() > 1e-3


def test_an_image_within_the_windows_may_begin_anywhere(tmp_path: Path) -> None:
    golden = Golden.named("dflash_gemma4")
    drafter = load_drafter(all_windows(tmp_path), golden.target())
    state = told(drafter, random_taps(drafter, 1, 40))
    restored = drafter.new_state(1)
    restored.restore(0, state.image(0, 29))
    assert restored.lengths == [40]
    close(logits(drafter, restored, [9])[1], logits(drafter, state, [9])[1], 1e-5)
    with pytest.raises(SeamError, match=r"0\.keys holds 8 of 8 positions"):
        drafter.new_state(1).restore(0, state.image(0, 32))


def test_an_image_that_full_attention_cannot_resume_from_is_refused() -> None:
    drafter = Golden.named("dspark_qwen3").drafter()
    state = told(drafter, random_taps(drafter, 1, 20))
    with pytest.raises(SeamError, match="starts at position 5"):
        drafter.new_state(1).restore(0, state.image(0, 5))


def test_a_row_that_began_late_has_no_image_of_what_it_never_saw() -> None:
    drafter = Golden.named("dspark_qwen3").drafter()
    state = told(drafter, random_taps(drafter, 1, 20), start=7)
    assert state.image(0, 7).length == 27
    with pytest.raises(UnsupportedError, match="began at position 7"):
        state.image(0, 6)


def test_misuse_is_refused() -> None:
    drafter = Golden.named("dspark_qwen3").drafter()
    other = Golden.named("dspark_gemma4").drafter()
    state, tokens = drafter.new_state(1), mx.zeros((1, 2), dtype=mx.int32)
    taps = random_taps(drafter, 1, 2)
    with pytest.raises(SeamError, match="reads 4 taps; it was given 3"):
        drafter.extend(state, tokens, taps[:3], [2])
    with pytest.raises(SeamError, match=r"keep is \[3\]"):
        drafter.extend(state, tokens, taps, [3])
    drafter.extend(state, tokens, taps, [2])
    with pytest.raises(SeamError, match="do not fit"):
        state.join(told(other, random_taps(other, 1, 2)))
    with pytest.raises(SeamError, match="restore needs none"):
        state.restore(0, state.image(0))


def test_a_round_costs_the_same_memory_at_any_context() -> None:
    """Nothing is copied whose size grows with the context; scores aside, which are computed."""
    drafter = Golden.named("dspark_qwen3").drafter()
    spec = drafter.spec
    extra = {}
    for context in (500, 8000):
        state = told(drafter, random_taps(drafter, 1, context))
        mx.eval(*state.pending())
        logits(drafter, state, [9])
        taps = random_taps(drafter, 1, 3)
        mx.eval(*taps, *state.pending())
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        for _ in range(3):
            drafter.extend(state, mx.zeros((1, 3), dtype=mx.int32), taps, [3])
            tokens, _ = logits(drafter, state, [9])
            mx.eval(tokens, *state.pending())
        extra[context] = mx.get_peak_memory() - before
    scores = 8000 * spec.num_heads * spec.block_size * 4
    assert extra[8000] - extra[500] < scores < 8000 * spec.num_kv_heads * spec.head_dim * 4


def rounded(folder: Path, golden: Golden, bits: int) -> Path:
    """The golden with every matrix whose rows divide into groups replaced by its quantised self."""
    shutil.copytree(golden.path, folder, dirs_exist_ok=True)
    weights = dict(mx.load(str(folder / "model.safetensors")))
    for name, weight in weights.items():
        group_size = next((g for g in (64, 32) if weight.shape[-1] % g == 0), None)
        if weight.ndim == 2 and group_size and "confidence" not in name:
            parts = mx.quantize(weight, group_size=group_size, bits=bits)
            weights[name] = mx.dequantize(*parts, group_size=group_size, bits=bits)
    mx.eval(weights)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", ["dspark_qwen3", "dspark_gemma4"])
def test_a_quantised_drafter_is_one_of_rounded_matrices(
    tmp_path: Path, name: str, bits: int
) -> None:
    golden = Golden.named(name)
    small = golden.drafter(bits=bits)
    dense = load_drafter(rounded(tmp_path, golden, bits), golden.target())
    taps = golden.all_taps(len(dense.taps))
    wanted, got = (logits(d, told(d, taps), [7])[1] for d in (dense, small))
    close(got, wanted)
    assert mx.abs(got - logits(golden.drafter(), told(golden.drafter(), taps), [7])[1]).max() > 0.01


def test_half_precision_holds_everything_in_half_precision() -> None:
    golden = Golden.named("dspark_gemma4")
    drafter = golden.drafter(dtype="bfloat16")
    state = told(drafter, golden.all_taps(len(drafter.taps)))
    hidden = drafter.hidden(state, mx.array([7]), 7)
    assert hidden.dtype == mx.bfloat16
    assert {buffer.dtype for buffer in state.pending()} == {mx.bfloat16}
    exact = golden.drafter()
    wanted = exact.hidden(told(exact, golden.all_taps(len(exact.taps))), mx.array([7]), 7)
    error = mx.abs(hidden.astype(mx.float32) - wanted).mean() / mx.abs(wanted).mean()
    assert error.item() < 0.03


def test_precision_out_of_range_is_refused() -> None:
    golden = Golden.named("dspark_qwen3")
    with pytest.raises(InvalidValueError, match="drafter bits is 3"):
        golden.drafter(bits=3)
    with pytest.raises(InvalidValueError, match="drafter dtype is 'int8'"):
        golden.drafter(dtype="int8")


def test_a_borrowed_head_is_used_in_its_own_type() -> None:
    golden = Golden.named("dflash_qwen3")
    target = golden.target()
    assert target.lender is not None
    target.lender.embedding = target.lender.embedding.astype(mx.bfloat16)
    target.lender.head = target.lender.head.astype(mx.bfloat16)
    unembed, seen = target.lender.unembed, []

    def watch(hidden: mx.array) -> mx.array:
        seen.append(hidden.dtype)
        return unembed(hidden)

    target.lender.unembed = watch  # type: ignore[method-assign]
    drafter = load_drafter(golden.path, target, dtype="float32")
    _, got = logits(drafter, told(drafter, random_taps(drafter, 1, 5)), [9])
    assert (seen, got.dtype) == ([mx.bfloat16], mx.float32)
