"""GGUF drafters: the container, both dialects, and conversion."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from spec_drafters.block import BlockDrafter
from spec_drafters.errors import CheckpointError, DrafterError, PackagingError
from spec_drafters.gguf import parse_gguf
from spec_drafters.load import inspect_drafter, load_drafter

from .helpers import GOLDEN, Golden, Greedy

SOURCE = GOLDEN / "gguf_dspark_log_snr" / "drafter-dspark-bf16.gguf"
TOLERANCE = 5e-4
F32, F16, Q4_0, Q4_1, Q8_0, I32, BF16 = 0, 1, 2, 3, 8, 26, 30


# --- a writer, from the format's description ----------------------------------------------------


def _text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<Ii", 5, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    kinds, codes = {bool: 7, int: 5, str: 8}, {bool: "?", int: "i"}
    kind = type(value[0])
    items = [_text(v) if kind is str else struct.pack("<" + codes[kind], v) for v in value]
    return struct.pack("<IIQ", 9, kinds[kind], len(value)) + b"".join(items)


def write_gguf(
    path: Path,
    metadata: dict[str, Any],
    tensors: dict[str, tuple[tuple[int, ...], int, bytes]],
    version: int = 3,
) -> Path:
    """Tensors are (row-major shape, type, bytes)."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, value in metadata.items():
        head += _text(key) + _value(value)
    data = b""
    for name, (shape, kind, content) in tensors.items():
        head += _text(name) + struct.pack("<I", len(shape))
        head += struct.pack(f"<{len(shape)}Q", *reversed(shape))
        head += struct.pack("<IQ", kind, len(data))
        data += content + b"\0" * (-len(content) % 32)
    path.write_bytes(head + b"\0" * (-len(head) % 32) + data)
    return path


def floats(array: mx.array) -> tuple[tuple[int, ...], int, bytes]:
    return array.shape, F32, np.array(array.astype(mx.float32)).tobytes()


# --- the container ------------------------------------------------------------------------------


def test_bfloat16_keeps_its_range(tmp_path: Path) -> None:
    values = mx.array([1.0, 1e5, 1e-9, 3.0], dtype=mx.bfloat16)
    raw = np.array(values.view(mx.uint16)).tobytes()
    file = parse_gguf(write_gguf(tmp_path / "x.gguf", {}, {"a": ((4,), BF16, raw)}))
    assert file.read("a").dtype == mx.bfloat16
    assert file.read("a").tolist() == values.tolist()


@pytest.mark.parametrize(
    ("name", "kind", "size"), [("Q4_0", Q4_0, 18), ("Q4_1", Q4_1, 20), ("Q8_0", Q8_0, 34)]
)
def test_quantised_blocks_decode_as_mlx_decodes_them(
    tmp_path: Path, name: str, kind: int, size: int
) -> None:
    noise = np.random.default_rng(1)
    blocks = noise.integers(0, 256, (6, size), dtype=np.uint8)
    for at in range(0, 4 if kind == Q4_1 else 2, 2):
        blocks[:, at : at + 2] = noise.normal(size=(6, 1)).astype(np.float16).view(np.uint8)
    path = tmp_path / "x.gguf"
    write_gguf(path, {"general.architecture": "x"}, {"a.weight": ((3, 64), kind, blocks.tobytes())})
    file = parse_gguf(path)
    assert file.tensors["a.weight"].type.name == name
    theirs = mx.load(str(path))
    bits = 8 if kind == Q8_0 else 4
    wanted = mx.dequantize(
        theirs["a.weight"], theirs["a.scales"], theirs["a.biases"], group_size=32, bits=bits
    )
    got = file.read("a.weight")
    assert got.shape == (3, 64)
    assert mx.abs(got - wanted).max().item() <= 2e-3 * mx.abs(wanted).max().item()


def test_types_that_are_not_read_are_named(tmp_path: Path) -> None:
    for kind, name in ((35, "TQ2_0"), (12, "Q4_K"), (99, "type 99")):
        path = write_gguf(tmp_path / "x.gguf", {}, {"token_embd.weight": ((256,), kind, b"")})
        with pytest.raises(PackagingError, match=f"token_embd.weight is stored as {name}"):
            inspect_drafter(path)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = SOURCE.read_bytes()
    for size in [*range(4, 4000, 97), len(whole) - 1]:
        path = tmp_path / "cut.gguf"
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match="truncated"):
            inspect_drafter(path)


def test_other_versions_and_other_models_are_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", {}, {}, version=1)
    with pytest.raises(PackagingError, match="version 1 or its byte order"):
        inspect_drafter(path)
    write_gguf(path, {"general.architecture": "qwen3"}, {})
    with pytest.raises(PackagingError, match="'qwen3' is no drafter's; dspark and dflash are"):
        inspect_drafter(path)


def test_a_folder_may_hold_one_gguf_file(tmp_path: Path) -> None:
    first = tmp_path / "a.gguf"
    first.write_bytes(SOURCE.read_bytes())
    assert inspect_drafter(tmp_path) == inspect_drafter(SOURCE)
    (tmp_path / "b.gguf").write_bytes(SOURCE.read_bytes())
    with pytest.raises(CheckpointError, match=r"2 GGUF files; name one: a\.gguf, b\.gguf"):
        inspect_drafter(tmp_path)


# --- PrismML's dialect --------------------------------------------------------------------------


def golden_drafter(path: Path, **options: Any) -> tuple[Golden, BlockDrafter]:
    golden = Golden.named("gguf_dspark_log_snr")
    return golden, load_drafter(path, golden.target(), **options)  # type: ignore[arg-type]


def test_log_snr_golden() -> None:
    golden, drafter = golden_drafter(SOURCE, dtype="float32")
    state = drafter.new_state(1)
    for index in range(2):
        taps = golden.taps(index, 3)
        rows, chooser = taps[0].shape[1], Greedy()
        drafter.extend(state, mx.zeros((1, rows), dtype=mx.int32), taps, [rows])
        anchor = golden.inputs[f"anchor_{index}"]
        hidden = drafter.hidden(state, anchor, 4)
        proposal = drafter.propose(state, anchor, 4, chooser)
        assert proposal.confidence is not None
        for name, got in (
            ("block_hidden", hidden),
            ("base_logits", drafter.head(hidden)),
            ("greedy_logits", chooser.logits),
        ):
            assert mx.abs(got - golden.outputs[f"{name}_{index}"]).max().item() < TOLERANCE
        wanted = mx.sigmoid(golden.outputs[f"confidence_logits_{index}"])
        assert mx.abs(proposal.confidence - wanted).max().item() < TOLERANCE
        assert proposal.tokens.tolist() == golden.outputs[f"greedy_tokens_{index}"].tolist()


def test_a_bfloat16_file_stays_bfloat16() -> None:
    golden, drafter = golden_drafter(SOURCE)
    state = drafter.new_state(1)
    assert drafter.hidden(state, golden.inputs["anchor_0"], 4).dtype == mx.bfloat16


# --- llama.cpp's dialect ------------------------------------------------------------------------

_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP = {
    "embed_tokens.weight": "token_embd.weight",
    "lm_head.weight": "output.weight",
    "norm.weight": "output_norm.weight",
    "hidden_norm.weight": "enc.output_norm.weight",
    "fc.weight": "fc.weight",
    "markov_head.markov_w1.weight": "markov_w1.weight",
    "markov_head.markov_w2.weight": "markov_w2.weight",
    "confidence_head.proj.weight": "conf_proj.weight",
    "confidence_head.proj.bias": "conf_proj.bias",
}


def as_dflash(path: Path, name: str, **changes: Any) -> Path:
    """A golden's checkpoint as llama.cpp's converter lays it out; None removes a key or tensor."""
    config = json.loads((GOLDEN / name / "config.json").read_text())
    nested = {**config, **config.get("dflash_config", {})}
    slides = [kind == "sliding_attention" for kind in config["layer_types"]]
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    metadata = {
        "general.architecture": "dflash",
        "dflash.block_count": config["num_hidden_layers"],
        "dflash.embedding_length": config["hidden_size"],
        "dflash.feed_forward_length": config["intermediate_size"],
        "dflash.attention.head_count": config["num_attention_heads"],
        "dflash.attention.head_count_kv": config["num_key_value_heads"],
        "dflash.attention.key_length": config["head_dim"],
        "dflash.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "dflash.rope.freq_base": theta,
        "dflash.block_size": config["block_size"],
        "dflash.target_layers": [layer + 1 for layer in nested["target_layer_ids"]],
        "tokenizer.ggml.mask_token_id": nested["mask_token_id"],
        "tokenizer.ggml.tokens": [f"t{i}" for i in range(config["vocab_size"])],
    }
    if any(slides):
        metadata["dflash.attention.sliding_window"] = config["sliding_window"]
        metadata["dflash.attention.sliding_window_pattern"] = slides
    tensors = {}
    for ours, array in mx.load(str(GOLDEN / name / "model.safetensors")).items():
        theirs = _TOP.get(ours)
        if theirs is None:
            layer, stem = ours.removeprefix("layers.").removesuffix(".weight").split(".", 1)
            theirs = f"blk.{layer}.{_LAYER[stem]}.weight"
        tensors[theirs] = floats(array)
    for key, value in changes.items():
        into = tensors if key in tensors or isinstance(value, tuple) else metadata
        into[key] = value  # type: ignore[index]
        if value is None:
            del into[key]
    return write_gguf(path, metadata, tensors)


@pytest.mark.parametrize("name", ["dspark_qwen3", "dflash_qwen3", "dflash_gemma4"])
def test_llama_cpp_files_draft_what_their_originals_do(tmp_path: Path, name: str) -> None:
    golden = Golden.named(name)
    path = as_dflash(tmp_path / "x.gguf", name, **{"dflash.final_logit_softcapping": 30.0})
    drafter = load_drafter(path, golden.target())  # type: ignore[arg-type]
    original = golden.drafter()
    assert drafter.spec.taps == original.spec.taps
    assert drafter.spec.attention == original.spec.attention
    state, taps = drafter.new_state(1), golden.taps(0, len(drafter.taps))
    rows = taps[0].shape[1]
    drafter.extend(state, mx.zeros((1, rows), dtype=mx.int32), taps, [rows])
    proposal = drafter.propose(state, golden.inputs["anchor_0"], drafter.max_block, Greedy())
    assert proposal.tokens.tolist() == golden.outputs["greedy_tokens_0"].tolist()


def test_a_flat_confidence_row_without_bias(tmp_path: Path) -> None:
    golden = Golden.named("dspark_qwen3")
    row = mx.load(str(golden.path / "model.safetensors"))["confidence_head.proj.weight"]
    changes: dict[str, Any] = {"conf_proj.weight": floats(row[0]), "conf_proj.bias": None}
    path = as_dflash(tmp_path / "x.gguf", "dspark_qwen3", **changes)
    drafter = load_drafter(path, golden.target())  # type: ignore[arg-type]
    hidden = mx.random.normal((1, 1, 64), key=mx.random.key(1))
    embedded = mx.random.normal((1, 16), key=mx.random.key(2))
    assert drafter.confidence is not None
    got = drafter.confidence.logits(hidden, [embedded]).item()
    wanted = (mx.concatenate([hidden[0, 0], embedded[0]]) * row[0]).sum().item()
    assert got == pytest.approx(wanted, abs=1e-4)


def test_a_silent_anchor_is_said_by_its_key(tmp_path: Path) -> None:
    key = {"dflash.sample_from_anchor": False}
    spec = inspect_drafter(as_dflash(tmp_path / "x.gguf", "dspark_qwen3", **key))
    assert (spec.first_slot, spec.max_block) == (1, 6)


def test_d2t_lists_target_ids(tmp_path: Path) -> None:
    golden = Golden.named("dspark_qwen3")
    ids = np.arange(7, 300, 5, dtype=np.int32)
    weights = mx.load(str(golden.path / "model.safetensors"))
    changes = {
        "d2t": (ids.shape, I32, ids.tobytes()),
        "output.weight": floats(weights["lm_head.weight"][mx.array(ids)]),
        "markov_w2.weight": floats(weights["markov_head.markov_w2.weight"][mx.array(ids)]),
    }
    path = as_dflash(tmp_path / "x.gguf", "dspark_qwen3", **changes)
    drafter = load_drafter(path, golden.target())  # type: ignore[arg-type]
    seen: list[list[int]] = []

    class Look(Greedy):
        def draft(self, logits, slot, prefix, token_ids=None):  # type: ignore[no-untyped-def]
            seen.append(token_ids.tolist())
            return super().draft(logits, slot, prefix)

    drafter.propose(drafter.new_state(1), mx.array([5]), 1, Look())
    assert seen == [ids.tolist()]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dflash.selector_rank": 256}, "DFlash 2"),
        ({"dflash.hyper_connection.count": 4}, "DeepSeek-V4 layers"),
        ({"dflash.logit_scale": 0.5}, "scaled logits"),
        ({"dflash.rope.scaling.type": "yarn"}, "scaled rotary positions"),
        ({"dflash.rope.dimension_count": 8}, "part of each head"),
        ({"blk.0.attn_sinks.weight": ((4,), F32, b"\0" * 16)}, "attention sinks"),
        ({"blk.0.attn_conv_base": ((4,), F32, b"\0" * 16)}, "blk.0.attn_conv_base"),
        ({"dflash.block_size": None}, "lacks the key dflash.block_size"),
        ({"dflash.embedding_length": "x"}, "dflash.embedding_length is 'x'"),
        ({"output_norm.weight": None}, r"lacks norm\.weight"),
        ({"dflash.target_layers": 3}, "target_layer_ids is 3"),
    ],
)
def test_what_a_dflash_file_may_not_have(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = as_dflash(tmp_path / "x.gguf", "dspark_qwen3", **changes)
    with pytest.raises(DrafterError, match=message):
        inspect_drafter(path)
