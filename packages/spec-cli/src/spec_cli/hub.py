"""The hub's cache on this machine: what it holds, and how that is removed. The network is never
asked here."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from spec_core.errors import SpecError

if TYPE_CHECKING:
    from huggingface_hub import HFCacheInfo


class CacheError(SpecError):
    """Something cannot be removed from the cache."""


@dataclass(frozen=True, slots=True)
class Cached:
    """A model repository in the cache.

    Attributes:
        repo: its id.
        nbytes: what its files take on disk.
        folder: where the cache keeps it.
    """

    repo: str
    nbytes: int
    folder: Path


def cache_folder() -> Path:
    """Where the hub's client keeps repositories."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def snapshot(repo: str) -> Path | None:
    """The folder of a cached repository, complete or not; None if it has no config.json there, or
    the name is no hub id."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(repo, "config.json", cache_dir=cache_folder())
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None


def cached_models() -> Mapping[str, Cached]:
    """Every model repository in the cache, by its id."""
    scanned = _scan()
    repos = frozenset() if scanned is None else scanned.repos
    return {
        one.repo_id: Cached(one.repo_id, one.size_on_disk, Path(one.repo_path))
        for one in sorted(repos, key=lambda one: one.repo_id)
        if one.repo_type == "model"
    }


def remove(cached: Cached) -> int:
    """Remove a repository with all its versions; the bytes that are free now.

    (The client's own removal goes by the versions' hashes, which copies of a repository share.)

    Raises:
        CacheError: it lies outside of the cache, or cannot be removed.
    """
    cache = cache_folder().resolve()
    if cached.folder.is_symlink() or cached.folder.resolve().parent != cache:
        raise CacheError(
            f"{cached.folder} is a link out of the hub cache; only what is inside {cache} is "
            "removed, so remove it yourself"
        )
    freed = sum(file.lstat().st_size for file in cached.folder.rglob("*") if file.is_file())
    try:
        shutil.rmtree(cached.folder)
    except OSError as error:
        raise CacheError(f"{cached.folder} cannot be removed: {error.strerror}") from error
    shutil.rmtree(cache / ".locks" / cached.folder.name, ignore_errors=True)
    return freed


def _scan() -> HFCacheInfo | None:
    """The cache's contents; None if there is no cache."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        return scan_cache_dir(cache_folder())
    except (CacheNotFound, ValueError):
        return None
