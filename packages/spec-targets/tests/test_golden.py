"""A tiny Qwen3 equals the reference implementation, logits, hidden states and taps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from spec_targets import LoadedTarget, load_target

GOLDEN = Path(__file__).parent / "golden" / "e2e_qwen3"


@pytest.fixture(scope="module")
def loaded() -> LoadedTarget:
    return load_target(GOLDEN / "target")


@pytest.fixture(scope="module")
def expected() -> Any:
    return mx.load(str(GOLDEN / "outputs.safetensors"))


@pytest.fixture(scope="module")
def prompt() -> mx.array:
    arrays = mx.load(str(GOLDEN / "inputs.safetensors"))
    assert isinstance(arrays, dict)
    return arrays["input_ids"]


def _off(ours: mx.array, theirs: mx.array) -> float:
    return mx.abs(ours - theirs).max().item()  # type: ignore[return-value]


def test_logits_and_taps(loaded: LoadedTarget, expected: Any, prompt: mx.array) -> None:
    target = loaded.target
    forward = target.forward(prompt, target.new_state(1), taps=(-1, 0, 2, 3))
    assert forward.logits is not None
    assert _off(forward.logits, expected["target_prompt_logits"]) < 2e-5
    taps = mx.concatenate(list(forward.taps), axis=-1)
    assert _off(taps, expected["target_prompt_taps"]) < 5e-6


def test_every_hidden_state(loaded: LoadedTarget, expected: Any, prompt: mx.array) -> None:
    target = loaded.target
    taps = target.forward(prompt, target.new_state(1), taps=(-1, 0, 1, 2, 3)).taps
    states = expected["target_prompt_hidden_states"]
    for tap, theirs in zip(taps, states[:5], strict=True):
        assert _off(tap[0], theirs) < 5e-6


def test_greedy_tokens(loaded: LoadedTarget, expected: Any, prompt: mx.array) -> None:
    target = loaded.target
    state = target.new_state(1)
    tokens = prompt.tolist()[0]
    step = tokens
    for _ in range(40):
        logits = target.forward(mx.array([step]), state, logits="last").logits
        assert logits is not None
        state.commit([len(step)])
        step = [int(mx.argmax(logits[0, -1]).item())]
        tokens = tokens + step
    assert tokens == expected["plain_greedy_ids"].tolist()[0]
