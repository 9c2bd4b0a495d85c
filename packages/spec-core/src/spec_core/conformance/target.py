"""What every Target has to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import mlx.core as mx

from spec_core.conformance._findings import (
    CheckFailed,
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
from spec_core.errors import UnsupportedError
from spec_core.seams import Forward, Target, TargetState


def target_findings(
    target: Target,
    *,
    tolerance: float = 0.0,
    prompt_length: int = 13,
    columns: int = 5,
    seed: int = 0,
) -> tuple[Finding, ...]:
    """Run every check of `TARGET_CHECKS`; empty if all hold.

    Args:
        target: what to check.
        tolerance: the largest allowed difference of a logit or tap, where the arithmetic itself
            depends on shapes; 0 where it does not.
        prompt_length: committed positions before the interesting forward; choose more than a
            window for targets that have one.
        columns: T of that forward, at least 2.
        seed: of the token ids.
    """
    return run(_Kit(target, tolerance, prompt_length, columns, seed), TARGET_CHECKS)


def check_target(
    target: Target,
    *,
    tolerance: float = 0.0,
    prompt_length: int = 13,
    columns: int = 5,
    seed: int = 0,
) -> None:
    """Like `target_findings`, but raises ConformanceError if there are any."""
    found = target_findings(
        target, tolerance=tolerance, prompt_length=prompt_length, columns=columns, seed=seed
    )
    if found:
        raise ConformanceError(f"target {target.info.family!r}", found)


class _Kit:
    """A target, some text, and how to compare it with states that were only fed kept tokens."""

    def __init__(
        self, target: Target, tolerance: float, prompt_length: int, columns: int, seed: int
    ) -> None:
        self.target = target
        self.tolerance = tolerance
        self.columns = columns
        vocab = target.info.vocab_size
        self.prompts = [
            draw_tokens(seed * 1000 + row, max(prompt_length - 3 * row, 1), vocab)
            for row in range(4)
        ]
        self.drafts = [draw_tokens(seed * 1000 + 100 + row, columns, vocab) for row in range(4)]
        self.probe = draw_tokens(seed * 1000 + 200, 2, vocab)
        layers = target.info.num_layers
        self.taps = tuple(range(-1, layers)) if target.info.tappable else ()

    def feed(self, state: TargetState, tokens: Sequence[Sequence[int]]) -> Forward:
        """Forward [B, T] tokens with all logits and taps; still provisional."""
        return self.target.forward(mx.array([list(row) for row in tokens]), state, taps=self.taps)

    def fresh(self, tokens: Sequence[int]) -> TargetState:
        """A state of one row that was given exactly these tokens, at once."""
        state = self.target.new_state(1)
        if tokens:
            self.feed(state, [list(tokens)])
            state.commit([len(tokens)])
        return state

    def batch(self, texts: Sequence[Sequence[int]]) -> TargetState:
        """A state with one row a text, joined from states of one row."""
        state = self.fresh(texts[0])
        for text in texts[1:]:
            state.join(self.fresh(text))
        return state

    def require_texts(self, what: str, state: TargetState, texts: Sequence[Sequence[int]]) -> None:
        """Each row of `state` continues as a fresh state given that row's text does."""
        require_lengths(what, state, [len(t) for t in texts])
        got = self.feed(state, [self.probe] * len(texts))
        wanted = [self.feed(self.fresh(text), [self.probe]) for text in texts]
        mx.eval([(f.logits, f.taps) for f in (got, *wanted)])
        for row, alone in enumerate(wanted):
            self.require_forward(f"{what}, row {row}", got, row, alone)
        state.commit([0] * len(texts))

    def require_forward(self, what: str, got: Forward, row: int, wanted: Forward) -> None:
        """Row `row` of one forward equals the only row of another."""
        require_close(f"{what}, logits", _logits(got)[row], _logits(wanted)[0], self.tolerance)
        for layer, tap, other in zip(self.taps, got.taps, wanted.taps, strict=True):
            require_close(f"{what}, tap {layer}", tap[row], other[0], self.tolerance)


def _logits(forward: Forward) -> mx.array:
    if forward.logits is None:
        raise CheckFailed("the forward gave no logits")
    return forward.logits


# --- one forward -----------------------------------------------------------------------------


def _shapes(kit: _Kit) -> None:
    info, state = kit.target.info, kit.target.new_state(2)
    forward = kit.feed(state, [kit.drafts[0], kit.drafts[1]])
    logits, wanted = _logits(forward), (2, kit.columns, info.vocab_size)
    require(logits.shape == wanted, f"logits have shape {logits.shape}, expected {wanted}")
    require_finite("logits", logits)
    require(len(forward.taps) == len(kit.taps), f"{len(forward.taps)} taps of {len(kit.taps)}")
    for layer, tap in zip(kit.taps, forward.taps, strict=True):
        wanted = (2, kit.columns, info.hidden_size)
        require(tap.shape == wanted, f"tap {layer} has shape {tap.shape}, expected {wanted}")
        require_finite(f"tap {layer}", tap)


def _logits_modes(kit: _Kit) -> None:
    tokens, valid = mx.array([kit.drafts[0], kit.drafts[1]]), [kit.columns, kit.columns - 1]
    every = _logits(kit.target.forward(tokens, kit.target.new_state(2), valid=valid))
    last = _logits(kit.target.forward(tokens, kit.target.new_state(2), logits="last", valid=valid))
    none = kit.target.forward(tokens, kit.target.new_state(2), logits="none", valid=valid)
    require(none.logits is None, 'logits="none" gave logits')
    wanted = mx.stack([every[row, valid[row] - 1][None] for row in range(2)])
    require_close('logits="last"', last, wanted, kit.tolerance)


def _steps(kit: _Kit) -> None:
    text = kit.prompts[0] + kit.drafts[0]
    whole = kit.feed(kit.target.new_state(1), [text])
    state, steps = kit.target.new_state(1), []
    for token in text:
        steps.append(kit.feed(state, [[token]]))
        state.commit([1])
    logits = mx.concatenate([_logits(s) for s in steps], axis=1)
    require_close("logits of single steps", logits, _logits(whole), kit.tolerance)
    for index, layer in enumerate(kit.taps):
        tap = mx.concatenate([s.taps[index] for s in steps], axis=1)
        require_close(f"tap {layer} of single steps", tap, whole.taps[index], kit.tolerance)


def _tap_order(kit: _Kit) -> None:
    tokens, whole = mx.array([kit.drafts[0]]), kit.feed(kit.target.new_state(1), [kit.drafts[0]])
    asked = tuple(reversed(kit.taps))
    back = kit.target.forward(tokens, kit.target.new_state(1), taps=asked)
    for layer, tap in zip(asked, back.taps, strict=True):
        wanted = whole.taps[kit.taps.index(layer)]
        require_close(f"tap {layer} when asked in reverse", tap, wanted, kit.tolerance)
    for layer, wanted in zip(kit.taps, whole.taps, strict=True):
        alone = kit.target.forward(tokens, kit.target.new_state(1), taps=(layer,)).taps
        require_close(f"tap {layer} when asked alone", alone[0], wanted, kit.tolerance)


def _tap_embedding(kit: _Kit) -> None:
    lender = kit.target.lender
    if lender is None or not kit.taps:
        return
    tokens = mx.array([kit.drafts[0]])
    tap = kit.target.forward(tokens, kit.target.new_state(1), taps=(-1,)).taps[0]
    wanted = lender.embed(tokens) * kit.target.info.embed_scale
    rounding = 0.0 if tap.dtype == mx.float32 else 2.0**-7
    scale = float(mx.abs(wanted.astype(mx.float32)).max().item())  # type: ignore[arg-type]
    require_close("tap -1 and the lent embedding", tap, wanted, kit.tolerance + rounding * scale)
    shape = lender.unembed(tap).shape
    wanted_shape = (1, kit.columns, kit.target.info.vocab_size)
    require(shape == wanted_shape, f"the lent head gives {shape}, expected {wanted_shape}")


def _taps_refused(kit: _Kit) -> None:
    tokens = mx.array([kit.drafts[0]])
    if kit.target.info.tappable:
        return
    require(bool(kit.target.info.taps_refused), "taps are refused without a reason")
    try:
        kit.target.forward(tokens, kit.target.new_state(1), taps=(0,))
    except UnsupportedError:
        return
    raise CheckFailed("taps of a target that is not tappable were not refused")


def _padding(kit: _Kit) -> None:
    valid, vocab = [kit.columns, 1, kit.columns - 1], kit.target.info.vocab_size
    drafts = [list(d) for d in kit.drafts[:3]]
    state = kit.batch(kit.prompts[:3])
    first = kit.target.forward(mx.array(drafts), state, taps=kit.taps, valid=valid)
    require_finite("logits of padded rows", _logits(first))
    for row, count in enumerate(valid):
        alone = kit.feed(kit.fresh(kit.prompts[row]), [drafts[row][:count]])
        cut = Forward(_logits(first)[:, :count], tuple(t[:, :count] for t in first.taps))
        kit.require_forward(f"valid columns of row {row}", cut, row, alone)
    over = [valid[0], valid[1] + 1, valid[2]]
    refused(f"commit({over}) of valid {valid}", lambda: state.commit(over))
    state.commit(valid)
    texts = [p + d[:n] for p, d, n in zip(kit.prompts, drafts, valid, strict=False)]
    kit.require_texts(f"after padded columns (ids below {vocab})", state, texts)


# --- commit ----------------------------------------------------------------------------------


def _commit(kit: _Kit) -> None:
    for keep in range(1, kit.columns + 1):
        state = kit.fresh(kit.prompts[0])
        kit.feed(state, [kit.drafts[0]])
        state.commit([keep])
        text = kit.prompts[0] + kit.drafts[0][:keep]
        kit.require_texts(f"commit([{keep}]) of {kit.columns}", state, [text])


def _commit_zero(kit: _Kit) -> None:
    state = kit.fresh(kit.prompts[0])
    for _ in range(2):
        kit.feed(state, [kit.drafts[0]])
        state.commit([0])
    kit.require_texts("commit([0])", state, [kit.prompts[0]])
    empty = kit.target.new_state(1)
    kit.feed(empty, [kit.drafts[0]])
    empty.commit([0])
    kit.require_texts("commit([0]) of an empty state", empty, [[]])


def _commit_ragged(kit: _Kit) -> None:
    state, texts = kit.batch(kit.prompts), [list(p) for p in kit.prompts]
    for turn in range(4):
        keep = [(row * 2 + turn * 3) % (kit.columns + 1) for row in range(4)]
        kit.feed(state, kit.drafts)
        state.commit(keep)
        texts = [t + d[:n] for t, d, n in zip(texts, kit.drafts, keep, strict=True)]
        kit.require_texts(f"ragged commit({keep})", state, texts)


def _commit_bounds(kit: _Kit) -> None:
    state = kit.fresh(kit.prompts[0])
    kit.feed(state, [kit.drafts[0]])
    for keep in ([kit.columns + 1], [-1], [1, 1], []):
        refused(f"commit({keep}) of one row and {kit.columns} columns", partial(state.commit, keep))
    state.commit([1])
    kit.require_texts("after refused commits", state, [kit.prompts[0] + kit.drafts[0][:1]])


def _double_forward(kit: _Kit) -> None:
    state = kit.fresh(kit.prompts[0])
    kit.feed(state, [kit.drafts[0]])
    refused("a second forward before commit", lambda: kit.feed(state, [kit.drafts[0]]))
    state.commit([2])
    kit.require_texts("after a refused forward", state, [kit.prompts[0] + kit.drafts[0][:2]])


def _chunked(kit: _Kit) -> None:
    text = kit.prompts[0] + kit.drafts[0]
    for sizes in ([1] * len(text), [2, 3, 1], [len(text) - 1]):
        state = kit.target.new_state(1)
        for piece in chunks(text, sizes):
            kit.target.forward(mx.array([piece]), state, logits="none")
            state.commit([len(piece)])
        kit.require_texts(f"prefill in chunks of {sizes}", state, [text])


# --- rows ------------------------------------------------------------------------------------


def _batch(kit: _Kit) -> None:
    state = kit.batch(kit.prompts)
    got = kit.feed(state, kit.drafts)
    for row in range(4):
        alone = kit.feed(kit.fresh(kit.prompts[row]), [kit.drafts[row]])
        kit.require_forward(f"row {row} in a batch of 4", got, row, alone)
    state.commit([0] * 4)


def _select(kit: _Kit) -> None:
    for rows in ([3, 1], [0, 1, 2, 3], [2, 0, 3, 1], [1], [0, 3, 2]):
        state = kit.batch(kit.prompts)
        state.select(rows)
        require(state.rows == len(rows), f"select({rows}) left {state.rows} rows")
        kit.require_texts(f"select({rows})", state, [kit.prompts[r] for r in rows])


def _select_refused(kit: _Kit) -> None:
    state = kit.batch(kit.prompts[:2])
    for rows in ([0, 0], [2], [-1]):
        refused(f"select({rows}) of 2 rows", partial(state.select, rows))
    kit.require_texts("after refused selects", state, kit.prompts[:2])


def _join(kit: _Kit) -> None:
    state = kit.batch(kit.prompts[:2])
    state.join(kit.batch(kit.prompts[2:]))
    kit.require_texts("join of 2 and 2 rows", state, kit.prompts)


def _hole(kit: _Kit) -> None:
    state, texts = kit.batch(kit.prompts), [list(p) for p in kit.prompts]
    for leaving in (1, 0):
        last = len(texts) - 1
        order = [last if r == leaving else r for r in range(last)]
        state.select(order)
        texts = [texts[r] for r in order]
        kit.feed(state, kit.drafts[: len(texts)])
        keep = [min(1 + r, kit.columns) for r in range(len(texts))]
        state.commit(keep)
        texts = [t + d[:n] for t, d, n in zip(texts, kit.drafts, keep, strict=False)]
        newcomer = kit.prompts[2] + kit.drafts[3][:leaving]
        state.join(kit.fresh(newcomer))
        texts.append(newcomer)
        kit.require_texts(f"row {leaving} left, the last row moved, one joined", state, texts)


def _provisional_rows(kit: _Kit) -> None:
    state = kit.batch(kit.prompts[:2])
    kit.feed(state, kit.drafts[:2])
    refused("select while provisional", lambda: state.select([0]))
    refused("join while provisional", lambda: state.join(kit.fresh(kit.prompts[2])))
    refused("image while provisional", lambda: state.image(0))
    state.commit([1, 2])


# --- images ----------------------------------------------------------------------------------


def _image(kit: _Kit) -> None:
    state = kit.batch(kit.prompts[:3])
    image = state.image(1)
    check_image(image, 0, len(kit.prompts[1]))
    texts = [list(kit.prompts[2]), list(kit.prompts[1])]
    other = kit.fresh(texts[0])
    other.join(kit.target.new_state(1))
    for kind, again in (("whole", image), ("cut to its reach", trimmed(image))):
        other.restore(1, again)
        kit.require_texts(f"restore of an image ({kind})", other, texts)
        other.select([0])
        other.join(kit.target.new_state(1))
    refused("restore into a row that is not empty", lambda: other.restore(0, image))
    kit.require_texts("after its image was taken", state, kit.prompts[:3])


def _image_start(kit: _Kit) -> None:
    text = kit.prompts[0] + kit.drafts[0]
    for start in (1, len(kit.prompts[0]), len(text) - 1):
        state = kit.fresh(text[:start])
        first = state.image(0)
        kit.feed(state, [text[start:]])
        state.commit([len(text) - start])
        second = state.image(0, start)
        check_image(second, start, len(text))
        restored = kit.target.new_state(1)
        restored.restore(0, assemble(first, second))
        kit.require_texts(f"images of 0..{start} and {start}..{len(text)}", restored, [text])


def _image_owned(kit: _Kit) -> None:
    state = kit.batch(kit.prompts[:2])
    image = state.image(0)
    before = image_bytes(image)
    restored = kit.target.new_state(1)
    restored.restore(0, image)
    for live in (state, restored):
        rows = live.rows
        kit.feed(live, kit.drafts[:rows])
        live.commit([min(3, kit.columns)] * rows)
        mx.eval(list(live.pending()))
    changed = [name for name, old in before.items() if image_bytes(image)[name] != old]
    require(not changed, f"arrays {changed} of an image changed when its row went on")


TARGET_CHECKS: Mapping[str, Callable[[_Kit], None]] = MappingProxyType(
    {
        "shapes": _shapes,
        "logits-modes": _logits_modes,
        "steps": _steps,
        "tap-order": _tap_order,
        "tap-embedding": _tap_embedding,
        "taps-refused": _taps_refused,
        "padding": _padding,
        "commit": _commit,
        "commit-zero": _commit_zero,
        "commit-ragged": _commit_ragged,
        "commit-bounds": _commit_bounds,
        "double-forward": _double_forward,
        "chunked-prefill": _chunked,
        "batch": _batch,
        "select": _select,
        "select-refused": _select_refused,
        "join": _join,
        "hole": _hole,
        "provisional-rows": _provisional_rows,
        "image": _image,
        "image-start": _image_start,
        "image-owned": _image_owned,
    }
)
"""The checks by name.

- shapes, logits-modes: what a forward gives, in each mode.
- steps: a forward of many columns equals single steps, logits and taps.
- tap-order, tap-embedding, taps-refused: each tap is the layer that was asked for; -1 is the lent
  embedding times its scale; a target without taps says why.
- padding: columns beyond `valid` change nothing.
- commit, commit-zero, commit-ragged, commit-bounds, double-forward: commit is exact at every keep.
- chunked-prefill: how a prompt is cut does not matter.
- batch, select, select-refused, join, hole, provisional-rows: rows do not touch each other.
- image, image-start, image-owned: images restore exactly, in pieces too, and never change.
"""
