"""An mlx-lm model as a Target."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from spec_core.device import layers_ahead, on_cuda, runs_beside_host
from spec_core.errors import SeamError, UnsupportedError
from spec_core.packed import CHEAP_ROWS, has_kernel
from spec_core.seams import EmbeddingLender, Forward, LogitRows, TargetInfo, TargetState
from spec_targets.anatomy import Anatomy
from spec_targets.attention import RowByRow
from spec_targets.compiled import CompiledForwards
from spec_targets.families import Family
from spec_targets.layers import Frame, FullLayer, LayerCache, LayerOptions
from spec_targets.quantised import quantisations
from spec_targets.rope import SharedAngles
from spec_targets.siblings import siblings_of
from spec_targets.solo import SoloRows
from spec_targets.state import LayeredState
from spec_targets.swap import EarlyStarts, Recorder, Swap, Wrapping, swapped


@dataclass(frozen=True, slots=True)
class Bones:
    """A model taken apart, with all that is needed to run it over our caches.

    Attributes:
        anatomy: its parts.
        family: how its architecture becomes a target.
        options: how layers store what they remember.
        window: makes every sliding window at most so wide; only for the proof of wrapping.
        compiled: plain steps and verifies are replayed from traces where spec_targets.compiled
            serves.
        stores: in traces, what attends also stores where rows may attend alone.
    """

    anatomy: Anatomy
    family: Family
    options: LayerOptions
    window: int | None = None
    compiled: bool = False
    stores: bool = True

    def own_caches(self) -> list[Any]:
        """Fresh caches of mlx-lm's own."""
        made = self.family.own_caches(self.anatomy.model, self.options)
        for cache in made if self.window else ():
            if windowed(cache):
                cache.max_size = min(cache.max_size, self.window)
        return made


def windowed(cache: object) -> bool:
    """Whether one of mlx-lm's own caches is a sliding window."""
    return type(cache).__name__ == "RotatingKVCache"


class Runner:
    """Runs a model over our caches: class swaps for taps and last rows, nothing else.

    It knows nothing of what was proven; ModelTarget does.
    """

    def __init__(self, bones: Bones) -> None:
        self._bones = bones
        self._model = bones.anatomy.model
        self._recorder = Recorder(bones.anatomy.layers)
        self._narrowing = Wrapping(self._narrow)
        self._row_by_row = RowByRow(self._model)
        self._angles = SharedAngles(self._model)
        self._siblings = siblings_of(self._model)
        self._early = EarlyStarts(bones.anatomy.layers, layers_ahead())
        self._columns_at_least = CHEAP_ROWS if _columns_cost(self._model) else 1
        self._compiled: CompiledForwards | None = None
        if bones.compiled:
            stores = bones.stores and bones.options.waste != math.inf
            self._compiled = CompiledForwards(self._model, self._trace, stores=stores)
        self._pick: Callable[[mx.array], mx.array] = _same

    @property
    def traces(self) -> int:
        """How many traces there are to replay."""
        return self._compiled.traces if self._compiled else 0

    def new_state(self, rows: int) -> LayeredState:
        if self._compiled:
            self._compiled.renew()
        family, options, own = self._bones.family, self._bones.options, self._bones.own_caches()
        return LayeredState(rows, lambda frame: family.new_layers(own, frame, options))

    def run(
        self,
        tokens: mx.array,
        state: LayeredState,
        taps: Sequence[int],
        logits: LogitRows,
        valid: Sequence[int] | None,
    ) -> Forward:
        """One provisional forward; if it raises, the state is as before."""
        columns = tokens.shape[1]
        compiled = self._compiled_for(state, columns) if logits == "all" else None
        padding = self._width(state.rows, columns, compiled) - columns
        if padding:
            valid = valid or [columns] * state.rows
            tokens = mx.concatenate([tokens, *[tokens[:, -1:]] * padding], axis=1)
        state.begin(tokens.shape[1], valid)
        try:
            if compiled:
                layers: list[Any] = state.layers
                forward = compiled.run(tokens, layers, state.clock, taps)
            else:
                forward = self._forward(tokens, state, taps, logits)
            return _first_columns(forward, columns) if padding else forward
        except BaseException:
            state.commit([0] * state.rows)
            for siblings in self._siblings:
                siblings.forget()
            raise
        finally:
            self._recorder.clear()
            self._angles.clear()
            self._pick = _same

    def _compiled_for(self, state: LayeredState, columns: int) -> CompiledForwards | None:
        """What replays such a forward, if something does."""
        compiled, bones = self._compiled, self._bones
        if compiled is None or not compiled.serve(state.layers, columns):
            return None
        return None if bones.family.swaps(bones.anatomy, state.layers) else compiled

    def _width(self, rows: int, columns: int, compiled: CompiledForwards | None) -> int:
        """Columns to forward: more where they cost less, or nothing. A single column takes other
        kernels anyway."""
        cheap = -(-self._columns_at_least // rows) if columns > 1 else 1
        return max(columns, cheap, compiled.width(rows, columns) if compiled else 1)

    def _forward(
        self, tokens: mx.array, state: LayeredState, taps: Sequence[int], logits: LogitRows
    ) -> Forward:
        columns = tokens.shape[1]
        swaps = list(self._bones.family.swaps(self._bones.anatomy, state.layers))
        if columns > 1 or not runs_beside_host():  # a GPU's plain rounds are built ahead
            swaps += self._early.swaps
        last = last_column(state.valid, columns) if logits == "last" else _same
        inner = self._bones.anatomy.inner
        if inner is not None and last is not _same:
            self._pick, last = last, _same
            swaps.append((inner, self._narrowing))
        apart = state.part_rows(columns, self._bones.options.waste)
        out, recorded = self._call(tokens, state.layers, taps, apart, swaps)
        # The head of an unwanted forward is never evaluated: arrays are lazy.
        return Forward(logits=None if logits == "none" else last(out), taps=recorded)

    def _trace(
        self, tokens: mx.array, layers: Sequence[FullLayer], frame: Frame, taps: Sequence[int]
    ) -> tuple[mx.array, tuple[mx.array, ...]]:
        apart = frame.part_rows(tokens.shape[1], self._bones.options.waste)
        return self._call(tokens, layers, taps, apart, [])

    def _call(
        self,
        tokens: mx.array,
        layers: Sequence[LayerCache],
        taps: Sequence[int],
        apart: bool,
        swaps: Sequence[Swap],
    ) -> tuple[mx.array, tuple[mx.array, ...]]:
        """The model's own call under these swaps and those for what is asked: logits and taps."""
        swaps = [*swaps, *self._angles.swaps, *self._recorder.swaps(taps)]
        if apart:
            swaps += self._row_by_row.swaps()
        with swapped(swaps):
            out: mx.array = self._model(tokens, cache=layers)
        return out, self._recorder.take(taps) if taps else ()

    def _narrow(
        self,
        inner: Module,
        own: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        return self._pick(own(inner, *args, **kwargs))


def _columns_cost(model: Module) -> bool:
    """Whether a few columns cost more than somewhat more of them."""
    kinds = quantisations(model) if on_cuda() else []
    return not all(has_kernel(k.bits, k.group_size, k.mode, k.dtype) for k in kinds)


def _first_columns(forward: Forward, columns: int) -> Forward:
    """Without the columns that were added."""
    logits = None if forward.logits is None else forward.logits[:, :columns]
    return Forward(logits=logits, taps=tuple(tap[:, :columns] for tap in forward.taps))


def _same(hidden: mx.array) -> mx.array:
    return hidden


def last_column(valid: Sequence[int], columns: int) -> Callable[[mx.array], mx.array]:
    """Picks column valid[b] - 1 of [B, T, ...], giving [B, 1, ...]."""
    at = [max(v - 1, 0) for v in valid]
    if len(set(at)) == 1:
        first = at[0]
        return _same if columns == 1 else lambda hidden: hidden[:, first : first + 1]
    index = mx.array(at, dtype=mx.int32)[:, None, None]
    return lambda hidden: mx.take_along_axis(hidden, index, axis=1)


class ModelTarget:
    """A proven mlx-lm model. See spec_core.seams.Target; made by `spec_targets.build_target`.

    Args:
        runner: runs the model.
        info: what was found and proven.
        lender: its embedding and head, or None if they could not be proven.
        batch_refused: why rows cannot share a forward; "" if they can.

    Attributes:
        batch_refused: if not empty, rows are run one after the other for this reason.
    """

    def __init__(
        self,
        runner: Runner,
        info: TargetInfo,
        lender: EmbeddingLender | None,
        batch_refused: str = "",
    ) -> None:
        self._runner = runner
        self._info = info
        self._lender = lender
        self.batch_refused = batch_refused

    @property
    def info(self) -> TargetInfo:
        return self._info

    @property
    def lender(self) -> EmbeddingLender | None:
        return self._lender

    def new_state(self, rows: int) -> TargetState:
        if self.batch_refused:
            return SoloRows(lambda: self._runner.new_state(1), rows)
        return self._runner.new_state(rows)

    def forward(
        self,
        tokens: mx.array,
        state: TargetState,
        *,
        taps: Sequence[int] = (),
        logits: LogitRows = "all",
        valid: Sequence[int] | None = None,
    ) -> Forward:
        if tokens.ndim != 2 or tokens.shape[0] != state.rows or not tokens.shape[1]:
            raise SeamError(f"tokens of shape {tokens.shape} do not fit {state.rows} rows")
        if taps:
            self._check_taps(taps)
        if isinstance(state, SoloRows):
            return state.run(
                lambda row, one, count: self._runner.run(
                    tokens[row : row + 1], one, taps, logits, count
                ),
                valid,
            )
        if not isinstance(state, LayeredState):
            raise SeamError(f"{type(state).__name__} is not a state of this target")
        return self._runner.run(tokens, state, taps, logits, valid)

    def _check_taps(self, taps: Sequence[int]) -> None:
        if not self._info.tappable:
            raise UnsupportedError(f"this target has no taps: {self._info.taps_refused}")
        if any(not -1 <= tap < self._info.num_layers for tap in taps):
            raise SeamError(f"taps {list(taps)} do not lie in -1..{self._info.num_layers - 1}")
