"""Tiny deterministic targets and drafters, for the tests of every package.

`TinyTarget` computes in integers modulo 2**32 and turns the result into small multiples of 1/64,
whose sums of products are exact in float32 in any order. So its numbers do not depend on the
batch, on how a text is cut into forwards, or on the device: any difference is a real one.
"""

from spec_core.testing.drafter import TinyDrafter, TinyDrafterState
from spec_core.testing.target import TinyLender, TinyState, TinyTarget, continuation
from spec_core.testing.text import NoisyOracle, ScriptedDrafter, TextState

__all__ = [
    "NoisyOracle",
    "ScriptedDrafter",
    "TextState",
    "TinyDrafter",
    "TinyDrafterState",
    "TinyLender",
    "TinyState",
    "TinyTarget",
    "continuation",
]
