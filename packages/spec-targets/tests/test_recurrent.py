"""Recurrent targets: whatever is kept of a forward, the state is that of the kept tokens alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import pytest
from mlx.nn.layers.base import Module

from spec_core import Batch, FixedLength, Request, SeamError, decode
from spec_core.conformance import check_target
from spec_core.seams import StateImage
from spec_core.testing import ScriptedDrafter
from spec_targets import UnsupportedTargetError, build_target, replay
from spec_targets.mlx_lm_import import mlx_lm_utils

TEXT = [(17 * i * i + 5 * i + 3) % 97 for i in range(200)]
OTHER = [(11 * i + 40) % 97 for i in range(40)]
SEED = 1  # its greedy texts do not fall into a loop
VARIANTS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": mx.bfloat16},
    "8-bit": {"weight_bits": 8},
}
slow = pytest.mark.slow


def _equal(ours: mx.array, theirs: mx.array) -> bool:
    return ours.shape == theirs.shape and bool(mx.array_equal(ours, theirs).item())


def _forward(target: Any, state: Any, tokens: Sequence[int], **how: Any) -> Any:
    return target.forward(mx.array([list(tokens)]), state, **how)


def _prefilled(target: Any, tokens: Sequence[int], chunk: int = 64) -> Any:
    state = target.new_state(1)
    for start in range(0, len(tokens), chunk):
        piece = tokens[start : start + chunk]
        _forward(target, state, piece, logits="none")
        state.commit([len(piece)])
    return state


# --- the contract ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "variant"),
    [
        ("qwen3_5", {}),
        ("lfm2", {}),
        pytest.param("qwen3_next", {}, marks=slow),
        pytest.param("qwen3_5", {"dtype": mx.bfloat16}, marks=slow),
        pytest.param("qwen3_5", {"weight_bits": 8}, marks=slow),
        pytest.param("qwen3_5", {"weight_bits": 2}, marks=slow),
        pytest.param("qwen3_5", {"kv_bits": 8}, marks=slow),
        pytest.param("qwen3_next", {"weight_bits": 8, "dtype": mx.bfloat16}, marks=slow),
        pytest.param("lfm2", {"dtype": mx.bfloat16}, marks=slow),
        pytest.param("lfm2", {"weight_bits": 8}, marks=slow),
    ],
    ids=str,
)
def test_recurrent_families_conform(tiny_target: Any, family: str, variant: dict[str, Any]) -> None:
    target, _ = tiny_target(family, **variant)
    assert target.info.tappable
    assert target.batch_refused == ""
    check_target(target)


# --- decoding ----------------------------------------------------------------------------------


class Oracle:
    """Plain greedy decoding with mlx-lm's own caches, and a drafter that knows it, with errors."""

    def __init__(self, own: Any, prompt: Sequence[int], count: int) -> None:
        self.prompt, self.tokens = list(prompt), list(prompt)
        step = self.prompt
        for _ in range(count):
            step = [int(mx.argmax(own.feed(step)[-1]).item())]
            self.tokens += step

    @property
    def continuation(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    def drafter(self, max_block: int) -> ScriptedDrafter:
        return ScriptedDrafter(self.guesses, max_block=max_block)

    def guesses(self, text: tuple[int, ...]) -> list[int]:
        """What comes next, a fifth of it wrong, with stretches that are all right."""
        known = enumerate(self.tokens[len(text) :], start=len(text))
        wrong = lambda at: at % 100 >= 40 and (at * at + at // 3) % 5 == 0  # noqa: E731
        return [(token + 1) % 97 if wrong(at) else token for at, token in known]


def _decoded(target: Any, oracle: Oracle, block: int, chunk: int) -> tuple[list[int], list[int]]:
    """The tokens, and how many drafts each round accepted."""
    rounds = list(
        decode(
            target,
            oracle.drafter(block),
            oracle.prompt,
            max_tokens=len(oracle.continuation),
            prefill_chunk=chunk,
        )
    )
    tokens = [token for outcome in rounds for token in outcome.tokens]
    return tokens, [outcome.accepted for outcome in rounds if not outcome.prefill]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", ["qwen3_5", "lfm2"])
def test_drafts_do_not_change_greedy_tokens(
    tiny_target: Any, own: Any, family: str, variant: str
) -> None:
    target, model = tiny_target(family, seed=SEED, **VARIANTS[variant])
    oracle = Oracle(own(model), TEXT[:9], 90)
    assert len(set(oracle.continuation)) > 20
    for block, chunk in ((2, 1), (7, 7)):
        tokens, accepted = _decoded(target, oracle, block, chunk)
        assert tokens == oracle.continuation
        assert len(set(accepted)) > 2


@slow
@pytest.mark.parametrize("length", [3, 70, 150])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", ["qwen3_5", "lfm2"])
def test_every_draft_length_and_chunk(
    tiny_target: Any, own: Any, family: str, variant: str, length: int
) -> None:
    target, model = tiny_target(family, seed=SEED, **VARIANTS[variant])
    oracle = Oracle(own(model), TEXT[:length], 300)
    assert len(set(oracle.continuation)) > 20
    chunks = (1, 7, 64, length)
    for block in range(1, 17):
        tokens, _ = _decoded(target, oracle, block, chunks[block % 4])
        assert tokens == oracle.continuation, f"draft length {block}"


@pytest.mark.parametrize("family", ["qwen3_5", "lfm2"])
def test_rows_of_a_batch_write_what_they_write_alone(
    tiny_target: Any, own: Any, family: str
) -> None:
    """Rows draft at different lengths, plain ones among them, join late and end early."""
    target, model = tiny_target(family, seed=SEED)
    oracles = [Oracle(own(model), TEXT[n : n + 5 + n], 40 + 10 * n) for n in range(3)]

    def script(text: tuple[int, ...]) -> list[int]:
        return next(o.guesses(text) for o in oracles if list(text[:5]) == o.prompt[:5])

    batch = Batch(target, ScriptedDrafter(script, max_block=6), FixedLength(6))
    written: dict[int, list[int]] = {}
    for number, oracle in enumerate(oracles):
        request = Request(
            tuple(oracle.prompt), max_tokens=len(oracle.continuation), max_draft=(6, 0, 3)[number]
        )
        prefill = batch.prefill(request)
        while (first := prefill.step(4)) is None:
            pass
        written[first.key] = list(first.tokens)
        batch.join(prefill)
        for _ in range(3):
            _note(written, batch)
    while batch.rows:
        _note(written, batch)
    assert list(written.values()) == [oracle.continuation for oracle in oracles]


def _note(written: dict[int, list[int]], batch: Batch) -> None:
    for outcome in batch.step():
        written[outcome.key] += outcome.tokens


# --- commit ------------------------------------------------------------------------------------


def _check_commit(target: Any, own: Any, model: Any, columns: int, keep: int) -> None:
    """Three columns after a commit are what a cache gives that only saw the kept tokens."""
    state = _prefilled(target, TEXT[:20])
    drafted = TEXT[20 : 20 + keep] + OTHER[: columns - keep]
    _forward(target, state, drafted)
    state.commit([keep])
    ours = _forward(target, state, TEXT[150:153]).logits
    reference = own(model)
    reference.feed(TEXT[: 20 + keep])
    assert _equal(ours[0], reference.feed(TEXT[150:153])), f"{keep} of {columns}"


@pytest.mark.parametrize("family", ["qwen3_5", "lfm2"])
def test_a_commit_leaves_what_the_kept_tokens_alone_give(
    tiny_target: Any, own: Any, family: str
) -> None:
    target, model = tiny_target(family)
    for columns, keep in ((1, 0), (1, 1), (2, 1), (5, 0), (5, 3), (16, 1), (16, 15), (16, 16)):
        _check_commit(target, own, model, columns, keep)


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe", "lfm2_moe"])
def test_their_relatives_commit_exactly_too(tiny_target: Any, own: Any, family: str) -> None:
    target, model = tiny_target(family)
    assert target.info.tappable
    assert target.batch_refused == ""
    for columns, keep in ((1, 1), (5, 0), (5, 3), (16, 9), (16, 16)):
        _check_commit(target, own, model, columns, keep)


@slow
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", ["qwen3_5", "lfm2", "qwen3_next"])
def test_every_commit_leaves_what_the_kept_tokens_alone_give(
    tiny_target: Any, own: Any, family: str, variant: str
) -> None:
    target, model = tiny_target(family, **VARIANTS[variant])
    for columns in range(1, 17):
        for keep in range(columns + 1):
            _check_commit(target, own, model, columns, keep)


@pytest.mark.parametrize("chunk", [1, 7, 64, len(TEXT)])
@pytest.mark.parametrize("family", ["qwen3_5", "lfm2"])
def test_prefill_chunks_do_not_matter(tiny_target: Any, own: Any, family: str, chunk: int) -> None:
    target, model = tiny_target(family)
    text = TEXT if chunk > 1 else TEXT[:60]
    state = _prefilled(target, text, chunk)
    reference = own(model)
    reference.feed(text)
    assert _equal(_forward(target, state, OTHER[:3]).logits[0], reference.feed(OTHER[:3]))


def _walk(target: Any, own: Any, model: Any, seed: int, steps: int) -> None:
    """Rows draft, join, leave, change places and resume from images, at random; every row always
    gives what mlx-lm's own cache gives that saw its text alone."""
    dice = random.Random(seed)
    texts = [TEXT[: dice.randint(1, 30)] for _ in range(3)]
    state = _prefilled(target, texts[0])
    for text in texts[1:]:
        state.join(_prefilled(target, text))
    for _ in range(steps):
        if dice.random() < 0.3 and len(texts) < 5:
            texts.append([dice.randrange(97) for _ in range(dice.randint(1, 20))])
            state.join(_resumed(target, _prefilled(target, texts[-1]).image(0)))
        if dice.random() < 0.3 and len(texts) > 2:
            order = dice.sample(range(len(texts)), len(texts) - 1)
            state.select(order)
            texts = [texts[row] for row in order]
        columns = dice.randint(1, 6)
        rows = [[dice.randrange(97) for _ in range(columns)] for _ in texts]
        valid = [dice.randint(1, columns) for _ in texts]
        logits = target.forward(mx.array(rows), state, valid=valid).logits
        keep = [dice.randint(0, real) for real in valid]
        state.commit(keep)
        for row, (text, real) in enumerate(zip(texts, valid, strict=True)):
            reference = own(model)
            reference.feed(text)
            assert _equal(logits[row, :real], reference.feed(rows[row][:real]))
        texts = [text + new[:n] for text, new, n in zip(texts, rows, keep, strict=True)]


def _resumed(target: Any, image: StateImage) -> Any:
    state = target.new_state(1)
    state.restore(0, image)
    return state


@pytest.mark.parametrize("family", ["qwen3_5", "lfm2"])
def test_rows_join_leave_and_keep_different_numbers(
    tiny_target: Any, own: Any, family: str
) -> None:
    target, model = tiny_target(family)
    _walk(target, own, model, seed=1, steps=8)


@slow
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("seed", range(2, 10))
@pytest.mark.parametrize("family", ["qwen3_5", "lfm2", "qwen3_next"])
def test_many_rows_join_leave_and_keep_different_numbers(
    tiny_target: Any, own: Any, family: str, seed: int, variant: str
) -> None:
    target, model = tiny_target(family, **VARIANTS[variant])
    _walk(target, own, model, seed, steps=20)


# --- what a commit costs -----------------------------------------------------------------------


def _counted(model: Any, part: str) -> list[int]:
    """Counts the runs of the mixers of a model."""
    runs = [0]
    mixers = [layer[part] for layer in model.layers if part in layer]
    cls = type(mixers[0])

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        runs[0] += 1
        return cls.__call__(self, *args, **kwargs)

    counting = type(cls.__name__, (cls,), {"__call__": call})
    for mixer in mixers:
        mixer.__class__ = counting
    return runs


@pytest.mark.parametrize(("family", "part"), [("qwen3_5", "linear_attn"), ("lfm2", "conv")])
def test_only_a_partial_commit_runs_the_recurrences_again_and_only_once(
    tiny_target: Any, family: str, part: str
) -> None:
    target, model = tiny_target(family)
    runs = _counted(model, part)
    for keep, again in (([4, 4], 0), ([0, 0], 0), ([4, 0], 0), ([2, 2], 1), ([4, 1], 1)):
        state = target.new_state(2)
        target.forward(mx.array([TEXT[:4], OTHER[:4]]), state)
        before = runs[0]
        state.commit(keep)
        mx.eval(state.pending())
        assert runs[0] - before == again, f"commit({keep})"


@pytest.mark.parametrize("limit", [1, 60_000])
def test_how_many_recurrences_run_together_does_not_matter(
    tiny_target: Any, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    target, _ = tiny_target("qwen3_5", num_hidden_layers=8)
    states = []
    for bytes_together in (1 << 30, limit):
        monkeypatch.setattr(replay, "_TOGETHER_BYTES", bytes_together)
        state = _prefilled(target, TEXT[:9])
        state.join(_prefilled(target, TEXT[:4]))
        target.forward(mx.array([TEXT[:5], OTHER[:5]]), state)
        state.commit([2, 4])
        states.append(state)
    mx.eval([state.pending() for state in states])
    assert all(_equal(*pair) for pair in zip(*(s.pending() for s in states), strict=True))


def test_a_partial_commit_computes_no_projection(tiny_target: Any) -> None:
    """The rebuild reads what was recorded: weights that change meanwhile do not matter."""
    target, model = tiny_target("qwen3_5")
    states = [target.new_state(1) for _ in range(2)]
    for state in states:
        mx.eval(_forward(target, state, TEXT[:6]).logits)
    states[0].commit([4])
    for layer in model.layers:
        mixer = layer.get("linear_attn")
        for name in ("in_proj_qkv", "in_proj_a", "in_proj_b", "conv1d") if mixer else ():
            mixer[name].weight = mixer[name].weight * 0
    states[1].commit([4])
    kept, rebuilt = (state.image(0).at_end for state in states)
    assert kept.keys() == rebuilt.keys()
    assert all(_equal(kept[name], rebuilt[name]) for name in kept)


def test_nothing_recorded_is_kept(tiny_target: Any) -> None:
    target, _ = tiny_target("qwen3_5")
    state = target.new_state(4)

    def memory_after(keep: list[int]) -> int:
        mx.eval(target.forward(mx.array([TEXT[:32]] * 4), state).logits)
        state.commit(keep)
        mx.eval(state.pending())
        return mx.get_active_memory()

    memory_after([32] * 4)
    full = memory_after([32] * 4)
    for keep in ([0, 0, 0, 0], [5, 5, 5, 5], [9, 1, 0, 32]):
        # The allocator may hand out somewhat larger buffers; 327680 bytes were recorded.
        assert memory_after(keep) < full + 16384, f"commit({keep})"


def test_an_error_in_the_model_leaves_the_state_as_it_was(tiny_target: Any) -> None:
    target, model = tiny_target("qwen3_5")
    classes = [type(module) for module in model.modules()]
    state = _prefilled(target, TEXT[:10])
    projection = model.layers[2].mlp.up_proj
    weight, projection.weight = projection.weight, projection.weight[:, :3]
    with pytest.raises(ValueError, match="matmul"):
        _forward(target, state, OTHER[:4])
    projection.weight = weight
    assert [type(module) for module in model.modules()] == classes
    ours = _forward(target, state, OTHER[:4]).logits
    assert _equal(ours, _forward(target, _prefilled(target, TEXT[:10]), OTHER[:4]).logits)


# --- images ------------------------------------------------------------------------------------


def test_an_image_has_the_recurrences_at_its_end_only(tiny_target: Any) -> None:
    target, _ = tiny_target("qwen3_5")
    image = _prefilled(target, TEXT[:12]).image(0, start=5)
    assert sorted(image.at_end) == ["0.slot0", "0.slot1", "2.slot0", "2.slot1"]
    assert sorted(image.per_token) == ["1.keys", "1.values", "3.keys", "3.values"]
    assert {each.array.shape[0] for each in image.per_token.values()} == {7}
    assert image.at_end["0.slot1"].shape == (4, 24, 16)


def test_without_its_recurrences_an_image_is_refused(tiny_target: Any) -> None:
    target, _ = tiny_target("qwen3_5")
    image = _prefilled(target, TEXT[:12]).image(0)
    for at_end in ({}, {k: v for k, v in image.at_end.items() if k != "2.slot0"}):
        cut = StateImage(image.start, image.length, image.per_token, at_end)
        with pytest.raises(SeamError, match="only from its state at exactly 12"):
            target.new_state(1).restore(0, cut)


def test_an_image_of_another_model_is_refused(tiny_target: Any) -> None:
    target, _ = tiny_target("qwen3_5")
    other, _ = tiny_target("qwen3_5", linear_value_head_dim=40)
    state = _prefilled(target, TEXT[:5])
    state.join(target.new_state(1))
    with pytest.raises(SeamError, match=r"state of shape .* does not fit"):
        state.restore(1, _prefilled(other, TEXT[:5]).image(0))


# --- what is refused ---------------------------------------------------------------------------


def test_an_unknown_recurrent_family_is_refused_by_name() -> None:
    config = {
        "model_type": "mamba2",
        "num_heads": 4,
        "head_dim": 16,
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 64,
        "state_size": 16,
        "num_hidden_layers": 2,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4,
        "n_groups": 1,
        "use_bias": False,
        "use_conv_bias": False,
        "tie_word_embeddings": True,
        "time_step_limit": [0.0, 1e9],
        "time_step_rank": "auto",
    }
    model_class, args_class = mlx_lm_utils()._get_classes(config)
    with pytest.raises(UnsupportedTargetError, match="ArraysCache, which cannot be taken back"):
        build_target(model_class(args_class.from_dict(config)), config)


def _hidden_mixers(model: Any) -> None:
    """The mixers go by another name, so that nothing records them."""

    def call(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        mixed = self.mixer(self.input_layernorm(x), mask, cache)
        return x + mixed + self.mlp(self.post_attention_layernorm(x + mixed))

    for layer in model.layers:
        if layer.is_linear:
            layer.mixer = layer.pop("linear_attn")
            layer.__class__ = type("Renamed", (type(layer),), {"__call__": call})


def _second_memory(model: Any) -> None:
    """The first mixer remembers something that no projection gives."""
    layer = model.layers[0]
    own = type(layer.linear_attn).__call__

    def call(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        past = 0 if cache is None or cache[2] is None else cache[2]
        sums = past + mx.cumsum(x, axis=1)
        if cache is not None:
            cache[2] = sums[:, -1:]
        return own(self, x, mask, cache) + sums

    cls = type(layer.linear_attn)
    layer.linear_attn.__class__ = type("Second", (cls,), {"__call__": call})
    outer, made = type(model), type(model).make_cache

    def make_cache(self: Any) -> list[Any]:
        caches: list[Any] = made(self)
        caches[0].cache.append(None)
        return caches

    model.__class__ = type(outer.__name__, (outer,), {"make_cache": make_cache})


@pytest.mark.parametrize(
    ("change", "reason"),
    [(_hidden_mixers, "was not recorded"), (_second_memory, "after a partial commit")],
)
def test_recurrences_that_cannot_be_rebuilt_are_refused(
    tiny: Any, change: Callable[[Module], None], reason: str
) -> None:
    model, config = tiny("qwen3_5")
    change(model)
    with pytest.raises(UnsupportedTargetError, match=reason):
        build_target(model, config)
