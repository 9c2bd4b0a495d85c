"""What our caches give equals what mlx-lm's own caches give, bit for bit on a CPU."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

FAMILIES = ["qwen3", "llama", "mistral", "qwen2"]
TEXT = [(17 * i * i + 5 * i + 3) % 97 for i in range(80)]
OTHER = [(11 * i + 40) % 97 for i in range(80)]
VARIANTS: list[dict[str, Any]] = [
    {},
    {"dtype": mx.bfloat16},
    {"weight_bits": 8},
    {"weight_bits": 4, "dtype": mx.bfloat16},
    {"kv_bits": 8},
    {"kv_bits": 4, "dtype": mx.bfloat16},
]


def _feed(target: Any, state: Any, tokens: list[int], **how: Any) -> Any:
    return target.forward(mx.array([tokens]), state, **how)


def _equal(ours: mx.array, theirs: mx.array) -> bool:
    return ours.shape == theirs.shape and bool(mx.array_equal(ours, theirs).item())


def _model(tiny_target: Any, family: str, variant: dict[str, Any]) -> Any:
    return tiny_target(family, **variant)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_partial_commits_equal_a_cache_that_saw_only_kept_tokens(
    tiny_target: Any, own: Any, family: str, variant: dict[str, Any]
) -> None:
    target, model = _model(tiny_target, family, variant)
    for keep in range(6):
        state = target.new_state(1)
        _feed(target, state, TEXT[:10], logits="none")
        state.commit([10])
        _feed(target, state, TEXT[10 : 10 + keep] + OTHER[: 5 - keep])
        state.commit([keep])
        ours = _feed(target, state, TEXT[10 + keep : 14 + keep]).logits
        reference = own(model, variant.get("kv_bits"))
        reference.feed(TEXT[: 10 + keep])
        assert _equal(ours[0], reference.feed(TEXT[10 + keep : 14 + keep]))


@pytest.mark.parametrize("chunk", [1, 7, 64, len(TEXT)])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_prefill_chunks_do_not_matter(
    tiny_target: Any, own: Any, variant: dict[str, Any], chunk: int
) -> None:
    target, model = _model(tiny_target, "qwen3", variant)
    state = target.new_state(1)
    for start in range(0, len(TEXT), chunk):
        piece = TEXT[start : start + chunk]
        last = _feed(target, state, piece, logits="last").logits
        state.commit([len(piece)])
    assert _equal(last[0], own(model, variant.get("kv_bits")).feed(TEXT)[-1:])


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_rows_of_different_length_equal_rows_alone(
    tiny_target: Any, own: Any, variant: dict[str, Any]
) -> None:
    target, model = _model(tiny_target, "llama", variant)
    lengths = [1, 30, 9]
    state = target.new_state(3)
    columns = max(lengths)
    padded = [TEXT[:n] + [TEXT[n - 1]] * (columns - n) for n in lengths]
    target.forward(mx.array(padded), state, logits="none", valid=lengths)
    state.commit(lengths)
    references = [own(model, variant.get("kv_bits")) for _ in lengths]
    for reference, n in zip(references, lengths, strict=True):
        reference.feed(TEXT[:n])
    for keep in ([2, 0, 3], [1, 3, 0], [3, 3, 3]):
        at = list(state.lengths)
        rows = [TEXT[n : n + k] + OTHER[: 3 - k] for n, k in zip(at, keep, strict=True)]
        ours = target.forward(mx.array(rows), state).logits
        state.commit(keep)
        for row, (reference, n, k) in enumerate(zip(references, at, keep, strict=True)):
            if k:
                assert _equal(ours[row, :k], reference.feed(TEXT[n : n + k]))


def test_capacity_growth_keeps_everything(tiny_target: Any, own: Any) -> None:
    target, model = tiny_target("qwen3")
    state, reference = target.new_state(1), own(model)
    text = [(31 * i + i // 7) % 97 for i in range(700)]
    for start in range(0, 700, 100):
        _feed(target, state, text[start : start + 100], logits="none")
        state.commit([100])
    reference.feed(text)
    assert _equal(_feed(target, state, [5, 6]).logits[0], reference.feed([5, 6]))


def test_unwanted_positions_never_reach_the_head(tiny_target: Any) -> None:
    target, model = tiny_target("qwen3")
    widths: list[int] = []
    head = type(model.lm_head)

    class Watched(head):  # type: ignore[misc, valid-type]
        def __call__(self, x: mx.array) -> mx.array:
            widths.append(x.shape[1])
            return super().__call__(x)

    model.lm_head.__class__ = Watched
    state = target.new_state(2)
    target.forward(mx.array([TEXT[:6]] * 2), state, logits="last", valid=[6, 2])
    state.commit([6, 2])
    target.forward(mx.array([TEXT[:6]] * 2), state, logits="all", valid=[6, 2])
    assert widths == [1, 6]
