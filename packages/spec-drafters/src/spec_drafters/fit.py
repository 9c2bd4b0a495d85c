"""Whether a drafter fits a target, before any weight is read."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TypeVar

from spec_core.seams import TargetInfo
from spec_drafters.errors import MisfitError
from spec_drafters.spec import BlockSpec, DrafterSpec

Spec = TypeVar("Spec", bound=DrafterSpec)


def fit(spec: Spec, info: TargetInfo, *, lends: bool) -> Spec:
    """The spec with what the target decides filled in: embedding scale, softcap, default taps.

    Args:
        spec: what the drafter is.
        info: what the target is.
        lends: whether the target lends its embedding and head.

    Raises:
        MisfitError: sizes, layers or taps do not fit, or something to borrow is not lent.
    """
    name = f"{spec.packaging} drafter"
    if spec.taps is None:
        spec = replace(spec, taps=default_taps(info.num_layers))
    if spec.taps and not info.tappable:
        raise MisfitError(
            f"the {name} reads hidden states, which the target {info.family} does not offer: "
            f"{info.taps_refused or 'no reason given'}"
        )
    _equal(name, "hidden size", spec.hidden_size, info.hidden_size)
    _equal(name, "vocabulary", spec.vocab_size, info.vocab_size)
    if spec.num_target_layers is not None:
        _equal(name, "target layer count", spec.num_target_layers, info.num_layers)
    _check_taps(name, spec.taps or (), info.num_layers)
    if isinstance(spec, BlockSpec):
        _check_mask(name, spec)
    if not (spec.own_embedding and spec.own_head) and not lends:
        raise MisfitError(
            f"the {name} has no embedding or head of its own, and the target {info.family} "
            "lends none"
        )
    return replace(
        spec,
        embed_scale=info.embed_scale if spec.embed_scale == "target" else spec.embed_scale,
        softcap=info.logit_softcap if spec.softcap == "target" else spec.softcap,
    )


def default_taps(layers: int) -> tuple[int, ...]:
    """What vLLM gives a drafter that names no layers: the inputs of 2, n // 2 and n - 3."""
    return (1, layers // 2 - 1, layers - 4)


def _equal(name: str, what: str, drafter: int, target: int) -> None:
    if drafter != target:
        raise MisfitError(
            f"the {name} was made for a {what} of {drafter}; the target's is {target}"
        )


def _check_mask(name: str, spec: BlockSpec) -> None:
    if spec.mask_token >= spec.vocab_size and not spec.mask_embedding:
        raise MisfitError(
            f"the {name}'s mask token {spec.mask_token} lies outside its vocabulary of "
            f"{spec.vocab_size}"
        )


def _check_taps(name: str, taps: tuple[int, ...], layers: int) -> None:
    """Taps ascend and stay below the last layer, whose output no drafter was trained on."""
    if any(b <= a for a, b in pairwise(taps)):
        raise MisfitError(f"the {name}'s taps {list(taps)} do not ascend")
    outside = [tap for tap in taps if not -1 <= tap < layers]
    if outside:
        raise MisfitError(
            f"the {name} taps layers {outside}; the target has layers 0 to {layers - 1}"
        )
    if layers - 1 in taps:
        raise MisfitError(
            f"the {name} taps layer {layers - 1}, the target's last, which no drafter reads; "
            "its layer numbers are probably off by one"
        )
