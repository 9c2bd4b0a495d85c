"""`spec serve` as a process: its options, its output, its end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "spec_cli", "serve"]


def run(
    *arguments: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """The command where no draft length is set beside what the test sets."""
    unset = {name: value for name, value in os.environ.items() if name != "SPEC_MAX_DRAFT"}
    return subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=unset | (environment or {}),
    )


def config(*arguments: str, environment: dict[str, str] | None = None) -> dict[str, object]:
    shown = run("--print-config", *arguments, environment=environment)
    assert shown.returncode == 0, shown.stderr
    return tomllib.loads(shown.stdout)


def test_command_line_before_environment_before_file(tmp_path: Path) -> None:
    file = tmp_path / "spec.toml"
    file.write_text('port = 1001\nmax-batch = 2\nmax-queue = 3\ncors-origin = ["https://a.org"]\n')
    environment = {"SPEC_PORT": "1002", "SPEC_MAX_BATCH": "4", "SPEC_CONFIG": str(file)}
    found = config("--port", "1003", environment=environment)
    assert (found["port"], found["max-batch"], found["max-queue"]) == (1003, 4, 3)
    assert found["cors-origin"] == ["https://a.org"]
    assert found["host"] == "127.0.0.1"


def test_print_config_reads_back_and_hides_keys(tmp_path: Path) -> None:
    arguments = ("--memory-limit", "2G", "--api-key", "hush", "--max-draft", "4")
    shown = run("--print-config", *arguments)
    assert "hush" not in shown.stdout
    assert re.search(r"^max-draft = .*4.*# command line$", shown.stdout, re.MULTILINE)
    file = tmp_path / "again.toml"
    file.write_text("\n".join(li for li in shown.stdout.splitlines() if "api-key" not in li))
    again = config("--config", str(file))
    assert again == {k: v for k, v in tomllib.loads(shown.stdout).items() if k != "api-key"}
    assert again["memory-limit"] == 2 * 2**30


def test_a_variable_that_no_command_reads_is_named() -> None:
    shown = run("--print-config", environment={"SPEC_MAXDRAFT": "3", "SPEC_PORT": "1002"})
    assert shown.returncode == 0
    (line,) = shown.stderr.splitlines()
    assert "SPEC_MAXDRAFT" in line
    assert "SPEC_MAX_DRAFT" in line


def test_the_page_can_be_switched_off_everywhere(tmp_path: Path) -> None:
    file = tmp_path / "spec.toml"
    file.write_text("no-page = true\n")
    assert config()["no-page"] is False
    assert config("--no-page")["no-page"] is True
    assert config("--config", str(file))["no-page"] is True
    assert config(environment={"SPEC_NO_PAGE": "1"})["no-page"] is True


@pytest.mark.parametrize(
    ("text", "mentions"),
    [("prot = 1", "prot"), ("port = 'x'", "port"), ("[port]\na = 1", "port"), ("port", "TOML")],
)
def test_a_wrong_file_is_named(tmp_path: Path, text: str, mentions: str) -> None:
    file = tmp_path / "spec.toml"
    file.write_text(text)
    ended = run("--config", str(file))
    assert ended.returncode == 2
    assert mentions in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "mentions"),
    [
        (["--max-batch", "0"], "--max-batch is 0;"),
        (["--memory-limit", "lots"], "lots"),
        (["--memory-limit", "0"], "--memory-limit is 0;"),
        (["--max-body", "0"], "--max-body is 0;"),
        (["--max-tokens", "0"], "--max-tokens is 0;"),
        (["--cors-origin", "example.org"], "--cors-origin is 'example.org';"),
        (["--port", "99999"], "--port is 99999;"),
        (["--confidence-threshold", "2"], "--confidence-threshold is 2.0;"),
        (["--prefix-cache-dir", "x", "--no-prefix-cache"], "--prefix-cache-dir needs a cache"),
    ],
)
def test_wrong_options_are_named(arguments: list[str], mentions: str) -> None:
    for shown in ([], ["--print-config"]):
        ended = run(*arguments, *shown)
        assert (ended.returncode, ended.stdout) == (2, "")
        assert mentions in ended.stderr
        assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("max-batch", "0", "{} is 0; it must be at least 1"),
        ("max-batch", '"x"', "{}: 'x' is not a valid integer"),
        ("max-draft", '"few"', "{}: 'few' is neither a whole number"),
        ("mode", '"turbo"', "{}: 'turbo' is not one of"),
        ("prefix-cache-ram", '"1G"', "{} needs a cache; drop --no-prefix-cache"),
    ],
)
def test_a_wrong_value_is_sought_where_it_was_written(
    tmp_path: Path, name: str, value: str, sentence: str
) -> None:
    file, variable = tmp_path / "spec.toml", f"SPEC_{name.upper().replace('-', '_')}"
    file.write_text(f"{name} = {value}\n")
    more = ["--no-prefix-cache"] if "needs a cache" in sentence else []
    from_file = run("--config", str(file), *more)
    from_variable = run(*more, environment={variable: value.strip('"')})
    for ended, place in ((from_file, f"{name} in {file}"), (from_variable, variable)):
        assert ended.returncode == 2
        assert sentence.format(place) in ended.stderr
        assert f"--{name}" not in ended.stderr


def test_an_option_without_effect_is_refused() -> None:
    ended = run("--mode", "baseline", "--max-draft", "4")
    assert ended.returncode == 2
    assert "--max-draft" in ended.stderr


@contextmanager
def served(
    *arguments: str, until: str = "/v1 (", env: dict[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process, and the line that says it is ready, or one before it."""
    process = subprocess.Popen(
        [*COMMAND, "--port", "0", *arguments], stderr=subprocess.PIPE, text=True, env=env
    )
    assert process.stderr is not None
    try:
        line = ""
        while until not in line:
            line = process.stderr.readline()
            assert line, "the server ended"
            assert until in line or "/v1 (" not in line, f"it is ready, and never said {until!r}"
        yield process, line
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def port_of(line: str) -> int:
    found = re.search(r"http://127\.0\.0\.1:(\d+)/v1 ", line)
    assert found
    return int(found[1])


def test_it_says_what_it_serves_and_that_it_has_stopped(folders: Callable[[str], Path]) -> None:
    quiet = ("--log-level", "error", "--no-prefix-cache", "--context-window", "64")
    with served("--model", str(folders("scripted")), "--mode", "lookup", *quiet) as (process, line):
        for fact in (
            f"serving scripted at http://127.0.0.1:{port_of(line)}/v1 (mode lookup, drafter none, ",
            "context 64, float32, prefix cache off",
            f"Ctrl-C or `kill {process.pid}` stops it",
        ):
            assert fact in line
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert process.stderr is not None
        assert process.stderr.read().splitlines() == ["spec: the server has stopped"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_logs_one_line_a_request_and_ends_with_0(
    folders: Callable[[str], Path], number: int
) -> None:
    with served("--model", str(folders("scripted")), "--mode", "lookup") as (process, line):
        connection = HTTPConnection("127.0.0.1", port_of(line), timeout=60)
        body = json.dumps({"messages": [{"role": "user", "content": "very private S"}]})
        kind = {"content-type": "application/json"}
        connection.request("POST", "/v1/chat/completions", body, kind)
        answer = json.loads(connection.getresponse().read())
        connection.close()
        assert answer["choices"][0]["message"]["content"] == "alpha beta gamma delta2"
        process.send_signal(number)
        assert process.wait(60) == 0
        assert process.stderr is not None
        log = process.stderr.read()
        assert log.count("POST '/v1/chat/completions'") == 1
        assert "private" not in log
        assert "Traceback" not in log


def test_a_second_server_on_a_port_says_so(folders: Callable[[str], Path]) -> None:
    model = str(folders("scripted"))
    with served("--model", model, "--mode", "baseline") as (_, line):
        port = port_of(line)
        ended = run("--model", model, "--port", str(port))
        assert ended.returncode == 1
        assert f":{port} cannot be listened on" in ended.stderr


def test_a_second_signal_ends_the_answers_that_the_first_waits_for() -> None:
    """Each is told so: an error event, and the end of the stream."""
    with served("--mode", "baseline", "--grace-seconds", "600") as (process, line):
        connection = HTTPConnection("127.0.0.1", port_of(line), timeout=60)
        ask = {"messages": [{"role": "user", "content": "Tell me a story."}], "stream": True}
        body = json.dumps({**ask, "max_tokens": 3900, "temperature": 2, "seed": 4})
        kind = {"content-type": "application/json"}
        connection.request("POST", "/v1/chat/completions", body, kind)
        response = connection.getresponse()
        begun = response.readline()
        assert begun.startswith(b"data: {")
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        said = [process.stderr.readline()]
        while "another signal" not in said[-1]:
            said.append(process.stderr.readline())
        process.send_signal(signal.SIGINT)
        rest = response.read().decode().split("\n\n")
        connection.close()
        assert rest[-2:] == ["data: [DONE]", ""]
        assert (
            json.loads(rest[-3].strip().removeprefix("data: "))["error"]["code"] == "shutting_down"
        )
        assert process.wait(60) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_that_is_still_loading_stops_at_once(
    tmp_path: Path, number: signal.Signals
) -> None:
    """While round times are measured: MLX would abort a process that ends in the ordinary way."""
    env = {**os.environ, "SPEC_CURVES_DIR": str(tmp_path)}
    with served("--max-draft", "auto", until="measuring", env=env) as (process, _):
        process.send_signal(number)
        assert process.wait(60) == 0
        assert process.stderr is not None
        assert process.stderr.read().splitlines()[-1] == "spec: the server has stopped"
