"""The hub's cache on this machine: what it holds. Nothing here asks the network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo


@dataclass(frozen=True, slots=True)
class Cached:
    """A repository in the cache.

    Attributes:
        repo: its id.
        nbytes: what its files take on disk.
        folder: where the cache keeps it.
        partial: bytes of downloads that were interrupted.
    """

    repo: str
    nbytes: int
    folder: Path
    partial: int = 0


def cache_folder() -> Path:
    """Where the hub's client keeps repositories."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def snapshot(repo: str, cache: Path | None = None) -> Path | None:
    """The folder of a cached repository, complete or not; None if nothing is cached, or the name
    is no hub id."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repo, local_files_only=True, cache_dir=cache))
    except (HFValidationError, LocalEntryNotFoundError):
        return None


def cached_models(cache: Path | None = None) -> Mapping[str, Cached]:
    """Every model repository in the cache, by its id."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        found = scan_cache_dir(cache)
    except (CacheNotFound, NotADirectoryError):
        return {}
    return {one.repo_id: _cached(one) for one in found.repos if one.repo_type == "model"}


def _cached(one: CachedRepoInfo) -> Cached:
    return Cached(one.repo_id, one.size_on_disk, Path(one.repo_path), partial(Path(one.repo_path)))


def partial(folder: Path) -> int:
    """Bytes of a repository's interrupted downloads."""
    return sum(file.stat().st_size for file in folder.glob("blobs/*.incomplete"))
