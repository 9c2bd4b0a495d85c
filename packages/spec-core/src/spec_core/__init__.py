"""The round of lossless speculative decoding: propose, verify, accept, commit, observe."""

from spec_core.adaptive import AdaptiveLength
from spec_core.batch import Batch, Prefill, RowImage
from spec_core.calibrate import FreeDrafter, calibrate
from spec_core.copies import CopyLength, WithCopies
from spec_core.curves import CostCurves, RoundCost
from spec_core.decode import decode
from spec_core.errors import InvalidValueError, SeamError, SpecError, UnsupportedError
from spec_core.policy import ConfidenceThreshold, FixedLength
from spec_core.request import Request
from spec_core.sampling import SamplingParams
from spec_core.seams import (
    Chooser,
    Constraint,
    Copier,
    DraftChoice,
    Drafter,
    DrafterState,
    DraftPolicy,
    EmbeddingLender,
    Finish,
    Forward,
    PerToken,
    Proposal,
    RowOutcome,
    RowState,
    RowStatus,
    StateImage,
    Target,
    TargetInfo,
    TargetState,
    TokenLogprob,
)
from spec_core.stats import Statistics

__all__ = [
    "AdaptiveLength",
    "Batch",
    "Chooser",
    "ConfidenceThreshold",
    "Constraint",
    "Copier",
    "CopyLength",
    "CostCurves",
    "DraftChoice",
    "DraftPolicy",
    "Drafter",
    "DrafterState",
    "EmbeddingLender",
    "Finish",
    "FixedLength",
    "Forward",
    "FreeDrafter",
    "InvalidValueError",
    "PerToken",
    "Prefill",
    "Proposal",
    "Request",
    "RoundCost",
    "RowImage",
    "RowOutcome",
    "RowState",
    "RowStatus",
    "SamplingParams",
    "SeamError",
    "SpecError",
    "StateImage",
    "Statistics",
    "Target",
    "TargetInfo",
    "TargetState",
    "TokenLogprob",
    "UnsupportedError",
    "WithCopies",
    "calibrate",
    "decode",
]
