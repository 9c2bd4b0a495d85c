"""mlx-lm's own generation loop, as the plain decoder to be measured against."""

from __future__ import annotations

import time
from typing import Any

import mlx.core as mx

from spec_cli.bench.trial import Task, Trial
from spec_server.text import Tokeniser


def run_reference(model: Any, tokeniser: Tokeniser, task: Task) -> Trial:
    """`mlx_lm.stream_generate` over the same weights. Where it samples, its text is another one."""
    from mlx_lm import stream_generate

    trial, ids = Trial(), list[int]()
    mx.reset_peak_memory()
    start = time.perf_counter()
    first = None
    responses = stream_generate(
        model,
        tokeniser.wrapper,
        list(task.prompt),
        max_tokens=task.max_tokens,
        sampler=_sampler(task),
    )
    for response in responses:
        if first is None:
            first = time.perf_counter()
        ids.append(int(response.token))
    end = time.perf_counter()
    first = first or end
    trial.decode_seconds, trial.ttft_seconds = end - first, first - start
    trial.peak_bytes = mx.get_peak_memory()
    trial.token_ids = tuple(ids)
    return trial


def _sampler(task: Task) -> Any:
    """mlx-lm's sampler with the same parameters; None is greedy."""
    from mlx_lm.sample_utils import make_sampler

    asked = task.sampling
    if asked is None or asked.greedy:
        return None
    return make_sampler(
        temp=asked.temperature, top_p=asked.top_p, min_p=asked.min_p, top_k=asked.top_k
    )
