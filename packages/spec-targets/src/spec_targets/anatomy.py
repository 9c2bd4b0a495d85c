"""Where the parts of an mlx-lm model are, found by structure instead of by family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from spec_targets.errors import IncompleteTargetError

_EMBEDDINGS = ("embed_tokens", "wte", "tok_embeddings", "word_embeddings", "embedding")
_HEADS = ("lm_head", "output", "embed_out")


@dataclass(frozen=True, slots=True)
class Anatomy:
    """The parts of a model that a target uses.

    Attributes:
        model: the whole, called as model(tokens, cache=caches).
        layers: the decoder layers in the order they run.
        inner: the module that runs the layers and returns what the head gets, or None.
        embedding: the input embedding, or None.
        head: the output projection; None where the embedding serves (tied weights).
    """

    model: Module
    layers: tuple[Module, ...]
    inner: Module | None
    embedding: Module | None
    head: Module | None


def dissect(model: Module) -> Anatomy:
    """Find the parts by structure: the inner model is the one that owns the layer list, unless it
    owns the head as well."""
    layers = tuple(model.layers)
    owner = next((module for module in _modules(model) if _owns(module, layers)), model)
    whole = owner is model or _child(owner, _HEADS) is not None
    return Anatomy(
        model=model,
        layers=layers,
        inner=None if whole else owner,
        embedding=_child(owner, _EMBEDDINGS),
        head=_child(owner if whole else _parent(model, owner), _HEADS),
    )


def _owns(module: Module, layers: tuple[Module, ...]) -> bool:
    """Whether one of the module's lists holds exactly these layers."""
    return any(
        isinstance(child, list)
        and len(child) == len(layers)
        and all(mine is layer for mine, layer in zip(child, layers, strict=True))
        for child in module.values()
    )


def _parent(model: Module, inner: Module) -> Module:
    holders = (m for m in _modules(model) if any(child is inner for child in m.values()))
    return next(holders, model)


def _modules(model: Module) -> list[Module]:
    return list(model.modules())  # type: ignore[no-untyped-call]


def _child(module: Module, names: tuple[str, ...]) -> Module | None:
    found = (module.get(name) for name in names)
    return next((child for child in found if isinstance(child, Module)), None)


class Lender:
    """An EmbeddingLender over a target's own weights. See spec_core.seams.EmbeddingLender."""

    def __init__(self, embedding: Module, head: Module | None) -> None:
        self._embedding = embedding
        self._head = head

    def embed(self, tokens: mx.array) -> mx.array:
        rows: mx.array = self._embedding(tokens)
        return rows

    def unembed(self, hidden: mx.array) -> mx.array:
        project = self._embedding.as_linear if self._head is None else self._head
        logits: mx.array = project(hidden)
        return logits


@dataclass(frozen=True, slots=True)
class Scales:
    """What a model does around its embedding and head.

    Attributes:
        embed: factor on the embedding rows before layer 0.
        softcap: cap of `cap * tanh(x / cap)` on the logits, or None.
    """

    embed: float = 1.0
    softcap: float | None = None


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a config.json (multimodal ones nest it)."""
    nested = config.get("text_config")
    return {**config, **nested} if isinstance(nested, Mapping) else config


def context_window(config: Mapping[str, Any]) -> int:
    """The most positions the model was made for; a very large number if it does not say.

    Raises:
        IncompleteTargetError: it says something else than a positive number.
    """
    facts = text_config(config)
    names = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
    name, known = next(((n, facts[n]) for n in names if facts.get(n) is not None), ("", 2**31 - 1))
    if isinstance(known, bool) or not isinstance(known, int | float) or not known >= 1:
        raise IncompleteTargetError(f"config.json: {name} is {known!r}; it must be at least 1")
    return int(min(known, 2**31 - 1))
