"""The reference's own loop on tiny random pairs: every round's drafts, verdict and length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import cast

import mlx.core as mx
import pytest

from spec_core import ConfidenceThreshold, DraftPolicy, FixedLength, RowOutcome, Target, decode
from spec_core.seams import Drafter
from spec_drafters.load import load_drafter
from spec_targets import load_target

GOLDENS = Path(__file__).parent / "golden"
POLICIES: Mapping[str, DraftPolicy] = {
    "full": FixedLength(),
    "thr": ConfidenceThreshold(0.35),
}


@dataclass
class Pair:
    """A target and its drafter, and what the reference made of a prompt with them."""

    folder: Path

    @cached_property
    def target(self) -> Target:
        return load_target(self.folder / "target", dtype="float32").target

    @cached_property
    def drafter(self) -> Drafter:
        return load_drafter(self.folder / "drafter", self.target)

    @cached_property
    def prompt(self) -> list[int]:
        return cast("list[int]", self._arrays("inputs")["input_ids"][0].tolist())

    @cached_property
    def plain(self) -> list[int]:
        """What the reference writes without drafts."""
        return self.ints("plain_greedy_ids")[len(self.prompt) :]

    def ints(self, name: str) -> list[int]:
        return cast("list[int]", self._arrays("outputs")[name].flatten().tolist())

    def _arrays(self, name: str) -> dict[str, mx.array]:
        return cast("dict[str, mx.array]", mx.load(str(self.folder / f"{name}.safetensors")))


@pytest.fixture(scope="module", params=["e2e_qwen3", "e2e_gemma4"])
def pair(request: pytest.FixtureRequest) -> Pair:
    return Pair(GOLDENS / request.param)


def test_plain_decoding_writes_the_golden_tokens(pair: Pair) -> None:
    outcomes = decode(pair.target, None, pair.prompt, max_tokens=len(pair.plain))
    assert [token for outcome in outcomes for token in outcome.tokens] == pair.plain


@pytest.mark.parametrize("kind", POLICIES)
def test_every_round_is_the_golden_one(pair: Pair, kind: str) -> None:
    rounds = len(pair.ints(f"{kind}_acceptance_lengths"))
    # The reference never shortens a block for the budget: there is room for one more.
    budget = len(pair.plain) + 8
    outcomes = list(
        decode(pair.target, pair.drafter, pair.prompt, max_tokens=budget, policy=POLICIES[kind])
    )
    seen: list[RowOutcome] = [o for o in outcomes if not o.prefill][:rounds]
    assert [o.accepted + 1 for o in seen] == pair.ints(f"{kind}_acceptance_lengths")
    assert [o.drafted for o in seen] == pair.ints(f"{kind}_proposal_lengths")
    written = [token for outcome in outcomes for token in outcome.tokens]
    expected = pair.ints(f"{kind}_output_ids")
    assert [*pair.prompt, *written][: len(expected)] == expected


@pytest.mark.parametrize("length", [1, 2, 3, 5, 7])
def test_shorter_drafts_write_the_same_tokens(pair: Pair, length: int) -> None:
    how = {"max_tokens": len(pair.plain), "prefill_chunk": 3 * length}
    outcomes = decode(pair.target, pair.drafter, pair.prompt, policy=FixedLength(length), **how)
    assert [token for outcome in outcomes for token in outcome.tokens] == pair.plain
