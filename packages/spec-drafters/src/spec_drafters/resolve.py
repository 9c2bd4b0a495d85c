"""From what a user typed to files on this machine: a folder, a hub repository, or a GGUF file.

Local paths win. The hub's own cache and HF_HUB_OFFLINE are honoured. Whatever fails is answered
in one sentence, within seconds, by a `ResolveError`.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, TypeVar

from spec_drafters.errors import DrafterError
from spec_drafters.pairs import nearest_names

CONFIG_FILES = ("config.json",)
"""Enough to recognise a packaging before any weights are fetched."""

DRAFTER_FILES = ("*.json", "*.safetensors")
"""All that a drafter folder needs; code and pickles are never fetched."""

GGUF = "gguf:"
"""Prefix of a GGUF file in a repository: `gguf:owner/name/file.gguf`."""

_HUB_ID = re.compile(r"(?!\.+/)[\w.-]+/[\w.-]*[\w-][\w.-]*", re.ASCII)

Reason = Literal["missing", "unfit", "offline", "unreachable", "gated", "unknown", "incomplete"]

_Result = TypeVar("_Result")


class ResolveError(DrafterError):
    """A model or drafter was not found where the user said it is.

    Attributes:
        source: what the user typed.
        reason: "missing" (no such path, and no hub id), "unfit" (a path of the wrong kind),
            "offline" or "unreachable" (not cached, and the hub cannot be asked), "gated",
            "unknown" (the hub has no such repository) or "incomplete" (files are missing there).
    """

    def __init__(self, source: str, reason: Reason, sentence: str) -> None:
        super().__init__(f"{source}: {sentence}")
        self.source = source
        self.reason = reason


class HubProblem(Exception):
    """Why a hub gave nothing. `detail` is a phrase without a full stop."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


class Hub(Protocol):
    """Where repositories come from."""

    def snapshot(self, repo: str, files: Sequence[str]) -> Path:
        """The folder with a repository's top-level files that match. Raises HubProblem."""

    def file(self, repo: str, name: str) -> Path:
        """One file of a repository. Raises HubProblem."""


def resolve(
    source: str | os.PathLike[str],
    *,
    files: Sequence[str] = DRAFTER_FILES,
    beside: Path | None = None,
    hub: Hub | None = None,
) -> Path:
    """The local folder, or the local .gguf file, that `source` names.

    Args:
        source: a folder, a .gguf file, a hub id ("owner/name"), or "gguf:" before the path of a
            GGUF file or before "owner/name/file.gguf".
        files: patterns of the files to fetch from a repository, top level only. Each must match
            something there.
        beside: the target's folder. A bare name is also looked for next to it.
        hub: asked for what is not local; the Hugging Face hub if None.

    Raises:
        ResolveError: nothing usable was found.
    """
    text = os.fspath(source)
    path = text.removeprefix(GGUF)
    places = _places(path, beside)
    for place in places:
        if place.exists():
            return _usable(text, place)
    remote = hub or HuggingFaceHub()
    if text.startswith(GGUF):
        return _remote_file(text, path, places, remote)
    if not is_hub_id(text):
        raise ResolveError(text, "missing", _nowhere(text, places))
    return _fetch(text, text, places, lambda: remote.snapshot(text, files))


def is_hub_id(text: str) -> bool:
    """Whether it is written like a repository's name, "owner/name"."""
    return _HUB_ID.fullmatch(text) is not None


def _places(path: str, beside: Path | None) -> list[Path]:
    """Where a local file or folder of this name may be, most specific first."""
    places = [Path(os.path.expanduser(path))] if path else []
    if beside is not None and path and len(Path(path).parts) == 1:
        places.append(Path(beside).resolve().parent / path)
    return places


def _usable(source: str, place: Path) -> Path:
    """An existing path, if it is a folder or a GGUF file as the source promises."""
    if place.is_dir() and not source.startswith(GGUF):
        return place.resolve()
    if place.is_file() and place.suffix == ".gguf":
        return place.resolve()
    wanted = "a .gguf file" if source.startswith(GGUF) else "a folder or a .gguf file"
    kind = "a folder" if place.is_dir() else "another kind of file"
    raise ResolveError(source, "unfit", f"{place} is {kind}; name {wanted}")


def _remote_file(source: str, path: str, places: Sequence[Path], hub: Hub) -> Path:
    """A GGUF file from a repository: owner/name/file.gguf, possibly in a sub-folder."""
    owner, _, rest = path.partition("/")
    name, _, file = rest.partition("/")
    repo = f"{owner}/{name}"
    if not file.endswith(".gguf") or not is_hub_id(repo):
        raise ResolveError(source, "missing", _nowhere(source, places))
    return _fetch(source, repo, places, lambda: hub.file(repo, file))


def _fetch(source: str, repo: str, places: Sequence[Path], call: Callable[[], Path]) -> Path:
    """Ask the hub; its problem becomes one sentence that says what else was tried."""
    try:
        return call()
    except HubProblem as problem:
        sentence = problem.detail
        if problem.reason in ("offline", "unreachable", "unknown"):
            sentence += f"; there is no local {_listed(places)} either"
        if problem.reason == "unknown":
            sentence += _suggestion(repo)
        raise ResolveError(source, problem.reason, sentence) from problem


def _nowhere(source: str, places: Sequence[Path]) -> str:
    looked = f"not found (looked for {_listed(places)})" if places else "nothing was named"
    if source.endswith(".gguf") and not source.startswith(GGUF):
        return f'{looked}; for a file in a hub repository write "gguf:owner/name/file.gguf"'
    form = "gguf:owner/name/file.gguf" if source.startswith(GGUF) else "owner/name"
    return f'{looked}, and it is not a hub id ("{form}")' + _suggestion(source.removeprefix(GGUF))


def _suggestion(name: str) -> str:
    near = nearest_names(name)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _listed(places: Sequence[Path]) -> str:
    return " or ".join(str(place.absolute()) for place in places)


@dataclass(frozen=True, slots=True)
class HuggingFaceHub:
    """The Hugging Face hub and its cache, through `huggingface_hub` (imported on first use).

    A repository that is cached is used as it is when the hub cannot be asked.

    Attributes:
        endpoint: another server; the client's own setting if None.
        cache: another cache folder; the client's own setting if None.
        patience: seconds that the hub may take to say whether it has a repository.
        ask: go to the server at all; False: only what is cached.
    """

    endpoint: str | None = None
    cache: Path | None = None
    patience: float = 3.0
    ask: bool = True

    def snapshot(self, repo: str, files: Sequence[str]) -> Path:
        """The cached folder of a repository with its matching top-level files, fetched if needed.

        Raises:
            HubProblem: it cannot be had, or some pattern matches none of its files.
        """
        from huggingface_hub import snapshot_download

        folder = self._obtain(
            repo,
            lambda cached_only: snapshot_download(
                repo,
                allow_patterns=list(files),
                ignore_patterns=["*/*"],
                endpoint=self.endpoint,
                cache_dir=self.cache,
                local_files_only=cached_only,
            ),
        )
        lacking = [pattern for pattern in files if not any(folder.glob(pattern))]
        if lacking:
            raise HubProblem("incomplete", f"{folder} has no {' and no '.join(lacking)}")
        return folder

    def file(self, repo: str, name: str) -> Path:
        """One cached file of a repository, fetched if needed. Raises HubProblem."""
        from huggingface_hub import hf_hub_download

        return self._obtain(
            repo,
            lambda cached_only: hf_hub_download(
                repo,
                name,
                endpoint=self.endpoint,
                cache_dir=self.cache,
                local_files_only=cached_only,
            ),
        )

    def _obtain(self, repo: str, download: Callable[[bool], str]) -> Path:
        """Download if the hub has the repository, otherwise take what is cached."""
        from huggingface_hub.errors import LocalEntryNotFoundError

        problem = self.problem_with(repo)
        try:
            return Path(download(problem is not None))
        except LocalEntryNotFoundError as error:
            raise problem or self.explained(repo, error) from error
        except Exception as error:  # whatever the client raises is the hub's problem
            raise self.explained(repo, error) from error

    def problem_with(self, repo: str) -> HubProblem | None:
        """None if the hub says that it has the repository and we may read it."""
        from huggingface_hub import HfApi

        forbidden = self.forbidden(repo)
        if forbidden is not None:
            return forbidden
        api = HfApi(endpoint=self.endpoint)
        try:
            _within(self.patience, lambda: api.model_info(repo, timeout=self.patience))
        except Exception as error:  # see _obtain
            return self.explained(repo, error)
        return None

    def forbidden(self, repo: str) -> HubProblem | None:
        """Why the hub may not be asked for what the cache lacks; None if it may."""
        from huggingface_hub import constants

        if not self.ask:
            return HubProblem(
                "offline",
                f"not (completely) in the cache, {self._folder(repo)}, and the hub was not asked",
            )
        if constants.HF_HUB_OFFLINE:
            return HubProblem(
                "offline",
                f"not (completely) in the cache, {self._folder(repo)}, and HF_HUB_OFFLINE "
                f"forbids asking the hub; unset it and run `hf download {repo}` (or `spec pull "
                f"{repo}`) once while online, or name a local folder",
            )
        return None

    def explained(self, repo: str, error: Exception) -> HubProblem:
        """What an exception of the client means to the user."""
        from huggingface_hub import constants, errors

        server = self.endpoint or constants.ENDPOINT
        if isinstance(error, errors.GatedRepoError):
            return HubProblem(
                "gated",
                f"gated: accept its terms at {server}/{repo}, then run `hf auth login` or set "
                f"HF_TOKEN to a token of that account ({_token()})",
            )
        if isinstance(error, errors.RepositoryNotFoundError | errors.HFValidationError):
            return HubProblem(
                "unknown", f"{server} has no such repository, or it is private ({_token()})"
            )
        if isinstance(error, errors.EntryNotFoundError) and not isinstance(
            error, errors.LocalEntryNotFoundError
        ):
            return HubProblem("incomplete", f"the repository {repo} has no such file")
        return HubProblem(
            "unreachable",
            f"not (completely) in the cache, {self._folder(repo)}, and {server} could not be used "
            f"({_phrase(error)}); check the connection, or name a local folder",
        )

    def _folder(self, repo: str) -> Path:
        from huggingface_hub import constants

        return Path(self.cache or constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"


def _token() -> str:
    """Which token the client would send, by its place; never its value."""
    from huggingface_hub import constants

    if os.environ.get("HF_TOKEN"):
        return "the one in HF_TOKEN has no access"
    if Path(constants.HF_TOKEN_PATH).is_file():
        return f"the one in {constants.HF_TOKEN_PATH} has no access"
    return "no token is set"


def _phrase(error: Exception) -> str:
    """An exception's kind and first line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__


def _within(seconds: float, call: Callable[[], _Result]) -> _Result:
    """The call's result; a name server that does not answer ignores the client's own timeouts.

    Raises:
        TimeoutError: it took longer. Its thread is left behind, and does not hold up the exit.
    """
    results: list[_Result] = []
    failures: list[Exception] = []

    def work() -> None:
        try:
            results.append(call())
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=work, name="hub", daemon=True)
    thread.start()
    thread.join(seconds)
    if failures:
        raise failures[0]
    if not results:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return results[0]
