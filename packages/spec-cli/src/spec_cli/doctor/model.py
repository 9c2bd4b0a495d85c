"""Whether a model is all there, recognised, and small enough."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec_cli.doctor.finding import Finding, Status
from spec_cli.sizes import in_bytes
from spec_core.errors import SpecError

if TYPE_CHECKING:
    from spec_core.seams import TargetInfo
    from spec_drafters.spec import DrafterSpec
    from spec_server import LoadOptions
    from spec_server.loading import DrafterChoice
    from spec_server.memory import RowCost

_SECTION = "model"
_NAME_ANOTHER = "name a folder, or a hub id (owner/name)"
_LEAST_CONTEXT = 256
"""With fewer positions than this a model is of no use."""
_TEMPLATES = ("chat_template.jinja", "chat_template.json")


@dataclass(frozen=True, slots=True)
class Asked:
    """What is to be looked at.

    Attributes:
        load: the model, and how it shall draft.
        context: positions that have to fit; None: as many as the model was made for.
    """

    load: LoadOptions
    context: int | None


@dataclass(frozen=True, slots=True)
class Found:
    """A target on this machine.

    Attributes:
        folder: its files.
        config: its config.json.
        dtype: what its activations will be.
    """

    folder: Path
    config: Mapping[str, Any]
    dtype: str

    @property
    def info(self) -> TargetInfo:
        """What a drafter has to fit; taps are proven at load only."""
        from spec_core.seams import TargetInfo
        from spec_targets.anatomy import context_window, text_config

        facts = text_config(self.config)
        return TargetInfo(
            family=str(self.config.get("model_type", "")),
            vocab_size=int(facts.get("vocab_size", 0)),
            hidden_size=int(facts.get("hidden_size", 0)),
            num_layers=int(facts.get("num_hidden_layers", 0)),
            context_window=context_window(self.config),
        )


def model(asked: Asked) -> Iterator[Finding]:
    """The model's findings."""
    folder = _folder(asked.load.model)
    if isinstance(folder, Finding):
        yield folder
        return
    yield Finding(_SECTION, "folder", "ok", str(folder))
    files = list(_files(folder, asked.load))
    yield from files
    if any(finding.status == "problem" for finding in files):
        return
    found = _found(folder, asked.load)
    drafter, spec = _drafter(asked.load, found)
    yield drafter
    yield _fits(asked, found, spec)


def _folder(name: str) -> Path | Finding:
    """Where the files are, or why they are not there."""
    from spec_cli.hub import cache_folder, snapshot

    path = Path(os.path.expanduser(name))
    if path.is_dir():
        return path
    if path.exists():
        seen = f"{name} is a file"
        return Finding(_SECTION, "folder", "problem", seen, "name the folder that it is in")
    cached = snapshot(name)
    if cached is not None:
        return cached
    seen = f"{name} is no folder here, and nothing of that name is in {cache_folder()}"
    return Finding(_SECTION, "folder", "problem", seen, _get_model(name))


def _get_model(name: str) -> str:
    """How to come by a model that is missing."""
    from spec_drafters.pairs import nearest_names
    from spec_drafters.resolve import is_hub_id

    near = nearest_names(name)
    if is_hub_id(name) and (name in near or not near):
        return f"`spec pull {name}` fetches it"
    if not near:
        return _NAME_ANOTHER
    return f"did you mean {' or '.join(near)}? `spec pull` fetches it"


def _files(folder: Path, load: LoadOptions) -> Iterator[Finding]:
    from spec_targets.folder import check_folder, read_config

    kind = _drafter_kind(folder)
    if kind is not None:
        seen = f"{folder.name} is a {kind} drafter, not a target"
        advice = "name the target it was made for with --model, and this one with --drafter"
        yield Finding(_SECTION, "family", "problem", seen, advice)
        return
    try:
        library = check_folder(folder, trust_remote_code=load.trust_remote_code)
    except SpecError as error:
        yield Finding(_SECTION, "files", "problem", str(error), _again(load.model))
        return
    count = len(list(folder.glob("*.safetensors")))
    weights = "one weight file" if count == 1 else f"{count} weight files"
    yield Finding(_SECTION, "files", "ok", f"config.json and {weights}, all of it whole")
    family = read_config(folder)["model_type"]
    yield Finding(_SECTION, "family", "ok", f"{family}, which mlx-{library} runs")
    yield _tokeniser(folder, load)


def _again(name: str) -> str:
    local = Path(os.path.expanduser(name)).is_dir()
    return "" if local else f"`spec pull {name}` fetches what is missing"


def _drafter_kind(folder: Path) -> str | None:
    """The mode of a folder that holds a drafter; None for any other."""
    from spec_drafters.load import inspect_drafter

    try:
        return inspect_drafter(folder).mode
    except SpecError:
        return None


def _tokeniser(folder: Path, load: LoadOptions) -> Finding:
    from spec_targets.load import missing_tokenizer

    missing = missing_tokenizer(folder)
    if missing:
        return Finding(_SECTION, "tokenizer", "problem", missing, _again(load.model))
    damaged = _damage(folder / "tokenizer.json") or _odd_answers(folder)
    if damaged:
        return Finding(_SECTION, "tokenizer", "problem", damaged, _again(load.model))
    if not _has_template(folder):
        seen = "there is no chat template, so it takes plain text only"
        advice = "use `spec generate --no-chat-template`, or an instruction-tuned model"
        return Finding(_SECTION, "tokenizer", "note", seen, advice)
    return Finding(_SECTION, "tokenizer", "ok", "there, with a chat template")


def _odd_answers(folder: Path) -> str:
    """What is wrong with how the checkpoint samples and ends answers; "" if nothing is."""
    from spec_server.generation_config import end_tokens, recommended_sampling

    try:
        recommended_sampling(folder)
        end_tokens(folder)
    except SpecError as error:
        return str(error)
    return ""


def _damage(file: Path) -> str:
    """What is wrong with a file of JSON that need not be there; "" if nothing is."""
    try:
        json.loads(file.read_bytes())
    except FileNotFoundError:
        return ""
    except (ValueError, RecursionError) as error:
        return f"{file.name} is damaged: it is not valid JSON ({error})"
    return ""


def _has_template(folder: Path) -> bool:
    if any((folder / name).is_file() for name in _TEMPLATES):
        return True
    configured = folder / "tokenizer_config.json"
    return configured.is_file() and '"chat_template"' in configured.read_text(encoding="utf-8")


def _found(folder: Path, load: LoadOptions) -> Found:
    from spec_server.loading import default_dtype
    from spec_targets.anatomy import text_config
    from spec_targets.folder import read_config

    config = read_config(folder)
    facts = text_config(config)
    own = facts.get("dtype") or facts.get("torch_dtype") or "bfloat16"
    return Found(folder, config, load.dtype or default_dtype(folder, config) or str(own))


def _drafter(load: LoadOptions, found: Found) -> tuple[Finding, DrafterSpec | None]:
    """What would draft; its spec if it is a model that fits."""
    if load.mode == "baseline":
        return Finding(_SECTION, "drafter", "ok", "none: the mode is baseline"), None
    try:
        choice, spec = _chosen(load, found)
    except SpecError as error:
        asked = load.drafter is not None or load.mode != "auto"
        seen = str(error) if asked else f"{error}; drafting by lookup instead"
        status: Status = "problem" if asked else "note"
        return Finding(_SECTION, "drafter", status, seen, _get_drafter(load)), None
    if spec is None:
        seen = choice.fallbacks[0] if choice.fallbacks else "lookup: it copies from the text"
        status = "note" if choice.fallbacks else "ok"
        return Finding(_SECTION, "drafter", status, seen, _get_drafter(load)), None
    seen = f"{spec.mode}, {choice.source}: {spec.max_block} guesses a round, fits the target"
    return Finding(_SECTION, "drafter", "ok", seen), spec


def _chosen(load: LoadOptions, found: Found) -> tuple[DrafterChoice, DrafterSpec | None]:
    """The drafter that an engine would take, and its spec if it is a model.

    Raises:
        SpecError: what was asked for cannot draft.
    """
    from spec_drafters.errors import MisfitError
    from spec_drafters.fit import fit
    from spec_drafters.load import inspect_drafter
    from spec_drafters.resolve import HuggingFaceHub
    from spec_server.loading import cannot_draft, choose_drafter

    choice = choose_drafter(load, found.folder, hub=HuggingFaceHub(ask=False))
    if choice.path is None:
        return choice, None
    try:
        return choice, fit(inspect_drafter(choice.path), found.info, lends=True)
    except MisfitError as error:
        raise cannot_draft(choice.source, error) from error


def _get_drafter(load: LoadOptions) -> str:
    """How to come by a drafter that is missing."""
    from spec_drafters.pairs import find_pair
    from spec_drafters.resolve import is_hub_id

    if load.mode == "lookup":
        return ""
    if load.drafter is not None and Path(os.path.expanduser(load.drafter)).exists():
        return "`spec models` lists the drafters that are known for a target"
    if load.drafter is not None:
        fetched = f"`spec pull {load.drafter}` fetches it, if it is one that fits"
        return fetched if is_hub_id(load.drafter) else _NAME_ANOTHER
    pair = find_pair(load.model)
    known = None if pair is None else pair.drafter(load.mode)
    if known is None:
        return "`spec models` lists the targets whose drafters are known"
    return f"`spec pull {known.source}` fetches it"


def _fits(asked: Asked, found: Found, spec: DrafterSpec | None) -> Finding:
    """Weights, drafter and one request's state against what an engine may use."""
    from spec_cli.doctor import cost
    from spec_cli.doctor.machine import memory_facts
    from spec_server.loading import drafter_bits, drafter_dtype
    from spec_server.memory import MemoryBudget, total

    load, info = asked.load, found.info
    item = cost.ITEM.get(found.dtype, 2)
    weights = cost.weight_bytes(found.folder, item)
    rows: list[RowCost] = [cost.target_row(found.config, item, load.kv_bits)]
    drafter = 0
    if spec is not None:
        drafter_item = cost.ITEM.get(drafter_dtype(found.dtype), 2)
        drafter = cost.drafter_bytes(spec, drafter_item, drafter_bits(load))
        rows.append(cost.drafter_row(spec, drafter_item))
    usable = memory_facts().usable
    budget = MemoryBudget(max(0.0, usable - weights - drafter), total(rows), info.num_layers)
    context = asked.context or info.context_window
    parts = [
        f"{in_bytes(weights)} of weights in {found.dtype}",
        *([f"{in_bytes(drafter)} of drafter"] if spec is not None else []),
        f"{in_bytes(budget.need(1, context))} for one request of {context} positions",
    ]
    seen = f"{', '.join(parts)}; {in_bytes(usable)} may be used"
    if budget.fits(1, context):
        return Finding(_SECTION, "memory", "ok", seen)
    longest = budget.longest(context)
    if longest < _LEAST_CONTEXT:
        advice = "take a smaller or a quantised (-4bit) copy of the model"
        return Finding(_SECTION, "memory", "problem", seen, advice)
    advice = f"requests of up to {longest} positions fit; --kv-bits 8 makes room for more"
    return Finding(_SECTION, "memory", "note", seen, advice)
