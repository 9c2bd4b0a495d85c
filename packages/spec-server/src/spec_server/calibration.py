"""What rounds cost on this device: measured once for a target and what drafts for it, then kept.

A file is named by a fingerprint of everything that the costs depend on, and says in plain text
what that is, so that a foreign file is recognised. Files are written under another name and
renamed: a reader finds a whole file or none, and of several writers the last one wins. A file that
does not fit is replaced by a new measurement, and that is reported.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from platformdirs import user_cache_path

from spec_core import (
    AdaptiveLength,
    Copier,
    CopyLength,
    CostCurves,
    Drafter,
    DraftPolicy,
    FixedLength,
    FreeDrafter,
    InvalidValueError,
    RoundCost,
    Target,
    WithCopies,
    calibrate,
)
from spec_server import device

DIRECTORY_VARIABLE = "SPEC_CURVES_DIR"
BUDGET_SECONDS = 4.0

_FORMAT = 4
_SAMPLES, _SAMPLE_BYTES = 64, 4096
_MOST_HEADER = 64 * 2**20

_log = logging.getLogger("spec_server")

Announce = Callable[[str], None]
"""Told, in a sentence, what takes a while."""


@dataclass(frozen=True, slots=True)
class Subject:
    """Everything that the cost of a round depends on, by name."""

    facts: Mapping[str, str]

    @property
    def fingerprint(self) -> str:
        text = json.dumps(dict(self.facts), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def with_facts(self, **facts: str) -> Subject:
        return Subject({**self.facts, **facts})


@dataclass(frozen=True, slots=True)
class Measured:
    """Curves of a target and what drafts for it.

    Attributes:
        drafts: of a drafter that computes its guesses; None where there is none.
        copies: of copies from the text; None where nothing copies.
        notes: what was wrong with the stored curves, one sentence each.
    """

    drafts: CostCurves | None = None
    copies: CostCurves | None = None
    notes: tuple[str, ...] = ()

    def policy(self) -> DraftPolicy:
        """A new policy, without experience."""
        drafts = None if self.drafts is None else AdaptiveLength(self.drafts)
        if self.copies is not None:
            return WithCopies(CopyLength(self.copies), drafts)
        return drafts or FixedLength(0)


class CurveStore:
    """Curves in a directory.

    Args:
        directory: made when something is to be kept; None: `curves_directory()`.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = directory or curves_directory()

    def curves(
        self, subject: Subject, measure: Callable[[], CostCurves]
    ) -> tuple[CostCurves, str | None]:
        """The stored curves of a subject, measured and stored if there are none; and a sentence
        about what went wrong, if something did."""
        path, note = self.path(subject), None
        try:
            return read(path, subject), None
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            note = f"the stored round times in {path} cannot be used ({error}); measured anew"
        curves = measure()
        try:
            write(path, subject, curves)
        except OSError as error:
            note = (
                f"round times cannot be stored in {path.parent} ({error.strerror}); "
                "every start measures"
            )
        return curves, note

    def path(self, subject: Subject) -> Path:
        return self.directory / f"{subject.fingerprint[:32]}.json"


def curves_directory() -> Path:
    """Where curves are kept: $SPEC_CURVES_DIR, or a folder in the user's cache.

    Raises:
        InvalidValueError: the variable names the home of a user who does not exist.
    """
    named = os.environ.get(DIRECTORY_VARIABLE)
    if named:
        try:
            return Path(named).expanduser()
        except RuntimeError as error:
            raise InvalidValueError(
                DIRECTORY_VARIABLE, named, "a folder, below the home of a user that there is"
            ) from error
    return user_cache_path("spec", appauthor=False) / "curves"


def read(path: Path, subject: Subject) -> CostCurves:
    """Curves from a file.

    Raises:
        OSError: there is no file, or it is not readable.
        ValueError: it is damaged, or of another subject; the message says which.
    """
    try:
        held = json.loads(path.read_bytes())
        form = held["format"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError("it is damaged") from error
    if form != _FORMAT:
        raise ValueError(f"its format is {form!r}, not {_FORMAT}")
    try:
        facts, costs, checksum = dict(held["subject"]), held["costs"], held["sha256"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError("it is damaged") from error
    if facts != dict(subject.facts):
        raise ValueError("it is of something else")
    if checksum != _checksum(costs):
        raise ValueError("its checksum does not fit")
    try:
        return CostCurves((RoundCost(*point) for point in costs["points"]), costs["cut"])
    except (KeyError, TypeError, InvalidValueError) as error:
        raise ValueError(f"it is damaged: {error}") from error


def write(path: Path, subject: Subject, curves: CostCurves) -> None:
    """Put curves into a file, at once or not at all. Raises OSError."""
    points = [[p.rows, p.length, p.depth, p.seconds] for p in curves.points]
    costs = {"points": points, "cut": curves.cut}
    held = {
        "format": _FORMAT,
        "subject": dict(subject.facts),
        "costs": costs,
        "sha256": _checksum(costs),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with _replacing(path) as file:
        file.write_text(json.dumps(held, indent=1), encoding="utf-8")


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A temporary file beside `path` that takes its place if all goes well."""
    handle, name = tempfile.mkstemp(prefix=f".{path.stem}-", suffix=".tmp", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _checksum(points: object) -> str:
    return hashlib.sha256(json.dumps(points).encode()).hexdigest()


# ---------------------------------------------------------------------- what is measured


def subject_of(
    target_folder: Path, drafter_path: Path | None, options: Mapping[str, object]
) -> Subject:
    """The device, the software and the weights.

    Args:
        target_folder: of the target's checkpoint.
        drafter_path: the drafter's folder or file; None: no model drafts.
        options: whatever else changes the cost of a round (dtype, bits).
    """
    software = ("mlx", "spec-core", "spec-drafters", "spec-targets")
    facts = {
        "device": device.describe(),
        **{package: _version(package) for package in software},
        "target": weights_digest(target_folder),
        "drafter": "none" if drafter_path is None else weights_digest(drafter_path),
    }
    return Subject({**facts, **{name: str(value) for name, value in options.items()}})


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def measure(
    target: Target,
    drafter: Drafter | None,
    subject: Subject,
    *,
    max_rows: int = 1,
    store: CurveStore | None = None,
    announce: Announce = _log.info,
) -> Measured:
    """Curves for what drafts: stored ones, or new ones, which takes a few seconds.

    Args:
        target: with its weights loaded.
        drafter: what drafts for it, perhaps combined with lookup.
        subject: what is measured, as `subject_of` gives it.
        max_rows: the widest batch of interest.
        store: where curves are kept; None: the user's cache.
        announce: told before a measurement begins.
    """
    kept = store or CurveStore()
    subject = subject.with_facts(rows=str(max_rows))
    trained, copier = _parts(drafter)

    def curves(of: Drafter) -> tuple[CostCurves, str | None]:
        about = subject.with_facts(drafts=f"{of.name}, up to {of.max_block}")

        def timed() -> CostCurves:
            kind = "copies" if isinstance(of, FreeDrafter) else of.name
            announce(f"measuring what rounds cost here with {kind} (once; a few seconds)")
            return calibrate(target, of, max_rows=max_rows, budget_seconds=BUDGET_SECONDS)

        return kept.curves(about, timed)

    drafts, first = (None, None) if trained is None else curves(trained)
    copies, second = (None, None) if copier is None else curves(FreeDrafter(copier.max_block))
    return Measured(drafts, copies, tuple(dict.fromkeys(filter(None, (first, second)))))


def _parts(drafter: Drafter | None) -> tuple[Drafter | None, Copier | None]:
    """What computes guesses, and what copies them."""
    from spec_drafters.combined import Combined

    if isinstance(drafter, Combined):
        return drafter.drafter, drafter.lookup
    if isinstance(drafter, Copier):
        return None, drafter
    return drafter, None


def weights_digest(path: Path) -> str:
    """Identity of a checkpoint by content: its configuration, and of each weight file the size,
    the header (names, types, shapes) and samples of its bytes. File names do not matter."""
    files = [path] if path.is_file() else [*path.glob("*.safetensors"), *path.glob("*.gguf")]
    parts = sorted(_file_digest(file) for file in files)
    config = path / "config.json"
    if config.is_file():
        parts.append(hashlib.sha256(config.read_bytes()).digest())
    return hashlib.sha256(b"".join(parts)).hexdigest()


def _file_digest(file: Path) -> bytes:
    size = file.stat().st_size
    digest = hashlib.sha256(size.to_bytes(8, "little"))
    with file.open("rb") as stream:
        if file.suffix == ".safetensors":
            header = int.from_bytes(stream.read(8), "little")
            digest.update(stream.read(min(header, _MOST_HEADER)))
        step = max(size // _SAMPLES, _SAMPLE_BYTES)
        for start in range(0, size, step):
            stream.seek(start)
            digest.update(stream.read(_SAMPLE_BYTES))
    return digest.digest()
