"""Tiny targets equal the reference implementation: logits, hidden states, taps, greedy tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from spec_targets import LoadedTarget, load_target

GOLDENS = Path(__file__).parent / "golden"
TAPS = {"e2e_qwen3": (-1, 0, 2, 3), "e2e_gemma4": (0, 2, 4)}


@dataclass
class Golden:
    """A checkpoint, a prompt, and what the reference made of it."""

    loaded: LoadedTarget
    prompt: mx.array
    expected: Any
    taps: tuple[int, ...]


@pytest.fixture(scope="module", params=sorted(TAPS))
def golden(request: pytest.FixtureRequest) -> Golden:
    folder = GOLDENS / request.param
    inputs = mx.load(str(folder / "inputs.safetensors"))
    assert isinstance(inputs, dict)
    return Golden(
        load_target(folder / "target"),
        inputs["input_ids"],
        mx.load(str(folder / "outputs.safetensors")),
        TAPS[request.param],
    )


def _off(ours: mx.array, theirs: mx.array) -> float:
    return mx.abs(ours - theirs).max().item()  # type: ignore[return-value]


def test_logits_and_taps(golden: Golden) -> None:
    target, expected = golden.loaded.target, golden.expected
    forward = target.forward(golden.prompt, target.new_state(1), taps=golden.taps)
    assert forward.logits is not None
    assert _off(forward.logits, expected["target_prompt_logits"]) < 2e-5
    taps = mx.concatenate(list(forward.taps), axis=-1)
    assert _off(taps, expected["target_prompt_taps"]) < 5e-6


def test_every_hidden_state(golden: Golden) -> None:
    target = golden.loaded.target
    layers = target.info.num_layers
    taps = target.forward(golden.prompt, target.new_state(1), taps=range(-1, layers)).taps
    # The reference's last state comes after the final norm.
    states = golden.expected["target_prompt_hidden_states"][:layers]
    for tap, theirs in zip(taps[:layers], states, strict=True):
        assert _off(tap[0], theirs) < 5e-6


@pytest.mark.parametrize("chunk", [1, 64])
def test_greedy_tokens(golden: Golden, chunk: int) -> None:
    target = golden.loaded.target
    state = target.new_state(1)
    tokens: list[int] = golden.prompt.tolist()[0]  # type: ignore[assignment, index]
    wanted = golden.expected["plain_greedy_ids"].tolist()[0]
    done = 0
    while len(tokens) < len(wanted):
        piece = tokens[done : done + chunk]
        logits = target.forward(mx.array([piece]), state, logits="last").logits
        state.commit([len(piece)])
        done += len(piece)
        if done == len(tokens):
            assert logits is not None
            tokens = [*tokens, int(mx.argmax(logits[0, -1]).item())]
    assert tokens == wanted
