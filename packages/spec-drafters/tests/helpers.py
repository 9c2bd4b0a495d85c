"""Goldens of the reference implementations, a target that only lends, and two small choosers."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from spec_core.seams import DraftChoice, TargetInfo
from spec_drafters.block import BlockDrafter
from spec_drafters.eagle import EagleDrafter
from spec_drafters.load import load_drafter

GOLDEN = Path(__file__).parent / "golden"


@dataclass
class Lender:
    """The embedding and head of a golden's target."""

    embedding: mx.array
    head: mx.array

    def embed(self, tokens: mx.array) -> mx.array:
        return self.embedding[tokens]

    def unembed(self, hidden: mx.array) -> mx.array:
        return hidden @ self.head.T


@dataclass
class StubTarget:
    """A target as far as a drafter's loader looks at one."""

    info: TargetInfo
    lender: Lender | None = None


class Greedy:
    """argmax; keeps the logits it was shown."""

    def __init__(self) -> None:
        self.seen: list[mx.array] = []

    def draft(
        self, logits: mx.array, slot: int, prefix: mx.array, token_ids: mx.array | None = None
    ) -> DraftChoice:
        assert prefix.shape == (logits.shape[0], slot)
        self.seen.append(logits[:, None])
        return DraftChoice(self.choose(logits[:, None], slot)[:, 0], None)

    def draft_block(self, logits: mx.array, token_ids: mx.array | None = None) -> DraftChoice:
        self.seen.append(logits)
        return DraftChoice(self.choose(logits, 0), None)

    def choose(self, logits: mx.array, slot: int) -> mx.array:
        return mx.argmax(logits, axis=-1).astype(mx.int32)

    @property
    def logits(self) -> mx.array:
        return mx.concatenate(self.seen, axis=1)


class Forced(Greedy):
    """Draws given tokens [B, K], whatever the logits."""

    def __init__(self, tokens: mx.array) -> None:
        super().__init__()
        self.tokens = tokens

    def choose(self, logits: mx.array, slot: int) -> mx.array:
        return self.tokens[:, slot : slot + logits.shape[1]]


class InverseCdf(Greedy):
    """The first token whose cumulative probability at a temperature exceeds u, in float64."""

    def __init__(self, temperature: float, uniforms: np.ndarray[Any, Any]) -> None:
        super().__init__()
        self.temperature = temperature
        self.uniforms = uniforms
        self.probabilities: list[np.ndarray[Any, Any]] = []

    def choose(self, logits: mx.array, slot: int) -> mx.array:
        probabilities = np.array(mx.softmax(logits.astype(mx.float32) / self.temperature, axis=-1))
        self.probabilities.append(probabilities)
        totals = probabilities.astype(np.float64).cumsum(axis=-1)
        u = self.uniforms[slot : slot + logits.shape[1]]
        return mx.array((totals > u[None, :, None]).argmax(axis=-1).astype(np.int32))


@dataclass
class Golden:
    """One folder of golden: a checkpoint in its own format, inputs and outputs."""

    path: Path
    inputs: dict[str, mx.array] = field(init=False)
    outputs: dict[str, mx.array] = field(init=False)

    def __post_init__(self) -> None:
        self.inputs = dict(mx.load(str(self.path / "inputs.safetensors")))  # type: ignore[arg-type]
        self.outputs = dict(mx.load(str(self.path / "outputs.safetensors")))  # type: ignore[arg-type]

    @classmethod
    def named(cls, name: str) -> Golden:
        return cls(GOLDEN / name)

    @property
    def rounds(self) -> int:
        return sum(name.startswith("start_") for name in self.inputs)

    def target(self, **changes: Any) -> StubTarget:
        """A target that the drafter fits, except for these fields of its info."""
        hidden, vocabulary = self._sizes()
        lender = None
        scale = 1.0
        if "target_embed_weight" in self.inputs:
            head = self.inputs["target_lm_head_weight"]
            lender = Lender(self.inputs["target_embed_weight"], head)
            scale = hidden**0.5 if "gemma" in self.path.name else 1.0
        info = {
            "family": "golden",
            "vocab_size": vocabulary,
            "hidden_size": hidden,
            "num_layers": 12,
            "context_window": 4096,
            "embed_scale": scale,
        }
        return StubTarget(TargetInfo(**{**info, **changes}), lender)

    def _sizes(self) -> tuple[int, int]:
        if (self.path / "config.json").exists():
            config = json.loads((self.path / "config.json").read_text())
            return config["hidden_size"], config["vocab_size"]
        hidden, logits = self.outputs["block_hidden_0"], self.outputs["base_logits_0"]
        return hidden.shape[-1], logits.shape[-1]

    def drafter(self, **options: Any) -> BlockDrafter:
        drafter = load_drafter(self.path, self.target(), **options)  # type: ignore[arg-type]
        assert isinstance(drafter, BlockDrafter)
        return drafter

    def eagle(self, **options: Any) -> EagleDrafter:
        drafter = load_drafter(self.path, self.target(), **options)  # type: ignore[arg-type]
        assert isinstance(drafter, EagleDrafter)
        return drafter

    def taps(self, index: int, count: int) -> list[mx.array]:
        """Round `index`'s new context rows, one array for each of `count` taps."""
        return list(mx.split(self.inputs[f"target_hidden_{index}"], count, axis=-1))

    def all_taps(self, count: int) -> list[mx.array]:
        """The context rows of all rounds, [1, N, H] for each tap."""
        rounds = [self.taps(index, count) for index in range(self.rounds)]
        return [mx.concatenate(list(parts), axis=1) for parts in zip(*rounds, strict=True)]
