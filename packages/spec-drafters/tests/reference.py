"""Drafters in NumPy, float64, without caches: what the tests hold ours against.

Written from the equations alone; every round is computed anew from all context rows. Tensor
names are DeepSpec's, shapes without a batch axis: n context rows, T slots, H hidden, D head_dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def doubles(tensors: Mapping[str, mx.array]) -> dict[str, Array]:
    return {name: np.array(a.astype(mx.float32), dtype=np.float64) for name, a in tensors.items()}


def norm(x: Array, weight: Array | float = 1.0, eps: float = 1e-6) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@dataclass
class Drafter:
    """Sizes and weights of a drafter with Qwen3 layers.

    Attributes:
        frequencies: [D/2] of the rotary positions.
        stretch: factor on queries and keys.
        causal, window: of each layer.
        conv_group: group size of DFlash 2's convolutions, if it has any.
    """

    weights: dict[str, Array]
    heads: int
    kv_heads: int
    frequencies: Array
    stretch: float = 1.0
    causal: tuple[bool, ...] = ()
    window: tuple[int | None, ...] = ()
    eps: float = 1e-6
    conv_group: int = 0

    @classmethod
    def of(cls, tensors: Mapping[str, mx.array], config: Mapping[str, Any], **more: Any) -> Drafter:
        """From DeepSpec's or z-lab's config; full attention, unscaled rotary positions."""
        dim, layers = config["head_dim"], config["num_hidden_layers"]
        theta = config["rope_parameters"]["rope_theta"]
        given = {
            "frequencies": theta ** -(np.arange(0, dim, 2) / dim),
            "causal": (False,) * layers,
            "window": (None,) * layers,
            "eps": config["rms_norm_eps"],
        }
        sizes = config["num_attention_heads"], config["num_key_value_heads"]
        return cls(doubles(tensors), *sizes, **{**given, **more})

    def linear(self, x: Array, name: str) -> Array:
        y = x @ self.weights[f"{name}.weight"].T
        return y + self.weights.get(f"{name}.bias", 0.0)

    def rotate(self, x: Array, positions: Array) -> Array:
        """[n, heads, D] by half-split pairs."""
        angle = (positions[:, None] * self.frequencies)[:, None]
        cos, sin = np.cos(angle), np.sin(angle)
        one, two = np.split(x * self.stretch, 2, axis=-1)
        return np.concatenate([one * cos - two * sin, two * cos + one * sin], axis=-1)

    def split(self, x: Array, name: str, heads: int, positions: Array | None) -> Array:
        """Heads [n, heads, D] of a projection, normed and rotated where it has positions."""
        y = x.reshape(len(x), heads, -1)
        if positions is None:
            return y
        layer, _, kind = name.rpartition(".")
        weight = self.weights.get(f"{layer}.{kind[0]}_norm.weight")
        return self.rotate(y if weight is None else norm(y, weight, self.eps), positions)

    def attention(
        self, name: str, rows: Array, others: Array, seen: npt.NDArray[np.bool_], first: int
    ) -> Array:
        """Rows attend to `others`, the last of which they are; others[0] stands at `first`."""
        places = first + np.arange(len(others))
        queries = self.split(
            self.linear(rows, f"{name}.q_proj"), f"{name}.q_proj", self.heads, places[-len(rows) :]
        )
        keys, values = (
            self.split(self.linear(others, f"{name}.{kind}"), f"{name}.{kind}", self.kv_heads, at)
            for kind, at in (("k_proj", places), ("v_proj", None))
        )
        group = self.heads // self.kv_heads
        out = np.zeros_like(queries)
        for head in range(self.heads):
            scores = queries[:, head] @ keys[:, head // group].T / np.sqrt(queries.shape[-1])
            out[:, head] = softmax(np.where(seen, scores, -np.inf)) @ values[:, head // group]
        return self.linear(out.reshape(len(rows), -1), f"{name}.o_proj")

    def mlp(self, x: Array, name: str) -> Array:
        gate = self.linear(x, f"{name}.gate_proj")
        return self.linear(
            gate * sigmoid(gate) * self.linear(x, f"{name}.up_proj"), f"{name}.down_proj"
        )

    # --- block drafters -------------------------------------------------------------------------

    def fused(self, taps: Array) -> Array:
        return norm(self.linear(taps, "fc"), self.weights["hidden_norm.weight"], self.eps)

    def block(self, taps: Array, slots: Array, first: int = 0) -> Array:
        """Final-normed hidden states of embedded slots [T, H] behind tap rows [n, m*H]."""
        context, hidden = self.fused(taps), slots
        key = np.arange(len(context) + len(slots))
        query = key[len(context) :, None]
        for layer in range(len(self.causal)):
            at = f"layers.{layer}"
            seen = np.ones((len(slots), len(key)), dtype=bool)
            if self.causal[layer]:
                seen &= key <= query
            window = self.window[layer]
            if window is not None:
                seen &= key > query - window
            rows = norm(hidden, self.weights[f"{at}.input_layernorm.weight"], self.eps)
            rows, after = self.convolve(f"{at}.attention_conv", rows)
            others = np.concatenate([context, rows])
            hidden = hidden + after(self.attention(f"{at}.self_attn", rows, others, seen, first))
            rows = norm(hidden, self.weights[f"{at}.post_attention_layernorm.weight"], self.eps)
            rows, after = self.convolve(f"{at}.mlp_conv", rows)
            hidden = hidden + after(self.mlp(rows, f"{at}.mlp"))
        return norm(hidden, self.weights["norm.weight"], self.eps)

    def convolve(self, name: str, rows: Array):  # type: ignore[no-untyped-def]
        """DFlash 2: rows convolved, and the same for the sublayer's output; else untouched."""
        base = self.weights.get(f"{name}.base_kernel")
        if base is None:
            return rows, lambda x: x
        sides, width, hidden = base.shape
        groups = hidden // self.conv_group
        moved = self.linear(rows, f"{name}.kernel_projection").reshape(-1, sides, width, groups)
        kernel = base + np.repeat(moved, self.conv_group, axis=-1)

        def side(x: Array, number: int) -> Array:
            out = np.zeros_like(x)
            for slot in range(len(x)):
                for back in range(min(width, slot + 1)):
                    out[slot] += kernel[slot, number, back] * x[slot - back]
            return out

        return side(rows, 0), lambda x: side(x, 1)

    def head(self, hidden: Array, softcap: float | None = None, factor: float = 1.0) -> Array:
        logits = self.linear(hidden, "lm_head") * factor
        return logits if softcap is None else softcap * np.tanh(logits / softcap)

    def select(self, hidden: Array, logits: Array, anchor: int, count: int) -> list[int]:
        """DFlash 2's greedy walk through each slot's best candidates."""
        at, path = "candidate_selector", []
        projected = self.linear(hidden, f"{at}.hidden_projection")
        for slot in range(len(hidden)):
            best = np.argsort(-logits[slot], kind="stable")[:count]
            before = self.weights[f"{at}.predecessor_codebook"][anchor] * projected[slot]
            scores = logits[slot][best] + self.weights[f"{at}.successor_codebook"][best] @ before
            anchor = int(best[scores.argmax()])
            path.append(anchor)
        return path

    # --- EAGLE3 ---------------------------------------------------------------------------------

    def eagle(
        self,
        taps: Array,
        following: list[int],
        count: int,
        *,
        ids: npt.NDArray[np.int64] | None = None,
        norm_before_residual: bool = False,
        norm_output: bool = False,
    ) -> tuple[list[int], Array]:
        """(drafts, their logits) behind tap rows [n, m*H], each followed by the token beside it."""
        size = len(self.weights["norm.weight"])
        parts = taps.reshape(len(taps), -1, size)
        for tap in range(parts.shape[1]):
            if f"fc_norm.{tap}.weight" in self.weights:
                parts[:, tap] = norm(parts[:, tap], self.weights[f"fc_norm.{tap}.weight"], self.eps)
        rows = parts.reshape(len(taps), -1)
        if "input_norm.weight" in self.weights:
            rows = norm(rows, self.weights["input_norm.weight"], self.eps)
        hidden, tokens = self.linear(rows, "fc"), list(following)
        drafts, shown = [], []
        for _ in range(count):
            out = self._eagle_layer(hidden, tokens, norm_before_residual)
            normed = norm(out[-1], self.weights["norm.weight"], self.eps)
            shown.append(self.linear(normed, "lm_head"))
            best = int(shown[-1].argmax())
            drafts.append(best if ids is None else int(ids[best]))
            tokens.append(drafts[-1])
            hidden = np.concatenate([hidden, (normed if norm_output else out[-1])[None]])
        return drafts, np.stack(shown)

    def _eagle_layer(self, hidden: Array, tokens: list[int], norm_first: bool) -> Array:
        at = "layers.0"
        embedded = self.weights["embed_tokens.weight"][tokens]
        normed = norm(hidden, self.weights[f"{at}.hidden_norm.weight"], self.eps)
        first = norm(embedded, self.weights[f"{at}.input_layernorm.weight"], self.eps)
        rows = np.concatenate([first, normed], axis=-1)
        seen = np.tril(np.ones((len(rows), len(rows)), dtype=bool))
        out = (normed if norm_first else hidden) + self.attention(
            f"{at}.self_attn", rows, rows, seen, 0
        )
        inner = norm(out, self.weights[f"{at}.post_attention_layernorm.weight"], self.eps)
        return out + self.mlp(inner, f"{at}.mlp")
