"""From a name to a model in the hub's cache: what to fetch, and fetching it."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from spec_cli.hub import cache_folder
from spec_cli.sizes import in_bytes
from spec_core.errors import SpecError
from spec_drafters.pairs import find_pair, nearest_names
from spec_drafters.resolve import DRAFTER_FILES, GGUF, HubProblem, HuggingFaceHub

_SEARCH = "https://huggingface.co/models?library=mlx"
_PATIENCE = 15.0
"""Seconds that the hub may take to say whether it has a repository."""
_EVERY = 0.2
"""Seconds between two looks at what has arrived."""

Arrived = Callable[[int], None]
"""Told how many bytes of the files are there so far."""


class PullError(SpecError):
    """A model cannot be fetched."""


@dataclass(frozen=True, slots=True)
class Part:
    """One file of a repository.

    Attributes:
        name: its path there.
        nbytes: its size; 0 where the hub does not say.
        cached: it is there already.
    """

    name: str
    nbytes: int
    cached: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be fetched from one repository.

    Attributes:
        repo: its id.
        revision: the commit.
        parts: its files that are of use.
    """

    repo: str
    revision: str
    parts: tuple[Part, ...]

    @property
    def missing(self) -> tuple[Part, ...]:
        return tuple(part for part in self.parts if not part.cached)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def missing_bytes(self) -> int:
        return sum(part.nbytes for part in self.missing)


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model is on the hub.

    Attributes:
        repo: its id.
        file: the one file that is wanted; None: all that a model needs.
        drafter: it is a drafter.
    """

    repo: str
    file: str | None = None
    drafter: bool = False


def source_of(name: str) -> Source:
    """What a name means: a hub id, the name of a known target, or a known drafter's.

    Raises:
        PullError: it is none of them.
    """
    if name.startswith(GGUF):
        owner, repo, file = [*name.removeprefix(GGUF).split("/", 2), "", ""][:3]
        if file:
            return Source(f"{owner}/{repo}", file, drafter=True)
    pair = find_pair(name)
    if "/" not in name and pair is not None and pair.repo:
        return Source(pair.repo)
    if name.count("/") == 1 and not name.startswith((".", "~", "/")):
        return Source(name, drafter=_is_known_drafter(name))
    raise PullError(f"{name} is no hub id (owner/name){_advice(name)}")


def drafter_of(target: str) -> str | None:
    """The drafter that is known for a target; None if there is none, or it is not on the hub."""
    pair = find_pair(target)
    known = None if pair is None else pair.drafter()
    return None if known is None or known.beside_target else known.source


def _is_known_drafter(repo: str) -> bool:
    from spec_drafters.pairs import known_pairs

    return any(repo == drafter.source for pair in known_pairs() for drafter in pair.drafters)


def _advice(name: str) -> str:
    near = nearest_names(name)
    meant = f"; did you mean {' or '.join(near)}?" if near else ";"
    return f"{meant} `spec models` lists the known pairs, {_SEARCH} all others"


def plan(source: Source, hub: HuggingFaceHub | None = None) -> Plan:
    """Ask the hub what there is to fetch.

    Raises:
        PullError: the hub cannot be asked, or has nothing that can be used.
    """
    hub = hub or HuggingFaceHub(patience=_PATIENCE)
    problem = hub.problem_with(source.repo)
    if problem is not None:
        raise _refused(source.repo, problem)
    try:
        found = _listed(source)
    except Exception as error:  # whatever the client raises is the hub's problem
        raise _refused(source.repo, hub.explained(source.repo, error)) from error
    if not any(part.name.endswith((".safetensors", ".gguf")) for part in found.parts):
        raise PullError(
            f"{source.repo} has no safetensors files that MLX reads; look for a converted copy "
            f"(often mlx-community/{source.repo.rpartition('/')[2]}) at {_SEARCH}"
        )
    return found


def _refused(repo: str, problem: HubProblem) -> PullError:
    advice = _advice(repo) if problem.reason == "unknown" else ""
    return PullError(f"{repo}: {problem.detail}{advice}")


def _listed(source: Source) -> Plan:
    """A dry run of the client's own."""
    from huggingface_hub import snapshot_download

    from spec_targets.mlx_lm_import import mlx_lm_utils

    if source.file is not None:
        patterns = [source.file]
    elif source.drafter:
        patterns = list(DRAFTER_FILES)
    else:
        patterns = mlx_lm_utils().DEFAULT_ALLOW_PATTERNS
    files = snapshot_download(
        source.repo,
        cache_dir=cache_folder(),
        allow_patterns=patterns,
        ignore_patterns=["*/*"] if source.drafter and source.file is None else None,
        dry_run=True,
        tqdm_class=_silent(),
    )
    parts = tuple(Part(one.filename, one.file_size or 0, one.is_cached) for one in files)
    return Plan(source.repo, files[0].commit_hash if files else "", parts)


def check_room(plans: list[Plan]) -> None:
    """Whether the disk has room for all that is missing.

    Raises:
        PullError: it has not.
    """
    folder = next(one for one in (cache_folder(), *cache_folder().parents) if one.is_dir())
    free, wanted = shutil.disk_usage(folder).free, sum(one.missing_bytes for one in plans)
    if wanted > free:
        raise PullError(
            f"{in_bytes(wanted)} are to be fetched, but {folder} has {in_bytes(free)} left; "
            "`spec rm` frees room, and HF_HOME names another place"
        )


def fetch(wanted: Plan, arrived: Arrived, hub: HuggingFaceHub | None = None) -> Path:
    """Download what is missing, file by file; the folder. Files that are whole stay when a later
    one fails, and a connection that breaks is taken up where it broke.

    Raises:
        PullError: the hub failed on the way.
    """
    from huggingface_hub import hf_hub_download

    folder = cache_folder()
    try:
        with _watched(folder / f"models--{wanted.repo.replace('/', '--')}", arrived):
            for part in wanted.missing:
                hf_hub_download(
                    wanted.repo,
                    part.name,
                    revision=wanted.revision,
                    cache_dir=folder,
                    tqdm_class=_silent(),
                )
            return _completed(wanted)
    except Exception as error:
        problem = (hub or HuggingFaceHub()).explained(wanted.repo, error)
        raise PullError(
            f"{wanted.repo}: {problem.detail}; the same command goes on with the files that are "
            "not complete"
        ) from error


def _completed(wanted: Plan) -> Path:
    """Let the client know that this is the newest version, for whoever loads it by name."""
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            wanted.repo,
            cache_dir=cache_folder(),
            allow_patterns=[part.name for part in wanted.parts],
            tqdm_class=_silent(),
        )
    )


@contextmanager
def _watched(folder: Path, arrived: Arrived) -> Iterator[None]:
    """Tell how much has arrived in a repository's folder, until the block ends."""
    done, before = threading.Event(), _held(folder)

    def watch() -> None:
        while not done.wait(_EVERY):
            arrived(max(0, _held(folder) - before))

    thread = threading.Thread(target=watch, name="spec-pull", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        arrived(max(0, _held(folder) - before))


def _held(folder: Path) -> int:
    """Bytes of a repository's files, unfinished ones included."""
    total = 0
    for file in folder.glob("blobs/*"):
        try:
            total += file.stat().st_size
        except OSError:  # it was moved a moment ago
            continue
    return total


def _silent() -> Any:
    """A progress bar of the client's that shows nothing; ours does."""
    from huggingface_hub.utils.tqdm import tqdm

    return partial(tqdm, disable=True)
