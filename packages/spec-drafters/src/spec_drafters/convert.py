"""Any checkpoint that is read here, as a folder of config.json and model.safetensors."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

import mlx.core as mx

from spec_drafters.errors import CheckpointError
from spec_drafters.recognize import open_checkpoint, recognize
from spec_drafters.spec import DrafterSpec


def convert(source: str | Path, dest: str | Path) -> DrafterSpec:
    """Write the drafter at `source` as safetensors with DeepSpec's names, to be loaded from `dest`.

    Quantised numbers of a GGUF file become bfloat16, all others stay what they are. `dest`
    appears at once and complete, or not at all.

    Returns:
        What the new folder holds.

    Raises:
        DrafterError: the source is not read here, or is damaged.
        CheckpointError: `dest` is there already, or cannot be written.
    """
    source, dest = Path(source), Path(dest)
    if dest.exists():
        raise CheckpointError(f"{dest} is there already; remove it or name another destination")
    checkpoint = open_checkpoint(source)
    arrays = checkpoint.read(recognize(checkpoint).tensors())
    for name, array in arrays.items():
        header = checkpoint.tensors[name].dtype
        if array.dtype == mx.float32 and header.startswith("Q"):
            arrays[name] = array.astype(mx.bfloat16)
    try:
        dest.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(dir=dest.parent, prefix=f".{dest.name}."))
    except OSError as error:
        raise CheckpointError(f"{dest} cannot be written: {error}") from None
    try:
        mx.save_safetensors(str(part / "model.safetensors"), arrays, {"format": "mlx"})
        (part / "config.json").write_text(json.dumps(checkpoint.config.plain(), indent=2) + "\n")
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
