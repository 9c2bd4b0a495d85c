"""Forwards from traces give what the model's own call gives, and leave the state as it does."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx_lm.models.base import scaled_dot_product_attention

from spec_core import decode, flash_decode
from spec_core import traces as tracing
from spec_core._buffers import scatter
from spec_core.conformance import check_target
from spec_core.device import on_cuda
from spec_core.flash_decode import Columns
from spec_core.seams import StateImage
from spec_core.testing import ScriptedDrafter
from spec_core.traces import TracedClock
from spec_targets import build_target, layers, probe
from spec_targets.compiled import CompiledForwards
from spec_targets.target import ModelTarget, Runner

CLOSE = 2e-5


def with_traces(target: ModelTarget) -> ModelTarget:
    """The same target whose forwards are replayed from traces, each of its own width."""
    runner = Runner(replace(target._runner._bones, compiled=True))
    assert runner._compiled is not None
    runner._compiled._widens = False
    return ModelTarget(runner, target.info, target.lender, target.batch_refused)


OWN_RULE = tracing._Kept.met


@pytest.fixture(autouse=True)
def at_first_sight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is traced when it is first met."""
    monkeypatch.setattr(tracing._Kept, "met", lambda kept, key: True)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch, plainly: Any) -> None:
    """As on CUDA, with the kernels' contracts in their place."""

    def store_and_attend(
        queries: mx.array,
        stored: Columns,
        newest: Columns,
        ends: mx.array,
        scale: float,
        after: mx.array,
    ) -> tuple[mx.array, mx.array, Columns]:
        columns = queries.shape[2]
        at = ends[:, None] - columns + mx.arange(columns)
        pair = [
            scatter(buffer, new, at)
            for buffer, new in ((stored.keys, newest.keys), (stored.values, newest.values))
        ]
        out = plainly(queries, *(each[: len(at)] for each in pair), ends, scale)
        return out, out + after, Columns(*pair)

    monkeypatch.setattr(layers, "on_cuda", lambda: True)
    monkeypatch.setattr(flash_decode, "fits", lambda keys, values: True)
    monkeypatch.setattr(flash_decode, "serves", lambda queries, keys, values: True)
    monkeypatch.setattr(flash_decode, "attend", plainly)
    monkeypatch.setattr(layers, "store_and_attend", store_and_attend)


@pytest.fixture(scope="module")
def pair(make_target: Any) -> tuple[ModelTarget, ModelTarget]:
    """A target without and one with traces, over one model."""
    target, _ = make_target("qwen3")
    return target, with_traces(target)


@pytest.fixture
def traced(pair: tuple[ModelTarget, ModelTarget]) -> ModelTarget:
    """The target with traces, of which it has none yet."""
    return with_traces(pair[0])


def tokens_of(rows: int, columns: int, seed: int) -> mx.array:
    return mx.random.randint(0, 97, (rows, columns), key=mx.random.key(seed))


def close(ours: mx.array | None, theirs: mx.array | None) -> bool:
    assert ours is not None
    assert theirs is not None
    return ours.shape == theirs.shape and mx.allclose(ours, theirs, atol=CLOSE).item() is True


def filled(target: ModelTarget, lengths: Sequence[int], seed: int = 0) -> Any:
    """A state of a target with rows of these lengths."""
    state = target.new_state(len(lengths))
    target.forward(tokens_of(len(lengths), max(lengths), seed), state, logits="none", valid=lengths)
    state.commit(lengths)
    mx.eval(state.pending())
    return state


class Walk:
    """Two states that are led the same way; after each step both hold the same."""

    def __init__(self, targets: tuple[ModelTarget, ModelTarget], lengths: list[int]) -> None:
        self.targets = targets
        self.states = [filled(target, lengths) for target in targets]

    @property
    def rows(self) -> int:
        rows: int = self.states[0].rows
        return rows

    def forward(self, columns: int, taps: tuple[int, ...], keep: list[int], seed: int) -> None:
        tokens = tokens_of(self.rows, columns, seed)
        plain, traced = (
            target.forward(tokens, state, taps=taps)
            for target, state in zip(self.targets, self.states, strict=True)
        )
        assert close(traced.logits, plain.logits)
        assert len(traced.taps) == len(taps)
        assert all(close(*each) for each in zip(traced.taps, plain.taps, strict=True))
        for state in self.states:
            state.commit(keep)
        self.check()

    def select(self, rows: list[int]) -> None:
        for state in self.states:
            state.select(rows)
        self.check()

    def join(self, lengths: list[int], seed: int) -> None:
        for target, state in zip(self.targets, self.states, strict=True):
            state.join(filled(target, lengths, seed))
        self.check()

    def resume(self, row: int) -> None:
        """A copy of a row joins through its image."""
        for target, state in zip(self.targets, self.states, strict=True):
            other = target.new_state(1)
            other.restore(0, state.image(row))
            state.join(other)
        self.check()

    def check(self) -> None:
        lengths = [state.lengths for state in self.states]
        assert lengths[0] == lengths[1]
        for row in range(self.rows):
            images: list[StateImage] = [state.image(row) for state in self.states]
            for name, each in images[0].per_token.items():
                assert close(images[1].per_token[name].array, each.array)


WALKS = {
    "lengths": st.lists(st.integers(1, 6) | st.integers(249, 256), min_size=1, max_size=3),
    "seed": st.integers(0, 999),
}


@settings(max_examples=12, deadline=None)
@given(**WALKS)
def test_a_target_goes_the_same_way_with_traces_and_without(
    pair: tuple[ModelTarget, ModelTarget], lengths: list[int], seed: int
) -> None:
    """Over a buffer's end at 256 positions, too."""
    take_a_walk(pair, lengths, seed)


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(**WALKS)
@pytest.mark.usefixtures("kernels")
def test_so_it_does_where_what_attends_also_stores(
    traced: ModelTarget, pair: tuple[ModelTarget, ModelTarget], lengths: list[int], seed: int
) -> None:
    take_a_walk((pair[0], traced), lengths, seed)
    assert traced._runner.traces


def take_a_walk(pair: tuple[ModelTarget, ModelTarget], lengths: list[int], seed: int) -> None:
    choose = random.Random(seed)
    walk = Walk(pair, lengths)
    for step in range(6):
        columns = choose.choice((1, 2, 3, 5))
        taps = choose.choice(((), (1, -1), (0, 2)))
        keep = [choose.randint(0, columns) for _ in range(walk.rows)]
        walk.forward(columns, taps, keep, seed + step)
        turn = choose.randrange(4)
        if turn == 0 and walk.rows > 1:
            walk.select(choose.sample(range(walk.rows), choose.randint(1, walk.rows - 1)))
        elif turn == 1 and walk.rows < 3:
            walk.join([choose.randint(1, 9)], seed + 50 + step)
        elif turn == 2 and walk.rows < 3 and max(walk.states[0].lengths):
            walk.resume(choose.randrange(walk.rows))


def test_buffers_grow_before_they_are_traced(pair: tuple[ModelTarget, ModelTarget]) -> None:
    walk = Walk(pair, [250, 3])
    for seed in range(5):
        walk.forward(3, (), [3, 1], seed)
    assert walk.states[1].lengths == (265, 8)


def test_a_target_with_traces_conforms(traced: ModelTarget) -> None:
    check_target(traced, tolerance=CLOSE)
    assert traced._runner.traces


@pytest.mark.parametrize(
    ("family", "how"),
    [("granite", {}), ("qwen3", {"weight_bits": 4, "dtype": mx.bfloat16})],
)
def test_other_models_can_be_traced(make_target: Any, family: str, how: dict[str, Any]) -> None:
    plain, _ = make_target(family, **how)
    traced = with_traces(plain)
    logits = []
    for target in (plain, traced):
        state = filled(target, [3, 5])
        for seed in (1, 2):
            logits.append(target.forward(tokens_of(2, 3, seed), state).logits)
            state.commit([1, 2])
    assert traced._runner.traces == 1
    atol = CLOSE if logits[0].dtype == mx.float32 else 2e-2 * mx.abs(logits[0]).max().item()
    assert all(mx.allclose(logits[i + 2], logits[i], atol=atol) for i in (0, 1))


@pytest.mark.parametrize("right", [True, False])
def test_decoding_with_guesses_writes_what_plain_decoding_does(
    pair: tuple[ModelTarget, ModelTarget], right: bool
) -> None:
    plain, traced = pair
    prompt = [5, 17, 40, 8]
    alone = [t for outcome in decode(plain, None, prompt, max_tokens=40) for t in outcome.tokens]
    script = alone if right else [(t + i % 3 // 2) % 97 for i, t in enumerate(alone)]
    drafter = ScriptedDrafter.by_position([*prompt, *script])
    rounds = list(decode(traced, drafter, prompt, max_tokens=40))
    assert [t for outcome in rounds for t in outcome.tokens] == alone
    assert len(rounds) < len(alone)
    assert traced._runner.traces


def test_a_trace_is_made_once_for_each_shape(traced: ModelTarget) -> None:
    runner, state = traced._runner, filled(traced, [4, 9])
    for columns, taps, traces in [
        (3, (), 1),
        (2, (), 2),
        (3, (), 2),
        (3, (0,), 3),
        (3, (1,), 4),
        (3, (0,), 4),
    ]:
        traced.forward(tokens_of(2, columns, 1), state, taps=taps)
        state.commit([1, 0])
        assert runner.traces == traces


def test_of_the_traces_those_used_last_are_kept(
    pair: tuple[ModelTarget, ModelTarget], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, traced = pair[0], with_traces(pair[0])
    runner = traced._runner
    runner._compiled = CompiledForwards(runner._model, runner._trace, most=2)
    runner._compiled._widens = False
    made: list[int] = []
    own = Runner._trace

    def counted(tokens: mx.array, *rest: Any) -> Any:
        made.append(tokens.shape[1])
        return own(runner, tokens, *rest)

    monkeypatch.setattr(runner._compiled, "_call", counted)
    walk = Walk((plain, traced), [4])
    for columns in (2, 3, 2, 4, 2, 3):
        walk.forward(columns, (), [1], columns)
        assert runner.traces <= 2
    assert made == [2, 3, 4, 3]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("fault", [ValueError("no"), KeyboardInterrupt()])
def test_a_trace_that_fails_leaves_the_state_as_it_was(
    pair: tuple[ModelTarget, ModelTarget], monkeypatch: pytest.MonkeyPatch, fault: BaseException
) -> None:
    traced = with_traces(pair[0])
    walk = Walk((pair[0], traced), [255, 4])
    block = traced._runner._model.layers[2].mlp
    own = type(block)

    def broken(*args: Any) -> mx.array:
        raise fault

    block.__class__ = type(own.__name__, (own,), {"__call__": broken})
    try:
        with pytest.raises(type(fault)):
            traced.forward(tokens_of(2, 3, 1), walk.states[1], taps=(1,))
    finally:
        block.__class__ = own
    assert traced._runner.traces == 0
    walk.check()
    walk.forward(3, (1,), [2, 3], 2)
    walk.forward(1, (), [1, 1], 3)
    assert traced._runner.traces == 2


def test_new_weights_are_used(make_target: Any) -> None:
    """Adapters and merges replace what was loaded: arrays, or whole modules."""
    plain, _ = make_target("qwen3")
    traced = with_traces(plain)
    Walk((plain, traced), [4]).forward(3, (), [1], 0)
    layers = plain._runner._model.layers
    block = layers[1].mlp
    block.up_proj.update({"weight": block.up_proj.weight * 2})
    Walk((plain, traced), [4]).forward(3, (), [1], 0)
    block.down_proj = type(block.down_proj)(*block.down_proj.weight.shape[::-1], bias=False)
    Walk((plain, traced), [4]).forward(3, (), [1], 0)
    other, _ = make_target("qwen3")
    layers[2] = other._runner._model.layers[0]
    Walk((plain, traced), [4]).forward(3, (), [1], 0)
    assert traced._runner.traces == 1


def test_what_cannot_be_traced_goes_the_way_it_goes_without(traced: ModelTarget) -> None:
    """Prompts, unwanted and last logits, and more columns than a verify has."""
    state = traced.new_state(2)
    for columns, logits in [(3, "all"), (3, "last"), (3, "none"), (17, "all")]:
        traced.forward(tokens_of(2, columns, 1), state, logits=logits)  # type: ignore[arg-type]
        state.commit([1, 1])
    assert traced._runner.traces == 0
    traced.forward(tokens_of(2, 16, 1), state)
    assert traced._runner.traces == 1


@pytest.mark.parametrize(
    ("family", "how"),
    [("qwen3", {"kv_bits": 8}), ("gemma3", {}), ("lfm2", {})],
)
def test_layers_that_store_otherwise_are_not_traced(
    make_target: Any, family: str, how: dict[str, Any]
) -> None:
    traced = with_traces(make_target(family, **how)[0])
    state = filled(traced, [4, 4])
    traced.forward(tokens_of(2, 3, 1), state)
    assert traced._runner.traces == 0


def test_added_columns_are_traced_and_cut(
    pair: tuple[ModelTarget, ModelTarget], traced: ModelTarget
) -> None:
    """As on CUDA with quantised weights, where eight rows cost what one costs."""
    traced._runner._columns_at_least = 8
    walk = Walk((pair[0], traced), [4])
    for columns in (2, 5, 3):
        walk.forward(columns, (0,), [columns - 1], columns)
    assert traced._runner.traces == 1


@pytest.mark.parametrize(
    ("rows", "columns", "filled_up"),
    [(1, 2, 8), (1, 8, 8), (1, 9, 16), (3, 2, 4), (3, 5, 8), (2, 9, 16), (1, 1, 1)],
)
@pytest.mark.usefixtures("kernels")
def test_widths_share_traces(
    pair: tuple[ModelTarget, ModelTarget], rows: int, columns: int, filled_up: int
) -> None:
    traced = with_traces(pair[0])
    traced._runner._compiled._widens = True
    walk = Walk((pair[0], traced), [4] * rows)
    for count in (columns, filled_up):
        walk.forward(count, (0,), [count - 1] * rows, count)
    assert traced._runner.traces == 1


def test_experts_are_not_given_more_columns(make_target: Any) -> None:
    for family, width in (("qwen3", 8), ("qwen3_5_moe", 3)):
        target, _ = make_target(family)
        compiled = CompiledForwards(target._runner._model, target._runner._trace)
        assert compiled.width(1, 3) == width


def test_prompts_are_not_filled_up(traced: ModelTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    traced._runner._compiled._widens = True
    state = filled(traced, [4])
    traced.forward(tokens_of(1, 3, 0), state, logits="last")
    assert state._clock.provisional == 3


@pytest.mark.skipif(not on_cuda(), reason="the kernels are CUDA's")
@pytest.mark.parametrize("seed", range(4))
def test_kernels_and_mlxs_own_operations_keep_their_order(make_target: Any, seed: int) -> None:
    """Buffers that grow, rows that move and prompts between forwards, few of them waited for."""
    choose = random.Random(seed)
    made, _ = make_target("qwen3", dtype=mx.bfloat16, head_dim=64)
    traced = with_traces(made)
    assert traced._runner._bones.stores
    runner = Runner(replace(made._runner._bones, compiled=False))
    both = ModelTarget(runner, made.info, made.lender), traced
    states = [filled(target, [250, 3]) for target in both]
    logits: list[tuple[mx.array, ...]] = []

    def forward(columns: int, keep: list[int], step: int) -> None:
        tokens = tokens_of(states[0].rows, columns, step)
        pair = zip(both, states, strict=True)
        logits.append(tuple(t.forward(tokens, state).logits for t, state in pair))
        for state in states:
            state.commit(keep)

    for step in range(60):
        columns, rows = choose.choice((1, 1, 2, 5, 20)), states[0].rows
        forward(columns, [choose.randint(1, columns) for _ in range(rows)], step)
        turn = choose.randrange(9)
        if turn < 3:
            mx.async_eval(logits[-1])
        elif turn == 3 and rows > 1:
            kept = choose.sample(range(rows), rows - 1)
            for state in states:
                state.select(kept)
        elif turn == 4 and rows < 3:
            for target, state in zip(both, states, strict=True):
                state.join(filled(target, [5 + step * 5], step))
        elif turn == 5 and rows < 3:
            for target, state in zip(both, states, strict=True):
                other = target.new_state(1)
                other.restore(0, state.image(0))
                state.join(other)
    for plain, ours in logits:
        assert mx.abs(plain - ours).max() <= 0.06 * mx.abs(plain).max()


def test_single_columns_are_traced_where_what_attends_also_stores(
    pair: tuple[ModelTarget, ModelTarget], traced: ModelTarget, request: pytest.FixtureRequest
) -> None:
    walk = Walk((pair[0], traced), [4, 7])
    walk.forward(1, (), [1, 1], 0)
    assert traced._runner.traces == 0
    request.getfixturevalue("kernels")
    walk.forward(1, (), [1, 1], 1)
    assert traced._runner.traces == 1


@pytest.mark.usefixtures("kernels")
def test_what_is_stored_comes_after_what_was_stored_before(
    traced: ModelTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kernel of the one before, forwards in a row too, which are traced once."""
    state, calls = filled(traced, [4]), []
    own = layers.store_and_attend

    def marked(*args: Any) -> Any:
        calls.append(args)
        out, _, stored = own(*args)
        return out, args[-1] + 1, stored

    monkeypatch.setattr(layers, "store_and_attend", marked)
    for count in (1, 2):
        traced.forward(tokens_of(1, 2, count), state)
        state.commit([2])
        assert state.clock.storing.item() == count * traced.info.num_layers
    assert len(calls) == traced.info.num_layers
    assert state.clock.storing is state.pending()[0]


@pytest.mark.usefixtures("kernels")
def test_what_mlx_does_itself_waits_for_what_is_stored(traced: ModelTarget) -> None:
    def storing(lengths: list[int]) -> Any:
        state = filled(traced, lengths)
        traced.forward(tokens_of(state.rows, 2, 1), state)
        state.commit([1] * state.rows)
        assert state.clock.storing is not None
        return state

    def further(state: Any, columns: int) -> None:
        traced.forward(tokens_of(state.rows, columns, 3), state, logits="none")

    def join(other: Any) -> None:
        filled(traced, [3]).join(other)

    def grow(state: Any) -> None:
        for layer in state.layers:
            layer.make_room(300)

    def refill(state: Any) -> None:
        image = filled(traced, [3]).image(0)
        state.clock.lengths[0] = 0
        state.restore(0, image)

    for verb in (
        lambda state: state.image(0),
        lambda state: state.join(filled(traced, [3])),
        lambda state: state.select([1]),
        lambda state: further(state, 2),
        join,
        grow,
        refill,
    ):
        state = storing([4, 9])
        verb(state)
        assert state.clock.storing is None
    state = storing([4])
    state.layers[0].make_room(3)
    assert state.clock.storing is not None


@pytest.mark.usefixtures("kernels")
def test_attention_of_a_models_own_is_not_traced_past(make_target: Any) -> None:
    """What does not attend as mlx-lm does would see the newest columns alone."""
    plain, _ = make_target("qwen3")
    attention = plain._runner._model.layers[1].self_attn
    own = type(attention)

    def call(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        cache.update_and_fetch(*[mx.zeros((1, 2, x.shape[1], 32))] * 2)
        return x

    attention.__class__ = type(own.__name__, (own,), {"__call__": call})
    traced = with_traces(plain)
    state = filled(traced, [4])
    with pytest.raises(ValueError, match="in a way of its own"):
        traced.forward(tokens_of(1, 2, 1), state)
    assert state.clock.storing is None


@pytest.mark.parametrize("chunks", [2, 10])
def test_a_replay_writes_in_place(traced: ModelTarget, chunks: int) -> None:
    """What it needs besides is less than a copy of one buffer, of which there are six."""
    state, block = traced.new_state(1), tokens_of(1, 3, 1)
    for _ in range(chunks):
        traced.forward(tokens_of(1, 256, 0), state, logits="none")
        state.commit([200])
        mx.eval(state.pending())
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in range(4):
        forward = traced.forward(block, state, taps=(0,))
        mx.eval(forward.logits, forward.taps)
        state.commit([1])
    assert traced._runner.traces == 1
    assert mx.get_peak_memory() - before < state.layers[0].pending()[0].nbytes


def test_a_target_with_traces_takes_its_memory_along(tiny: Any) -> None:
    def use() -> None:
        target = with_traces(build_target(*tiny("qwen3")))
        state = filled(target, [4])
        mx.eval(target.forward(tokens_of(1, 3, 1), state).logits)
        assert target._runner.traces == 1

    use()
    gc.collect()
    before = mx.get_active_memory()
    use()
    gc.collect()
    assert mx.get_active_memory() <= before


def test_each_thread_has_traces_of_its_own(pair: tuple[ModelTarget, ModelTarget]) -> None:
    """One after the other, with room for one trace, so that each forgets what the other made."""
    plain, traced = pair[0], with_traces(pair[0])
    runner = traced._runner
    runner._compiled = CompiledForwards(runner._model, runner._trace, most=1)

    def check(*taps: int) -> None:
        assert runner.traces == 0
        walk = Walk((plain, traced), [4])
        for tap in taps:
            walk.forward(3, (tap,), [1], tap)
        assert runner.traces == 1

    check(0, 1)
    assert _in_a_thread(lambda: check(0, 1, 2)) is None
    assert runner.traces == 1
    Walk((plain, traced), [5]).forward(3, (2,), [1], 2)


def _in_a_thread(run: Callable[[], None]) -> BaseException | None:
    """What it raised."""
    raised: list[BaseException] = []

    def guarded() -> None:
        try:
            run()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join()
    return raised[0] if raised else None


# The proof.


@pytest.fixture
def proving(monkeypatch: pytest.MonkeyPatch) -> None:
    """Targets are proven for traces, as on CUDA."""
    monkeypatch.setattr(probe, "on_cuda", lambda: True)
    monkeypatch.setattr(tracing._Kept, "met", OWN_RULE)


@pytest.mark.usefixtures("proving")
@pytest.mark.parametrize(
    ("family", "how", "proven"),
    [
        ("qwen3", {}, True),
        ("qwen3", {"kv_bits": 8}, False),
        ("gemma2", {}, False),
        ("gemma3", {}, False),
        ("lfm2", {}, False),
    ],
)
def test_traces_are_used_where_they_are_proven(
    make_target: Any, family: str, how: dict[str, Any], proven: bool
) -> None:
    target, _ = make_target(family, **how)
    assert target._runner._bones.compiled is proven


def test_off_cuda_nothing_is_traced(pair: tuple[ModelTarget, ModelTarget]) -> None:
    assert not pair[0]._runner._bones.compiled


def _doing(model: Any, more: Callable[[Any, mx.array], mx.array]) -> None:
    """Let the inner model do more with what it gives."""
    inner = type(model.model)

    def call(self: Any, *args: Any, **kwargs: Any) -> mx.array:
        return more(self, inner.__call__(self, *args, **kwargs))

    model.model.__class__ = type(inner.__name__, (inner,), {"__call__": call})


def _evaluates(inner: Any, hidden: mx.array) -> mx.array:
    mx.eval(hidden)
    return hidden


def _keeps(inner: Any, hidden: mx.array) -> mx.array:
    inner.last = hidden
    return hidden


def _casting(own: Any) -> type:
    """Qwen3's attention, to something that it makes of its keys once they are stored."""

    def call(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        queries, keys, values = (
            each(x).reshape(*x.shape[:2], -1, 32).swapaxes(1, 2)
            for each in (self.q_proj, self.k_proj, self.v_proj)
        )
        offset = cache.offset if cache else 0
        queries, keys = (
            self.rope(norm(each), offset=offset)
            for norm, each in ((self.q_norm, queries), (self.k_norm, keys))
        )
        if cache:
            keys, values = cache.update_and_fetch(keys, values)
        out = scaled_dot_product_attention(
            queries, keys.astype(x.dtype) * 1, values, cache=cache, scale=self.scale, mask=mask
        )
        return self.o_proj(out.swapaxes(1, 2).flatten(2))

    return type(own.__name__, (own,), {"__call__": call})


@pytest.mark.usefixtures("proving", "kernels")
def test_a_model_that_changes_what_it_stored_has_ordinary_layers_in_traces(tiny: Any) -> None:
    plain = build_target(*tiny("qwen3"))
    model, config = tiny("qwen3")
    attention = model.layers[1].self_attn
    attention.__class__ = _casting(type(attention))
    target = build_target(model, config)
    bones, others = target._runner._bones, plain._runner._bones
    assert (others.compiled, others.stores) == (True, True)
    assert (bones.compiled, bones.stores) == (True, False)
    Walk((plain, target), [3, 8]).forward(3, (), [1, 2], 1)


@pytest.mark.usefixtures("proving")
@pytest.mark.parametrize("more", [_evaluates, _keeps])
def test_a_model_that_cannot_be_traced_runs_without(tiny: Any, more: Any) -> None:
    plain = build_target(*tiny("qwen3"))
    model, config = tiny("qwen3")
    _doing(model, more)
    target = build_target(model, config)
    assert plain._runner._bones.compiled
    assert not target._runner._bones.compiled
    Walk((plain, target), [3, 8]).forward(3, (), [1, 2], 1)


@pytest.mark.usefixtures("proving")
def test_a_trace_that_is_wrong_is_not_used(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TracedClock, "positions", lambda clock, columns: clock._at + 1)
    assert not build_target(*tiny("qwen3"))._runner._bones.compiled
