"""Which slot convention is right: told by what a target accepts."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import mlx.core as mx
import pytest

from spec_core.errors import InvalidValueError
from spec_core.testing import NoisyOracle, TinyTarget, continuation
from spec_drafters.block import BlockDrafter
from spec_drafters.errors import PackagingError
from spec_drafters.load import SlotConvention, inspect_drafter, load_drafter
from spec_drafters.probe import Acceptance, measure, plain_prompts
from spec_drafters.readings import Reading, hint, readings

from .helpers import Golden

VOCAB = 16
HIDDEN = 2 * VOCAB
CONFIG = {
    "architectures": ["DFlashDraftModel"],
    "block_size": 5,
    "hidden_size": HIDDEN,
    "intermediate_size": 4,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": HIDDEN,
    "num_hidden_layers": 1,
    "num_target_layers": 3,
    "vocab_size": VOCAB,
    "rope_theta": 10000.0,
    "markov_rank": 1,
    "dflash_config": {"mask_token_id": VOCAB - 1, "target_layer_ids": [0]},
}


def target() -> TinyTarget:
    return TinyTarget(vocab=VOCAB, hidden=HIDDEN, layers=3)


@cache
def follower() -> list[int]:
    """The token that the target most often puts after each token."""
    tiny, counts = target(), [[0] * VOCAB for _ in range(VOCAB)]
    for prompt in plain_prompts(VOCAB):
        text = prompt + continuation(tiny, prompt, 60, {})
        for before, after in zip(text[len(prompt) - 1 :], text[len(prompt) :], strict=False):
            counts[before][after] += 1
    return [row.index(max(row)) for row in counts]


def hybrid(folder: Path, convention: str) -> Path:
    """A drafter that knows what follows its anchor, and says so in one slot only.

    Features 0..15 of a row name its token; the head reads features 16..31 alone. A drafter of
    the anchor's slot has the name there too. For the other convention attention carries it: all
    keys are alike, context and masks are zero, so every slot receives the anchor's name; and the
    anchor's own slot holds something else, which is larger.
    """
    zeros = mx.zeros((HIDDEN, HIDDEN))
    name, half = mx.eye(VOCAB), mx.zeros((VOCAB, VOCAB))
    other = name if convention == "anchor" else mx.ones((VOCAB, VOCAB)) * mx.arange(VOCAB)
    embedding = mx.concatenate([name, other], axis=1)
    embedding[VOCAB - 1] = 0
    head = mx.zeros((VOCAB, HIDDEN))
    for before, after in enumerate(follower()):
        head[after, VOCAB + before] = 1.0
    carried = convention == "shifted"
    tensors = {
        "embed_tokens.weight": embedding,
        "lm_head.weight": head,
        "fc.weight": zeros,
        "layers.0.self_attn.v_proj.weight": mx.eye(HIDDEN) * carried,
        "layers.0.self_attn.o_proj.weight": mx.concatenate(
            [mx.zeros((VOCAB, HIDDEN)), mx.concatenate([name, half], axis=1)]
        ),
        "markov_head.markov_w1.weight": mx.zeros((VOCAB, 1)),
        "markov_head.markov_w2.weight": mx.zeros((VOCAB, 1)),
        "layers.0.mlp.down_proj.weight": mx.zeros((HIDDEN, 4)),
    }
    for norm in ("norm", "hidden_norm", "layers.0.input_layernorm"):
        tensors[f"{norm}.weight"] = mx.ones((HIDDEN,))
    tensors["layers.0.post_attention_layernorm.weight"] = mx.ones((HIDDEN,))
    for kind in ("q", "k"):
        tensors[f"layers.0.self_attn.{kind}_proj.weight"] = zeros
        tensors[f"layers.0.self_attn.{kind}_norm.weight"] = mx.ones((HIDDEN,))
    for kind in ("gate", "up"):
        tensors[f"layers.0.mlp.{kind}_proj.weight"] = mx.zeros((4, HIDDEN))
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.mark.parametrize(("convention", "slot"), [("anchor", 0), ("shifted", 1)])
def test_a_hybrid_that_does_not_say_is_tried(tmp_path: Path, convention: str, slot: int) -> None:
    folder = hybrid(tmp_path, convention)
    spec = inspect_drafter(folder)
    assert spec.first_slot is None  # type: ignore[attr-defined]
    drafter = load_drafter(folder, target())
    assert isinstance(drafter, BlockDrafter)
    assert (drafter.spec.first_slot, drafter.max_block) == (slot, 5 - slot)


@pytest.mark.parametrize("convention", ["anchor", "shifted"])
def test_the_wrong_convention_shows_in_acceptance(
    tmp_path: Path, convention: SlotConvention
) -> None:
    folder, prompts = hybrid(tmp_path, convention), plain_prompts(VOCAB)
    other: SlotConvention = "shifted" if convention == "anchor" else "anchor"
    right, wrong = (
        measure(target(), load_drafter(folder, target(), slot_convention=c), prompts)
        for c in (convention, other)
    )
    assert right.by_position[0] > 2 * wrong.by_position[0]
    assert right.accepted > 2 * wrong.accepted
    assert right.rounds < wrong.rounds


def test_a_convention_that_trying_does_not_tell_is_asked_for(tmp_path: Path) -> None:
    folder = hybrid(tmp_path, "anchor")
    tensors = dict(mx.load(str(folder / "model.safetensors")))
    tensors["lm_head.weight"] = mx.zeros((VOCAB, HIDDEN))
    mx.eval(tensors)
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    with pytest.raises(PackagingError, match="name the slot convention") as refusal:
        load_drafter(folder, target())
    assert "\n" not in str(refusal.value)


def test_unfit_conventions_are_refused() -> None:
    golden = Golden.named("eagle3_qwen3")
    with pytest.raises(InvalidValueError, match="auto: a drafter of mode eagle3"):
        load_drafter(golden.path, golden.target(), slot_convention="anchor")  # type: ignore[arg-type]
    with pytest.raises(InvalidValueError, match="auto, anchor or shifted"):
        load_drafter(golden.path, golden.target(), slot_convention="x")  # type: ignore[arg-type]


def test_what_is_measured_is_what_the_round_counts() -> None:
    """An oracle that is always right is accepted whole, slot by slot."""
    tiny = target()
    seen = measure(tiny, NoisyOracle(tiny, probability=1.0, max_block=4), [[1, 2, 3]], tokens=21)
    assert (seen.rounds, seen.accepted, seen.by_position) == (4, 4.0, (1.0,) * 4)


@pytest.mark.parametrize("vocabulary", [2, 16, 300, 150_000])
def test_plain_prompts_are_legal_and_differ(vocabulary: int) -> None:
    prompts = plain_prompts(vocabulary)
    assert all(0 <= token < vocabulary for prompt in prompts for token in prompt)
    assert vocabulary < 300 or len({tuple(p) for p in prompts}) == len(prompts)


# --- several readings ---------------------------------------------------------------------------


@pytest.mark.parametrize("convention", ["anchor", "shifted"])
def test_the_right_reading_is_pointed_out(tmp_path: Path, convention: SlotConvention) -> None:
    folder, prompts = hybrid(tmp_path, convention), plain_prompts(VOCAB)[:2]
    other: SlotConvention = "shifted" if convention == "anchor" else "anchor"
    wrong = list(readings(folder, target(), prompts, slot_convention=other, tokens=20))
    assert [(r.slot_convention, r.tap_shift) for r in wrong] == [
        (other, 0),
        (convention, 0),
        (other, -1),
        (other, 1),
    ]
    advice = hint(wrong)
    assert advice is not None
    assert f"with --slot-convention {convention}; " in advice
    assert hint(list(readings(folder, target(), prompts, tokens=20))) is None


def test_taps_that_the_target_does_not_have_are_not_tried() -> None:
    golden = Golden.named("eagle3_qwen3")
    info = golden.target().info
    tiny = TinyTarget(info.vocab_size, info.hidden_size, 12)
    found = list(readings(golden.path, tiny, [[1, 2, 3]], tap_shift=1, tokens=4))
    assert [(r.slot_convention, r.tap_shift) for r in found] == [("auto", 1), ("auto", 0)]


def test_moved_taps_are_pointed_out() -> None:
    def reading(shift: int, accepted: float) -> Reading:
        return Reading("auto", shift, Acceptance(10, accepted, (0.5,)))

    advice = hint([reading(0, 0.4), reading(-1, 1.2), reading(1, 0.3)])
    assert advice is not None
    assert advice.startswith("0.40 guesses a round are accepted, 1.20 with --tap-shift -1; ")
    assert hint([reading(0, 1.0), reading(-1, 1.2)]) is None
