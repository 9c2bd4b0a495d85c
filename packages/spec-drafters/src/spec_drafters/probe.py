"""Trying a drafter on its target: what is accepted, slot by slot, and which reading is right.

A drafter that is read under the wrong slot convention, or fed the layer beside the one it was
trained on, still decodes losslessly; only acceptance tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spec_core import Statistics, decode
from spec_core.seams import Drafter, Target
from spec_drafters.block import BlockDrafter
from spec_drafters.errors import PackagingError

TOKENS = 48
"""Tokens decoded for each prompt."""

PROMPTS, PROMPT_TOKENS = 4, 8
CLEAR = 1.25
"""How many times as many tokens the right slot convention must have accepted, and
`CLEAR_TOKENS` of them a round more, to be believed: the wrong one accepts about half."""
CLEAR_TOKENS = 0.1


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How many guesses were accepted, greedily.

    Attributes:
        rounds: target forwards behind the prompts' own.
        accepted: mean accepted guesses a round.
        by_position: for each slot, the share accepted of those whose earlier slots all were.
    """

    rounds: int
    accepted: float
    by_position: tuple[float, ...]


def measure(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    tokens: int = TOKENS,
    end_tokens: Sequence[int] = (),
) -> Acceptance:
    """Decode `tokens` tokens behind each prompt, and count."""
    seen = Statistics()
    for prompt in prompts:
        for outcome in decode(target, drafter, prompt, max_tokens=tokens, end_tokens=end_tokens):
            seen.add(outcome)
    accepted = seen.mean_accept_length - 1
    return Acceptance(seen.rounds, accepted, tuple(seen.accept_by_position))


def plain_prompts(vocab_size: int) -> list[list[int]]:
    """Prompts for a target whose tokenizer is not at hand: tokens from all over its vocabulary."""
    stride = max(1, vocab_size // (PROMPTS * PROMPT_TOKENS + 1))
    count = range(1, PROMPT_TOKENS + 1)
    return [[(row + PROMPTS * i) * stride % vocab_size for i in count] for row in range(PROMPTS)]


def right_slots(
    target: Target, drafter: BlockDrafter, prompts: Sequence[Sequence[int]] | None = None
) -> BlockDrafter:
    """The drafter under the slot convention that is accepted more.

    Raises:
        PackagingError: neither is clearly better.
    """
    prompts = prompts or plain_prompts(target.info.vocab_size)
    anchor, shifted = drafter.reading(0), drafter.reading(1)
    by_anchor, by_shifted = (measure(target, d, prompts).accepted for d in (anchor, shifted))
    high, low = max(by_anchor, by_shifted), min(by_anchor, by_shifted)
    if high >= CLEAR * low and high - low >= CLEAR_TOKENS:
        return anchor if by_anchor > by_shifted else shifted
    raise PackagingError(
        drafter.spec.packaging,
        "it does not say which slot predicts first, and trying does not tell: "
        f"{by_anchor:.2f} tokens a round are accepted if the anchor's does, {by_shifted:.2f} if "
        'the one after it does; name the slot convention, "anchor" or "shifted"',
    )
