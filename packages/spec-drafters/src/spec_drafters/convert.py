"""Any checkpoint that is read here, as a folder of config.json and model.safetensors."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx

from spec_drafters.checkpoint import Checkpoint
from spec_drafters.config import Config
from spec_drafters.errors import CheckpointError, DrafterError, PackagingError
from spec_drafters.fit import default_taps
from spec_drafters.load import SlotConvention, read_otherwise
from spec_drafters.native import deepspec_config, dflash_config
from spec_drafters.recognize import open_checkpoint, recognize
from spec_drafters.spec import DrafterSpec

Layout = Literal["DeepSpec", "z-lab", "own"]


@dataclass(frozen=True, slots=True)
class Converted:
    """What a conversion wrote.

    Attributes:
        spec: what the new folder holds, as it is read.
        layout: whose config.json it has: "DeepSpec", "z-lab", or "own" where neither can say
            what this drafter is and the source's was kept.
    """

    spec: DrafterSpec
    layout: Layout


def convert(
    source: str | Path,
    dest: str | Path,
    *,
    slot_convention: SlotConvention = "auto",
    tap_shift: int = 0,
    target_layers: int | None = None,
) -> Converted:
    """Write the drafter at `source` as safetensors with DeepSpec's names, to be loaded from `dest`.

    Quantised numbers of a GGUF file become bfloat16, all others stay what they are. `dest`
    appears at once and complete, or not at all.

    Args:
        source: any checkpoint that is read here.
        dest: the new folder.
        slot_convention: as for `load_drafter`; what it names is written down.
        tap_shift: the same.
        target_layers: the target's decoder layers. They are needed only where the source leaves
            its taps to the target's depth.

    Raises:
        DrafterError: the source is not read here, or is damaged.
        CheckpointError: `dest` is there already, or cannot be written.
        InvalidValueError: as `read_otherwise`.
    """
    source, dest = Path(source), Path(dest)
    check_free(dest)
    checkpoint = open_checkpoint(source)
    spec = recognize(checkpoint)
    if spec.taps is None:
        spec = replace(spec, taps=_taps(source, target_layers))
    spec = read_otherwise(spec, slot_convention, tap_shift)
    layout, config = _config(checkpoint, spec)
    arrays = checkpoint.read(spec.tensors())
    for name, array in arrays.items():
        header = checkpoint.tensors[name].dtype
        if array.dtype == mx.float32 and header.startswith("Q"):
            arrays[name] = array.astype(mx.bfloat16)
    return Converted(_write(dest, config, arrays), layout)


def check_free(dest: Path) -> None:
    """Raise CheckpointError if something is at a destination."""
    if dest.exists():
        raise CheckpointError(f"{dest} is there already; remove it or name another destination")


def _taps(source: Path, layers: int | None) -> tuple[int, ...]:
    if layers is None:
        raise CheckpointError(
            f"{source} leaves its taps to the target's depth; name the target's layer count too"
        )
    return default_taps(layers)


def _config(checkpoint: Checkpoint, spec: DrafterSpec) -> tuple[Layout, dict[str, Any]]:
    """The first layout that is read back as the same drafter."""
    candidates = (
        ("DeepSpec", deepspec_config(spec)),
        ("z-lab", dflash_config(spec)),
        ("own", checkpoint.config.plain()),
    )
    layout: Layout
    for layout, config in candidates:  # type: ignore[assignment]
        if config is None:
            continue
        with suppress(DrafterError):
            read = recognize(replace(checkpoint, config=Config(config, "config.json")))
            if replace(read, packaging=spec.packaging) == spec:
                return layout, config
    raise PackagingError(
        spec.packaging, "this drafter with these changes has no form that could be written"
    )


def _write(dest: Path, config: dict[str, Any], arrays: dict[str, mx.array]) -> DrafterSpec:
    try:
        dest.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(dir=dest.parent, prefix=f".{dest.name}."))
    except OSError as error:
        raise CheckpointError(f"{dest} cannot be written: {error}") from None
    try:
        mx.save_safetensors(str(part / "model.safetensors"), arrays, {"format": "mlx"})
        (part / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        spec = recognize(open_checkpoint(part))
        _settle(part)
        os.rename(part, dest)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{dest} cannot be written: {error}") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return spec


def _settle(folder: Path) -> None:
    """Let the files reach the disk before the folder gets its name."""
    for file in folder.iterdir():
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
    folder.chmod(0o755)
