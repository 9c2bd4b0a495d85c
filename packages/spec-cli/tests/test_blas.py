"""--cpu-blas: which library takes the place of MLX's own."""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest

from spec_cli import blas, main
from spec_server import device

generate = importlib.import_module("spec_cli.commands.generate")

PROMPT = "Write a Python function that checks if a number is even."


class Library:
    """What `ctypes.CDLL` gives, for a library with some symbols."""

    def __init__(self, *symbols: str, configuration: bytes = b"") -> None:
        for symbol in symbols:
            setattr(self, symbol, _Function(configuration))


class _Function:
    def __init__(self, value: bytes) -> None:
        self.value, self.restype = value, None

    def __call__(self) -> bytes:
        return self.value


class System:
    """A loader over a few named libraries; remembers what was made global."""

    def __init__(self, **libraries: Library) -> None:
        self.libraries = libraries
        self.made_global: list[str] = []

    def __call__(self, name: str, mode: int | None = None) -> Library:
        key = name.split(".")[0].removeprefix("lib")
        if key not in self.libraries:
            raise OSError(f"{name}: cannot open shared object file")
        if mode == ctypes.RTLD_GLOBAL:
            self.made_global.append(name)
        return self.libraries[key]


OPENBLAS = Library("cblas_sgemm", "openblas_get_config", configuration=b"OpenBLAS 0.3.30")
WIDE = Library("cblas_sgemm", "openblas_get_config", configuration=b"OpenBLAS 0.3 USE64BITINT")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process with MLX's CPU backend that has not loaded it yet."""
    monkeypatch.setattr(blas, "replaceable", lambda: True)


def test_auto_takes_an_openblas_that_is_installed() -> None:
    system = System(openblas=OPENBLAS)
    assert blas.use("auto", system) == "libopenblas.so.0"
    assert system.made_global == ["libopenblas.so.0"]


def test_auto_passes_over_what_does_not_fit() -> None:
    system = System(openblas=WIDE, openblasp=OPENBLAS)
    assert blas.use("auto", system) == "libopenblasp.so.0"
    assert system.made_global == ["libopenblasp.so.0"]


@pytest.mark.parametrize("system", [System(), System(openblas=WIDE), System(openblas=Library())])
def test_auto_stays_with_mlx_where_there_is_none(system: System) -> None:
    assert blas.use("auto", system) is None
    assert system.made_global == []


def test_bundled_loads_nothing() -> None:
    system = System(openblas=OPENBLAS)
    assert blas.use("bundled", system) is None
    assert system.made_global == []


@pytest.mark.parametrize(
    ("system", "reason"),
    [
        (System(), "cannot open shared object file"),
        (System(mine=Library("dgemm_")), "no cblas_sgemm"),
        (System(mine=WIDE), "64 bits"),
    ],
)
def test_a_named_library_that_does_not_fit_is_refused(system: System, reason: str) -> None:
    with pytest.raises(click.BadParameter, match=reason):
        blas.use("libmine.so", system)
    assert system.made_global == []


def test_a_named_library_is_taken() -> None:
    system = System(mine=Library("cblas_sgemm"))
    assert blas.use("libmine.so", system) == "libmine.so"
    assert system.made_global == ["libmine.so"]


def test_elsewhere_auto_does_nothing_and_a_name_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(blas, "replaceable", lambda: False)
    system = System(openblas=OPENBLAS)
    assert blas.use("auto", system) is None
    with pytest.raises(click.BadParameter, match="on Linux"):
        blas.use("libopenblas.so.0", system)
    assert system.made_global == []


def test_every_command_that_loads_a_model_has_the_option() -> None:
    for name, command in main.cli.commands.items():
        options = {parameter.name for parameter in command.params}
        assert ("cpu_blas" in options) == ("dtype" in options), name


# ---------------------------------------------------------------------- the program itself


def spec(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {k: v for k, v in os.environ.items() if k != "SPEC_CPU_BLAS"}
    return subprocess.run(
        [sys.executable, "-m", "spec_cli", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**inherited, **environment},
    )


def test_a_library_that_is_none_ends_in_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "libopenblas.so"
    file.write_text("no library")
    for place, ran in (
        ("--cpu-blas", spec("generate", "hi", "--cpu-blas", str(file))),
        ("SPEC_CPU_BLAS", spec("benchmark", SPEC_CPU_BLAS=str(file))),
    ):
        assert ran.returncode == 2
        assert f"Invalid value for {place}: " in ran.stderr.replace("'", "")
        assert "cannot be used" in ran.stderr
        assert "Traceback" not in ran.stderr


def installed() -> bool:
    try:
        return sys.platform == "linux" and hasattr(ctypes.CDLL("libopenblas.so.0"), "cblas_sgemm")
    except OSError:
        return False


@pytest.mark.skipif(not installed(), reason="no OpenBLAS is installed here")
def test_an_installed_openblas_computes_in_float32_on_tried_threads() -> None:
    ran = spec("generate", PROMPT, "--max-tokens", "4", "--mode", "baseline")
    assert ran.returncode == 0
    assert "float32 with openblas on " in ran.stderr
    fixed = spec("generate", PROMPT, "--max-tokens", "4", OPENBLAS_NUM_THREADS="1")
    assert "float32 with openblas on 1 thread:" in fixed.stderr


@pytest.mark.skipif(not installed(), reason="no OpenBLAS is installed here")
def test_quantised_keys_and_values_stay_with_mlx_s_own_unless_another_is_named() -> None:
    """Whichever option comes first."""
    asked = ("generate", PROMPT, "--max-tokens", "4")
    for arguments in (("--kv-bits", "8"), ("--cpu-blas", "auto", "--kv-bits", "4")):
        ran = spec(*asked, *arguments)
        assert ran.returncode == 0
        assert "openblas" not in ran.stderr
    named = spec(*asked, "--cpu-blas", "libopenblas.so.0", "--kv-bits", "8")
    assert "with openblas on " in named.stderr


@pytest.mark.parametrize("by_variable", [False, True])
def test_a_file_s_kv_bits_count_as_those_of_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_variable: bool
) -> None:
    file = tmp_path / "serve.toml"
    file.write_text('kv-bits = "8"\n')
    arguments = [] if by_variable else ["--cpu-blas", "auto", "--config", str(file)]
    if by_variable:
        monkeypatch.setenv("SPEC_CONFIG", str(file))
    options = main.cli.commands["serve"].make_context("serve", arguments).params
    assert (options["kv_bits"], options["cpu_blas"]) == ("8", "bundled")


def test_the_bundled_one_can_be_asked_for() -> None:
    ran = spec(
        "generate", PROMPT, "--max-tokens", "4", "--dtype", "float32", SPEC_CPU_BLAS="bundled"
    )
    assert ran.returncode == 0
    assert "openblas" not in ran.stderr


@pytest.mark.parametrize(
    ("choice", "terminal", "quiet", "given"),
    [
        ("auto", True, False, True),
        ("bundled", True, False, False),
        ("auto", False, False, False),
        ("auto", True, True, False),
    ],
)
def test_advice_is_for_people_who_could_use_it(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    choice: str,
    terminal: bool,
    quiet: bool,
    given: bool,
) -> None:
    monkeypatch.setattr(device, "arithmetic", lambda: device.BUNDLED_BLAS)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    generate._advise(choice, generate.Output(as_json=False, quiet=quiet))
    assert ("libopenblas0-pthread" in capsys.readouterr().err) == given
    monkeypatch.setattr(device, "arithmetic", lambda: "openblas on 1 thread")
    generate._advise(choice, generate.Output(as_json=False, quiet=quiet))
    assert capsys.readouterr().err == ""


def test_pipes_are_not_given_advice() -> None:
    arguments = ("generate", PROMPT, "--max-tokens", "2", "--cpu-blas", "bundled")
    assert "libopenblas" not in spec(*arguments).stderr
    ran: Any = spec(*arguments, "--json")
    assert ran.stderr == ""
    assert json.loads(ran.stdout)["completion_tokens"] == 2
