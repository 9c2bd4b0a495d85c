"""LFM2: gated short convolutions between layers of full attention.

The state of a short convolution is the end of its input, which the projection decides.
"""

from spec_targets.recurrent import RecurrentFamily

FAMILY = RecurrentFamily(
    model_types=("lfm2", "lfm2_moe", "lfm2-vl"),
    mixer="conv",
    recorded=("in_proj",),
)
