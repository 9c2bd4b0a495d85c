"""`spec pull`, `spec rm` and `spec models` against a hub on the loopback."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import close_session, constants

from spec_cli import bundled

from .command import Spec

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TARGET, DRAFTER = "Qwen/Qwen3-4B", "deepseek-ai/dspark_qwen3_4b_block7"
"""A known pair, as the table has it."""


@dataclass
class FakeHub:
    """Serves a few repositories, and remembers which bytes it sent.

    Attributes:
        repos: files of each.
        gated: repositories whose files are refused.
        breaks: after how many bytes a file's first transfer breaks off.
        sent: file name and first byte of every transfer.
    """

    repos: dict[str, dict[str, bytes]]
    gated: set[str] = field(default_factory=set)
    breaks: dict[str, int] = field(default_factory=dict)
    sent: list[tuple[str, int]] = field(default_factory=list)

    def entries(self, repo: str) -> list[dict[str, object]]:
        return [
            {"type": "file", "path": name, "size": len(data), "oid": tag(data)}
            for name, data in self.repos[repo].items()
        ]


def tag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


class Handler(BaseHTTPRequestHandler):
    hub: FakeHub

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        for repo in self.hub.repos:
            if path.startswith(f"/api/models/{repo}/tree/"):
                self._json(self.hub.entries(repo))
                return
            if path in (f"/api/models/{repo}", f"/api/models/{repo}/revision/main"):
                self._json({"id": repo, "sha": COMMIT, "siblings": []})
                return
            if path.startswith(f"/{repo}/resolve/"):
                self._file(repo, path.split("/", 5)[-1])
                return
        self._refuse(401, "RepoNotFound")

    do_HEAD = do_GET

    def _json(self, value: object) -> None:
        self._reply(200, {}, json.dumps(value).encode())

    def _refuse(self, status: int, code: str) -> None:
        self._reply(status, {"X-Error-Code": code}, b"{}")

    def _file(self, repo: str, name: str) -> None:
        if repo in self.hub.gated:
            self._refuse(403, "GatedRepo")
            return
        data = self.hub.repos[repo][name]
        headers = {"ETag": f'"{tag(data)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        start = int(self.headers.get("Range", "bytes=0-")[6:].split("-")[0])
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        if self.command == "GET":
            self.hub.sent.append((name, start))
        self._reply(206 if start else 200, headers, data[start:], self._breaks(name))

    def _breaks(self, name: str) -> int | None:
        return self.hub.breaks.pop(name, None) if self.command == "GET" else None

    def _reply(
        self, status: int, headers: dict[str, str], body: bytes, breaks: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:breaks])
        if breaks is not None:
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        pass


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, no token, and nobody to ask."""
    folder = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return folder


def answer_at(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", address)
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """The pair under the names of a known one: what they hold is spec-tiny's."""
    fake = FakeHub(
        {
            TARGET: {**files_of(bundled.TARGET), "notes.md": b"not needed"},
            DRAFTER: files_of(bundled.TARGET.with_name("spec-tiny-dspark")),
        }
    )
    handler = type("OwnHandler", (Handler,), {"hub": fake})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        answer_at(monkeypatch, f"http://127.0.0.1:{server.server_port}")
        yield fake
        server.shutdown()
        close_session()


def pulled(spec: Spec, *arguments: str) -> list[dict[str, Any]]:
    ran = spec("pull", "--json", *arguments)
    assert ran.code == 0, ran.err
    record: list[dict[str, Any]] = json.loads(ran.out)
    return record


def test_a_model_comes_with_its_drafter_and_can_be_used_offline(
    spec: Spec, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, drafter = pulled(spec, TARGET)
    assert (target["repo"], drafter["repo"]) == (TARGET, DRAFTER)
    held = files_of(Path(target["folder"]))
    assert held == {name: hub.repos[TARGET][name] for name in held}
    assert "notes.md" not in held
    assert target["bytes"] == target["fetched_bytes"] == sum(map(len, held.values()))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    ran = spec("generate", "--json", "--model", TARGET, "--max-tokens", "4", "Hello")
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["drafter"] == DRAFTER
    looked = spec("doctor", "--model", TARGET)
    assert looked.code == 0
    assert DRAFTER in looked.out


def test_what_is_there_is_not_fetched_again(spec: Spec, hub: FakeHub) -> None:
    pulled(spec, "--no-drafter", "Qwen3-4B")  # the target's name in the table of pairs
    hub.sent.clear()
    (again,) = pulled(spec, "--no-drafter", TARGET)
    assert (hub.sent, again["fetched_bytes"]) == ([], 0)
    ran = spec("pull", "--no-drafter", TARGET)
    assert ran.out == f"{again['folder']}\n"
    assert "there already" in ran.err


def test_a_broken_connection_is_taken_up_where_it_broke(spec: Spec, hub: FakeHub) -> None:
    hub.breaks["model.safetensors"] = 12_000_000
    (target,) = pulled(spec, "--no-drafter", TARGET)
    first, second = (start for name, start in hub.sent if name == "model.safetensors")
    assert first == 0
    assert 0 < second <= 12_000_000
    assert (
        files_of(Path(target["folder"]))["model.safetensors"]
        == (hub.repos[TARGET]["model.safetensors"])
    )


def test_after_a_failure_the_same_command_goes_on(spec: Spec, hub: FakeHub) -> None:
    whole = dict(hub.repos[DRAFTER])
    hub.gated.add(DRAFTER)
    ran = spec("pull", TARGET)
    assert ran.code == 1
    assert "accept its terms" in ran.err
    assert "HF_TOKEN" in ran.err
    hub.gated.clear()
    hub.repos[DRAFTER] = whole
    target, drafter = pulled(spec, TARGET)
    assert drafter["fetched_bytes"] == sum(map(len, whole.values()))
    assert target["bytes"] > 0


def test_a_large_download_is_asked_about(
    spec: Spec, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spec_cli.commands.pull.ASK_ABOVE", 1000)
    ran = spec("pull", TARGET)
    assert ran.code == 2
    assert "add --yes" in ran.err
    assert hub.sent == []
    assert pulled(spec, TARGET, "--yes")


def test_a_full_disk_is_seen_before_anything_is_fetched(
    spec: Spec, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 9, 1000))  # type: ignore[attr-defined]
    ran = spec("pull", "--yes", TARGET)
    assert ran.code == 1
    assert "1000 B left" in ran.err
    assert hub.sent == []


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("Qwen3-4", "did you mean Qwen3-4B"),
        ("Qwen/Qwen3-4X", "did you mean Qwen/Qwen3-4B"),
        ("someone/unheard-of", "no token is set"),
        ("zzz", "spec models"),
        ("./here", "no hub id"),
    ],
)
def test_names_that_the_hub_does_not_know(
    spec: Spec, hub: FakeHub, name: str, sentence: str
) -> None:
    ran = spec("pull", name)
    assert (ran.code, ran.out) == (1, "")
    assert sentence in ran.err
    assert "https://huggingface.co/models" in ran.err
    assert len(ran.err.splitlines()) == 1


def test_a_repository_without_weights_for_mlx(spec: Spec, hub: FakeHub) -> None:
    hub.repos["someone/old"] = {"config.json": b"{}", "pytorch_model.bin": b"x"}
    ran = spec("pull", "someone/old")
    assert ran.code == 1
    assert "mlx-community/old" in ran.err


def test_without_a_network_a_sentence_says_what_to_do(
    spec: Spec, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_at(monkeypatch, "http://127.0.0.1:9")
    ran = spec("pull", TARGET)
    assert ran.code == 1
    assert "check the connection" in ran.err
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for command in (["pull", TARGET], ["generate", "hi", "--model", TARGET]):
        ran = spec(*command)
        assert ran.code == 1
        assert "HF_HUB_OFFLINE forbids asking the hub" in ran.err
        assert "check the name" not in ran.err


def test_the_bundled_model_needs_no_pull(spec: Spec, cache: Path) -> None:
    ran = spec("pull", "spec-tiny")
    assert ran.code == 0
    assert "comes with this program" in ran.err


def row(spec: Spec, target: str) -> dict[str, Any]:
    rows = json.loads(spec("models", "--json").out)
    found: dict[str, Any] = next(row for row in rows if row["target"] == target)
    return found


def test_models_shows_what_is_downloaded_and_what_fits(
    spec: Spec, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert row(spec, "Qwen3-4B")["downloaded"] == []
    hub.repos["mlx-community/Qwen3-4B-4bit"] = hub.repos[TARGET]
    hub.repos["someone/else"] = hub.repos[TARGET]
    (target, drafter) = pulled(spec, "mlx-community/Qwen3-4B-4bit")
    pulled(spec, "someone/else")
    found = row(spec, "Qwen3-4B")
    (copy,) = found["downloaded"]
    assert (copy["repo"], copy["fits"]) == ("mlx-community/Qwen3-4B-4bit", True)
    assert copy["bytes"] == target["bytes"]
    assert found["drafters"][0]["downloaded_bytes"] == drafter["bytes"]
    assert row(spec, "else")["repo"] == "someone/else"
    monkeypatch.setattr("spec_server.memory.default_limit", lambda: 5 * 2**30)
    assert row(spec, "Qwen3-4B")["fits"] == {"16 bits": False, "4 bits": True}
    assert row(spec, "Qwen3-14B")["fits"] == {"16 bits": False, "4 bits": False}
    shown = spec("models").out
    assert "Qwen3-4B  (fits here in 4 bits)" in shown
    assert "downloaded: mlx-community/Qwen3-4B-4bit, 17." in shown
    assert "someone/else" in shown


def held(folder: Path) -> int:
    """Bytes of the files in a folder."""
    return sum(file.lstat().st_size for file in folder.rglob("*") if file.is_file())


def test_rm_frees_what_it_says_and_nothing_else(spec: Spec, hub: FakeHub, cache: Path) -> None:
    pulled(spec, TARGET)
    ran = spec("rm", TARGET)
    assert ran.code == 2
    assert "add --yes" in ran.err
    before = held(cache)
    (removed,) = json.loads(spec("rm", "--yes", "--json", TARGET).out)
    assert removed["freed_bytes"] == before - held(cache) > 17e6
    assert row(spec, "Qwen3-4B")["downloaded"] == []
    assert row(spec, "Qwen3-4B")["drafters"][0]["downloaded_bytes"]
    again = spec("rm", "--yes", TARGET)
    assert again.code == 1
    assert str(cache) in again.err


def test_rm_never_leaves_the_cache(spec: Spec, hub: FakeHub, cache: Path, tmp_path: Path) -> None:
    pulled(spec, "--no-drafter", TARGET)
    folder = cache / f"models--{TARGET.replace('/', '--')}"
    outside = tmp_path / "elsewhere"
    folder.rename(outside)
    folder.symlink_to(outside)
    for name in (TARGET, str(outside), "spec-tiny", str(bundled.TARGET)):
        ran = spec("rm", "--yes", name)
        assert ran.code == 1
    assert any(outside.rglob("config.json"))
    assert bundled.TARGET.is_dir()
