"""From the names that a user gives to a target, a drafter and a tokenizer that fit together."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from spec_cache import Namespace
from spec_core import (
    ConfidenceThreshold,
    Drafter,
    DraftPolicy,
    FixedLength,
    SamplingParams,
    SpecError,
    Target,
)
from spec_core.device import backend
from spec_core.errors import InvalidValueError
from spec_server import threads
from spec_server.errors import ModelLoadError
from spec_server.generation_config import recommended_sampling
from spec_server.job import Labels
from spec_server.scheduler import Models
from spec_server.text import Tokeniser

if TYPE_CHECKING:
    from spec_drafters.resolve import Hub
    from spec_server.calibration import Announce, Measured

_log = logging.getLogger("spec_server")

Mode = Literal["auto", "dspark", "dflash", "eagle3", "lookup", "baseline"]
DType = Literal["float32", "float16", "bfloat16"]
Bits = Literal[4, 8]

MaxDraft = int | Literal["auto"] | None
"""A cap on guesses a round, 0 being plain decoding; None: the drafter's whole block; "auto": the
length with the most tokens a second, from measured costs and live acceptance."""

DEFAULT_MAX_DRAFT: MaxDraft = None
"""Of the library; the command line's own default is "auto"."""

DRAFTER_BITS_ON_GPU: Bits = 4


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What to load and how to draft; the fields are `Engine.load`'s arguments.

    Raises:
        InvalidValueError: a field is out of range, or two of them contradict each other.
    """

    model: str
    drafter: str | None = None
    mode: Mode = "auto"
    max_draft: MaxDraft = DEFAULT_MAX_DRAFT
    lookup_drafts: bool | None = None
    confidence_threshold: float | None = None
    dtype: DType | None = None
    kv_bits: Bits | None = None
    drafter_bits: Bits | Literal["auto"] | None = "auto"
    trust_remote_code: bool = False

    @property
    def copies(self) -> bool:
        """Whether a hit of the lookup replaces the drafter's guesses: where nothing was said, if
        the length is chosen by what copies bring."""
        return self.max_draft == "auto" if self.lookup_drafts is None else self.lookup_drafts

    def __post_init__(self) -> None:
        _one_of("mode", self.mode, get_args(Mode))
        _one_of("dtype", self.dtype, (None, *get_args(DType)))
        _one_of("kv_bits", self.kv_bits, (None, 4, 8))
        _one_of("drafter_bits", self.drafter_bits, ("auto", None, 4, 8))
        if self.drafter is not None and self.mode in ("lookup", "baseline"):
            raise InvalidValueError(
                "drafter", self.drafter, f"left out in mode {self.mode}, which uses none"
            )
        if self.lookup_drafts is False and self.mode == "lookup":
            raise InvalidValueError("lookup_drafts", False, "left out in mode lookup")
        if self.lookup_drafts and self.mode == "baseline":
            raise InvalidValueError("lookup_drafts", True, "off in mode baseline")
        if self.confidence_threshold is not None and self.mode in ("lookup", "baseline"):
            raise InvalidValueError(
                "confidence_threshold",
                self.confidence_threshold,
                f"left out in mode {self.mode}, which scores no guesses",
            )
        if isinstance(self.max_draft, str):
            self._check_auto(self.max_draft)
        else:
            policy(self)

    def _check_auto(self, max_draft: str) -> None:
        if max_draft != "auto":
            raise InvalidValueError("max_draft", max_draft, 'a whole number, None, or "auto"')
        if self.confidence_threshold is not None:
            raise InvalidValueError(
                "confidence_threshold",
                self.confidence_threshold,
                "left out where the draft length is auto, which chooses it itself",
            )


@dataclass(frozen=True, slots=True)
class Facts:
    """What an engine runs.

    Attributes:
        model: the target, as it was named.
        labels: mode, drafter and fallbacks, as every answer reports them.
        context_window: the most positions of a request, prompt and answer together.
        dtype: of the target's activations.
        max_block: the most tokens drafted in a round; 0 without a drafter.
        vocab_size: columns of the target's logits; None if it is not known beforehand.
        sampling: what the model's makers recommend (generation_config.json, where it samples).
    """

    model: str
    labels: Labels
    context_window: int
    dtype: str
    max_block: int
    vocab_size: int | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)


@dataclass(frozen=True, slots=True)
class Loaded:
    """Everything an engine is made of.

    Attributes:
        namespace: names everything that changes a row's state, for the prefix cache.
    """

    models: Models
    tokeniser: Tokeniser
    facts: Facts
    namespace: Namespace


@dataclass(frozen=True, slots=True)
class TargetParts:
    """A loaded target and its folder.

    Attributes:
        dtype: of the activations.
        model: mlx-lm's own module, for comparison with its generation loop.
    """

    target: Target
    folder: Path
    dtype: str
    model: Any


@dataclass(frozen=True, slots=True)
class DrafterChoice:
    """Which drafter it shall be, before anything is loaded.

    Attributes:
        path: its files; None: no model drafts.
        source: what it is called, or None.
        fallbacks: what is not as it was asked, one sentence each.
    """

    path: Path | None
    source: str | None = None
    fallbacks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DrafterParts:
    """What drafts, and what is not as it was asked.

    Attributes:
        drafter: None decodes plainly.
        source: folder or id of the drafter's model, or None.
        fallbacks: one sentence each.
        path: the drafter's files, or None.
    """

    drafter: Drafter | None
    source: str | None = None
    fallbacks: tuple[str, ...] = ()
    path: Path | None = None

    @property
    def mode(self) -> str:
        return "baseline" if self.drafter is None else self.drafter.name

    def under(self, options: LoadOptions) -> DrafterParts:
        """The same with the copies that are asked for: hits of the lookup then replace a trained
        drafter's guesses."""
        from spec_drafters.combined import with_lookup

        if not options.copies or self.drafter is None or self.source is None:
            return self
        return replace(self, drafter=with_lookup(self.drafter))


def load(options: LoadOptions, *, max_rows: int = 1, announce: Announce | None = None) -> Loaded:
    """Load a target, its tokenizer and what drafts for it.

    Args:
        options: what, and how to draft.
        max_rows: the most requests that will be decoded together.
        announce: told, in a sentence, what takes a while.

    Raises:
        SpecError: something is missing, damaged or does not fit; a sentence says what.
    """
    folder = locate_target(options)
    choice = choose_drafter(options, folder)
    parts = load_target_parts(options, folder)
    tokeniser = Tokeniser.load(folder, trust_remote_code=options.trust_remote_code)
    drafting = load_drafter_parts(options, parts, choice).under(options)
    drafter = drafting.drafter
    if options.max_draft == "auto":
        measured = measure_rounds(options, parts, drafting, max_rows=max_rows, announce=announce)
        drafts, notes = measured.policy(), (*drafting.fallbacks, *measured.notes)
    else:
        drafts, notes = policy(options, drafter), drafting.fallbacks
    facts = Facts(
        model=options.model,
        labels=Labels(drafting.mode, drafting.source, notes, drafts if drafter else None),
        context_window=parts.target.info.context_window,
        dtype=parts.dtype,
        max_block=0 if drafter is None else drafter.max_block,
        vocab_size=parts.target.info.vocab_size,
        sampling=recommended_sampling(folder),
    )
    namespace = Namespace(
        target=f"{options.model.rstrip('/').rpartition('/')[2]} {fingerprint(folder)}",
        drafter=f"{drafting.mode} {'' if choice.path is None else fingerprint(choice.path)}",
        quantisation=f"{parts.dtype}, drafter {options.drafter_bits}",
        kv_bits=options.kv_bits,
    )
    return Loaded(Models(parts.target, drafter, drafts), tokeniser, facts, namespace)


def fingerprint(path: Path) -> str:
    """Identity of a checkpoint: its configuration, and the size and time of its weight files.

    (Reading the weights would take as long as loading them.)
    """
    files = [path] if path.is_file() else sorted(path.glob("*"))
    digest = hashlib.sha256()
    for file in files:
        if file.name == "config.json":
            digest.update(file.read_bytes())
        elif file.suffix in (".safetensors", ".gguf"):
            facts = file.stat()
            digest.update(f"{file.name} {facts.st_size} {facts.st_mtime_ns}".encode())
    return digest.hexdigest()


def policy(options: LoadOptions, drafter: Drafter | None = None) -> DraftPolicy:
    """How far to draft, where that is fixed; never beyond the block of a drafter that is known.

    Raises:
        InvalidValueError: the length or the threshold is out of range, or the length is "auto".
    """
    length = options.max_draft
    if isinstance(length, str):
        raise InvalidValueError("max_draft", length, "a fixed length here")
    if length is not None and drafter is not None:
        length = min(length, drafter.max_block)
    if options.confidence_threshold is not None:
        return ConfidenceThreshold(options.confidence_threshold, length)
    return FixedLength(length)


def measure_rounds(
    options: LoadOptions,
    parts: TargetParts,
    drafting: DrafterParts,
    *,
    max_rows: int = 1,
    announce: Announce | None = None,
) -> Measured:
    """What `max_draft` "auto" chooses by: measured now, or on this device before.

    Args:
        options: what the models were loaded with.
        parts: the target.
        drafting: what drafts.
        max_rows: the most requests that will be decoded together.
        announce: told before a measurement begins.
    """
    from spec_server.calibration import measure, subject_of

    subject = subject_of(
        parts.folder,
        drafting.path,
        {
            "dtype": parts.dtype,
            "kv_bits": options.kv_bits,
            "drafter_bits": drafter_bits(options),
        },
    )
    said = announce or _log.info
    return measure(parts.target, drafting.drafter, subject, max_rows=max_rows, announce=said)


def locate_target(options: LoadOptions) -> Path:
    """The target's folder, downloaded if need be.

    Raises:
        SpecError: there is no such folder, and the hub does not have it or cannot be reached.
    """
    from spec_targets import TargetNotFoundError, locate

    try:
        return locate(options.model)
    except TargetNotFoundError as error:
        sentence = _offline(options.model) or f"{error}{_meant(options.model)}"
        raise ModelLoadError(sentence) from error


def _offline(model: str) -> str | None:
    """What to say of a hub id where the hub must not be asked: its name may well be right."""
    from spec_drafters.resolve import HuggingFaceHub, is_hub_id

    if not is_hub_id(model) or Path(model).exists():
        return None
    problem = HuggingFaceHub().forbidden(model)
    return None if problem is None else f"{model}: {problem.detail}"


def _meant(model: str) -> str:
    """Loadable names of the table of pairs that look like one that was not found."""
    from spec_drafters.pairs import find_pair, nearest_names

    pairs = [find_pair(name) for name in (model, *nearest_names(model))]
    names = list(dict.fromkeys(pair.repo or pair.target for pair in pairs if pair is not None))
    return "" if not names or model in names else f"; did you mean {' or '.join(names[:3])}?"


def load_target_parts(options: LoadOptions, folder: Path) -> TargetParts:
    """Load the target.

    Raises:
        SpecError: as `spec_targets.load_target`.
    """
    from spec_targets import load_target

    config = _config(folder)
    threads.settle(_hidden_size(config))
    dtype = options.dtype or default_dtype(folder, config)
    try:
        loaded = load_target(
            folder,
            dtype=dtype,
            kv_bits=options.kv_bits,
            trust_remote_code=options.trust_remote_code,
        )
    except SpecError as error:
        _explain_drafter(folder, error)
        raise
    return TargetParts(loaded.target, folder, dtype or _activations(loaded.target), loaded.model)


def _explain_drafter(folder: Path, error: SpecError) -> None:
    """Raise ModelLoadError if what could not be loaded as a target is a drafter."""
    from spec_drafters.load import inspect_drafter

    try:
        kind = inspect_drafter(folder).mode
    except SpecError:
        return
    raise ModelLoadError(
        f"{folder} is a {kind} drafter, not a target; name the target it was made for with "
        "--model, and this one with --drafter"
    ) from error


def _hidden_size(config: Mapping[str, Any]) -> int:
    nested = config.get("text_config")
    size = {**config, **(nested if isinstance(nested, dict) else {})}.get("hidden_size")
    return size if isinstance(size, int) else 0


def default_dtype(folder: Path, config: Mapping[str, Any]) -> DType | None:
    """The dtype to cast a target to where the user names none; None keeps the checkpoint's.

    On a Linux CPU float32 is the fastest: it goes through a BLAS, other types do not, and
    quantised matrices are unpacked into it. It takes twice the memory of 16 bits, so a dense
    checkpoint for which that would be half of the machine's memory or more is left as it is.
    """
    if backend() != "cpu" or sys.platform != "linux":
        return None
    if "quantization" in config:
        return "float32"
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return "float32" if 2 * stored < memory / 2 else None


def choose_drafter(
    options: LoadOptions, target_folder: Path, *, hub: Hub | None = None
) -> DrafterChoice:
    """Decide what drafts, and recognise the drafter's files, before any weights are read.

    Args:
        options: what was asked for.
        target_folder: the target's files.
        hub: asked for a drafter that is not local; the Hugging Face hub if None.

    Raises:
        SpecError: an explicit choice cannot be honoured. Under mode "auto" without a named
            drafter it is a reported fallback to lookup instead.
    """
    if options.mode in ("baseline", "lookup"):
        return DrafterChoice(None)
    if options.mode != "auto" or options.drafter is not None:
        return _trained(options, target_folder, hub)
    try:
        return _trained(options, target_folder, hub)
    except SpecError as error:
        return DrafterChoice(None, fallbacks=(_by_lookup(error),))


def load_drafter_parts(
    options: LoadOptions, parts: TargetParts, choice: DrafterChoice
) -> DrafterParts:
    """Load what drafts for a target, without copies beside it; see `DrafterParts.under`.

    Raises:
        SpecError: as `choose_drafter`.
    """
    from spec_drafters.lookup import Lookup

    if options.mode == "baseline":
        return DrafterParts(None)
    if choice.path is None:
        return DrafterParts(Lookup(), None, choice.fallbacks)
    try:
        drafter = _load_trained(options, parts, choice)
    except SpecError as error:
        if options.mode != "auto" or options.drafter is not None:
            raise
        return DrafterParts(Lookup(), None, (_by_lookup(error),))
    return DrafterParts(drafter, choice.source, path=choice.path)


def _trained(options: LoadOptions, target_folder: Path, hub: Hub | None) -> DrafterChoice:
    """The drafter with weights that was named, or is known for the target."""
    from spec_drafters.errors import DrafterError
    from spec_drafters.load import inspect_drafter
    from spec_drafters.resolve import resolve

    source = options.drafter or _known_drafter(options, target_folder)
    path = resolve(source, beside=target_folder, hub=hub)
    try:
        spec = inspect_drafter(path)
    except DrafterError as error:
        raise cannot_draft(source, error) from error
    if options.mode not in ("auto", spec.mode):
        raise ModelLoadError(
            f"{source} is a {spec.mode} drafter, but the mode is {options.mode}; "
            f"choose mode {spec.mode} or auto, or another drafter"
        )
    if options.confidence_threshold is not None and spec.confidence is None:
        raise InvalidValueError(
            "confidence_threshold",
            options.confidence_threshold,
            f"left out with {source}, which has no confidence head",
        )
    return DrafterChoice(path, source)


def _known_drafter(options: LoadOptions, target_folder: Path) -> str:
    """What the table of pairs names for this target and mode."""
    from spec_drafters.pairs import find_pair

    pair = find_pair(options.model) or find_pair(target_folder)
    if pair is None:
        raise ModelLoadError(f"no drafter is known for {options.model}; name one as the drafter")
    known = pair.drafter(options.mode)
    if known is None:
        raise ModelLoadError(
            f"no {options.mode} drafter is known for {pair.target}, only "
            f"{' and '.join(pair.modes)}; name one as the drafter, or choose another mode"
        )
    return known.source


def cannot_draft(source: str | None, error: SpecError) -> ModelLoadError:
    """What to say of a drafter that cannot be used for the target."""
    return ModelLoadError(
        f"{source} cannot draft: {error}; name a drafter that was made for this target, or leave "
        "it out"
    )


def _load_trained(options: LoadOptions, parts: TargetParts, choice: DrafterChoice) -> Drafter:
    from spec_drafters.errors import DrafterError
    from spec_drafters.load import load_drafter

    assert choice.path is not None
    dtype = drafter_dtype(parts.dtype)
    try:
        return load_drafter(choice.path, parts.target, bits=drafter_bits(options), dtype=dtype)
    except DrafterError as error:
        raise cannot_draft(choice.source, error) from error


def drafter_dtype(dtype: str) -> str:
    """What a drafter computes in beside a target of this dtype: on a CPU float32 is the faster
    one, whatever the target's own (3 to 10 % of a bfloat16 round)."""
    return "float32" if backend() == "cpu" else dtype


def _by_lookup(error: SpecError) -> str:
    return f"{error}; drafting by lookup instead"


def drafter_bits(options: LoadOptions) -> Bits | None:
    """To how many bits the drafter's matrices are quantised here; None: not at all."""
    if options.drafter_bits != "auto":
        return options.drafter_bits
    return None if backend() == "cpu" else DRAFTER_BITS_ON_GPU


def _config(folder: Path) -> dict[str, Any]:
    """config.json; unreadable ones are the target loader's to report, and empty here."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def _activations(target: Target) -> str:
    """The dtype a target computes in, seen on one embedding row."""
    import mlx.core as mx

    state = target.new_state(1)
    logits = target.forward(mx.array([[0]], dtype=mx.int32), state, logits="last").logits
    state.commit([0])
    assert logits is not None
    return str(logits.dtype).rpartition(".")[2]


def _one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        shown = ", ".join("none" if item is None else str(item) for item in allowed)
        raise InvalidValueError(name, value, f"one of {shown}")
