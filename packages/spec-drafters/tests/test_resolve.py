"""Sources to files: local first, then a hub on the loopback, and one sentence for a failure."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import close_session, constants

from spec_core.errors import SpecError
from spec_drafters.resolve import (
    CONFIG_FILES,
    HubProblem,
    HuggingFaceHub,
    ResolveError,
    resolve,
)

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "modeling.py": b"raise SystemExit",
    "training/optimizer.safetensors": b"state",
    "small.gguf": b"GGUF",
}


@dataclass
class FakeHub:
    """Serves one repository and remembers what was asked."""

    repo: str = "owner/drafter"
    files: dict[str, bytes] = field(default_factory=lambda: dict(FILES))
    gated: bool = False
    asked: list[str] = field(default_factory=list)

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        self.asked.append(path)
        api = f"/api/models/{self.repo}"
        if path in (api, f"{api}/revision/main"):
            return 200, {}, json.dumps({"id": self.repo, "sha": COMMIT}).encode()
        if path.startswith(f"{api}/tree/"):
            return 200, {}, json.dumps([self._entry(name) for name in self.files]).encode()
        if path.startswith(f"/{self.repo}/resolve/"):
            return self._file(path.split("/", 5)[-1])
        return 401, {"X-Error-Code": "RepoNotFound"}, b"{}"

    def _entry(self, name: str) -> dict[str, object]:
        data = self.files[name]
        return {"type": "file", "path": name, "size": len(data), "oid": self._tag(data)}

    def _file(self, name: str) -> tuple[int, dict[str, str], bytes]:
        if self.gated:
            return 403, {"X-Error-Code": "GatedRepo"}, b"{}"
        if name not in self.files:
            return 404, {"X-Error-Code": "EntryNotFound"}, b"{}"
        data = self.files[name]
        return 200, {"ETag": f'"{self._tag(data)}"', "X-Repo-Commit": COMMIT}, data

    @staticmethod
    def _tag(data: bytes) -> str:
        return hashlib.sha1(data).hexdigest()


def serve(fake: FakeHub) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, headers, body = fake.answer(self.path.split("?")[0])
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    return ThreadingHTTPServer(("127.0.0.1", 0), Handler)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return FakeHub()


@pytest.fixture
def hub(fake: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HuggingFaceHub]:
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    with serve(fake) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield HuggingFaceHub(
            endpoint=f"http://127.0.0.1:{server.server_port}", cache=tmp_path / "cache"
        )
        server.shutdown()
        close_session()


def go_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def names(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if not p.is_dir()}


@dataclass
class NoHub:
    """A hub that nobody may ask."""

    def snapshot(self, repo: str, files: Sequence[str]) -> Path:
        raise AssertionError(f"the hub was asked for {repo}")

    def file(self, repo: str, name: str) -> Path:
        raise AssertionError(f"the hub was asked for {repo}/{name}")


def refused(source: str, hub: HuggingFaceHub | NoHub, **options: Path) -> ResolveError:
    """The error, after checking its form: one line that begins with what was typed."""
    with pytest.raises(ResolveError) as caught:
        resolve(source, hub=hub, **options)  # type: ignore[arg-type]
    assert isinstance(caught.value, SpecError)
    assert caught.value.source == source
    assert str(caught.value).startswith(f"{source}: ")
    assert "\n" not in str(caught.value)
    return caught.value


class TestLocal:
    def test_a_folder_wins_over_the_hub(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = tmp_path / "owner" / "drafter"
        folder.mkdir(parents=True)
        monkeypatch.chdir(tmp_path)
        for source in ("owner/drafter", "./owner/drafter/", folder, str(folder)):
            assert resolve(source, hub=NoHub()) == folder

    def test_home_is_expanded(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        (tmp_path / "drafter").mkdir()
        assert resolve("~/drafter", hub=NoHub()) == tmp_path / "drafter"

    def test_a_gguf_file_with_and_without_the_prefix(self, tmp_path: Path) -> None:
        file = tmp_path / "a.gguf"
        file.write_bytes(b"GGUF")
        assert resolve(file, hub=NoHub()) == file
        assert resolve(f"gguf:{file}", hub=NoHub()) == file

    def test_a_bare_name_is_found_beside_the_target(self, tmp_path: Path) -> None:
        target, drafter = tmp_path / "spec-tiny", tmp_path / "spec-tiny-dspark"
        target.mkdir()
        drafter.mkdir()
        assert resolve("spec-tiny-dspark", beside=target, hub=NoHub()) == drafter
        error = refused("spec-tiny-dflash", NoHub(), beside=target)
        assert str(tmp_path / "spec-tiny-dflash") in str(error)

    def test_paths_of_the_wrong_kind(self, tmp_path: Path) -> None:
        weights = tmp_path / "model.safetensors"
        weights.write_bytes(b"")
        assert refused(str(weights), NoHub()).reason == "unfit"
        error = refused(f"gguf:{tmp_path}", NoHub())
        assert (error.reason, "is a folder; name a .gguf file" in str(error)) == ("unfit", True)

    @pytest.mark.parametrize(
        "source",
        ["", "nothing-here", "/no/such/folder", "./owner/drafter", "../x", "a/b/c", "gguf:a.gguf"],
    )
    def test_what_cannot_be_a_hub_id_is_never_asked_for(self, source: str) -> None:
        error = refused(source, NoHub())
        assert error.reason == "missing"
        assert not source or str(Path(source.removeprefix("gguf:")).absolute()) in str(error)

    def test_slips_get_suggestions(self) -> None:
        assert "did you mean spec-tiny" in str(refused("spec-tinny-dspark", NoHub()))
        assert "gguf:owner/name/file.gguf" in str(refused("owner/name/file.gguf", NoHub()))


class TestHub:
    def test_only_needed_files_are_fetched(self, hub: HuggingFaceHub, fake: FakeHub) -> None:
        folder = resolve(fake.repo, hub=hub)
        assert names(folder) == {"config.json", "model.safetensors"}
        assert (folder / "model.safetensors").read_bytes() == b"weights"

    def test_the_config_can_be_had_before_the_weights(
        self, hub: HuggingFaceHub, fake: FakeHub
    ) -> None:
        assert names(resolve(fake.repo, files=CONFIG_FILES, hub=hub)) == {"config.json"}
        assert not any("safetensors" in path for path in fake.asked)
        assert "model.safetensors" in names(resolve(fake.repo, hub=hub))

    def test_a_gguf_file(self, hub: HuggingFaceHub, fake: FakeHub) -> None:
        file = resolve(f"gguf:{fake.repo}/small.gguf", hub=hub)
        assert file.read_bytes() == b"GGUF"
        assert not any("safetensors" in path for path in fake.asked)

    def test_the_cache_serves_offline_and_when_the_hub_is_away(
        self, hub: HuggingFaceHub, fake: FakeHub, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = resolve(fake.repo, hub=hub)
        file = resolve(f"gguf:{fake.repo}/small.gguf", hub=hub)
        away = HuggingFaceHub(endpoint="http://127.0.0.1:1", cache=hub.cache)
        assert resolve(fake.repo, hub=away) == folder
        asked = len(fake.asked)
        go_offline(monkeypatch)
        assert resolve(fake.repo, hub=hub) == folder
        assert resolve(f"gguf:{fake.repo}/small.gguf", hub=hub) == file
        assert len(fake.asked) == asked

    def test_a_cached_repository_that_became_gated_still_serves(
        self, hub: HuggingFaceHub, fake: FakeHub
    ) -> None:
        folder = resolve(fake.repo, hub=hub)
        fake.gated = True
        assert resolve(fake.repo, hub=hub) == folder

    def test_files_that_the_repository_lacks_are_named(
        self, hub: HuggingFaceHub, fake: FakeHub
    ) -> None:
        error = refused(f"gguf:{fake.repo}/large.gguf", hub)
        assert (error.reason, "no such file" in str(error)) == ("incomplete", True)
        del fake.files["model.safetensors"]
        error = refused(fake.repo, hub)
        assert (error.reason, "has no *.safetensors" in str(error)) == ("incomplete", True)


class TestHubRefusals:
    def test_offline_says_where_it_looked_and_what_to_do(
        self, hub: HuggingFaceHub, fake: FakeHub, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        go_offline(monkeypatch)
        for source in (fake.repo, f"gguf:{fake.repo}/small.gguf"):
            error = refused(source, hub)
            assert error.reason == "offline"
            assert f"{hub.cache}/models--owner--drafter" in str(error)
            assert "HF_HUB_OFFLINE" in str(error)
            assert f"hf download {fake.repo}" in str(error)
            assert str(Path(source.removeprefix("gguf:")).absolute()) in str(error)
        assert fake.asked == []

    def test_a_half_filled_cache_is_not_enough(
        self, hub: HuggingFaceHub, fake: FakeHub, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        resolve(fake.repo, files=CONFIG_FILES, hub=hub)
        go_offline(monkeypatch)
        assert refused(fake.repo, hub).reason in ("offline", "incomplete")
        assert names(resolve(fake.repo, files=CONFIG_FILES, hub=hub)) == {"config.json"}

    def test_an_unreachable_hub_is_named(self, fake: FakeHub, tmp_path: Path) -> None:
        error = refused(fake.repo, HuggingFaceHub("http://127.0.0.1:1", tmp_path))
        assert error.reason == "unreachable"
        assert "http://127.0.0.1:1" in str(error)
        assert "local folder" in str(error)

    def test_a_hub_that_never_answers_is_given_up(self, fake: FakeHub, tmp_path: Path) -> None:
        with serve(fake) as silent:  # listens, but nobody accepts
            endpoint = f"http://127.0.0.1:{silent.server_port}"
            error = refused(fake.repo, HuggingFaceHub(endpoint, tmp_path, patience=0.2))
        assert error.reason == "unreachable"

    def test_an_unknown_repository_gets_the_nearest_names(self, hub: HuggingFaceHub) -> None:
        error = refused("deepseek-ai/dspark_qwen3_4b_block8", hub)
        assert error.reason == "unknown"
        assert "did you mean deepseek-ai/dspark_qwen3_4b_block7" in str(error)
        assert "no token is set" in str(error)

    @pytest.mark.parametrize("held", ["nothing", "HF_TOKEN", "file"])
    def test_a_gated_repository_says_which_token_was_sent(
        self,
        hub: HuggingFaceHub,
        fake: FakeHub,
        held: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        fake.gated = True
        if held == "HF_TOKEN":
            monkeypatch.setenv("HF_TOKEN", "hf_never_shown")
        if held == "file":
            (tmp_path / "token").write_text("hf_never_shown")
        error = refused(fake.repo, hub)
        shown = {"nothing": "no token is set", "file": str(tmp_path / "token")}.get(held, held)
        assert error.reason == "gated"
        assert f"{hub.endpoint}/{fake.repo}" in str(error)
        assert shown in str(error)
        assert "hf_never_shown" not in str(error)

    def test_a_problem_of_another_hub_keeps_its_reason(self) -> None:
        class Mirror(NoHub):
            def snapshot(self, repo: str, files: Sequence[str]) -> Path:
                raise HubProblem("unreachable", "the mirror is being rebuilt")

        error = refused("owner/drafter", Mirror())
        assert (error.reason, "the mirror is being rebuilt" in str(error)) == ("unreachable", True)


def test_huggingface_hub_is_imported_only_when_it_is_asked() -> None:
    code = "import sys, spec_drafters.resolve; print('huggingface_hub' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
