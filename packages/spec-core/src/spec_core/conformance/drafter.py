"""What every Drafter has to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import mlx.core as mx
import numpy as np

from spec_core.conformance._findings import (
    ConformanceError,
    Finding,
    assemble,
    check_image,
    chunks,
    draw_tokens,
    image_bytes,
    refused,
    require,
    require_close,
    require_finite,
    require_lengths,
    run,
    trimmed,
)
from spec_core.seams import DraftChoice, Drafter, DrafterState, Proposal, Target


def drafter_findings(
    drafter: Drafter,
    target: Target,
    *,
    tolerance: float = 0.0,
    prompt_length: int = 13,
    seed: int = 0,
    texts: Sequence[Sequence[int]] | None = None,
) -> tuple[Finding, ...]:
    """Run every check of `DRAFTER_CHECKS`; empty if all hold.

    Args:
        drafter: what to check.
        target: gives the taps, where the drafter reads any.
        tolerance: the largest allowed difference of a draft logit or a confidence, where the
            arithmetic itself depends on shapes; 0 where it does not.
        prompt_length: positions that the drafter is told before it proposes, at least 10.
        seed: of the token ids.
        texts: four texts of different length to use instead of random ones (for a drafter that
            finds nothing in random text); each at least 10 tokens, the anchor last.
    """
    return run(_Kit(drafter, target, tolerance, prompt_length, seed, texts), DRAFTER_CHECKS)


def check_drafter(
    drafter: Drafter,
    target: Target,
    *,
    tolerance: float = 0.0,
    prompt_length: int = 13,
    seed: int = 0,
    texts: Sequence[Sequence[int]] | None = None,
) -> None:
    """Like `drafter_findings`, but raises ConformanceError if there are any."""
    found = drafter_findings(
        drafter,
        target,
        tolerance=tolerance,
        prompt_length=prompt_length,
        seed=seed,
        texts=texts,
    )
    if found:
        raise ConformanceError(f"drafter {drafter.name!r}", found)


class _RecordingChooser:
    """A chooser that draws a fixed token for each slot and keeps what it was shown.

    Because the tokens do not depend on the logits, rounding cannot send two runs different ways,
    and their logits can be compared with a tolerance.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.seen: list[mx.array] = []
        self.first: int | None = None

    def forced(self, slot: int, token_ids: mx.array | None) -> int:
        """The target id that slot `slot` gets."""
        choices = self.vocab_size if token_ids is None else token_ids.shape[0]
        index = (slot * 7 + 3) % choices
        return index if token_ids is None else int(token_ids[index].item())  # type: ignore[arg-type]

    def draft(
        self, logits: mx.array, slot: int, prefix: mx.array, token_ids: mx.array | None = None
    ) -> DraftChoice:
        rows = logits.shape[0]
        require(logits.ndim == 2, f"draft() was given logits of shape {logits.shape}, not [B, V]")
        require(
            prefix.shape == (rows, slot),
            f"draft() of slot {slot} was given a prefix of shape {prefix.shape}",
        )
        drawn = [self.forced(s, token_ids) for s in range(slot)]
        require(
            prefix.tolist() == [drawn] * rows, f"the prefix of slot {slot} is not what was drawn"
        )
        tokens = mx.full((rows,), self.forced(slot, token_ids), dtype=mx.int32)
        self.first = self.forced(0, token_ids)
        return DraftChoice(tokens, self._log_q(logits, token_ids))

    def draft_block(self, logits: mx.array, token_ids: mx.array | None = None) -> DraftChoice:
        require(logits.ndim == 3, f"draft_block() was given logits of shape {logits.shape}")
        rows, slots = logits.shape[:2]
        forced = [self.forced(slot, token_ids) for slot in range(slots)]
        self.first = forced[0]
        return DraftChoice(
            mx.array([forced] * rows, dtype=mx.int32), self._log_q(logits, token_ids)
        )

    def _log_q(self, logits: mx.array, token_ids: mx.array | None) -> mx.array:
        width = self.vocab_size if token_ids is None else token_ids.shape[0]
        require(
            logits.shape[-1] == width,
            f"draft logits have {logits.shape[-1]} columns for {width} token ids",
        )
        values = logits.astype(mx.float32)
        log_q = values - mx.logsumexp(values, axis=-1, keepdims=True)
        if token_ids is not None:
            full = mx.full((*log_q.shape[:-1], self.vocab_size), -mx.inf)
            full[..., token_ids] = log_q
            log_q = full
        self.seen.append(log_q if log_q.ndim == 3 else log_q[:, None])
        return log_q if log_q.ndim == 3 else self.seen[-1][:, 0]


@dataclass(frozen=True, slots=True)
class _Shown:
    """A proposal, the log-distributions [B, K, V] its tokens were chosen from, and the token that
    the chooser gave slot 0 (None and None, if it was not asked)."""

    proposal: Proposal
    seen: mx.array | None
    first: int | None


class _Kit:
    """A drafter, some text, and how to compare what it proposes."""

    def __init__(
        self,
        drafter: Drafter,
        target: Target,
        tolerance: float,
        prompt_length: int,
        seed: int,
        texts: Sequence[Sequence[int]] | None,
    ) -> None:
        self.drafter, self.target, self.tolerance = drafter, target, tolerance
        vocab = target.info.vocab_size
        given = texts or [
            draw_tokens(seed * 1000 + row, max(prompt_length - 3 * row, 1) + 1, vocab)
            for row in range(4)
        ]
        self.texts = [list(text[:-1]) for text in given]
        self.anchors = [text[-1] for text in given]
        self.count = drafter.max_block

    def taps(self, text: Sequence[int]) -> tuple[mx.array, ...]:
        """The taps [1, T, H] of a text, from a forward of its own."""
        if not self.drafter.taps:
            return ()
        state, layers = self.target.new_state(1), tuple(self.drafter.taps)
        forward = self.target.forward(mx.array([text]), state, taps=layers, logits="none")
        return forward.taps

    def extend(
        self, state: DrafterState, text: Sequence[int], sizes: Sequence[int], start: int = 0
    ) -> None:
        """Tell a state of one row the positions start.. of `text`, in chunks of these sizes."""
        taps, at = self.taps(text), start
        for piece in chunks(text[start:], sizes):
            end = at + len(piece)
            cut = [tap[:, at:end] for tap in taps]
            self.drafter.extend(state, mx.array([piece]), cut, [len(piece)])
            mx.eval(*state.pending())
            at = end

    def fresh(self, text: Sequence[int]) -> DrafterState:
        """A state of one row that was told exactly this text, at once."""
        state = self.drafter.new_state(1)
        self.extend(state, text, [])
        return state

    def batch(self, rows: Sequence[int]) -> DrafterState:
        """A state with these texts as its rows."""
        state = self.fresh(self.texts[rows[0]])
        for row in rows[1:]:
            state.join(self.fresh(self.texts[row]))
        return state

    def propose(
        self, state: DrafterState, anchors: Sequence[int], count: int | None = None
    ) -> _Shown:
        """Ask for `count` guesses (the whole block, if None), through a recording chooser."""
        chooser = _RecordingChooser(self.target.info.vocab_size)
        anchor = mx.array(list(anchors), dtype=mx.int32)
        proposal = self.drafter.propose(state, anchor, count or self.count, chooser)
        seen = mx.concatenate(chooser.seen, axis=1) if chooser.seen else None
        mx.eval([proposal.tokens, proposal.confidence, seen])
        return _Shown(proposal, seen, chooser.first)

    def require_row(
        self, what: str, got: _Shown, row: int, text: Sequence[int], anchor: int
    ) -> None:
        """Row `row` proposes what a fresh state of one row given `text` does."""
        self.require_same(what, got, row, self.propose(self.fresh(text), [anchor]))

    def require_same(self, what: str, got: _Shown, row: int, wanted: _Shown) -> None:
        """Row `row` of one proposal equals the only row of another."""
        length, expected = got.proposal.lengths[row], wanted.proposal.lengths[0]
        require(length == expected, f"{what}: {length} guesses, expected {expected}")
        one = _ints(got.proposal.tokens[row, :length])
        other = _ints(wanted.proposal.tokens[0, :length])
        require(one == other, f"{what}: proposes {one}, expected {other}")
        for name, a, b in (
            ("draft logits", got.seen, wanted.seen),
            ("confidence", got.proposal.confidence, wanted.proposal.confidence),
        ):
            if length:
                require((a is None) == (b is None), f"{what}: {name} only sometimes")
            if length and a is not None and b is not None:
                require_close(f"{what}, {name}", a[row, :length], b[0, :length], self.tolerance)

    def require_rows(self, what: str, state: DrafterState, rows: Sequence[int]) -> None:
        """`state` holds these texts as its rows."""
        require_lengths(what, state, [len(self.texts[r]) for r in rows])
        got = self.propose(state, [self.anchors[r] for r in rows])
        for index, row in enumerate(rows):
            self.require_row(f"{what}, row {index}", got, index, self.texts[row], self.anchors[row])


def _ints(tokens: mx.array) -> list[int]:
    return [int(t) for t in np.array(tokens)]


# --- what it is, and what it proposes --------------------------------------------------------


def _description(kit: _Kit) -> None:
    drafter, layers = kit.drafter, kit.target.info.num_layers
    require(bool(drafter.name), "it has no name")
    require(drafter.max_block >= 1, f"max_block is {drafter.max_block}; it must be at least 1")
    wrong = [i for i in drafter.taps if not -1 <= i < layers]
    require(not wrong, f"taps {wrong} do not lie in -1..{layers - 1}")
    require(not drafter.taps or kit.target.info.tappable, "it reads taps that the target lacks")


def _proposal(kit: _Kit) -> None:
    vocab = kit.target.info.vocab_size
    state = kit.batch([0, 1, 2, 3])
    for count in range(1, kit.count + 1):
        shown = kit.propose(state, kit.anchors, count)
        proposal, what = shown.proposal, f"proposal of {count}"
        require(len(proposal.lengths) == 4, f"{what}: {len(proposal.lengths)} lengths for 4 rows")
        require(
            all(type(n) is int for n in proposal.lengths),
            f"{what}: lengths {proposal.lengths} are not host integers",
        )
        require(max(proposal.lengths) <= count, f"{what}: lengths are {proposal.lengths}")
        ids = _ints(proposal.tokens.reshape(-1))
        require(all(0 <= t < vocab for t in ids), f"{what}: token ids outside 0..{vocab - 1}")
        require(
            len(proposal.sources) in (0, 4), f"{what}: {len(proposal.sources)} sources for 4 rows"
        )


def _count_bounds(kit: _Kit) -> None:
    state = kit.fresh(kit.texts[0])
    for count in (-1, kit.count + 1):
        refused(f"propose of {count}", partial(kit.propose, state, kit.anchors[:1], count))


def _log_q(kit: _Kit) -> None:
    vocab = kit.target.info.vocab_size
    shown = kit.propose(kit.batch([0, 1, 2, 3]), kit.anchors)
    proposal, columns = shown.proposal, shown.proposal.tokens.shape[1]
    if proposal.log_q is None:
        drawn = [
            row
            for row, n in enumerate(proposal.lengths)
            if n and _ints(proposal.tokens[row, :1]) == [shown.first]
        ]
        require(not drawn, f"rows {drawn} were drawn through the chooser, but log_q is None")
        return
    wanted = (4, columns, vocab)
    require(proposal.log_q.shape == wanted, f"log_q is {proposal.log_q.shape}, not {wanted}")
    values = np.array(proposal.log_q.astype(mx.float32))
    tokens = np.array(proposal.tokens)
    for row, length in enumerate(proposal.lengths):
        for slot in range(length):
            mass = float(np.exp(values[row, slot]).sum())
            what = f"log_q of row {row}, slot {slot}"
            require(abs(mass - 1.0) < 1e-3, f"{what} sums to {mass:.6g}, not 1")
            value = values[row, slot, tokens[row, slot]]
            require(value > -np.inf, f"{what} gives the proposed token no probability")


def _confidence(kit: _Kit) -> None:
    proposal = kit.propose(kit.batch([0, 1, 2, 3]), kit.anchors).proposal
    if proposal.confidence is None:
        return
    shape, columns = proposal.confidence.shape, max(proposal.lengths)
    require(
        len(shape) == 2 and shape[0] == 4 and shape[1] >= columns,
        f"confidence has shape {shape} for 4 rows and {columns} guesses",
    )
    require_finite("confidence", proposal.confidence)
    values = np.array(proposal.confidence.astype(mx.float32))
    require(bool(((values >= 0) & (values <= 1)).all()), "confidence leaves 0..1")


def _propose_pure(kit: _Kit) -> None:
    state = kit.batch([0, 1, 2, 3])
    for count in (1, kit.count):
        kit.propose(state, kit.anchors, count)
    kit.require_rows("after earlier proposals", state, [0, 1, 2, 3])
    text = [*kit.texts[0], kit.anchors[0]]
    told = kit.fresh(kit.texts[0])
    kit.propose(told, kit.anchors[:1])
    kit.extend(told, text, [], start=len(kit.texts[0]))
    kit.require_row("extend after a proposal", kit.propose(told, [1]), 0, text, 1)


# --- extend ----------------------------------------------------------------------------------


def _chunked(kit: _Kit) -> None:
    text = kit.texts[0]
    for sizes in ([1] * len(text), [2, 3, 1], [len(text) - 1]):
        state = kit.drafter.new_state(1)
        kit.extend(state, text, sizes)
        require_lengths(f"chunks of {sizes}", state, [len(text)])
        shown = kit.propose(state, kit.anchors[:1])
        kit.require_row(f"chunks of {sizes}", shown, 0, text, kit.anchors[0])


def _keep(kit: _Kit) -> None:
    columns = 4
    drafts = [draw_tokens(77 + row, columns, kit.target.info.vocab_size) for row in range(4)]
    for turn in range(3):
        keep = [(row * 2 + turn * 3) % (columns + 1) for row in range(4)]
        state = kit.batch([0, 1, 2, 3])
        whole = [t + d for t, d in zip(kit.texts, drafts, strict=True)]
        taps = [kit.taps(text) for text in whole]
        cut = [
            mx.concatenate([taps[row][i][:, -columns:] for row in range(4)])
            for i in range(len(kit.drafter.taps))
        ]
        kit.drafter.extend(state, mx.array(drafts), cut, keep)
        kept = [t + d[:n] for t, d, n in zip(kit.texts, drafts, keep, strict=True)]
        require_lengths(f"keep {keep}", state, [len(t) for t in kept])
        shown = kit.propose(state, kit.anchors)
        for row, text in enumerate(kept):
            kit.require_row(f"keep {keep}, row {row}", shown, row, text, kit.anchors[row])


def _start(kit: _Kit) -> None:
    text, start = kit.texts[0], len(kit.texts[0]) // 2
    state = kit.drafter.new_state(2, start=start)
    require_lengths("new_state(2, start)", state, [start, start])
    kit.propose(state, kit.anchors[:2])
    state = kit.drafter.new_state(1, start=start)
    kit.extend(state, text, [2], start=start)
    require_lengths("extended from a start", state, [len(text)])
    shown = kit.propose(state, kit.anchors[:1])
    again = kit.drafter.new_state(1, start=start)
    kit.extend(again, text, [], start=start)
    wanted = kit.propose(again, kit.anchors[:1])
    kit.require_same("two states from the same start", shown, 0, wanted)


def _empty(kit: _Kit) -> None:
    state = kit.drafter.new_state(1)
    require_lengths("a new state", state, [0])
    kit.propose(state, kit.anchors[:1])


# --- rows ------------------------------------------------------------------------------------


def _batch(kit: _Kit) -> None:
    kit.require_rows("a batch of 4", kit.batch([0, 1, 2, 3]), [0, 1, 2, 3])


def _select(kit: _Kit) -> None:
    for rows in ([3, 1], [0, 1, 2, 3], [2, 0, 3, 1], [1], [0, 3, 2]):
        state = kit.batch([0, 1, 2, 3])
        state.select(rows)
        kit.require_rows(f"select({rows})", state, rows)


def _select_refused(kit: _Kit) -> None:
    state = kit.batch([0, 1])
    for rows in ([0, 0], [2], [-1]):
        refused(f"select({rows}) of 2 rows", partial(state.select, rows))
    kit.require_rows("after refused selects", state, [0, 1])


def _join(kit: _Kit) -> None:
    state = kit.batch([0, 1])
    state.join(kit.batch([2, 3]))
    kit.require_rows("join of 2 and 2 rows", state, [0, 1, 2, 3])
    state.select([0, 3, 2])
    state.join(kit.fresh(kit.texts[1]))
    kit.require_rows("row 1 left, the last row moved, one joined", state, [0, 3, 2, 1])


# --- images ----------------------------------------------------------------------------------


def _image(kit: _Kit) -> None:
    state = kit.batch([0, 1, 2])
    image = state.image(1)
    check_image(image, 0, len(kit.texts[1]))
    other = kit.fresh(kit.texts[2])
    for kind, again in (("whole", image), ("cut to its reach", trimmed(image))):
        other.join(kit.drafter.new_state(1))
        other.restore(1, again)
        kit.require_rows(f"restore of an image ({kind})", other, [2, 1])
        other.select([0])
    refused("restore into a row that is not empty", lambda: other.restore(0, image))
    kit.require_rows("after its image was taken", state, [0, 1, 2])


def _image_start(kit: _Kit) -> None:
    text = kit.texts[0]
    for start in (1, len(text) // 2, len(text) - 1):
        state = kit.fresh(text[:start])
        first = state.image(0)
        kit.extend(state, text, [], start=start)
        second = state.image(0, start)
        check_image(second, start, len(text))
        restored = kit.drafter.new_state(1)
        restored.restore(0, assemble(first, second))
        kit.require_rows(f"images of 0..{start} and {start}..{len(text)}", restored, [0])


def _image_owned(kit: _Kit) -> None:
    text = [*kit.texts[0], *kit.anchors[:3]]
    state = kit.fresh(kit.texts[0])
    image = state.image(0)
    before = image_bytes(image)
    restored = kit.drafter.new_state(1)
    restored.restore(0, image)
    for live in (state, restored):
        kit.extend(live, text, [1], start=len(kit.texts[0]))
    changed = [name for name, old in before.items() if image_bytes(image)[name] != old]
    require(not changed, f"arrays {changed} of an image changed when its row went on")


DRAFTER_CHECKS: Mapping[str, Callable[[_Kit], None]] = MappingProxyType(
    {
        "description": _description,
        "proposal": _proposal,
        "count-bounds": _count_bounds,
        "log-q": _log_q,
        "confidence": _confidence,
        "propose-pure": _propose_pure,
        "chunked-extend": _chunked,
        "keep": _keep,
        "start": _start,
        "empty": _empty,
        "batch": _batch,
        "select": _select,
        "select-refused": _select_refused,
        "join": _join,
        "image": _image,
        "image-start": _image_start,
        "image-owned": _image_owned,
    }
)
"""The checks by name.

- description: name, block and taps make sense for this target.
- proposal, count-bounds: shapes, host lengths, legal ids, never more guesses than asked for.
- log-q, confidence: normalised, positive at the proposed token, stated where tokens were drawn;
  scores in 0..1.
- propose-pure: proposing changes nothing.
- chunked-extend, keep: how text arrives does not matter; columns beyond `keep` leave no trace.
- start, empty: a state may begin in the middle of a text, or propose from nothing.
- batch, select, select-refused, join: rows do not touch each other.
- image, image-start, image-owned: images restore exactly, in pieces too, and never change.
"""
