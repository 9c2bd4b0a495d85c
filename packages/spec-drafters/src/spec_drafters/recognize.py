"""Which packaging a checkpoint is in: one table, tried in order, from config and tensor names.

A GGUF file is translated when it is opened, and then recognised like any other checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from spec_drafters import deepspec, dflash, eagle3, speculators
from spec_drafters.checkpoint import Checkpoint, open_safetensors
from spec_drafters.errors import CheckpointError, PackagingError
from spec_drafters.gguf import is_gguf
from spec_drafters.gguf_drafter import open_gguf
from spec_drafters.packaging import Packaging, installed_packagings
from spec_drafters.spec import DrafterSpec, Shape


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a drafter's folder or file without reading its weights.

    Raises:
        CheckpointError: nothing is there, or a file is missing or damaged.
        PackagingError: the path is a file of a kind that holds no drafter.
    """
    if not path.exists():
        raise CheckpointError(f"there is no drafter at {path}")
    if path.is_dir():
        files = sorted(path.glob("*.gguf"))
        if (path / "config.json").exists() or not files:
            return open_safetensors(path)
        if len(files) > 1:
            raise CheckpointError(
                f"{path} holds {len(files)} GGUF files; name one: "
                f"{', '.join(file.name for file in files)}"
            )
        path = files[0]
    if is_gguf(path):
        return open_gguf(path)
    raise PackagingError(
        path.name, "a drafter is a folder with config.json and *.safetensors, or a GGUF file"
    )


def recognize(checkpoint: Checkpoint) -> DrafterSpec:
    """What a checkpoint is, checked against its tensor names and shapes.

    Raises:
        PackagingError: its packaging is unknown or not supported; says which and why.
        CheckpointError: config and tensors contradict each other.
    """
    return read_as(packaging_of(checkpoint), checkpoint)


def packaging_of(checkpoint: Checkpoint) -> Packaging:
    """The row that matches: of those that other distributions registered, else of our table.

    Raises:
        PackagingError: a registered packaging cannot be loaded.
    """
    rows = (*installed_packagings(), *PACKAGINGS)
    return next(row for row in rows if row.matches(checkpoint))


def read_as(packaging: Packaging, checkpoint: Checkpoint) -> DrafterSpec:
    """What a checkpoint is in its packaging. Raises: as `recognize`."""
    if packaging.read is None:
        reason = packaging.refusal(checkpoint) if packaging.refusal else "it is not supported"
        raise PackagingError(packaging.name, reason)
    _refuse_strange_features(checkpoint, packaging.name)
    spec = packaging.read(checkpoint)
    check_tensors(spec, checkpoint)
    return spec


def check_tensors(spec: DrafterSpec, checkpoint: Checkpoint) -> None:
    """The file holds exactly the tensors that its config implies.

    Raises:
        CheckpointError: a tensor is missing, unexpected or of the wrong shape.
    """
    expected = spec.tensors()
    seen = {name: header.shape for name, header in checkpoint.tensors.items() if _counts(name)}
    where = checkpoint.path.name
    missing, extra = sorted(expected.keys() - seen.keys()), sorted(seen.keys() - expected.keys())
    if missing:
        raise CheckpointError(f"{where} lacks {_some(missing)}, which its config implies")
    if extra:
        raise CheckpointError(f"{where} holds {_some(extra)}, which its config does not explain")
    for name, shape in expected.items():
        if seen[name] != shape:
            raise CheckpointError(_wrong_shape(spec, where, name, seen[name], shape))


def _wrong_shape(spec: DrafterSpec, where: str, name: str, seen: Shape, wanted: Shape) -> str:
    message = f"{where}: {name} has shape {list(seen)}; its config implies {list(wanted)}"
    if name == "fc.weight" and seen[0] == wanted[0] and seen[1] % spec.hidden_size == 0:
        taps = seen[1] // spec.hidden_size
        message += f" ({taps} taps instead of the {spec.tap_count} that are named)"
    return message


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more tensors"


def _counts(name: str) -> bool:
    """Tensors that training leaves behind and inference does not need."""
    return name != "t2d" and not name.startswith(("verifier_norm.", "verifier_lm_head."))


def compatibility() -> str:
    """The recognition table as Markdown: how each packaging is told, and what becomes of it."""
    rows = [f"| {row.name} | {row.sign} | {row.status} |" for row in PACKAGINGS[:-1]]
    return "\n".join(["| packaging | told by | |", "|---|---|---|", *rows])


# --- features that no supported packaging has -------------------------------------------------


def _refuse_strange_features(checkpoint: Checkpoint, packaging: str) -> None:
    """Say what is special, rather than that some tensor is unexpected."""
    for what, present in _STRANGE_FEATURES.items():
        if present(checkpoint):
            raise PackagingError(packaging, f"not supported with {what}")


def _has_tensor(checkpoint: Checkpoint, *parts: str) -> bool:
    return any(part in name for name in checkpoint.tensors for part in parts)


def _has_key(checkpoint: Checkpoint, *keys: str) -> bool:
    own = checkpoint.config.section("dflash_config").over(checkpoint.config)
    return any(key in own for key in keys)


def _query_rows(checkpoint: Checkpoint) -> tuple[int, int]:
    """Rows of the first query matrix, and those that the norm's head size explains."""
    query = checkpoint.tensors.get("layers.0.self_attn.q_proj.weight")
    norm = checkpoint.tensors.get("layers.0.self_attn.q_norm.weight")
    if query is None or norm is None or "num_attention_heads" not in checkpoint.config:
        return 0, 0
    return query.shape[0], checkpoint.config.integer("num_attention_heads") * norm.shape[0]


def _gated_queries(checkpoint: Checkpoint) -> bool:
    rows, expected = _query_rows(checkpoint)
    return rows > 0 and rows == 2 * expected


_STRANGE_FEATURES: dict[str, Callable[[Checkpoint], bool]] = {
    "quantised weights; use the original checkpoint, which can be quantised at load": lambda c: (
        _has_key(c, "quantization_config", "quant_method", "quantization")
        or _has_tensor(c, ".scales", "weight_scale", "weight_packed")
    ),
    "multi-head latent attention (q_lora_rank)": lambda c: _has_key(c, "q_lora_rank"),
    "gated attention (Qwen3.5 layers)": _gated_queries,
    "attention sinks": lambda c: _has_tensor(c, "attention_sink_bias", "sinks"),
    "a pickled mask_embedding.pt": lambda c: (c.path / "mask_embedding.pt").exists(),
    "layer_fusion (DFly)": lambda c: _has_key(c, "layer_fusion"),
    "hidden_correction": lambda c: _has_tensor(c, "hidden_correction."),
}


# --- the table ---------------------------------------------------------------------------------


def _architecture(checkpoint: Checkpoint, *parts: str) -> bool:
    return any(part in name for name in checkpoint.config.texts("architectures") for part in parts)


def _embedded(checkpoint: Checkpoint) -> bool:
    config = checkpoint.config
    if any(key.startswith("dspark_") for key in config.names()) and not _has_key(
        checkpoint, "block_size"
    ):
        return True
    if config.text("model_type") == "deepseek_v4":
        return True
    if "num_target_layers" not in config or "num_hidden_layers" not in config:
        return False
    return config.integer("num_hidden_layers") >= config.integer("num_target_layers")


def _dflash2(checkpoint: Checkpoint) -> bool:
    return (
        _architecture(checkpoint, "DFlash2DraftModel")
        or "selector_rank" in checkpoint.config.section("dflash_config")
        or _has_tensor(checkpoint, "candidate_selector.", "_conv.")
    )


def _eagle3(checkpoint: Checkpoint) -> bool:
    query = checkpoint.tensors.get("layers.0.self_attn.q_proj.weight")
    doubled = (
        query is not None
        and "hidden_size" in checkpoint.config
        and query.shape[-1] == 2 * checkpoint.config.integer("hidden_size")
    )
    return _architecture(checkpoint, "Eagle3") or "ttt_length" in checkpoint.config or doubled


def _specforge(checkpoint: Checkpoint) -> bool:
    nested = checkpoint.config.section("dflash_config")
    if nested.text("projector_type") == "dspark" or _architecture(checkpoint, "DSparkDraftModel"):
        return True
    only_nested = "target_layer_ids" in nested and "target_layer_ids" not in checkpoint.config
    return _architecture(checkpoint, "DSpark") and only_nested


def _deepspec(checkpoint: Checkpoint) -> bool:
    return any(name in deepspec.ARCHITECTURES for name in checkpoint.config.texts("architectures"))


def _hybrid(checkpoint: Checkpoint) -> bool:
    if not _architecture(checkpoint, dflash.ARCHITECTURE):
        return False
    own = checkpoint.config.section("dflash_config").over(checkpoint.config)
    return own.integer("markov_rank", 0, least=0) > 0 or _has_tensor(checkpoint, "markov_head.")


def _unknown(checkpoint: Checkpoint) -> str:
    needed = ("architectures", "block_size", "mask_token_id", "target_layer_ids")
    missing = [key for key in needed if not _has_key(checkpoint, key)]
    named = ", ".join(checkpoint.config.texts("architectures")) or "none"
    lacks = f" and lacks {', '.join(missing)}" if missing else ""
    return f"not a drafter that is known here; its config names the architecture {named}{lacks}"


def _other_eagle(checkpoint: Checkpoint) -> str:
    named = ", ".join(checkpoint.config.texts("architectures")) or "no architecture"
    return f"not one of the layouts of EAGLE3 that are read; its config names {named}"


def _because(reason: str) -> Callable[[Checkpoint], str]:
    return lambda checkpoint: reason


PACKAGINGS: tuple[Packaging, ...] = (
    Packaging(
        "full model with an embedded drafter",
        "dspark_* keys without block_size, model_type deepseek_v4, or as many layers as the target",
        _embedded,
        refusal=_because("it is a whole target model; only separate drafters are loaded"),
    ),
    Packaging(
        speculators.NAME,
        "speculators_config or speculators_model_type, with the algorithm "
        + ", ".join(speculators.ALGORITHMS),
        lambda c: _has_key(c, "speculators_config", "speculators_model_type"),
        read=speculators.read_speculators,
    ),
    Packaging(
        dflash.DFLASH2,
        "DFlash2DraftModel, selector_rank, or candidate_selector tensors",
        _dflash2,
        read=dflash.read_dflash2,
    ),
    Packaging(
        eagle3.NAME,
        " or ".join(eagle3.ARCHITECTURES),
        lambda c: _architecture(c, *eagle3.ARCHITECTURES),
        read=eagle3.read_eagle3,
    ),
    Packaging(
        eagle3.ORIGINAL,
        " or ".join(eagle3.ORIGINAL_ARCHITECTURES),
        lambda c: _architecture(c, *eagle3.ORIGINAL_ARCHITECTURES),
        read=eagle3.read_original,
    ),
    Packaging(
        "EAGLE3 in another layout",
        "another *Eagle3* in architectures, ttt_length, or queries of twice the hidden size",
        _eagle3,
        refusal=_other_eagle,
    ),
    Packaging(
        dflash.SPECFORGE,
        "projector_type dspark, DSparkDraftModel, or target_layer_ids only in dflash_config",
        _specforge,
        read=dflash.read_specforge,
    ),
    Packaging(
        deepspec.NAME,
        " or ".join(deepspec.ARCHITECTURES),
        _deepspec,
        read=deepspec.read_deepspec,
    ),
    Packaging(
        "DSpark with other layers",
        "another *DSparkModel",
        lambda c: _architecture(c, "DSparkModel"),
        refusal=lambda c: (
            f"the layers of {', '.join(c.config.texts('architectures'))} are not supported"
        ),
    ),
    Packaging(
        dflash.HYBRID,
        f"{dflash.ARCHITECTURE} with markov_rank or markov_head tensors",
        _hybrid,
        read=dflash.read_hybrid,
    ),
    Packaging(
        dflash.ZLAB,
        dflash.ARCHITECTURE,
        lambda c: _architecture(c, dflash.ARCHITECTURE),
        read=dflash.read_zlab,
    ),
    Packaging("unknown packaging", "anything else", lambda c: True, refusal=_unknown),
)
"""The recognition table; the first row that matches decides."""
