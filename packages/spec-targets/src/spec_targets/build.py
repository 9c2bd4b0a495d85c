"""From a loaded mlx-lm model to a proven Target."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mlx.nn.layers.base import Module

from spec_core.errors import InvalidValueError
from spec_core.seams import TargetInfo
from spec_targets.anatomy import context_window, text_config
from spec_targets.errors import UnsupportedTargetError
from spec_targets.families import family_for
from spec_targets.probe import Reference, options_for, prove, refer
from spec_targets.quantised import check_quantised
from spec_targets.target import Bones, ModelTarget, Runner


def build_target(
    model: Module, config: Mapping[str, Any], *, kv_bits: int | None = None
) -> ModelTarget:
    """Make a Target of an mlx-lm model, and prove on a few tokens that it is one.

    Args:
        model: as mlx_lm.utils.load_model gives it.
        config: its config.json.
        kv_bits: 4 or 8 to store keys and values of full attention quantised. Sliding windows are
            bounded and stay as they are; a model that has nothing else is refused.

    Raises:
        InvalidValueError: `kv_bits` is something else.
        UnsupportedTargetError: quantised weights that this device cannot multiply with, a cache
            kind that cannot be taken back exactly, or a proof that failed for plain decoding.
            A failed proof for taps is in `info.taps_refused`.
    """
    if kv_bits not in (None, 4, 8):
        raise InvalidValueError("kv_bits", kv_bits, "4 or 8, or left out")
    check_quantised(model)
    model_type = str(config.get("model_type", ""))
    family = family_for(model_type)
    options = options_for(family, model, kv_bits)
    bones = Bones(family.dissect(model), family, options)
    reference = _refer(bones, int(text_config(config).get("vocab_size", 256)))
    findings = prove(bones, reference, family.scales(config))
    if not findings.row_by_row:
        bones = replace(bones, options=replace(options, waste=math.inf))
    bones = replace(bones, compiled=findings.compiled, stores=findings.stores)
    info = TargetInfo(
        family=model_type,
        vocab_size=reference.logits.shape[-1],
        hidden_size=_hidden_size(reference, config),
        num_layers=len(bones.anatomy.layers),
        context_window=context_window(config),
        embed_scale=findings.scales.embed,
        logit_softcap=findings.scales.softcap,
        tappable=not findings.taps_refused,
        taps_refused=findings.taps_refused,
    )
    return ModelTarget(Runner(bones), info, findings.lender, findings.batch_refused)


def _refer(bones: Bones, vocab_size: int) -> Reference:
    try:
        return refer(bones, vocab_size)
    except Exception as error:  # the model's own code, with its own caches
        raise UnsupportedTargetError(f"the model does not run: {error}") from error


def _hidden_size(reference: Reference, config: Mapping[str, Any]) -> int:
    if reference.taps:
        return reference.taps[0].shape[-1]
    facts = text_config(config)
    return int(facts.get("hidden_size") or facts.get("n_embd") or 0)
