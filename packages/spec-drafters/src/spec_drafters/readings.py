"""One checkpoint read in several ways, each tried on its target: shows a wrong convention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from spec_core.seams import Drafter, Target
from spec_drafters.block import BlockDrafter
from spec_drafters.errors import MisfitError
from spec_drafters.load import SlotConvention, load_drafter
from spec_drafters.probe import CLEAR, CLEAR_TOKENS, TOKENS, Acceptance, measure

TAP_SHIFTS = (-1, 1)


@dataclass(frozen=True, slots=True)
class Reading:
    """A way to read a checkpoint, and what was accepted so.

    Attributes:
        slot_convention: "auto" for a drafter without slots.
        tap_shift: added to the tapped layers' numbers.
        acceptance: what came of it.
    """

    slot_convention: SlotConvention
    tap_shift: int
    acceptance: Acceptance


def readings(
    path: Path,
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    slot_convention: SlotConvention = "auto",
    tap_shift: int = 0,
    tokens: int = TOKENS,
    end_tokens: Sequence[int] = (),
    dtype: str | None = None,
) -> Iterator[Reading]:
    """Try a checkpoint as asked, then with the other slot convention and with its taps moved.

    Args:
        path: the checkpoint.
        target: what it drafts for.
        prompts: token ids.
        slot_convention: of the first reading, as for `load_drafter`.
        tap_shift: the same.
        tokens: to decode behind each prompt.
        end_tokens: of the target.
        dtype: as for `load_drafter`.

    Raises:
        DrafterError: as `load_drafter`, in the first reading.
    """

    def load(slots: SlotConvention, shift: int) -> Drafter:
        return load_drafter(path, target, slot_convention=slots, tap_shift=shift, dtype=dtype)

    def tried(slots: SlotConvention, shift: int, drafter: Drafter) -> Reading:
        return Reading(slots, shift, measure(target, drafter, prompts, tokens, end_tokens))

    first = load(slot_convention, tap_shift)
    slots: SlotConvention = "auto"
    if isinstance(first, BlockDrafter):
        slots = "shifted" if first.spec.first_slot else "anchor"
    yield tried(slots, tap_shift, first)
    if isinstance(first, BlockDrafter):
        other: SlotConvention = "shifted" if slots == "anchor" else "anchor"
        yield tried(other, tap_shift, first.reading(0 if other == "anchor" else 1))
    for shift in TAP_SHIFTS if first.taps else ():
        try:
            moved = load(slots, tap_shift + shift)
        except MisfitError:  # the target has no such layer
            continue
        yield tried(slots, tap_shift + shift, moved)


def hint(tried: Sequence[Reading]) -> str | None:
    """What to do if another reading than the first is clearly accepted more."""
    first, best = tried[0], max(tried, key=lambda reading: reading.acceptance.accepted)
    high, low = best.acceptance.accepted, first.acceptance.accepted
    if high < CLEAR * low or high - low < CLEAR_TOKENS:
        return None
    changes = []
    if best.slot_convention != first.slot_convention:
        changes.append(f"--slot-convention {best.slot_convention}")
    if best.tap_shift != first.tap_shift:
        changes.append(f"--tap-shift {best.tap_shift:+d}")
    return (
        f"{low:.2f} guesses a round are accepted, {high:.2f} with {' '.join(changes)}; "
        "the drafter was probably trained that way"
    )
