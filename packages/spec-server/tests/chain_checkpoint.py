"""Builds a tiny Qwen3-format checkpoint that emits an exact, chosen token script.

Attention and MLP outputs are zero, the embedding is the identity, and the head's row of token b
points at token a where b follows a: the next token is a function of the last one, so every mode
must reproduce the script. Each token has one successor. The last character of the prompt selects
the script; added tokens set the token borders.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.qwen3 import Model, ModelArgs
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

Piece = str | int
"""An added token, a single one-byte character, or a byte."""

SPECIAL = ("<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% if messages[0].role == 'assistant' %}"
    "{{ raise_exception('The conversation must begin with the user.') }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking %}<think>\n{% endif %}{{ messages[-1].content[-1:] }}{% endif %}"
)


def build(
    folder: Path,
    scripts: Mapping[str, Sequence[Piece]],
    extra_tokens: Sequence[str] = (),
    gap: float = 30.0,
    template: str = TEMPLATE,
    positions: int = 2048,
) -> Path:
    """Write the checkpoint; `scripts` maps a selector character to what follows it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer(extra_tokens)
    tokenizer.save(str(folder / "tokenizer.json"))
    successor, end = _successors(tokenizer, scripts, extra_tokens)
    vocab = tokenizer.get_vocab_size()
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": (vocab + 63) // 64 * 64,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
        "vocab_size": vocab,
        "rope_theta": 10000.0,
        "max_position_embeddings": positions,
        "tie_word_embeddings": False,
        "rope_scaling": None,
        "eos_token_id": end,
        "torch_dtype": "float32",
    }
    _write_weights(folder, config, successor, end, gap)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": "<|im_end|>",
                "chat_template": template,
                "model_max_length": positions,
                "clean_up_tokenization_spaces": False,
            }
        )
    )
    return folder


def _tokenizer(extra_tokens: Sequence[str]) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIAL])
    tokenizer.add_tokens([AddedToken(s, special=False, normalized=False) for s in extra_tokens])
    return tokenizer


def _successors(
    tokenizer: Tokenizer, scripts: Mapping[str, Sequence[Piece]], extra_tokens: Sequence[str]
) -> tuple[dict[int, int], int]:
    byte_ids = _byte_ids(tokenizer)
    named = {*extra_tokens, *SPECIAL}

    def token(piece: Piece) -> int:
        if isinstance(piece, str) and piece in named:
            return int(tokenizer.token_to_id(piece))
        byte = piece if isinstance(piece, int) else ord(piece)
        return byte_ids[byte]

    end = int(tokenizer.token_to_id("<|im_end|>"))
    successor: dict[int, int] = {}
    for selector, pieces in scripts.items():
        ids = [token(selector), *map(token, pieces), end]
        for before, after in itertools.pairwise(ids):
            assert successor.get(before, after) == after, f"token {before} has two successors"
            successor[before] = after
    return successor, end


def _byte_ids(tokenizer: Tokenizer) -> dict[int, int]:
    """Token id of each byte, through the printable alphabet of byte-level BPE."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable}
    characters |= {byte: chr(256 + index) for index, byte in enumerate(others)}
    return {byte: int(tokenizer.token_to_id(char)) for byte, char in characters.items()}


def _write_weights(
    folder: Path, config: dict[str, object], successor: dict[int, int], end: int, gap: float
) -> None:
    model = Model(ModelArgs.from_dict(config))
    mx.random.seed(0)
    weights = dict(tree_flatten(model.parameters()))
    for name, value in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] = mx.zeros_like(value)
    vocab, width = model.args.vocab_size, model.args.hidden_size
    embedding = np.zeros((vocab, width), np.float32)
    embedding[np.arange(vocab), np.arange(vocab)] = 1.0
    head = np.zeros((vocab, width), np.float32)
    for before in range(vocab):
        head[successor.get(before, end), before] = gap / np.sqrt(width)
    weights["model.embed_tokens.weight"] = mx.array(embedding)
    weights["lm_head.weight"] = mx.array(head)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
