"""A block drafter that replays traces drafts as one that does not, and remembers the same."""

from __future__ import annotations

import random
from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spec_core import traces
from spec_core.conformance.drafter import check_drafter
from spec_core.testing import TinyTarget
from spec_core.traces import Traces
from spec_drafters import backbone
from spec_drafters.block import BlockDrafter
from spec_drafters.block_state import BlockState
from spec_drafters.load import load_drafter

from .helpers import Golden
from .test_block_drafter import ALL, all_windows, close, logits, random_taps, told

FEW = settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(autouse=True)
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are not started one by one: what is being traced cannot be. And everything is traced
    when it is first met."""
    monkeypatch.setattr(backbone, "start_layer", lambda hidden: None)
    monkeypatch.setattr(traces._Kept, "met", lambda kept, key: True)


def traced(drafter: BlockDrafter) -> BlockDrafter:
    """A drafter with the same weights as on CUDA."""
    other = drafter.reading(drafter.spec.first_slot)
    other._traces = Traces()
    return other


def same(ours: BlockState, theirs: BlockState) -> None:
    assert list(ours.lengths) == list(theirs.lengths)
    for row, start in enumerate(theirs._origins):
        wanted = theirs.image(row, start)
        for name, each in ours.image(row, start).per_token.items():
            close(each.array, wanted.per_token[name].array)


@FEW
@given(name=st.sampled_from(ALL), seed=st.integers(0, 999))
def test_it_drafts_the_same_over_any_history(name: str, seed: int) -> None:
    """Rows of different length that start late, join and leave, over a buffer's end at 256."""
    choose = random.Random(seed)
    plain = Golden.named(name).drafter()
    both = (plain, traced(plain))
    start, prompt = choose.choice((0, 7)), choose.choice((3, 240, 254))
    states = [told(d, random_taps(d, 1, prompt, seed), start=start) for d in both]
    for step in range(5):
        rows = states[0].rows
        if rows < 3 and choose.random() < 0.5:
            for drafter, state in zip(both, states, strict=True):
                state.join(told(drafter, random_taps(drafter, 1, 5 + step, seed + step)))
        elif rows > 1 and choose.random() < 0.5:
            for state in states:
                state.select([1])
        rows = states[0].rows
        columns = choose.randint(1, 6)
        keep = [choose.randint(0, columns) for _ in range(rows)]
        taps = random_taps(plain, rows, columns, seed + 100 + step)
        for drafter, state in zip(both, states, strict=True):
            drafter.extend(state, mx.zeros((rows, columns), dtype=mx.int32), taps, keep)
        anchors = [choose.randrange(60) for _ in range(rows)]
        count = choose.randint(1, plain.max_block)
        (wanted, expected), (tokens, got) = (
            logits(drafter, state, anchors, count)
            for drafter, state in zip(both, states, strict=True)
        )
        close(got, expected)
        assert tokens.tolist() == wanted.tolist()
        same(states[1], states[0])
    assert len(both[1]._traces)


def test_windows_hide_the_same(tmp_path: Path) -> None:
    golden = Golden.named("dflash_gemma4")
    plain = load_drafter(all_windows(tmp_path / "windows"), golden.target())
    assert isinstance(plain, BlockDrafter)
    taps = random_taps(plain, 1, 40)
    wanted, expected = logits(plain, told(plain, taps), [5])
    tokens, got = logits(traced(plain), told(plain, taps), [5])
    close(got, expected)
    assert tokens.tolist() == wanted.tolist()


def test_it_keeps_the_contract_of_a_drafter() -> None:
    golden = Golden.named("dspark_qwen3_rnn")
    info = golden.target().info
    target = TinyTarget(info.vocab_size, info.hidden_size, info.num_layers)
    drafter = load_drafter(golden.path, target)
    assert isinstance(drafter, BlockDrafter)
    with_traces = traced(drafter)
    check_drafter(with_traces, target, tolerance=2e-4, prompt_length=30)
    assert len(with_traces._traces)


def test_a_trace_is_made_once_for_each_shape() -> None:
    drafter = traced(Golden.named("dspark_qwen3").drafter())
    state = told(drafter, random_taps(drafter, 1, 9))
    for count in (3, 2, drafter.max_block):
        logits(drafter, state, [4], count)
        drafter.extend(state, mx.zeros((1, 2), dtype=mx.int32), random_taps(drafter, 1, 2), [2])
    assert len(drafter._traces) == 1
    state.join(told(drafter, random_taps(drafter, 1, 3)))
    logits(drafter, state, [4, 5])
    assert len(drafter._traces) == 2


def test_buffers_are_written_in_place() -> None:
    drafter = traced(Golden.named("dspark_qwen3").drafter())
    state = told(drafter, random_taps(drafter, 1, 4000))
    logits(drafter, state, [4])
    mx.eval(state.pending())
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    hidden = drafter.hidden(state, mx.array([5], dtype=mx.int32), 3)
    mx.eval(hidden, state.pending())
    assert mx.get_peak_memory() - before < state.pending()[0].nbytes


def test_a_state_that_was_told_nothing_drafts_without() -> None:
    plain = Golden.named("dspark_qwen3").drafter()
    with_traces = traced(plain)
    wanted, expected = logits(plain, plain.new_state(1), [4])
    tokens, got = logits(with_traces, with_traces.new_state(1), [4])
    close(got, expected)
    assert tokens.tolist() == wanted.tolist()
    assert not len(with_traces._traces)
