"""Write docs/recordings/*.txt: what a user sees at a terminal, taken from tmux.

    uv run python tools/record_terminal.py [NAME ...]

Needs tmux. Each recording runs in a terminal of its own, 100 columns wide, in an empty home folder;
lines that the terminal wrapped are joined, and folders of this machine get neutral names.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECORDINGS = ROOT / "docs" / "recordings"
HOME = Path(tempfile.gettempdir()) / "spec-recording"
MODELS = ROOT / "packages" / "spec-cli" / "src" / "spec_cli" / "models"
NEUTRAL = {str(HOME): "/home/ada", str(ROOT): "/opt/spec"}
WIDTH, HEIGHT, PATIENCE = 100, 40, 400.0
SHELL, CHAT = "$", ">"
"""The last line of the screen while the shell, or `spec chat`, waits for input."""


class Terminal:
    """A shell in tmux."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.frames: list[str] = []
        shutil.rmtree(HOME, ignore_errors=True)
        HOME.mkdir()
        environment = {
            "HOME": str(HOME),
            "PATH": f"{Path(sys.prefix, 'bin')}:{os.environ['PATH']}",
            "PS1": "$ ",
            "LANG": "C.UTF-8",
        }
        setting = [f"{key}={value}" for key, value in environment.items()]
        shell = shlex.join(["exec", "env", *setting, "bash", "--norc", "--noprofile"])
        size = ("-x", str(WIDTH), "-y", str(HEIGHT))
        self._tmux("new-session", "-d", *size, "-s", name, "-c", str(HOME), shell)
        self.wait(SHELL)
        self.run("set +m; clear")
        self.forget()

    def close(self) -> None:
        self._tmux("kill-session", "-t", self._name)

    def run(self, line: str, prompt: str = SHELL) -> None:
        """Type a line, and wait until the program or the shell waits for the next one."""
        self.type(line)
        time.sleep(0.5)
        self.wait(prompt)

    def type(self, line: str) -> None:
        self._tmux("send-keys", "-t", self._name, "-l", line)
        self.press("Enter")

    def press(self, key: str) -> None:
        self._tmux("send-keys", "-t", self._name, key)

    def wait(self, prompt: str) -> None:
        """Until the last line is nothing but a prompt."""
        deadline = time.monotonic() + PATIENCE
        while not self.screen().endswith(f"\n{prompt}") and self.screen() != prompt:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{prompt!r} did not come back:\n{self.screen()}")
            time.sleep(0.1)

    def wait_for(self, text: str) -> None:
        """Until a text is on the screen."""
        deadline = time.monotonic() + PATIENCE
        while text not in self.screen():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{text!r} did not appear:\n{self.screen()}")
            time.sleep(0.02)

    def keep(self, title: str) -> None:
        """Keep the picture of this moment, from the last prompt on."""
        shown = self.screen()
        since = shown.rindex(f"\n{CHAT} ") + 1
        self.frames.append(f"--- {title} ---\n\n{shown[since:]}")

    def forget(self) -> None:
        """Begin with an empty screen."""
        self._tmux("clear-history", "-t", self._name)

    def screen(self) -> str:
        """All that was shown so far, wrapped lines joined."""
        text = self._tmux("capture-pane", "-p", "-J", "-S", "-", "-t", self._name)
        return "\n".join(line.rstrip() for line in text.splitlines()).strip("\n")

    def _tmux(self, *words: str) -> str:
        command = ["tmux", "-L", "spec-recording", "-f", "/dev/null", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def first_run(terminal: Terminal) -> None:
    """A newcomer's first minutes."""
    terminal.run("spec --version")
    terminal.run('spec generate "Write a Python function that adds two numbers."')
    terminal.run('spec generate --json --max-tokens 8 "Hello" 2>/dev/null | head -c 80; echo')
    terminal.run("spec models | head -12")
    terminal.run("spec generat")


def chat(terminal: Terminal) -> None:
    """A conversation, with an answer that is stopped."""
    terminal.run("spec chat", CHAT)
    terminal.run("Write a Python function that adds two numbers.", CHAT)
    terminal.run("What is 17 + 25?", CHAT)
    terminal.run("/set temprature 0.7", CHAT)
    terminal.run("/set temperature warm", CHAT)
    terminal.run("/set temperature 0.7", CHAT)
    terminal.run("/set seed 1", CHAT)
    terminal.type("Tell me a long story about a dog.")
    terminal.wait_for("tokens/s, 2")
    time.sleep(1.0)
    terminal.keep("while it answers; the last line is redrawn in place")
    terminal.press("C-c")
    terminal.wait(CHAT)
    terminal.run("/save talk.json", CHAT)
    terminal.run("/stats", CHAT)
    terminal.run("/help", CHAT)
    terminal.press("C-d")
    terminal.wait(SHELL)
    terminal.run("stat -c '%A %n' talk.json .local/state/spec/chat-history")


def doctor(terminal: Terminal) -> None:
    """A sound machine and model, then some that are not."""
    terminal.run("spec doctor")
    terminal.run("spec doctor --model spec-tiny | tail -7")
    shutil.copytree(MODELS / "spec-tiny", HOME / "broken")
    os.truncate(HOME / "broken" / "model.safetensors", 1_000_000)
    terminal.run("SPEC_MAX_QEUE=5 spec doctor --model broken | tail -6; echo ${PIPESTATUS[0]}")
    terminal.run("spec doctor --model Qwen/Qwen3-4B | tail -4")


def wrong_model(terminal: Terminal) -> None:
    """Names that are no model."""
    away(terminal)
    for command in (
        'spec generate --model Qwen3-4 "Hello"',
        'spec generate --model Qwen/Qwen3-4 "Hello"',
        "spec chat --model spec-tini",
        "spec pull Qwen3-4",
        "spec doctor --model Qwen3-4 | tail -4",
        "spec rm Qwen3-4B --yes",
    ):
        terminal.run(command)


def wrong_drafter(terminal: Terminal) -> None:
    """Drafters that are none, or another target's."""
    away(terminal)
    shutil.copytree(ROOT / "tests" / "models" / "smollm2-135m-dflash", HOME / "smollm2-dflash")
    shutil.copytree(MODELS / "spec-tiny", HOME / "spec-tiny-copy")
    shutil.copytree(MODELS / "spec-tiny-dspark", HOME / "my-drafter")
    for command in (
        'spec generate --drafter smollm2-dflash "Hello"',
        'spec generate --drafter spec-tiny-copy "Hello"',
        'spec generate --drafter nowhere "Hello"',
        'spec generate --drafter z-lab/Qwen3-4B-DFlash "Hello"',
        'spec generate --model my-drafter "Hello"',
        'spec generate --mode eagle3 "Hello"',
        "spec doctor --model spec-tiny --drafter smollm2-dflash | tail -5",
    ):
        terminal.run(command)


def no_network(terminal: Terminal) -> None:
    """Nothing answers: no hub, no server."""
    away(terminal)
    for command in (
        'spec generate --model Qwen/Qwen3-4B "Hello"',
        "spec pull Qwen/Qwen3-4B",
        "HF_HUB_OFFLINE=1 spec pull Qwen/Qwen3-4B",
        "spec doctor --model Qwen/Qwen3-4B | tail -4",
        "spec ps",
    ):
        terminal.run(command)


def away(terminal: Terminal) -> None:
    """From here on the hub cannot be reached: its proxy refuses."""
    terminal.run("export HTTPS_PROXY=http://127.0.0.1:9; clear")
    terminal.forget()


SCENES: dict[str, Callable[[Terminal], None]] = {
    "first-run": first_run,
    "chat": chat,
    "doctor": doctor,
    "wrong-model": wrong_model,
    "wrong-drafter": wrong_drafter,
    "no-network": no_network,
}


def record(name: str) -> str:
    """One recording's text."""
    terminal = Terminal(name)
    try:
        SCENES[name](terminal)
        shown = terminal.screen().removesuffix(f"\n{SHELL}")
        text = "\n\n".join([shown, *terminal.frames])
    finally:
        terminal.close()
        shutil.rmtree(HOME, ignore_errors=True)
    for own, neutral in NEUTRAL.items():
        text = text.replace(own, neutral)
    return text + "\n"


def main() -> None:
    """Record what is named, or everything."""
    names = sys.argv[1:] or list(SCENES)
    RECORDINGS.mkdir(parents=True, exist_ok=True)
    for name in names:
        (RECORDINGS / f"{name}.txt").write_text(record(name), encoding="utf-8")


if __name__ == "__main__":
    main()
