"""A drafter family of another distribution: a table of which token follows which.

Installed by test_packaging.py, whose entry point names `PACKAGING`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from spec_core.errors import SeamError
from spec_core.seams import Chooser, DrafterState, EmbeddingLender, Proposal
from spec_core.testing import TextState
from spec_drafters.checkpoint import Checkpoint
from spec_drafters.linear import Weights
from spec_drafters.packaging import Packaging
from spec_drafters.spec import DrafterSpec, Rope, Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class SuccessorSpec(DrafterSpec):
    """Scores [V, V] of each token behind each token."""

    @property
    def num_layers(self) -> int:
        return 0

    @property
    def max_block(self) -> int:
        return 3

    def tensors(self) -> dict[str, Shape]:
        return {"scores": (self.vocab_size, self.vocab_size)}


class Successor:
    """Follows the table, choice by choice."""

    name = "successor"
    taps: Sequence[int] = ()
    max_block = 3
    needs_host_tokens = False

    def __init__(self, scores: mx.array) -> None:
        self.scores = scores

    def new_state(self, rows: int, start: int = 0) -> TextState:
        return TextState(rows, start)

    def extend(
        self,
        state: DrafterState,
        tokens: mx.array,
        taps: Sequence[mx.array],
        keep: Sequence[int],
    ) -> None:
        assert isinstance(state, TextState)
        state.extend(tokens, keep)

    def propose(
        self, state: DrafterState, anchor: mx.array, count: int, chooser: Chooser
    ) -> Proposal:
        if not 1 <= count <= self.max_block:
            raise SeamError(f"count is {count}")
        tokens, log_q = anchor[:, None], []
        for slot in range(count):
            choice = chooser.draft(self.scores[tokens[:, -1]], slot, tokens[:, 1:])
            tokens = mx.concatenate([tokens, choice.tokens[:, None]], axis=1)
            log_q += [] if choice.log_q is None else [choice.log_q]
        rows = anchor.shape[0]
        drawn = mx.stack(log_q, axis=1) if log_q else None
        return Proposal(tokens[:, 1:], (count,) * rows, drawn, sources=(self.name,) * rows)


def read(checkpoint: Checkpoint) -> SuccessorSpec:
    config = checkpoint.config
    return SuccessorSpec(
        packaging="successor",
        mode="successor",
        backbone="qwen3",
        hidden_size=config.integer("hidden_size"),
        intermediate_size=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=1,
        vocab_size=config.integer("vocab_size"),
        norm_eps=1e-6,
        rope=Rope(1.0),
        taps=(),
        num_target_layers=None,
        own_embedding=True,
        own_head=True,
    )


def build(spec: DrafterSpec, weights: Weights, lender: EmbeddingLender | None) -> Successor:
    return Successor(weights.vector("scores"))


PACKAGING = Packaging(
    "successor",
    "SuccessorModel in architectures",
    lambda checkpoint: "SuccessorModel" in checkpoint.config.texts("architectures"),
    read=read,
    build=build,
)
