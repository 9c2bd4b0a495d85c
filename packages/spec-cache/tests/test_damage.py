"""Whatever happens to files, no wrong state comes out of them."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from spec_cache import Namespace, PrefixCache

from .rows import BLOCK, DENSE, HYBRID, NAMESPACE, check, picture

TOKENS = [(i * 7) % 50 for i in range(5 * BLOCK)]
PROMPT = [*TOKENS, 1]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with five blocks and a checkpoint, and one of another namespace's."""
    directory = tmp_path_factory.mktemp("pristine") / "cache"
    with PrefixCache(1 << 22, 1 << 24, directory, BLOCK) as cache:
        cache.store(NAMESPACE, TOKENS[:24], picture(HYBRID, TOKENS[:24]))
        cache.store(NAMESPACE, TOKENS, picture(HYBRID, TOKENS))
        cache.store(Namespace("other"), TOKENS, picture(HYBRID, TOKENS))
    return directory


@pytest.fixture
def directory(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "cache"))


def files_of(directory: Path, namespace: Namespace = NAMESPACE) -> list[Path]:
    """By position; the two checkpoints after the blocks."""
    folder = directory / namespace.root(BLOCK).hex()
    return sorted(
        folder.iterdir(),
        key=lambda p: (int(p.name.split("-")[3]) == 0, int(p.name.split("-")[2])),
    )


def look(directory: Path) -> tuple[int, list[str]]:
    """What a fresh cache finds, twice; whatever it is must be right."""
    complaints: list[str] = []
    with PrefixCache(1 << 22, 1 << 24, directory, BLOCK, report=complaints.append) as cache:
        hit = cache.match(NAMESPACE, PROMPT)
        check(HYBRID, PROMPT, hit)
        assert cache.match(NAMESPACE, PROMPT).length == hit.length
        assert cache.stats().damaged == len(complaints)
    return hit.length, complaints


def test_undamaged(directory: Path) -> None:
    assert len(files_of(directory)) == 7
    assert look(directory) == (len(TOKENS), [])


@pytest.mark.parametrize("which", [0, 3, 4, 6], ids=["first", "fourth", "last", "checkpoint"])
def test_flipped_bytes(pristine: Path, tmp_path: Path, which: int) -> None:
    """A changed byte anywhere is found out (white space in the header may change)."""
    rng = random.Random(which)
    size = files_of(pristine)[which].stat().st_size
    places = [0, 7, 8, size - 1, *(rng.randrange(size) for _ in range(16))]
    for number, place in enumerate(places):
        copy = Path(shutil.copytree(pristine, tmp_path / str(number)))
        path = files_of(copy)[which]
        data = bytearray(path.read_bytes())
        data[place] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        length, complaints = look(copy)
        expected = 24 if which in (3, 4, 6) else 0
        assert length in (expected, len(TOKENS))
        assert len(complaints) == (length != len(TOKENS))
        assert path.exists() == (length == len(TOKENS))


@pytest.mark.parametrize("keep", [0.0, 0.001, 0.3, 0.9, 0.999])
def test_truncated_files(directory: Path, keep: float) -> None:
    path = files_of(directory)[4]
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    length, complaints = look(directory)
    assert length == 24
    assert len(complaints) == 1
    assert "it is removed" in complaints[0]
    assert not path.exists()
    assert look(directory) == (24, [])


def swap(directory: Path) -> None:
    a, b = files_of(directory)[3:5]
    data = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(data)


def foreign(directory: Path) -> None:
    mine, theirs = (files_of(directory, n)[4] for n in (NAMESPACE, Namespace("other")))
    mine.write_bytes(theirs.read_bytes())


def vanished(directory: Path) -> None:
    files_of(directory)[4].unlink()


def longer(directory: Path) -> None:
    with files_of(directory)[4].open("ab") as file:
        file.write(b"more")


def nonsense(directory: Path) -> None:
    files_of(directory)[4].write_bytes((1 << 62).to_bytes(8, "little") + b"{}")


def a_link(directory: Path) -> None:
    path = files_of(directory)[4]
    other = directory / "elsewhere"
    path.rename(other)
    path.symlink_to(other)


@pytest.mark.parametrize("harm", [swap, foreign, longer, nonsense])
def test_files_that_are_not_what_their_name_says(
    directory: Path, harm: Callable[[Path], None]
) -> None:
    harm(directory)
    length, complaints = look(directory)
    assert length == 24
    assert len(complaints) == 1
    assert look(directory)[0] == 24


@pytest.mark.parametrize("harm", [vanished, a_link])
def test_files_that_are_not_there(directory: Path, harm: Callable[[Path], None]) -> None:
    harm(directory)
    assert look(directory) == (24, [])


def test_a_file_that_vanishes_under_a_running_cache(directory: Path) -> None:
    complaints: list[str] = []
    with PrefixCache(1 << 22, 1 << 24, directory, BLOCK, report=complaints.append) as cache:
        vanished(directory)
        hit = cache.match(NAMESPACE, PROMPT)
        check(HYBRID, PROMPT, hit)
        assert (hit.length, len(complaints)) == (24, 1)
        assert "vanished" in complaints[0]
        cache.store(NAMESPACE, TOKENS, picture(HYBRID, TOKENS))
        cache.flush()
        assert cache.match(NAMESPACE, PROMPT).length == len(TOKENS)
    assert look(directory) == (len(TOKENS), [])


def test_everything_vanishes_under_a_running_cache(directory: Path) -> None:
    with PrefixCache(1 << 22, 1 << 24, directory, BLOCK, report=lambda _: None) as cache:
        for path in directory.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
        assert cache.match(NAMESPACE, PROMPT).length == 0
        cache.store(NAMESPACE, TOKENS, picture(HYBRID, TOKENS))
        cache.flush()
    assert look(directory) == (len(TOKENS), [])


def test_stray_files_are_left_alone(directory: Path) -> None:
    folder = files_of(directory)[0].parent
    strays = [
        directory / "readme.txt",
        directory / "x.safetensors",
        folder / "x.safetensors",
        folder / f"{'0' * 40}-{'1' * 40}-0-8.safetensors",
        folder / ".DS_Store",
    ]
    for path in strays:
        path.write_bytes(b"?")
    (directory / ("0" * 40)).mkdir()
    (directory / "folder").mkdir()
    assert look(directory) == (len(TOKENS), [])
    assert all(path.read_bytes() == b"?" for path in strays)


def test_unfinished_files_are_removed_at_the_next_start(directory: Path) -> None:
    path = files_of(directory)[0].with_name("tmp-1-1")
    path.write_bytes(b"half")
    assert look(directory) == (len(TOKENS), [])
    assert not path.exists()


def test_a_file_in_a_dense_namespace_cannot_pass_for_a_hybrid_one(directory: Path) -> None:
    """Same key, other arrays: an adapter that changed how it pictures itself."""
    plain = directory.with_name("plain")
    with PrefixCache(1 << 22, 1 << 24, plain, BLOCK) as cache:
        cache.store(NAMESPACE, TOKENS, picture(DENSE, TOKENS))
    for mine in files_of(directory)[3:5]:
        theirs = next(p for p in files_of(plain) if p.name.split("-")[0] in mine.name.split("-")[0])
        mine.write_bytes(theirs.read_bytes())
    length, complaints = look(directory)
    assert (length, len(complaints)) == (24, 1)
