"""The load-time proof: a few tokens through the model's own call, and through ours.

The reference is the model with mlx-lm's own caches. Against it are checked: logits of one row,
commit of a part, windows that wrap, rows of different length, the last column alone, the taps,
forwards replayed from traces, and whether the embedding and the head can be lent. What cannot be
proven is refused, with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from spec_core.device import on_cuda
from spec_core.kv import RowClock
from spec_targets.anatomy import Anatomy, Lender, Scales
from spec_targets.errors import UnsupportedTargetError
from spec_targets.families import Family
from spec_targets.layers import Frame, LayerOptions, group_size_for
from spec_targets.state import LayeredState
from spec_targets.swap import Recorder, Swap, Wrapping, swapped, with_hidden
from spec_targets.target import Bones, Runner, windowed

_PROMPT = 3
_CONTINUATION = 2
_WINDOW = 3
_WRAPPED = 8


class ProofError(Exception):
    """A property does not hold; the message says which, and by how much."""


@dataclass(frozen=True, slots=True)
class Reference:
    """What the model itself gives, with its own caches, for 3 tokens and then 2.

    Attributes:
        tokens: [1, 5].
        logits: [1, 5, V].
        taps: embedding output, then each layer's output, [1, 3, H] each, for the first 3
            tokens; empty if they could not be recorded.
        normed: [1, 3, H] what the head got, or None.
        refused: why there are no taps.
    """

    tokens: mx.array
    logits: mx.array
    taps: tuple[mx.array, ...]
    normed: mx.array | None
    refused: str


@dataclass(frozen=True, slots=True)
class Findings:
    """What was proven.

    Attributes:
        taps_refused: why the target has no taps; "" if it has.
        batch_refused: why rows cannot share a forward; "" if they can.
        row_by_row: rows can attend alone, see spec_targets.attention.
        compiled: forwards can be replayed on this device, see spec_targets.compiled.
        stores: what attends in them may also store; not so where a model makes something else of
            keys and values after they are stored.
        lender: embedding and head, if proven.
        scales: what surrounds them.
    """

    taps_refused: str
    batch_refused: str
    row_by_row: bool
    compiled: bool
    stores: bool
    lender: Lender | None
    scales: Scales


def refer(bones: Bones, vocab_size: int) -> Reference:
    """Run the model itself over its own caches, recording taps and what the head gets."""
    anatomy, caches = bones.anatomy, bones.own_caches()
    tokens = _tokens(vocab_size)
    recorder = Recorder(anatomy.layers)
    asked = tuple(range(-1, len(anatomy.layers)))
    normed: list[mx.array] = []
    swaps = recorder.swaps(asked)
    if anatomy.inner is not None:
        swaps.append((anatomy.inner, Wrapping(_keeping(normed))))
    with swapped(swaps):
        first = anatomy.model(tokens[:, :_PROMPT], cache=caches)
    taps, refused = _taken(recorder, asked)
    second = anatomy.model(tokens[:, _PROMPT:], cache=caches)
    logits = mx.concatenate([first, second], axis=1)
    mx.eval(logits, taps, normed)
    return Reference(
        tokens=tokens,
        logits=logits,
        taps=taps,
        normed=normed[0] if len(normed) == 1 else None,
        refused=refused,
    )


def prove(bones: Bones, reference: Reference, candidates: Sequence[Scales]) -> Findings:
    """All proofs. Raises UnsupportedTargetError where even plain decoding would be wrong."""
    together = replace(bones, options=replace(bones.options, waste=math.inf))
    runner = Runner(together)
    try:
        _prove_row(runner, reference)
        _prove_wrapping(together, reference.logits.shape[-1])
    except Exception as failure:  # whatever the model's code raises is a failed proof
        raise UnsupportedTargetError(
            f"this model cannot be decoded exactly over our caches: {failure}"
        ) from failure
    refused = reference.refused or _refusal(lambda: _prove_taps(together, runner, reference))
    lender, scales = _lend(bones.anatomy, reference, candidates)
    alone = Runner(replace(bones, options=replace(bones.options, waste=0)))
    batch_refused = _refusal(lambda: _prove_ragged(runner, reference))
    row_by_row = not _refusal(lambda: _prove_ragged(alone, reference))
    asked = () if refused else tuple(range(-1, len(bones.anatomy.layers)))
    traced = replace(bones if row_by_row else together, compiled=True)
    found = _traced(bones, traced, reference, asked) if on_cuda() and not batch_refused else bones
    return Findings(
        taps_refused=refused,
        batch_refused=batch_refused,
        row_by_row=row_by_row,
        compiled=found.compiled,
        stores=found.stores,
        lender=lender,
        scales=scales,
    )


def options_for(family: Family, model: Module, kv_bits: int | None) -> LayerOptions:
    """Storage options that fit the model's heads.

    Raises UnsupportedTargetError if none do, or if a cache kind cannot be taken back exactly.
    """
    caches = family.own_caches(model, LayerOptions())
    family.new_layers(caches, Frame(RowClock(1)), LayerOptions())
    if kv_bits is None:
        return LayerOptions()
    full = [cache for cache in caches if hasattr(cache, "to_quantized") and not windowed(cache)]
    if not full:
        raise UnsupportedTargetError(
            f"quantising keys and values to {kv_bits} bits would change nothing: no layer of this "
            "model has full attention, and what the others remember is bounded; leave them as they "
            "are"
        )
    model(_tokens(256)[:, :1], cache=caches)  # for the shapes; nothing is evaluated
    stored = (getattr(cache, name, None) for cache in full for name in ("keys", "values"))
    sizes = [each.shape[-1] for each in stored if isinstance(each, mx.array)]
    options = LayerOptions(kv_bits=kv_bits, group_size=group_size_for(sizes))
    family.own_caches(model, options)  # refuses what the family knows cannot be quantised
    return options


def _tokens(vocab_size: int, count: int = _PROMPT + _CONTINUATION) -> mx.array:
    """Different ids, spread over the vocabulary."""
    return mx.array([[(vocab_size * (2 * i + 1)) // (2 * count) for i in range(count)]])


def _taken(recorder: Recorder, asked: Sequence[int]) -> tuple[tuple[mx.array, ...], str]:
    try:
        return recorder.take(asked), ""
    except (ValueError, KeyError) as failure:
        return (), str(failure)


def _keeping(kept: list[mx.array]) -> Callable[..., Any]:
    def wrapper(module: Any, own: Any, args: Any, kwargs: Any) -> Any:
        kept.append(own(module, *args, **kwargs))
        return kept[-1]

    return wrapper


def _prove_row(runner: Runner, reference: Reference) -> None:
    """One row: logits, and a commit of one of three columns."""
    tokens, logits = reference.tokens, reference.logits
    state = runner.new_state(1)
    _same("logits", _run(runner, tokens[:, :_PROMPT], state), logits[:, :_PROMPT])
    state.commit([_PROMPT])
    wrong = mx.concatenate([tokens[:, _PROMPT : _PROMPT + 1], tokens[:, :2]], axis=1)
    mx.eval(_run(runner, wrong, state))
    state.commit([1])
    last = tokens[:, _PROMPT + 1 :]
    _same("logits after a partial commit", _run(runner, last, state), logits[:, _PROMPT + 1 :])


def _prove_wrapping(bones: Bones, vocab_size: int) -> None:
    """Windows made so narrow that a few tokens wrap them: many columns at once, and blocks of
    which a part is kept, give what single steps over mlx-lm's own give. (Its own masks for
    several columns do not know the narrower window; for one column it needs none.)"""
    narrow = replace(bones, window=_WINDOW, options=replace(bones.options, slack=_WINDOW - 1))
    caches = narrow.own_caches()
    if not any(windowed(cache) for cache in caches):
        return
    tokens = _tokens(vocab_size, _WRAPPED)
    steps = [bones.anatomy.model(tokens[:, at : at + 1], cache=caches) for at in range(_WRAPPED)]
    theirs = mx.concatenate(steps, axis=1)
    runner = Runner(narrow)
    at_once = _run(runner, tokens, runner.new_state(1))
    _same("logits of more columns than a window has", at_once, theirs)
    state = runner.new_state(1)
    for start, kept in ((0, 3), (3, 2)):
        wrong = tokens[:, : 3 - kept]
        mx.eval(_run(runner, mx.concatenate([tokens[:, start : start + kept], wrong], 1), state))
        state.commit([kept])
    _same("logits after a window wrapped", _run(runner, tokens[:, 5:], state), theirs[:, 5:])


def _prove_ragged(runner: Runner, reference: Reference) -> None:
    """Two rows of which one keeps one token of three: each goes on as if alone."""
    tokens, logits = reference.tokens, reference.logits
    state = runner.new_state(2)
    both = mx.concatenate([tokens[:, :_PROMPT]] * 2)
    valid = (_PROMPT, 1)
    last = runner.run(both, state, (), "last", valid).logits
    expected = mx.concatenate([logits[:, _PROMPT - 1 : _PROMPT], logits[:, :1]])
    _same("logits of the last columns", last, expected)
    state.commit(valid)
    further = mx.concatenate([tokens[:, _PROMPT:], tokens[:, 1:_PROMPT]])
    got = _run(runner, further, state)
    expected = mx.concatenate([logits[:, _PROMPT:], logits[:, 1:_PROMPT]])
    _same("logits of rows of different length", got, expected)


def _prove_taps(bones: Bones, runner: Runner, reference: Reference) -> None:
    """Tapped logits equal untapped ones; every tap is the whole output of its layer at the
    right rows: with the layer's output replaced by the tap, other tokens give the same logits."""
    asked = tuple(range(-1, len(bones.anatomy.layers)))
    state = runner.new_state(1)
    prompt = reference.tokens[:, :_PROMPT]
    forward = runner.run(prompt, state, asked, "all", None)
    _same("tapped logits", forward.logits, reference.logits[:, :_PROMPT])
    for tap, theirs in zip(forward.taps, reference.taps, strict=True):
        _same("taps", tap, theirs)
    for layer in bones.family.replayable(bones.anatomy):
        replayed = _replayed(bones, reference, layer)
        _same(f"logits from the tap of layer {layer}", replayed, reference.logits[:, :_PROMPT])


def _traced(bones: Bones, traced: Bones, reference: Reference, asked: Sequence[int]) -> Bones:
    """How forwards are traced: what attends stores, or ordinary layers do, or they are not."""
    for stores in (True, False):
        way = replace(traced, stores=stores)
        if not _refusal(partial(_prove_compiled, Runner(way), reference, asked)):
            return way
    return bones


def _prove_compiled(runner: Runner, reference: Reference, asked: Sequence[int]) -> None:
    """One row, and two of different length: forwards of two columns, and of a single one, of which
    the second is traced and the third replayed from another place."""
    for lengths in ((1,), (1, 2)):
        state, before = runner.new_state(len(lengths)), runner.traces
        prompt = mx.concatenate([reference.tokens[:, :2]] * state.rows)
        mx.eval(runner.run(prompt, state, (), "all", lengths).logits)
        state.commit(lengths)
        for columns in (2, 1):
            for keep in ((0, 0), (1, 0), (0, 0)):
                _prove_columns(runner, reference, asked, state, columns)
                state.commit(keep[: state.rows])
        if runner.traces == before:
            raise ProofError("nothing was traced")


def _prove_columns(
    runner: Runner,
    reference: Reference,
    asked: Sequence[int],
    state: LayeredState,
    count: int,
) -> None:
    """Each row goes on from where it stands as if alone; of the taps, the first row's are known."""
    columns = [slice(length, length + count) for length in state.lengths]
    tokens = mx.concatenate([reference.tokens[:, each] for each in columns])
    forward = runner.run(tokens, state, asked, "all", None)
    expected = mx.concatenate([reference.logits[:, each] for each in columns])
    _same("replayed logits", forward.logits, expected)
    for tap, theirs in zip(forward.taps, reference.taps if asked else (), strict=True):
        known = theirs[:, columns[0]]
        if known.size:
            _same("replayed taps", tap[:1, : known.shape[1]], known)


def _replayed(bones: Bones, reference: Reference, layer: int) -> mx.array:
    """Logits of other tokens when `layer` returns its recorded tap."""
    tap = reference.taps[layer + 1]

    def wrapper(module: Any, own: Any, args: Any, kwargs: Any) -> Any:
        return with_hidden(own(module, *args, **kwargs), tap)

    swap: Swap = (bones.anatomy.layers[layer], Wrapping(wrapper))
    others = reference.tokens[:, _CONTINUATION : _CONTINUATION + _PROMPT]
    with swapped([swap]):
        logits: mx.array = bones.anatomy.model(others, cache=bones.own_caches())
    return logits


def _lend(
    anatomy: Anatomy, reference: Reference, candidates: Sequence[Scales]
) -> tuple[Lender | None, Scales]:
    """Embedding and head, if embedding times scale is what layer 0 gets, and head of the normed
    states, capped, is the logits."""
    normed = reference.normed
    lendable = hasattr(anatomy.embedding, "as_linear")
    if anatomy.embedding is None or not lendable or normed is None or not reference.taps:
        return None, candidates[0]
    lender = Lender(anatomy.embedding, anatomy.head)
    rows = lender.embed(reference.tokens[:, :_PROMPT])
    raw = lender.unembed(normed)
    fitting = [each for each in candidates if _fits(each, rows, raw, reference)]
    if not fitting:
        return None, candidates[0]
    return lender, min(fitting, key=lambda each: _distance(rows * each.embed, reference.taps[0]))


def _fits(scales: Scales, rows: mx.array, raw: mx.array, reference: Reference) -> bool:
    """Whether these scales lead from the lent parts to what layer 0 gets and to the logits."""
    cap = scales.softcap
    capped = raw if cap is None else mx.tanh(raw / cap) * cap
    embedded = _close(rows * scales.embed, reference.taps[0])
    return embedded and _close(capped, reference.logits[:, :_PROMPT])


def _run(runner: Runner, tokens: mx.array, state: LayeredState) -> mx.array | None:
    return runner.run(tokens, state, (), "all", None).logits


def _refusal(proof: Callable[[], None]) -> str:
    try:
        proof()
    except Exception as failure:  # as in `prove`
        return str(failure) or type(failure).__name__
    return ""


def _same(what: str, ours: mx.array | None, theirs: mx.array) -> None:
    """Raise ProofError unless the arrays agree within what their type's arithmetic allows."""
    if ours is None or ours.shape != theirs.shape:
        shape = None if ours is None else ours.shape
        raise ProofError(f"{what} have shape {shape} where the model's own have {theirs.shape}")
    if mx.isnan(theirs).any().item():
        raise ProofError(f"{what} are not numbers (NaN) in the model's own; are its weights whole?")
    off = _distance(ours, theirs)
    if not off <= _tolerance(theirs.dtype):
        raise ProofError(f"{what} differ from the model's own by {off:.2g} of their size")


def _close(ours: mx.array, theirs: mx.array) -> bool:
    return ours.shape == theirs.shape and _distance(ours, theirs) <= _tolerance(theirs.dtype)


def _distance(ours: mx.array, theirs: mx.array) -> float:
    """Largest difference, relative to the largest magnitude of theirs."""
    a, b = ours.astype(mx.float32), theirs.astype(mx.float32)
    finite = mx.where(mx.isinf(b) & (a == b), 0, mx.abs(a - b))
    size = mx.abs(mx.where(mx.isinf(b), 0, b)).max()
    relative: float = (finite.max() / mx.maximum(size, 1e-6)).item()  # type: ignore[assignment]
    return relative


def _tolerance(dtype: mx.Dtype) -> float:
    return 1e-3 if dtype == mx.float32 else 3e-2
