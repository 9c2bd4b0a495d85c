"""Decode one sequence: token ids in, rounds out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from spec_core.batch import Batch
from spec_core.request import Request
from spec_core.sampling import SamplingParams
from spec_core.seams import Drafter, DraftPolicy, RowOutcome, Target

PREFILL_CHUNK = 512
"""Prompt tokens a forward, unless the caller says otherwise."""


def decode(
    target: Target,
    drafter: Drafter | None,
    prompt: Sequence[int],
    *,
    sampling: SamplingParams | None = None,
    max_tokens: int = 256,
    end_tokens: Sequence[int] = (),
    max_draft: int | None = None,
    policy: DraftPolicy | None = None,
    prefill_chunk: int = PREFILL_CHUNK,
) -> Iterator[RowOutcome]:
    """Decode a prompt and yield what each round emitted.

    The first outcome is the prompt's own forward (`prefill` is true); together the outcomes hold
    at most `max_tokens` tokens and nothing after an end token. The tokens are those that the
    target alone would have written (greedy or seeded), or are distributed as its own (unseeded).

    Args:
        target: the model whose output is wanted.
        drafter: None decodes plainly.
        prompt: token ids, at least one.
        sampling: greedy if None.
        max_tokens: the budget of emitted tokens, at least 1.
        end_tokens: ids that end the answer; the end token itself is emitted.
        max_draft: cap on guesses a round; 0 decodes plainly with the drafter attached.
        policy: how far to draft; the drafter's whole block if None.
        prefill_chunk: prompt tokens of one forward.

    Raises:
        InvalidValueError: a parameter or the prompt is out of range.
        UnsupportedError: the drafter reads taps of a target that has none.
    """
    request = Request(
        prompt=tuple(prompt),
        sampling=sampling or SamplingParams(),
        max_tokens=max_tokens,
        end_tokens=frozenset(end_tokens),
        max_draft=max_draft,
    )
    batch = Batch(target, drafter, policy)
    prefill = batch.prefill(request)
    while (first := prefill.step(prefill_chunk)) is None:
        pass
    yield first
    if first.finish is not None:
        return
    batch.join(prefill)
    while batch.rows:
        yield from batch.step()
