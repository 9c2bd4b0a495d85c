"""mlx-lm's own generation loop, as the plain decoder to be measured against."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from spec_cli.bench.trial import Trial
from spec_server.text import Tokeniser


def run_reference(
    model: Any, tokeniser: Tokeniser, prompt: Sequence[int], max_tokens: int
) -> Trial:
    """Greedy `mlx_lm.stream_generate` over the same weights."""
    from mlx_lm import stream_generate

    trial, ids = Trial(), list[int]()
    mx.reset_peak_memory()
    start = time.perf_counter()
    first = None
    for response in stream_generate(model, tokeniser.wrapper, list(prompt), max_tokens=max_tokens):
        if first is None:
            first = time.perf_counter()
        ids.append(int(response.token))
    end = time.perf_counter()
    first = first or end
    trial.decode_seconds, trial.ttft_seconds = end - first, first - start
    trial.peak_bytes = mx.get_peak_memory()
    trial.token_ids = tuple(ids)
    return trial
