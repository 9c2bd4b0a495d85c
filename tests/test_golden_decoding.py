"""The reference's own loop on a tiny random pair: every round's drafts, verdict and length."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import cast

import mlx.core as mx
import pytest

from spec_core import ConfidenceThreshold, DraftPolicy, FixedLength, RowOutcome, Target, decode
from spec_drafters.block import BlockDrafter
from spec_drafters.load import load_drafter
from spec_targets import load_target

GOLDEN = Path(__file__).parent / "golden" / "e2e_qwen3"
POLICIES: Mapping[str, DraftPolicy] = {
    "full": FixedLength(),
    "thr": ConfidenceThreshold(0.35),
}


def arrays(name: str) -> dict[str, mx.array]:
    return cast("dict[str, mx.array]", mx.load(str(GOLDEN / f"{name}.safetensors")))


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target(GOLDEN / "target", dtype="float32").target


@pytest.fixture(scope="module")
def drafter(target: Target) -> BlockDrafter:
    return load_drafter(GOLDEN / "drafter", target)


def ints(name: str) -> list[int]:
    return cast("list[int]", arrays("outputs")[name].flatten().tolist())


def prompt() -> list[int]:
    return cast("list[int]", arrays("inputs")["input_ids"][0].tolist())


def test_plain_decoding_writes_the_golden_tokens(target: Target) -> None:
    written = [t for o in decode(target, None, prompt(), max_tokens=40) for t in o.tokens]
    assert [*prompt(), *written] == ints("plain_greedy_ids")


@pytest.mark.parametrize("kind", POLICIES)
def test_every_round_is_the_golden_one(target: Target, drafter: BlockDrafter, kind: str) -> None:
    rounds = len(ints(f"{kind}_acceptance_lengths"))
    outcomes = list(
        # The reference never shortens a block for the budget: there is room for one more.
        decode(target, drafter, prompt(), max_tokens=48, policy=POLICIES[kind])
    )
    seen: list[RowOutcome] = [o for o in outcomes if not o.prefill][:rounds]
    assert [o.accepted + 1 for o in seen] == ints(f"{kind}_acceptance_lengths")
    assert [o.drafted for o in seen] == ints(f"{kind}_proposal_lengths")
    written = [token for outcome in outcomes for token in outcome.tokens]
    expected = ints(f"{kind}_output_ids")
    assert [*prompt(), *written][: len(expected)] == expected


@pytest.mark.parametrize("length", [1, 2, 3, 5, 7])
def test_shorter_drafts_write_the_same_tokens(
    target: Target, drafter: BlockDrafter, length: int
) -> None:
    outcomes = decode(target, drafter, prompt(), max_tokens=40, policy=FixedLength(length))
    written = [token for outcome in outcomes for token in outcome.tokens]
    assert [*prompt(), *written] == ints("plain_greedy_ids")
