"""`spec chat`: the model's own answers, settings by the options' rules, nothing lost."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_cli import bundled
from spec_cli.chat.conversation import ConversationError, load
from spec_cli.chat.reader import PlainReader
from spec_server import Engine

from .command import Spec

FIRST = "Write a Python function that adds two numbers."
SECOND = "What is 17 + 25?"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """Plain decoding without a prefix cache: what chat is compared with."""
    with Engine.load(bundled.TARGET, mode="baseline", prefix_cache=None) as made:
        yield made


def answers(engine: Engine, *messages: str, system: str | None = None, **options: Any) -> list[str]:
    """The answers of a conversation, each computed from the beginning."""
    said: list[dict[str, str]] = [] if system is None else [{"role": "system", "content": system}]
    texts = []
    for message in messages:
        said.append({"role": "user", "content": message})
        done = engine.generate(said, **{"max_tokens": 1024, **options})
        said.append(
            {"role": "assistant", "content": done.text, "reasoning_content": done.reasoning}
        )
        texts.append(done.text)
    return texts


def lines(*texts: str) -> str:
    return "".join(f"{text}\n" for text in texts)


def test_a_conversation_has_the_answers_of_plain_decoding(spec: Spec, engine: Engine) -> None:
    ran = spec("chat", stdin=lines(FIRST, SECOND, "", FIRST))
    assert ran.code == 0, ran.err
    assert ran.out == lines(*answers(engine, FIRST, SECOND, FIRST))
    reused = [int(n) for n in re.findall(r"(\d+) of \d+ prompt tokens reused", ran.err)]
    assert reused[0] == 0
    assert 0 < reused[1] < reused[2]
    assert "17 + 25 = 42" in ran.err  # the thought


def test_quiet_system_message_clear_and_a_slash(spec: Spec, engine: Engine) -> None:
    told = "Answer in one word."
    ran = spec(
        *("chat", "-q", "--max-tokens", "30"),
        stdin=lines(
            *(f"/system {told}", FIRST, "/clear", FIRST),
            *("/system none", "/clear", FIRST, "/clear", "//help"),
        ),
    )
    (with_system,) = answers(engine, FIRST, system=told, max_tokens=30)
    (without,) = answers(engine, FIRST, max_tokens=30)
    (slash,) = answers(engine, "/help", max_tokens=30)
    assert ran.out == lines(with_system, with_system, without, slash)
    assert ran.code == 0
    assert {line.partition(":")[0] for line in ran.err.splitlines()} <= {
        "system message",
        "there is no system message",
        "the conversation begins anew",
        "the conversation begins anew; the system message stays",
    }


def test_settings_act_as_the_options_do(spec: Spec) -> None:
    chat = spec(
        "chat", stdin=lines("/set temperature 1", "/set seed=5", "/set max-tokens 20", FIRST)
    )
    generated = spec(
        *("generate", "--temperature", "1", "--seed", "5", "--max-tokens", "20", FIRST)
    )
    assert chat.out == generated.out
    assert "max_tokens = 20" in chat.err


WRONG = (
    ("temperature", "-1"),
    ("temperature", "warm"),
    ("top-p", "0"),
    ("top-k", "2.5"),
    ("repetition-penalty", "0"),
    ("seed", "x"),
    ("max-tokens", "0"),
    ("max-draft", "-1"),
)


@pytest.mark.parametrize(("option", "value"), [("--stop", ""), ("--logit-bias", "99999=1")])
def test_what_only_an_answer_shows_to_be_wrong_is_named_by_its_option(
    spec: Spec, option: str, value: str
) -> None:
    chat = spec("chat", option, value, stdin=lines(FIRST))
    assert chat.code == 1
    assert f"spec: {option} is " in chat.err


def test_settings_have_the_rules_of_the_options(spec: Spec) -> None:
    chat = spec("chat", stdin=lines(*(f"/set {name} {value}" for name, value in WRONG), "/set"))
    assert chat.code == 1
    refused, kept = chat.err.splitlines()[: len(WRONG)], chat.err.splitlines()[len(WRONG) :]
    for (name, value), sentence in zip(WRONG, refused, strict=True):
        option = spec("generate", f"--{name}", value, FIRST)
        assert option.code == 2
        setting = name.replace("-", "_")
        rule = sentence.removeprefix("spec: ").rpartition(": ")[2].removeprefix(setting)
        assert rule in option.err
        assert f"{setting} = {value}" not in kept


def test_the_draft_length_that_is_shown_is_in_force(
    spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SPEC_MAX_DRAFT")
    ran = spec("chat", stdin=lines("/set", "/set max_draft 2", "/set max_draft auto"))
    shown = [line for line in ran.err.splitlines() if line.startswith("max_draft")]
    assert shown == [f"max_draft = auto{cap}" for cap in ("", ", at most 2", "")]
    refused = spec("chat", stdin=lines("/set max_draft full"))
    assert "spec chat --max-draft full" in refused.err


def test_thinking_can_be_switched(spec: Spec, engine: Engine) -> None:
    ran = spec("chat", stdin=lines("/set thinking off", SECOND))
    assert ran.out == lines(*answers(engine, SECOND, thinking=False))
    assert "17 + 25 = 42" not in ran.err


IMPOSSIBLE = {
    "/stat": "did you mean /stats?",
    "/zzz": "/help lists",
    "/set temprature 1": "did you mean temperature?",
    "/set max_draft auto": "--max-draft auto",
    "/save": "needs a file's name",
    "/load nowhere.json": "nowhere.json cannot be read",
    f"/load {__file__}": "is no saved conversation",
    f"/save {__file__}": "choose another name",
    "word " * 5000: "4096 positions",
}


def test_what_cannot_be_done_is_one_sentence_and_the_chat_goes_on(
    spec: Spec, engine: Engine
) -> None:
    ran = spec("chat", "--max-tokens", "4", stdin=lines(*IMPOSSIBLE, FIRST))
    assert ran.code == 1
    for sentence, line in zip(IMPOSSIBLE.values(), ran.err.splitlines(), strict=False):
        assert line.startswith("spec: ")
        assert sentence in line
    assert ran.out == lines(*answers(engine, FIRST, max_tokens=4))


def test_a_saved_conversation_goes_on(spec: Spec, engine: Engine, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    assert spec("chat", stdin=lines(FIRST, f"/save {file}", f"/save {file}")).code == 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    ran = spec("chat", stdin=lines(f"/load {file}", SECOND))
    assert ran.out == lines(answers(engine, FIRST, SECOND)[1])


DAMAGED: tuple[Any, ...] = (
    {"form": "spec chat 1", "system": None, "messages": [{"role": "user", "content": "x"}]},
    {"form": "spec chat 1", "system": 3, "messages": []},
    {"form": "spec chat 1", "system": None, "messages": [[], []]},
    {"form": "other", "system": None, "messages": []},
    [],
)


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_file_is_refused(tmp_path: Path, content: Any) -> None:
    file = tmp_path / "talk.json"
    file.write_text(json.dumps(content))
    with pytest.raises(ConversationError, match="no saved conversation"):
        load(file)


def test_help_and_stats_name_everything(spec: Spec) -> None:
    ran = spec("chat", "--max-tokens", "5", stdin=lines("/help", "/stats", FIRST, "/stats"))
    for word in ("/set", "/system", "/clear", "/save", "/load", "/stats", "nothing was answered"):
        assert word in ran.err
    assert "\n1 answer: 5 tokens" in ran.err
    assert "positions of the context" in ran.err


LINE = st.text(st.characters(exclude_characters='\n\r\\"', codec="utf-8"))


@given(st.lists(LINE, min_size=1))
def test_a_message_of_several_lines_arrives_whole(texts: list[str]) -> None:
    text = "\n".join(texts)
    continued = [f"{line}\\\n" for line in texts[:-1]] + [f"{texts[-1]}\n"]
    assert list(PlainReader(continued)) == [text]
    assert list(PlainReader(['"""\n', *(f"{line}\n" for line in texts), '"""\n'])) == [
        text.strip("\n")
    ]


def test_what_is_typed_is_for_its_owner_alone(tmp_path: Path) -> None:
    from spec_cli.chat.history import private_file

    file = tmp_path / "state" / "chat-history"
    file.parent.mkdir()
    file.write_text("old\n")
    file.chmod(0o644)
    assert private_file(file).read_text() == "old\n"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


PROMPT = "\x1b[?2004h"
"""Pasting as one piece is switched on: the prompt reads."""


class Terminal:
    """The program at a pseudo-terminal."""

    def __init__(self, home: Path, *arguments: str) -> None:
        own, theirs = pty.openpty()
        self._file = own
        environment = os.environ | {
            "TERM": "xterm",
            "PROMPT_TOOLKIT_NO_CPR": "1",
            "HOME": str(home),
            "XDG_STATE_HOME": str(home),
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "spec_cli", *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment,
            start_new_session=True,
        )
        os.close(theirs)
        self.seen, self._behind = "", 0

    def type(self, text: str) -> None:
        os.write(self._file, text.encode())

    def wait(self, text: str) -> None:
        """Read until a text appears behind the last one that was waited for."""
        deadline = time.monotonic() + 60
        while (found := self.seen.find(text, self._behind)) < 0:
            ready, _, _ = select.select([self._file], [], [], 5)
            assert ready or time.monotonic() < deadline, self.seen[self._behind :]
            if ready:
                self.seen += os.read(self._file, 4096).decode(errors="replace")
        self._behind = found + len(text)

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def close(self) -> int:
        """Read to the end, which is an error for Linux; the exit code."""
        with contextlib.suppress(OSError):
            while more := os.read(self._file, 4096):
                self.seen += more.decode(errors="replace")
        os.close(self._file)
        return self.process.wait(60)


def test_ctrl_c_stops_the_answer_and_ctrl_d_the_program(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, "chat", "--max-tokens", "3000", "--mode", "baseline")
    terminal.wait("Ctrl-D leaves")
    terminal.wait(PROMPT)
    terminal.type("Tell me a long story.\r")
    terminal.wait("prompt tokens reused")  # the live line
    terminal.interrupt()
    terminal.wait("Ctrl-C ended it]")
    terminal.wait(PROMPT)
    terminal.type("What is 17 + 25?\r")
    terminal.wait("prompt tokens reused]")
    terminal.wait(PROMPT)
    terminal.type("\x04")
    assert terminal.close() == 0
    said = re.sub(r"\x1b7.*?\x1b8", "", terminal.seen)  # all but the live line
    assert "17 + 25 is 42." in said
    assert "Traceback" not in said
    (history,) = tmp_path.rglob("chat-history")
    assert "Tell me a long story." in history.read_text()
    assert stat.S_IMODE(history.stat().st_mode) == 0o600


def test_a_message_that_is_not_text_is_explained_and_the_next_one_answered(
    spec: Spec, engine: Engine
) -> None:
    ran = spec("chat", "--quiet", stdin=b"\xff\n" + FIRST.encode() + b"\n")
    assert ran.code == 1
    assert "the prompt is not UTF-8 text: " in ran.err
    assert ran.out.strip() == answers(engine, FIRST)[0].strip()
