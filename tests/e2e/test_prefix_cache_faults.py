"""Servers that share a folder of kept prefixes, and die there: no answer is ever wrong."""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path

import pytest

from spec_server import CacheOptions, Engine, Prompt

DISK = 1 << 20
TOKENS = 6
Folders = Callable[[str], Path]
Ids = tuple[int, ...]


def prompts(seed: int, count: int) -> list[Ids]:
    """Prompts that share one of three beginnings."""
    chance = random.Random(seed)
    made = []
    for _ in range(count):
        start = random.Random(chance.randrange(3))
        system = [start.randrange(250) for _ in range(150)]
        made.append((*system, *(chance.randrange(250) for _ in range(chance.randrange(10, 90)))))
    return made


def expected(folder: Path, asked: Sequence[Ids]) -> dict[Ids, Ids]:
    """Each prompt's answer, computed without a cache."""
    with Engine.load(folder, mode="lookup", dtype="float32", prefix_cache=None) as engine:
        answers = [engine.generate(Prompt(ids), max_tokens=TOKENS) for ids in asked]
    return dict(zip(asked, (answer.token_ids for answer in answers), strict=True))


def size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            total += path.stat().st_size if path.is_file() else 0
    return total


class Served:
    """`spec serve` as a process of its own."""

    def __init__(self, model: Path, kept: Path, disk: int = DISK) -> None:
        options = ("--model", str(model), "--mode", "lookup", "--dtype", "float32", "--port", "0")
        cache = ("--prefix-cache-dir", str(kept), "--prefix-cache-disk", str(disk))
        command = [sys.executable, "-m", "spec_cli", "serve", *options, *cache]
        self.process = subprocess.Popen(
            [*command, "--prefix-cache-ram", str(1 << 20)], stderr=subprocess.PIPE, text=True
        )
        self.said: list[str] = []

    def wait(self) -> None:
        """Until it answers. Go on to read what it says, so that it never waits for us."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line)
            if found := re.search(r"http://127\.0\.0\.1:(\d+)/v1 ", line):
                self.port = int(found[1])
                self._reader = threading.Thread(target=self._read, daemon=True)
                self._reader.start()
                return
        raise AssertionError(f"the server ended: {self.said}")

    def ask(self, ids: Ids) -> tuple[str, int]:
        """The answer's text, and how many tokens of the prompt were there."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=120)
        body = {"prompt": list(ids), "max_tokens": TOKENS, "temperature": 0}
        try:
            headers = {"content-type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            answer = json.loads(connection.getresponse().read())
        finally:
            connection.close()
        return answer["choices"][0]["text"], answer["x_spec"]["cached_tokens"]

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(number)
        self.process.wait(120)
        self._reader.join(60)
        assert self.process.stderr is not None
        self.process.stderr.close()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.said.extend(self.process.stderr)


@contextmanager
def serving(model: Path, kept: Path, disk: int = DISK) -> Iterator[Served]:
    server = Served(model, kept, disk)
    try:
        server.wait()
        yield server
    finally:
        if server.process.poll() is None:
            server.end(signal.SIGKILL)


class Traffic:
    """Clients that ask until the server is gone; every answer that comes is checked."""

    def __init__(self, server: Served, texts: dict[Ids, str], seed: int) -> None:
        self.right = self.reused = 0
        self.wrong: list[Ids] = []
        self._threads = [
            threading.Thread(target=self._run, args=(server, texts, seed * 10 + n))
            for n in range(3)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, server: Served, texts: dict[Ids, str], seed: int) -> None:
        chance = random.Random(seed)
        while True:
            ids = chance.choice([*texts])
            try:
                text, reused = server.ask(ids)
            except (OSError, HTTPException, json.JSONDecodeError, KeyError):
                return
            self.right += text == texts[ids]
            self.reused += reused
            if text != texts[ids]:
                self.wrong.append(ids)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(120)


@pytest.mark.parametrize("kills", [1, pytest.param(50, marks=pytest.mark.slow)])
def test_killed_while_it_writes_under_traffic(folders: Folders, tmp_path: Path, kills: int) -> None:
    """The folder's budget is a fraction of what the traffic makes: files come and go all along."""
    model, kept = folders("hybrid"), tmp_path / "kept"
    asked = prompts(1, 24)
    with Engine.load(model, mode="lookup", dtype="float32", prefix_cache=None) as engine:
        texts = {i: engine.generate(Prompt(i), max_tokens=TOKENS).text for i in asked}
    chance, reused = random.Random(2), 0
    for kill in range(kills):
        with serving(model, kept) as server:
            traffic = Traffic(server, texts, kill)
            while traffic.right < 8:
                time.sleep(0.01)
            time.sleep(chance.random() * 0.5)
            server.end(signal.SIGKILL)
            traffic.join()
        assert not traffic.wrong
        assert DISK // 2 < size(kept) <= DISK
        assert not any("cache file" in line for line in server.said), server.said
        reused += traffic.reused
    assert reused > 100 * kills
    with serving(model, kept) as server:
        assert [server.ask(ids)[0] for ids in asked] == [texts[ids] for ids in asked]
        server.end()
    assert not [*kept.rglob("tmp-*")]
    assert size(kept) <= DISK


@pytest.mark.parametrize("models", [("dense", "dense"), ("dense", "hybrid")], ids="-".join)
def test_two_engines_share_a_folder(
    folders: Folders, tmp_path: Path, models: tuple[str, str]
) -> None:
    """Each with a memory that holds little, so that both write and load all the time.

    How much each finds depends on what the other has just driven out; that it finds some does not.
    """
    asked = prompts(3, 6)
    right = [expected(folders(name), asked) for name in models]
    seen: list[list[Ids]] = [[], []]
    cached = [0, 0]

    def run(number: int) -> None:
        cache = CacheOptions(1 << 18, DISK, tmp_path)
        model = folders(models[number])
        with Engine.load(model, mode="lookup", dtype="float32", prefix_cache=cache) as engine:
            for ids in asked * 2:
                answer = engine.generate(Prompt(ids), max_tokens=TOKENS)
                seen[number].append(answer.token_ids)
                cached[number] += answer.statistics.cached_tokens
                assert size(tmp_path) <= DISK

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    for number in range(2):
        assert seen[number] == [right[number][ids] for ids in asked] * 2
        assert cached[number] > 0


def flip(path: Path, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def cut(path: Path, chance: random.Random) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: chance.randrange(len(data))])


def vanish(path: Path, chance: random.Random) -> None:
    path.unlink()


def stray(path: Path, chance: random.Random) -> None:
    path.with_name(f"stray-{chance.randrange(1000)}").write_bytes(b"?" * 1000)
    shutil.copy(path, path.with_suffix(".copy"))


@pytest.mark.parametrize("harm", [flip, cut, vanish, stray])
def test_a_harmed_folder_gives_right_answers(
    folders: Folders, tmp_path: Path, harm: Callable[[Path, random.Random], None]
) -> None:
    """At rest, and under a running engine that has yet to load from it."""
    model, asked = folders("hybrid"), prompts(5, 4)
    right, chance = expected(model, asked), random.Random(6)

    def load() -> Engine:
        cache = CacheOptions(1 << 20, 1 << 26, tmp_path)
        return Engine.load(model, mode="lookup", dtype="float32", prefix_cache=cache)

    def harmed() -> None:
        for path in chance.sample(sorted(tmp_path.rglob("*.safetensors")), 8):
            harm(path, chance)

    with load() as engine:
        for ids in asked:
            engine.generate(Prompt(ids), max_tokens=TOKENS)
    cached = 0
    for _ in range(2):
        harmed()
        with load() as engine:
            for number, ids in enumerate(asked):
                if number == 2:
                    harmed()
                answer = engine.generate(Prompt(ids), max_tokens=TOKENS)
                assert answer.token_ids == right[ids]
                cached += answer.statistics.cached_tokens
    assert cached > 0
