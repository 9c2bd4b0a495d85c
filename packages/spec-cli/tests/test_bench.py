"""The parts of `spec benchmark`: on tiny targets and made-up figures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast
from xml.etree import ElementTree

import pytest

from spec_cli.bench import measure, sweeps
from spec_cli.bench.fences import RoundTimes
from spec_cli.bench.markdown import markdown
from spec_cli.bench.measure import BASELINE, Divergence, Plan, Result, SetResult
from spec_cli.bench.plot import plot
from spec_cli.bench.prompts import bundled_set, prompt_file
from spec_cli.bench.report import Context, Report, grids, record
from spec_cli.bench.svg import Bar, Bars, Lines, _Scale, page
from spec_cli.bench.sweeps import Point
from spec_cli.bench.trial import Setting, Task, Trial, named
from spec_cli.bench.verdict import verdict
from spec_cli.commands.benchmark import SETS
from spec_core import CostCurves, FixedLength, InvalidValueError, RoundCost, SamplingParams
from spec_core.testing import NoisyOracle, ScriptedDrafter, TinyTarget
from spec_server import Tokeniser

HARD = ("bytes", "prose", "foreign")

# ---------------------------------------------------------------------- sets


@pytest.mark.parametrize("name", SETS)
def test_bundled_sets_have_prompts_and_hard_ones_are_sampled_with_a_seed(name: str) -> None:
    found = bundled_set(name)
    assert len(found.prompts) >= 8
    assert all(prompt.text.strip() for prompt in found.prompts)
    assert (found.sampling is not None) == (name in HARD)
    if found.sampling is not None:
        assert found.sampling.seed is not None
        assert found.sampling.temperature > 0


def test_a_prompt_file_may_say_how_it_is_answered(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    prompts = ["one", {"text": "two", "chat": False}]
    file.write_text(json.dumps({"prompts": prompts, "sampling": {"temperature": 0.7}}))
    found = prompt_file(file)
    assert found.name == "mine"
    assert [prompt.chat for prompt in found.prompts] == [True, False]
    assert found.sampling == SamplingParams(temperature=0.7, seed=0)
    assert found.first(1).prompts == found.prompts[:1]


@pytest.mark.parametrize(
    "content",
    [
        {"prompts": []},
        {"sampling": {}},
        {"prompts": ["a"], "sampling": 3},
        {"prompts": ["a"], "sampling": {"heat": 1}},
        {"prompts": ["a"], "sampling": {"temperature": -1}},
    ],
)
def test_a_prompt_file_that_says_it_wrongly_is_refused(tmp_path: Path, content: object) -> None:
    (tmp_path / "p.json").write_text(json.dumps(content))
    with pytest.raises(InvalidValueError):
        prompt_file(tmp_path / "p.json")


@pytest.mark.parametrize("name", ["p.json", "p.txt"])
def test_a_prompt_file_that_is_no_text_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\xff\xfeabc")
    with pytest.raises(InvalidValueError, match="UTF-8"):
        prompt_file(tmp_path / name)


# ---------------------------------------------------------------------- measuring


class Letters:
    """A tokenizer whose tokens are letters."""

    byte_tokens: frozenset[int] = frozenset()
    markers = None
    end_tokens: frozenset[int] = frozenset()

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(64 + i) for i in ids)


TARGET = TinyTarget(vocab=31)
TASKS = {
    "easy": [Task((3, 5, 7), 12), Task((9, 1, 4, 2), 12)],
    "hot": [Task((8, 8, 2), 10, SamplingParams(temperature=1.0, seed=4))],
}


def plan(*drafters: ScriptedDrafter | NoisyOracle, **options: object) -> Plan:
    settings = [
        Setting(BASELINE, None, None, FixedLength),
        *(Setting(d.name, 3, d, partial(FixedLength, 3)) for d in drafters),
    ]
    whole = Plan(TARGET, cast(Tokeniser, Letters()), TASKS, settings, {}, 2)
    return replace(whole, **options)  # type: ignore[arg-type]


def quiet(text: str) -> None:
    """Progress that nobody reads."""


def test_every_setting_answers_as_the_baseline_does() -> None:
    oracle = NoisyOracle(TARGET, 0.8, max_block=4)
    base, drafted = measure.measure(plan(oracle), quiet)
    assert base.speedup == 1.0
    assert drafted.divergence is None
    assert set(drafted.sets) == set(TASKS)
    assert base.sets["easy"].plain_share == 1.0
    assert drafted.sets["easy"].plain_share < 0.5
    assert drafted.mean_accept_length > 1.5
    assert drafted.times is not None
    assert drafted.times.accept <= drafted.times.overhead


def test_a_policy_starts_anew_with_each_set_of_each_trial() -> None:
    made: list[FixedLength] = []

    def policy() -> FixedLength:
        made.append(FixedLength(2))
        return made[-1]

    drafter = NoisyOracle(TARGET, 0.5, max_block=4)
    one = plan(drafter)
    settings = [one.settings[0], Setting("oracle", 2, drafter, policy)]
    measure.measure(replace(one, settings=settings), quiet)
    assert len(made) >= 2 * len(TASKS)


def test_a_reference_is_compared_where_it_is_greedy_only() -> None:
    def wrong(task: Task) -> Trial:
        return Trial(token_ids=(1, 2, 3), decode_seconds=1.0, ttft_seconds=1.0)

    found = measure.measure(plan(reference={"other": wrong}), quiet)
    divergence = found[1].divergence
    assert divergence is not None
    assert divergence.set_name == "easy"
    hot_only = plan(reference={"other": wrong}, sets={"hot": TASKS["hot"]})
    assert measure.measure(hot_only, quiet)[1].divergence is None


def test_several_requests_at_once_answer_as_alone() -> None:
    points = sweeps.concurrency(plan(NoisyOracle(TARGET, 0.7, max_block=4)), [1, 3], quiet)
    assert [(p.value, p.mode) for p in points] == [
        (1, BASELINE),
        (1, "oracle"),
        (3, BASELINE),
        (3, "oracle"),
    ]
    assert all(point.identical for point in points)
    assert points[0].speedup == points[2].speedup == 1.0
    assert points[3].mean_accept_length > 1.1


def test_answers_behind_a_context_are_the_baselines() -> None:
    points = sweeps.contexts(plan(NoisyOracle(TARGET, 0.7, max_block=4)), [40, 90], quiet)
    assert [point.value for point in points] == [40, 40, 90, 90]
    assert all(point.identical for point in points)


@pytest.mark.parametrize(("depth", "reason"), [(2, "a prompt's length"), (10**7, "at most")])
def test_a_context_that_does_not_fit_is_refused(depth: int, reason: str) -> None:
    with pytest.raises(InvalidValueError, match=reason):
        sweeps.contexts(plan(), [depth], quiet)


# ---------------------------------------------------------------------- reports


def result(
    mode: str, max_draft: int | str | None, speedups: dict[str, float], **changes: object
) -> Result:
    plain: object = changes.pop("plain_share", {})
    assert isinstance(plain, dict)
    made = Result(
        mode=mode,
        max_draft=max_draft,
        source=None,
        tokens_per_second=10.0,
        speedup=sorted(speedups.values())[len(speedups) // 2],
        mean_accept_length=2.0,
        accept_by_position=(0.9, 0.5) if mode != BASELINE else (),
        times=RoundTimes(0.001, 0.01, 0.0005, 0.002),
        ttft_seconds=0.1,
        peak_bytes=10**8,
        sets={
            name: SetResult(20 * s, s, (s - 0.1, s + 0.1), 2.0, plain.get(name, 0.0))
            for name, s in speedups.items()
        },
        divergence=None,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


BASE = result(BASELINE, None, {"chat": 1.0, "code": 1.0, "bytes": 1.0})
FIXED = result("dspark", 3, {"chat": 1.2, "code": 1.7, "bytes": 0.6})
LONG = result("dspark", None, {"chat": 1.0, "code": 2.0, "bytes": 0.3})
CURVES = CostCurves(RoundCost(1, n, 64, 0.01 + 0.001 * n) for n in range(4))
AUTO = result(
    "dspark",
    "auto",
    {"chat": 1.2, "code": 1.9, "bytes": 0.99},
    plain_share={"bytes": 0.95},
    curves=CURVES,
)
CONTEXT = Context("spec benchmark", "a machine", "tiny", "float32", {"chat": 2, "code": 1}, 32, 3)
REPORT = Report(
    CONTEXT,
    [BASE, FIXED, LONG, AUTO],
    [Point(2, "dspark", 3, 40.0, 1.4, (1.3, 1.5), 2.0, True)],
    [Point(512, "dspark", "auto", 9.0, 1.1, (1.1, 1.1), 2.0, False)],
)


def test_settings_have_names() -> None:
    assert [named("x", n) for n in (None, 0, 4, "auto")] == ["x", "x at 0", "x at 4", "x auto"]


def test_the_verdict_says_where_auto_parks_and_what_it_gives_away() -> None:
    said = verdict(REPORT.results)
    assert "dspark auto is the fastest: 1.20x" in said or "is the fastest" in said
    assert "parked on bytes (0.99x)" in said
    assert "1.90x on code" in said
    assert "least on code, 0.95" in said
    assert said.endswith("All answers are identical to plain decoding's.")


def test_the_verdict_admits_a_loss_and_a_difference() -> None:
    odd = Divergence("chat", 1, 7, 3, None, 0.002)
    slow = result("dflash", None, {"chat": 0.7, "code": 0.9}, divergence=odd)
    said = verdict([BASE, slow])
    assert said.startswith("No setting is faster than plain decoding here")
    assert "at token 7 of chat prompt 1" in said
    assert verdict([BASE]).startswith("Nothing was drafted")


def test_json_has_every_run_and_sweep() -> None:
    found = json.loads(json.dumps(record(REPORT)))
    assert [run["max_draft"] for run in found["runs"]] == [None, 3, None, "auto"]
    assert found["runs"][3]["round_ms"][0] == {"rows": 1, "length": 0, "depth": 64, "ms": 10.0}
    assert found["runs"][3]["sets"]["bytes"]["plain_share"] == 0.95
    assert found["concurrency"][0]["rows"] == 2
    assert found["contexts"][0]["positions"] == 512


def test_tables_are_rectangular_and_show_the_spread() -> None:
    for grid in grids(REPORT):
        assert all(len(row) == len(grid.headings) for row in grid.rows)
    speeds = grids(REPORT)[0]
    assert speeds.rows[1][3] == "1.20x ±0.10"
    assert len(grids(replace(REPORT, concurrency=(), contexts=()))) == 2


def test_markdown_has_all_tables_and_how_they_were_made() -> None:
    page = markdown(REPORT)
    tables = [block for block in page.split("\n\n") if block.startswith("| ")]
    assert len(tables) == 4
    for table in tables:
        assert len({line.count("|") for line in table.splitlines()}) == 1
    assert "$ spec benchmark" in page
    assert verdict(REPORT.results) in page


def test_the_picture_is_sound_and_shows_every_setting() -> None:
    picture = plot(REPORT)
    tree = ElementTree.fromstring(picture)
    texts = [element.text for element in tree.iter("{http://www.w3.org/2000/svg}text")]
    for wanted in ("dspark at 3", "dspark auto", "bytes", "position in the draft", "guesses"):
        assert wanted in texts
    assert len(picture) < 40_000


def test_a_picture_of_plain_decoding_alone_has_no_empty_panels() -> None:
    assert plot(replace(REPORT, results=[BASE])).count('class="title"') == 1


def test_text_in_pictures_is_escaped() -> None:
    bars = Bars("a < b & c", "x", ("<g>",), (("s>", (Bar(1.0, 0.5, 1.5),)),))
    lines = Lines("t", "", "x", (("one", ((1.0, 2.0),)),))
    ElementTree.fromstring(page([bars, lines], "caption & more"))


@pytest.mark.parametrize("most", [0.0, 1e-6, 0.7, 1.0, 3.7, 99.0, 100.0, 12345.0])
def test_axes_end_at_or_above_the_largest_value(most: float) -> None:
    scale = _Scale.up_to(most)
    assert scale.top >= most
    assert 2 <= len(scale.ticks()) <= 7
    assert scale.ticks()[-1] == pytest.approx(scale.top)
