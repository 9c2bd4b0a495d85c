"""`spec cache` and the options of kept prefixes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spec_cli.sizes import counted

from .command import Spec

PROMPT = "Write a Python function that returns the squares of a list."


def generated(spec: Spec, *arguments: str) -> dict[str, Any]:
    ran = spec("generate", "--json", "--max-tokens", "8", PROMPT, *arguments)
    assert ran.code == 0, ran.err
    answer: dict[str, Any] = json.loads(ran.out)
    return answer


def test_a_second_run_reuses_the_first_one_s_prompt(spec: Spec, tmp_path: Path) -> None:
    kept = ("--prefix-cache-dir", str(tmp_path / "kept"))
    cold, first, second = generated(spec), generated(spec, *kept), generated(spec, *kept)
    assert cold["token_ids"] == first["token_ids"] == second["token_ids"]
    assert "cached_tokens" not in cold
    assert first["cached_tokens"] == 0
    assert second["cached_tokens"] == second["prompt_tokens"] - 1

    (listed,) = json.loads(spec("cache", "ls", "--json", str(tmp_path / "kept")).out)
    assert listed["target"].startswith("spec-tiny ")
    line = spec("cache", "ls", str(tmp_path / "kept")).out
    assert line.startswith(listed["root"][:12])
    assert "spec-tiny, dspark, float32" in line
    seen = json.loads(spec("cache", "stats", "--json", str(tmp_path / "kept")).out)
    assert (seen["bytes"], seen["files"]) == (listed["nbytes"], listed["files"])
    said = spec("cache", "stats", str(tmp_path / "kept")).out
    assert said.startswith(f"{seen['tokens']} tokens in {counted(seen['files'], 'file')} ")
    assert said.endswith(", of 1 namespace\n")

    refused = spec("cache", "clear", str(tmp_path / "kept"), "--namespace", "xyz")
    assert refused.code == 2
    assert "spec cache ls" in refused.err
    freed = spec("cache", "clear", str(tmp_path / "kept"), "--namespace", listed["root"][:6])
    assert freed.out.endswith("freed\n")
    assert json.loads(spec("cache", "ls", "--json", str(tmp_path / "kept")).out) == []
    assert json.loads(spec("cache", "clear", "--json", str(tmp_path / "kept")).out) == {
        "freed_bytes": 0
    }


@pytest.mark.parametrize(
    ("number", "said"), [(0, "0 files"), (1, "1 file"), (2, "2 files"), (11, "11 files")]
)
def test_one_is_singular(number: int, said: str) -> None:
    assert counted(number, "file") == said


def test_the_folder_comes_from_the_environment(
    spec: Spec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPEC_PREFIX_CACHE_DIR", str(tmp_path))
    for command in ("ls", "stats", "clear"):
        ran = spec("cache", command)
        assert (ran.code, ran.out) == (1, "")
        assert f"{tmp_path} is no cache directory" in ran.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("serve", "--no-prefix-cache", "--prefix-cache-ram", "1G"),
        ("serve", "--no-prefix-cache", "--prefix-cache-dir", "kept"),
        ("serve", "--prefix-cache-ram", "much"),
        ("generate", PROMPT, "--prefix-cache-ram", "1G"),
        ("generate", PROMPT, "--prefix-cache-disk", "1G"),
        ("chat", "--prefix-cache-disk", "1G"),
        ("serve", "--prefix-cache-disk", "1G"),
    ],
)
def test_contradictions_are_wrong_usage(spec: Spec, arguments: tuple[str, ...]) -> None:
    ran = spec(*arguments)
    assert ran.code == 2
    assert "--prefix-cache" in ran.err


def test_a_cache_larger_than_memory_is_refused(spec: Spec, tmp_path: Path) -> None:
    ran = spec(
        *("generate", PROMPT, "--prefix-cache-dir", str(tmp_path / "kept")),
        *("--prefix-cache-ram", "900T"),
    )
    assert ran.code == 2
    assert "memory limit leaves" in ran.err
