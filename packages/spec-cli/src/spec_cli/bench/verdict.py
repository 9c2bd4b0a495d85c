"""What the figures say, in words."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from spec_cli.bench.measure import BASELINE, Result, SetResult
from spec_cli.bench.trial import drafter_of, named

REFERENCES = ("mlx_lm",)
_PARKED = 0.5
"""From this share of plain rounds on a set counts as parked."""


def verdict(results: Sequence[Result]) -> str:
    """A few sentences: the fastest setting, what `auto` did, and whether answers are the same."""
    drafted = [r for r in results if r.mode not in (BASELINE, *REFERENCES)]
    if not drafted:
        return "Nothing was drafted; these are the figures of plain decoding."
    adaptive = [_adaptive(r, drafted) for r in drafted if r.max_draft == "auto"]
    return " ".join([_fastest(drafted), *adaptive, _equality(results)])


def label(result: Result) -> str:
    """For instance "dspark at 3"."""
    return named(result.mode, result.max_draft)


def _fastest(drafted: Sequence[Result]) -> str:
    best = max(drafted, key=lambda r: r.speedup)
    sets = ", ".join(f"{name} {one.speedup:.2f}x" for name, one in best.sets.items())
    if best.speedup < 1.0:
        said = f"No setting is faster than plain decoding here; the best, {label(best)}, is "
    else:
        said = f"{label(best)} is the fastest: "
    return f"{said}{best.speedup:.2f}x plain decoding ({sets})."


def _adaptive(result: Result, drafted: Sequence[Result]) -> str:
    """How the chosen lengths fare on each set, and against the best fixed one."""
    sets = ", ".join(_on(name, one) for name, one in result.sets.items())
    said = f"{label(result)}: {sets}"
    drafter = drafter_of(result.mode)
    fixed = [r for r in drafted if drafter_of(r.mode) == drafter and r.max_draft != "auto"]
    if not fixed:
        return f"{said}."
    shares = {
        name: one.tokens_per_second / max(r.sets[name].tokens_per_second for r in fixed)
        for name, one in result.sets.items()
    }
    worst = min(shares, key=shares.__getitem__)
    middle = statistics.median(shares.values())
    return (
        f"{said}; {middle:.2f} of the speed of the best fixed length (median of the sets; "
        f"least on {worst}, {shares[worst]:.2f})."
    )


def _on(name: str, one: SetResult) -> str:
    if one.plain_share > _PARKED:
        return f"parked on {name} ({one.speedup:.2f}x)"
    return f"{one.speedup:.2f}x on {name}"


def _equality(results: Sequence[Result]) -> str:
    others = [r for r in results if r.divergence is not None]
    if not others:
        return "All answers are identical to plain decoding's."
    first = others[0].divergence
    assert first is not None
    names = ", ".join(label(r) for r in others)
    return (
        f"Answers that differ from plain decoding's: {names}; the first at token "
        f"{first.position} of {first.set_name} prompt {first.prompt}, where the two best logits "
        f"are {first.margin:.2g} apart."
    )
