"""Goldens' checkpoints, edited: other packagings, and broken ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx

from spec_drafters.block import BlockDrafter

from .helpers import GOLDEN, Golden, Greedy

Edit = Callable[[dict[str, Any], dict[str, mx.array]], None]


def copy(folder: Path, name: str, edit: Edit | None = None) -> Path:
    """A golden's checkpoint with its config and tensors edited."""
    source = GOLDEN / name
    config = json.loads((source / "config.json").read_text())
    tensors = dict(mx.load(str(source / "model.safetensors")))
    if edit is not None:
        edit(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    return folder


def both(*edits: Edit) -> Edit:
    def edit(config: dict[str, Any], tensors: dict[str, mx.array]) -> None:
        for one in edits:
            one(config, tensors)

    return edit


def configured(**changes: Any) -> Edit:
    """Set these config keys; None removes one."""

    def edit(config: dict[str, Any], tensors: dict[str, mx.array]) -> None:
        config.update(changes)
        for key in [key for key, value in changes.items() if value is None]:
            del config[key]

    return edit


def with_tensor(name: str, *shape: int) -> Edit:
    def edit(config: dict[str, Any], tensors: dict[str, mx.array]) -> None:
        tensors[name] = mx.zeros(shape)

    return edit


def without_tensor(*names: str) -> Edit:
    def edit(config: dict[str, Any], tensors: dict[str, mx.array]) -> None:
        for name in names:
            del tensors[name]

    return edit


def first_drafts(drafter: BlockDrafter, golden: Golden, chooser: Greedy) -> mx.array:
    """What the drafter proposes in a golden's first round."""
    state, taps = drafter.new_state(1), golden.taps(0, len(drafter.taps))
    rows = taps[0].shape[1]
    drafter.extend(state, mx.zeros((1, rows), dtype=mx.int32), taps, [rows])
    anchor = golden.inputs["anchor_0"]
    return drafter.propose(state, anchor, drafter.max_block, chooser).tokens
