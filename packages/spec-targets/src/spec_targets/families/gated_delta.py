"""Qwen3.5, Qwen3.6 and their like: gated delta layers between layers of full attention.

The state of a gated delta layer is the end of its convolution's input and one matrix a head. What
decides the next one: the projections, the convolution's output, which gives queries, keys and
values, and two vectors that scale the decay.
"""

from spec_targets.recurrent import RecurrentFamily

FAMILY = RecurrentFamily(
    model_types=("qwen3_5", "qwen3_5_moe", "prism_hadamard_qwen35", "qwen3_next"),
    mixer="linear_attn",
    recorded=(
        "in_proj_qkv",
        "in_proj_a",
        "in_proj_b",
        "in_proj_qkvz",
        "in_proj_ba",
        "conv1d",
    ),
    weights=("A_log", "dt_bias"),
    aliases={"qwen3_5_text": "qwen3_5", "qwen3_5_moe_text": "qwen3_5_moe"},
)
