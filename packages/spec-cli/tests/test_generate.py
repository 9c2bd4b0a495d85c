"""`spec generate`: answers on stdout, everything else on stderr, JSON with the agreed keys."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from spec_cli import bundled

from .command import Spec

KEYS = [
    "text",
    "token_ids",
    "prompt_tokens",
    "completion_tokens",
    "finish_reason",
    "mode",
    "drafter",
    "max_draft",
    "rounds",
    "drafted",
    "accepted",
    "mean_accept_length",
    "round_accepts",
    "accept_by_position",
    "tokens_per_second",
    "ttft_seconds",
    "seconds",
    "fallbacks",
]
PROMPT = "Write a Python function that checks if a number is even."
ANSWER = """```python
def is_even(num):
    return num % 2 == 0
```

A number is even when the remainder of division by 2 is 0."""


def as_json(spec: Spec, *arguments: str, **options: Any) -> dict[str, Any]:
    ran = spec("generate", "--json", *arguments, **options)
    assert ran.code == 0, ran.err
    record: dict[str, Any] = json.loads(ran.out)
    return record


def test_the_bundled_pair_answers_and_drafts(spec: Spec) -> None:
    ran = spec("generate", PROMPT)
    assert (ran.code, ran.out) == (0, ANSWER + "\n")
    assert "dspark" in ran.err
    assert "tokens/s" in ran.err


def test_json_has_exactly_the_agreed_keys(spec: Spec) -> None:
    record = as_json(spec, PROMPT)
    assert list(record) == KEYS
    assert record["text"] == ANSWER
    assert record["mode"] == "dspark"
    assert record["drafter"] == "spec-tiny-dspark"
    assert record["max_draft"] == "full"
    assert record["completion_tokens"] == len(record["token_ids"])
    assert record["rounds"] == len(record["round_accepts"])
    assert record["accepted"] == sum(record["round_accepts"])
    mean = record["accepted"] / record["rounds"] + 1
    assert record["mean_accept_length"] == pytest.approx(mean)
    assert len(record["accept_by_position"]) == 7
    assert record["finish_reason"] == "stop"
    assert record["fallbacks"] == []


@pytest.fixture(scope="module")
def plain(spec: Spec) -> dict[str, Any]:
    return as_json(spec, PROMPT, "--mode", "baseline")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--mode", "dspark", "--max-draft", "3"],
        ["--mode", "dflash"],
        ["--mode", "lookup"],
        ["--lookup-drafts"],
        ["--max-draft", "auto"],
        ["--max-draft", "auto", "--mode", "lookup"],
        ["--max-draft", "auto", "--no-lookup-drafts"],
        ["--confidence-threshold", "0.6"],
        ["--drafter", str(bundled.TARGET.with_name("spec-tiny-dflash"))],
        ["--model", "spec-tiny", "--max-draft", "full"],
    ],
)
def test_every_way_of_drafting_gives_the_plain_answer(
    spec: Spec, plain: dict[str, Any], arguments: list[str]
) -> None:
    record = as_json(spec, PROMPT, *arguments)
    assert record["token_ids"] == plain["token_ids"]
    assert record["mode"] != "baseline"


def test_a_draft_length_of_0_is_plain_decoding(spec: Spec, plain: dict[str, Any]) -> None:
    record = as_json(spec, PROMPT, "--max-draft", "0")
    assert record["token_ids"] == plain["token_ids"]
    assert (record["mode"], record["max_draft"], record["drafted"]) == ("dspark", "0", 0)


def test_the_plain_answer_has_plain_statistics(plain: dict[str, Any]) -> None:
    assert (plain["mode"], plain["drafter"], plain["drafted"]) == ("baseline", None, 0)
    assert plain["mean_accept_length"] == 1.0
    assert plain["rounds"] == plain["completion_tokens"] - 1


def test_auto_says_where_it_stands(spec: Spec) -> None:
    record = as_json(spec, PROMPT, "--max-draft", "auto")
    assert re.fullmatch(r"auto: (parked|\d+)", record["max_draft"])
    told = spec("generate", PROMPT, "--max-draft", "auto").err
    assert f"dspark+lookup ({record['max_draft'][:5]}" in told


@pytest.fixture
def open_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody asked for a draft length."""
    monkeypatch.delenv("SPEC_MAX_DRAFT")


@pytest.mark.usefixtures("open_length")
@pytest.mark.parametrize("mode", ["auto", "dflash", "lookup", "baseline"])
def test_who_asks_for_no_draft_length_gets_auto(
    spec: Spec, plain: dict[str, Any], mode: str
) -> None:
    record = as_json(spec, PROMPT, "--mode", mode)
    assert record["token_ids"] == plain["token_ids"]
    shown = {"baseline": "0", "lookup": "auto"}.get(mode, r"auto: (parked|\d+)")
    assert re.fullmatch(shown, record["max_draft"])


@pytest.mark.usefixtures("open_length")
def test_a_confidence_threshold_cuts_the_whole_block_unless_a_length_was_asked_for(
    spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    threshold = ("--confidence-threshold", "0.6")
    assert as_json(spec, PROMPT, *threshold)["max_draft"] == "full, confidence 0.6"
    typed = spec("generate", PROMPT, *threshold, "--max-draft", "auto")
    monkeypatch.setenv("SPEC_MAX_DRAFT", "auto")
    for refused in (typed, spec("generate", PROMPT, *threshold)):
        assert refused.code == 2
        assert "--confidence-threshold" in refused.err
    assert as_json(spec, PROMPT, *threshold, "--max-draft", "2")["max_draft"].startswith("2")


@pytest.mark.usefixtures("open_length")
def test_the_first_run_says_that_it_measures_and_where_it_cannot_store(
    spec: Spec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SPEC_CURVES_DIR", str(tmp_path / "curves"))
    first, second = (spec("generate", PROMPT) for _ in range(2))
    assert "measuring what rounds cost here" in first.err
    assert "measuring" not in second.err
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPEC_CURVES_DIR", str(tmp_path / "file" / "curves"))
    unstored = spec("generate", PROMPT)
    assert unstored.err.count("note: ") == 1
    assert "cannot be stored" in unstored.err
    assert first.out == second.out == unstored.out


def test_the_draft_length_is_a_cap(spec: Spec) -> None:
    record = as_json(spec, PROMPT, "--max-draft", "2")
    assert len(record["accept_by_position"]) == 2
    assert max(record["round_accepts"]) <= 2


@pytest.mark.parametrize("mode", ["dspark", "lookup"])
def test_a_seed_repeats_in_every_mode(spec: Spec, mode: str) -> None:
    options = ("--temperature", "1", "--seed", "5", "--max-tokens", "24", "--top-p", "0.9")
    record = as_json(spec, "Hello", *options, "--mode", mode)
    assert (
        record["token_ids"] == as_json(spec, "Hello", *options, "--mode", "baseline")["token_ids"]
    )


def test_sampling_options_reach_the_model(spec: Spec, plain: dict[str, Any]) -> None:
    first = plain["token_ids"][0]
    record = as_json(spec, PROMPT, "--max-tokens", "3", "--logit-bias", f"{first}=-100")
    assert record["token_ids"][0] != first


@pytest.mark.parametrize("penalty", ["presence", "frequency", "repetition"])
def test_penalties_reach_the_model(spec: Spec, penalty: str) -> None:
    question = ("How does a bicycle stay upright?", "--max-tokens", "40")
    record = as_json(spec, *question, f"--{penalty}-penalty", "1.5")
    assert record["token_ids"] != as_json(spec, *question)["token_ids"]


def test_logprobs_come_with_json_when_asked_for(spec: Spec) -> None:
    record = as_json(spec, PROMPT, "--logprobs", "2", "--max-tokens", "5")
    assert list(record) == [*KEYS, "logprobs"]
    assert [entry["token"] for entry in record["logprobs"]] == record["token_ids"]
    for entry in record["logprobs"]:
        (best, value), _ = entry["top"]
        assert (best, value) == (entry["token"], entry["logprob"])


def test_a_stop_string_ends_the_answer(spec: Spec) -> None:
    record = as_json(spec, PROMPT, "--stop", "return", "--stop", "nowhere")
    assert record["text"] == ANSWER.partition("return")[0]
    assert record["finish_reason"] == "stop"


def test_the_budget_ends_the_answer(spec: Spec) -> None:
    record = as_json(spec, PROMPT, "--max-tokens", "7")
    assert (record["completion_tokens"], record["finish_reason"]) == (7, "length")


def test_a_thought_goes_to_stderr_unless_quiet(spec: Spec) -> None:
    ran = spec("generate", "What is 17 + 25?")
    assert ran.out == "17 + 25 is 42.\n"
    assert "17 + 25 = 42" in ran.err
    assert "think>" not in ran.err + ran.out
    quiet = spec("generate", "-q", "What is 17 + 25?")
    assert (quiet.out, quiet.err) == (ran.out, "")


def test_thinking_can_be_switched_off(spec: Spec) -> None:
    off = as_json(spec, "What is 17 + 25?", "--no-thinking")
    on = as_json(spec, "What is 17 + 25?")
    assert off["prompt_tokens"] > on["prompt_tokens"]
    assert off["completion_tokens"] < on["completion_tokens"]


def test_the_prompt_may_come_from_a_file_or_stdin(
    spec: Spec, plain: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT, encoding="utf-8")
    for record in (
        as_json(spec, "-", stdin=PROMPT),
        as_json(spec, "--prompt-file", str(file)),
        as_json(spec, "--prompt-file", "-", stdin=PROMPT),
    ):
        assert record["token_ids"] == plain["token_ids"]


def test_without_the_template_the_prompt_is_continued(spec: Spec) -> None:
    record = as_json(spec, "def add(a, b):\n", "--no-chat-template", "--max-tokens", "8")
    assert record["prompt_tokens"] < 12
    with_system = as_json(spec, PROMPT, "--system", "Be brief.", "--max-tokens", "1")
    assert with_system["prompt_tokens"] > record["prompt_tokens"]


ARGUMENT = re.compile(r"\b[a-z]+_[a-z]+\b")
USAGE = [
    ([], "give the prompt once"),
    (["hi", "--prompt-file", __file__], "give the prompt once"),
    (["  "], "prompt is empty"),
    (["hi", "--max-draft", "many"], "neither a whole number (0 or more) nor 'full'"),
    (["hi", "--max-draft", "-1"], "'-1' is neither a whole number (0 or more)"),
    (["hi", "--mode", "turbo"], "turbo"),
    (["hi", "--model", ""], "it is empty"),
    (["hi", "--drafter", " "], "it is empty"),
    (["hi", "--mode", "baseline", "--max-draft", "2"], "drafts nothing"),
    (["hi", "--mode", "lookup", "--drafter-bits", "4"], "no drafter"),
    (["hi", "--mode", "lookup", "--no-lookup-drafts"], "only copies"),
    (["hi", "--logit-bias", "5"], "ID=VALUE"),
    (["hi", "--logprobs", "2"], "add --json"),
    (["hi", "--system", "x", "--no-chat-template"], "--no-chat-template"),
    (["hi", "--thinking", "--no-chat-template"], "--no-chat-template"),
    (["hi", "--top-p", "0"], "--top-p is 0.0"),
    (["hi", "--temperature", "-1"], "--temperature is -1.0"),
    (["hi", "--max-tokens", "0"], "--max-tokens is 0"),
    (["hi", "--stop", ""], "--stop is ["),
    (["hi", "--logit-bias", "99999=1"], "--logit-bias is 99999"),
    (["hi", "--logit-bias", "3=inf"], "--logit-bias[3] is inf"),
    (["hi", "--prefix-cache-dir", "x", "--prefix-cache-ram", "0"], "--prefix-cache-ram is 0"),
    (["hi", "--prefix-cache-dir", "~no-such-user/x"], "the home of a user that there is not"),
    (["hi", "--prefix-cache-dir", "x", "--prefix-cache-disk", "0"], "--prefix-cache-disk is 0"),
    (["hi", "--confidence-threshold", "2"], "--confidence-threshold is 2.0"),
    (["hi", "--confidence-threshold", "0.5", "--mode", "dflash"], "no confidence head"),
    (["hi", "--mode", "baseline", "--drafter", "x"], "uses none"),
    (["hi", "--mode", "baseline", "--lookup-drafts"], "--lookup-drafts has no place"),
    (["hi", "--mode", "baseline", "--max-draft", "3"], "drafts nothing"),
]


@pytest.mark.parametrize(("arguments", "sentence"), USAGE)
def test_wrong_usage_is_explained(spec: Spec, arguments: list[str], sentence: str) -> None:
    ran = spec("generate", *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert sentence in ran.err
    assert "Traceback" not in ran.err
    assert not ARGUMENT.search(ran.err), "an option is called by an argument's name"


@pytest.mark.parametrize("option", ["--model", "--drafter"])
def test_a_folder_below_an_unknown_home_is_not_found(spec: Spec, option: str) -> None:
    ran = spec("generate", "hi", option, "~no-such-user/x")
    assert (ran.code, ran.out) == (1, "")
    assert "~no-such-user/x" in ran.err
    assert "internal" not in ran.err


def test_a_prompt_that_is_not_text_is_explained(spec: Spec) -> None:
    ran = spec("generate", "-", stdin=b"\xff\xfe")
    assert ran.code == 2
    assert "UTF-8" in ran.err


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["\udcff"], "the prompt"),
        ([PROMPT, "--system", "\udcff"], "--system"),
        ([PROMPT, "--stop", "\udcff"], "--stop"),
    ],
)
def test_an_argument_that_is_not_text_is_explained(
    spec: Spec, arguments: list[str], name: str
) -> None:
    ran = spec("generate", *arguments)
    assert ran.code == 2
    assert f"{name} is not UTF-8 text: " in ran.err


@pytest.mark.parametrize(
    ("arguments", "note"),
    [
        (["--seed", "3"], "note: --seed has no effect at temperature 0, which is greedy\n"),
        (["--seed", "3", "--top-p", "0.5"], "note: --seed, --top-p have no effect"),
    ],
)
def test_idle_sampling_options_are_noted(spec: Spec, arguments: list[str], note: str) -> None:
    limited = ("generate", PROMPT, "--max-tokens", "1")
    ran = spec(*limited, *arguments)
    assert (ran.code, ran.err.count("no effect")) == (0, 1)
    assert note in ran.err
    for silent in (["--quiet", *arguments], ["--temperature", "1", *arguments], []):
        assert "no effect" not in spec(*limited, *silent).err


def wrong_models(tmp_path: Path) -> Iterator[tuple[list[str], str]]:
    empty = tmp_path / "empty"
    empty.mkdir()
    yield ["--model", "nowhere"], "nowhere"
    yield ["--model", "someone/unheard-of-model"], "someone/unheard-of-model"
    yield ["--model", str(empty)], "config.json"
    yield ["--drafter", str(empty)], "config.json"
    yield ["--drafter", "nowhere"], "nowhere"
    yield ["--drafter", "someone/unheard-of-drafter"], "someone/unheard-of-drafter"
    yield ["--drafter", str(bundled.TARGET)], "drafter"
    yield ["--mode", "eagle3"], "no eagle3 drafter is known for spec-tiny"
    yield ["--model", str(bundled.TARGET.with_name("spec-tiny-dspark"))], "spec-tiny-dspark"


@pytest.mark.parametrize("which", range(9))
def test_what_cannot_be_loaded_is_named_in_one_sentence(
    spec: Spec, tmp_path: Path, which: int
) -> None:
    arguments, sentence = list(wrong_models(tmp_path))[which]
    ran = spec("generate", "hi", *arguments)
    assert (ran.code, ran.out) == (1, "")
    assert sentence in ran.err
    assert len(ran.err.splitlines()) == 1


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "spec_cli", *arguments]


def test_the_program_runs_by_itself() -> None:
    ran = subprocess.run(
        command("generate", PROMPT), capture_output=True, text=True, timeout=120, check=False
    )
    assert (ran.returncode, ran.stdout) == (0, ANSWER + "\n")
    assert len(ran.stderr.splitlines()) == 1


def in_shell(redirections: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The program with what a shell does to its streams."""
    return subprocess.run(
        ["/bin/sh", "-c", f'exec "$@" {redirections}', "sh", *command(*arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    ("redirections", "reason"),
    [
        pytest.param(
            ">/dev/full",
            "No space left on device",
            marks=pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full"),
        ),
        (">&-", "Bad file descriptor"),
    ],
)
@pytest.mark.parametrize("arguments", [("generate", "-q", "Hi"), ("generate", "--json", "Hi")])
def test_an_answer_that_cannot_be_written_is_one_sentence(
    redirections: str, reason: str, arguments: tuple[str, ...]
) -> None:
    ran = in_shell(redirections, *arguments, "--max-tokens", "4")
    assert ran.returncode == 1
    assert ran.stderr == f"spec: the output could not be written to stdout: {reason}\n"


def test_closed_streams_are_no_fault_of_the_model_file() -> None:
    assert in_shell("<&- 2>&-", "generate", PROMPT).stdout == ANSWER + "\n"


def started(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
    )


def test_a_prompt_that_is_too_long_is_explained_by_one_sentence() -> None:
    with started("generate", "Tell me a story. " * 3000) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        said = process.stderr.read().decode()
    assert process.returncode == 1
    assert re.fullmatch(r"spec: the prompt has \d+ tokens .*\n", said)


@pytest.mark.parametrize(
    "arguments", [("--version",), ("--help",), ("generate", "--help"), ("completion", "bash")]
)
def test_nobody_has_to_read(arguments: tuple[str, ...]) -> None:
    with started(*arguments) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(120) == 141


def test_a_reader_that_leaves_is_no_fault() -> None:
    with started("generate", "Tell me a long story.", "--max-tokens", "200") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(120) == 141


def test_ctrl_c_keeps_what_was_written() -> None:
    with started("generate", "Tell me a long story.", "--max-tokens", "3000") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        begin = process.stdout.read(10)
        process.send_signal(signal.SIGINT)
        rest, error = process.stdout.read(), process.stderr.read().decode()
        assert process.wait(60) == 130
    assert begin
    assert rest.endswith(b"\n")
    assert "ended by Ctrl-C" in error
    assert "tokens/s" in error
    assert "Traceback" not in error


def test_ctrl_c_while_loading_is_clean(spec: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr("spec_server.Engine.load", interrupted)
    ran = spec("generate", "Hello")
    assert (ran.code, ran.out, ran.err.strip()) == (130, "", "spec: interrupted")


def test_an_internal_error_is_one_sentence(spec: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> NoReturn:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("spec_server.Engine.load", broken)
    ran = spec("generate", "Hello")
    assert ran.code == 70
    assert "internal error: ZeroDivisionError: a bug" in ran.err
    assert "Traceback" not in ran.err
    monkeypatch.setenv("SPEC_TRACEBACK", "1")
    ran = spec("generate", "Hello")
    assert ran.code == 70
    assert "Traceback" in ran.err


@pytest.mark.parametrize(("given", "bits"), [("auto", "auto"), ("none", None), ("8", 8)])
def test_the_drafter_s_bits_reach_the_engine(
    spec: Spec, monkeypatch: pytest.MonkeyPatch, given: str, bits: object
) -> None:
    seen: list[object] = []

    def watched(*_: object, **options: object) -> NoReturn:
        seen.append(options["drafter_bits"])
        raise KeyboardInterrupt

    monkeypatch.setattr("spec_server.Engine.load", watched)
    spec("generate", "--drafter-bits", given, "Hello")
    assert seen == [bits]
