"""The table of pairs: every spelling of a target finds its row, and no other model does."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_drafters.pairs import Pair, base_name, find_pair, known_pairs, nearest_names

MODES = {"dspark", "dflash", "eagle3"}
SUFFIXES = [
    *("", "-4bit", "-8bit", "-bf16", "-fp16", "-f32", "-MLX-8bit", "-4bit-DWQ-053125", "-mxfp4"),
    *("-qat-4bit", "-2bit-g64", "-q4_k_m", ".w4a16", "-FP8"),
]
OWNERS = ["", "mlx-community/", "Qwen/", "/models/", "./", "C:\\models\\"]


@given(st.sampled_from(known_pairs()), st.sampled_from(OWNERS), st.sampled_from(SUFFIXES))
def test_owner_quantisation_and_case_make_no_difference(
    pair: Pair, owner: str, suffix: str
) -> None:
    for name in (pair.target, *pair.aliases):
        assert find_pair(f"{owner}{name}{suffix}") == pair
        assert find_pair(f"{owner}{name.upper()}{suffix}/") == pair


def test_published_repositories_and_cached_snapshots_are_found() -> None:
    for pair in known_pairs():
        if pair.repo:
            assert find_pair(pair.repo) == pair
            folder = "models--" + pair.repo.replace("/", "--")
            assert find_pair(Path("/home/u/hub") / folder / "snapshots" / "0f1e2d") == pair


@pytest.mark.parametrize(
    "model",
    [
        "Qwen/Qwen3-4B-Base",
        "mlx-community/Qwen3-4B-Instruct-2507-4bit",
        "mlx-community/Qwen3-40B-4bit",
        "Qwen/Qwen3-32B",
        "google/gemma-4-12B",
        "google/gemma-4-31B-it",
        "prism-ml/Bonsai-27B",
        "HuggingFaceTB/SmolLM2-360M-Instruct",
        "deepseek-ai/dspark_qwen3_4b_block7",
        "4bit",
        "",
        "/",
    ],
)
def test_another_model_is_not_the_target(model: str) -> None:
    assert find_pair(model) is None


def test_only_the_quantisation_at_the_end_of_a_name_goes() -> None:
    assert base_name("a/My-4bit-Model-Instruct-8bit") == "my-4bit-model-instruct"
    assert base_name("Qwen3-4B") == "qwen3-4b"
    assert base_name("model-32b-it") == "model-32b-it"
    assert base_name("phi-4") == "phi-4"
    assert base_name("series-16") == "series-16"


def test_names_are_unambiguous() -> None:
    names = [base_name(n) for pair in known_pairs() for n in (pair.target, *pair.aliases)]
    assert len(set(names)) == len(names)


def test_the_asked_for_targets_are_there_with_their_modes() -> None:
    modes = {pair.target: set(pair.modes) for pair in known_pairs()}
    assert modes == {
        "spec-tiny": {"dspark", "dflash"},
        "SmolLM2-135M-Instruct": {"dspark", "dflash"},
        "Qwen3-4B": MODES,
        "Qwen3-8B": MODES,
        "Qwen3-14B": MODES,
        "gemma-4-12B-it": MODES,
        "Ternary-Bonsai-27B": {"dspark"},
    }


def test_only_our_own_small_pairs_claim_to_be_measured() -> None:
    measured = {d.source for pair in known_pairs() for d in pair.drafters if d.measured}
    assert all(source.startswith(("spec-tiny-", "smollm2-135m-")) for source in measured)
    assert all(pair.measured == any(d.measured for d in pair.drafters) for pair in known_pairs())


def test_sources_are_repositories_files_or_folders_beside_the_target() -> None:
    for pair in known_pairs():
        for drafter in pair.drafters:
            where = drafter.source.removeprefix("gguf:")
            parts = where.split("/")
            if drafter.beside_target:
                assert parts == [drafter.source]
            elif where == drafter.source:
                assert len(parts) == 2
            else:
                assert len(parts) == 3
                assert where.endswith(".gguf")


def test_a_mode_picks_its_best_drafter() -> None:
    pair = find_pair("mlx-community/Qwen3-4B-8bit")
    assert pair is not None
    assert pair.drafter() == pair.drafters[0]
    dflash, eagle = pair.drafter("dflash"), pair.drafter("eagle3")
    assert dflash is not None
    assert dflash.source == "z-lab/Qwen3-4B-DFlash-b16"
    assert eagle is not None
    assert eagle.source == "deepseek-ai/eagle3_qwen3_4b_ttt7"
    assert pair.drafter("lookup") is None


@pytest.mark.parametrize(
    ("given_name", "meant"),
    [
        ("Qwen3-4", "Qwen3-4B"),
        ("mlx-community/Qwen-3-8B-4bit", "Qwen3-8B"),
        ("gemma-4-12B", "gemma-4-12B-it"),
        ("deepseek-ai/dspark_qwen3_4b", "deepseek-ai/dspark_qwen3_4b_block7"),
        ("spec-tinny", "spec-tiny"),
    ],
)
def test_a_slip_gets_the_name_that_was_meant(given_name: str, meant: str) -> None:
    assert meant in nearest_names(given_name)


def test_a_name_like_nothing_gets_nothing() -> None:
    assert nearest_names("zzzz") == ()
    assert nearest_names("") == ()
