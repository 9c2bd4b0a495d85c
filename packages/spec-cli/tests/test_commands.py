"""`spec` itself, `spec models` and `spec benchmark`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from spec_cli import main

from .command import Spec


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "-h"], ["benchmark", "--help"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys; from spec_cli.main import run; code = run(sys.argv[1:]); "
        "heavy = {'mlx', 'numpy', 'mlx_lm', 'transformers', 'rich', 'starlette', 'spec_core'}; "
        "sys.exit(code or ', '.join(heavy & set(sys.modules)) or 0)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "Usage: spec" in ran.stdout


def test_whatever_loads_a_model_can_say_what_it_logs() -> None:
    for name, command in main.cli.commands.items():
        options = {option for parameter in command.params for option in parameter.opts}
        assert "--log-level" in options or "--cpu-blas" not in options, name


@pytest.mark.parametrize("command", ["serve", "chat", "generate"])
def test_what_answers_chooses_the_draft_length_by_default(spec: Spec, command: str) -> None:
    told = " ".join(spec(command, "--help").out.split())
    assert "[default: auto; full with --confidence-threshold]" in told


def test_versions_are_listed(spec: Spec) -> None:
    ran = spec("--version")
    assert ran.code == 0
    assert [line.split()[0] for line in ran.out.splitlines()] == [
        f"spec-{part}" for part in ("cli", "server", "targets", "drafters", "cache", "core")
    ]


def test_an_unknown_command_is_wrong_usage(spec: Spec) -> None:
    ran = spec("generat")
    assert ran.code == 2
    assert "generat" in ran.err


def test_models_lists_the_pairs(spec: Spec) -> None:
    ran = spec("models")
    assert ran.code == 0
    assert "spec-tiny-dspark" in ran.out
    pairs: list[dict[str, Any]] = json.loads(spec("models", "--json").out)
    assert pairs[0]["target"] == "spec-tiny"
    assert {"mode", "source", "packaging", "measured", "downloaded_bytes"} == set(
        pairs[0]["drafters"][0]
    )
    assert pairs[0]["downloaded"][0]["bytes"] > 17e6


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_for_the_shell(spec: Spec, shell: str) -> None:
    ran = spec("completion", shell)
    assert ran.code == 0
    assert f"_SPEC_COMPLETE={shell}_complete" in ran.out


def test_a_shell_is_told_commands_and_options() -> None:
    def told(*words: str) -> str:
        environment = os.environ | {
            "_SPEC_COMPLETE": "bash_complete",
            "COMP_WORDS": " ".join(("spec", *words)),
            "COMP_CWORD": str(len(words)),
        }
        code = "from spec_cli.main import run; run()"
        ran = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.stderr == ""
        return ran.stdout

    assert told("gen") == "plain,generate\n"
    assert "plain,baseline" in told("chat", "--mode", "")


def test_no_color_takes_colours_away(monkeypatch: pytest.MonkeyPatch) -> None:
    def shown() -> str:
        return CliRunner().invoke(main.cli, ["doctor"], color=True).output

    assert "\x1b[" in shown()
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in shown()


RUN_KEYS = {
    "mode",
    "max_draft",
    "tokens_per_second",
    "speedup",
    "mean_accept_length",
    "accept_by_position",
    "draft_ms",
    "verify_ms",
    "overhead_ms",
    "ttft_ms",
    "peak_memory_bytes",
    "identical",
    "first_divergence",
}


def test_benchmark_compares_every_setting_with_plain_decoding(spec: Spec, tmp_path: Path) -> None:
    prompts = tmp_path / "mine.txt"
    prompts.write_text("Write a Python function that checks if a number is even.\n\n")
    arguments = ("--trials", "1", "--max-tokens", "20", "--prompts", str(prompts), "--json")
    ran = spec("benchmark", *arguments, "--modes", "dspark,lookup", "--max-draft", "2,full,998,999")
    assert ran.code == 0, ran.err
    record = json.loads(ran.out)
    assert {"device", "versions", "model", "drafter", "prompts", "runs", "verdict"} <= set(record)
    assert record["prompts"] == {"mine": 1}
    runs = record["runs"]
    assert [(run["mode"], run["max_draft"]) for run in runs] == [
        ("baseline", None),
        ("mlx_lm", None),
        ("dspark", 2),
        ("dspark", None),
        ("dspark", 7),
        ("lookup", 2),
        ("lookup", None),
        ("lookup", 32),
    ]
    for run in runs:
        assert set(run) >= RUN_KEYS
        assert run["identical"]
        assert run["first_divergence"] is None
        assert run["tokens_per_second"] > 0
        assert run["peak_memory_bytes"] > 17e6
    assert runs[0]["speedup"] == 1.0
    assert len(runs[2]["accept_by_position"]) == 2
    assert runs[3]["mean_accept_length"] > runs[2]["mean_accept_length"]
    assert "identical" in record["verdict"]


def test_benchmark_prints_tables(spec: Spec) -> None:
    arguments = ("--trials", "1", "--max-tokens", "8", "--max-prompts", "1", "--sets", "code")
    ran = spec("benchmark", *arguments, "--modes", "dspark", "--no-mlx-lm")
    assert ran.code == 0, ran.err
    lines = ran.out.splitlines()
    assert any(line.startswith("baseline") and "1.00x" in line for line in lines)
    assert any(line.startswith("dspark") for line in lines)
    assert any("ms a round" in line for line in lines)


def test_benchmark_of_chosen_lengths_as_a_page_and_a_picture(spec: Spec, tmp_path: Path) -> None:
    picture = tmp_path / "speeds.svg"
    arguments = ("--trials", "1", "--max-tokens", "12", "--max-prompts", "1", "--no-mlx-lm")
    sweeps = ("--concurrency", "2", "--contexts", "100")
    ran = spec(
        *("benchmark", *arguments, *sweeps, "--sets", "code,prose", "--modes", "dspark"),
        *("--caps", "auto", "--markdown", "--plot", str(picture)),
    )
    assert ran.code == 0, ran.err
    assert ran.out.startswith("# spec-tiny, float32" if sys.platform == "linux" else "# spec-tiny")
    assert "| dspark+lookup auto |" in ran.out
    assert "| 100 | dspark+lookup auto |" in ran.out
    assert "All answers are identical" in ran.out
    assert "dspark+lookup auto" in picture.read_text()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--concurrency", "two"], "'two'"),
        (["--contexts", "0"], "'0'"),
        (["--json", "--markdown"], "exclude each other"),
        (["--modes", "lookup", "--no-lookup-drafts"], "only copies"),
        (["--modes", "lookup", "--drafter-bits", "4"], "no drafter"),
        (["--contexts", "100000", "--no-mlx-lm"], "at most"),
        (["--modes", "turbo"], "turbo"),
        (["--sets", "poems"], "poems"),
        (["--max-draft", "2,x"], "'x'"),
        (["--plot", "/nowhere/speeds.svg"], "no folder '/nowhere'"),
        (["--prompts", __file__, "--sets", "chat"], "choose one"),
        (["--plot", "speeds.png"], "does not end in .svg"),
        (["--modes", "eagle3"], "no eagle3 drafter is known"),
    ],
)
def test_wrong_benchmark_options_are_explained(
    spec: Spec, arguments: list[str], sentence: str
) -> None:
    ran = spec("benchmark", *arguments)
    assert ran.code in (1, 2)
    assert sentence in ran.err


@pytest.mark.parametrize("content", ["[]", "{", '[{"tex": "x"}]', '["ok", ""]', "3"])
def test_a_prompt_file_that_holds_none_is_explained(
    spec: Spec, tmp_path: Path, content: str
) -> None:
    file = tmp_path / "prompts.json"
    file.write_text(content)
    ran = spec("benchmark", "--prompts", str(file))
    assert ran.code == 2
    assert "prompt" in ran.err


@pytest.mark.parametrize("module", ["click", "spec_cli.main"])
def test_ctrl_c_while_the_program_starts_ends_it_quietly(module: str) -> None:
    interrupted = f"""
import os, signal, sys
class Interrupts:
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupts())
from spec_cli.__main__ import main
main()
"""
    ran = subprocess.run(
        [sys.executable, "-c", interrupted], capture_output=True, timeout=60, check=False
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, b"", b"")
