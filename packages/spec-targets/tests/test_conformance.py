"""Targets keep the contract of their Protocol, with no difference at all on a CPU."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from spec_core.conformance import check_target


@pytest.mark.parametrize("family", ["qwen3", "llama", "mistral", "qwen2"])
def test_dense_families_conform(tiny_target: Any, family: str) -> None:
    target, _ = tiny_target(family)
    check_target(target)


@pytest.mark.parametrize("family", ["gemma2", "granite", "phi3"])
def test_families_with_scales_and_caps_conform(tiny_target: Any, family: str) -> None:
    target, _ = tiny_target(family)
    check_target(target, tolerance=2e-5)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_half_precision_conforms(tiny_target: Any, dtype: mx.Dtype) -> None:
    target, _ = tiny_target("qwen3", dtype=dtype)
    check_target(target)


@pytest.mark.parametrize("weight_bits", [4, 8])
def test_quantised_weights_conform(tiny_target: Any, weight_bits: int) -> None:
    target, _ = tiny_target("qwen3", weight_bits=weight_bits)
    check_target(target)


@pytest.mark.parametrize("kv_bits", [4, 8])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_quantised_keys_and_values_conform(tiny_target: Any, kv_bits: int, dtype: mx.Dtype) -> None:
    target, _ = tiny_target("llama", dtype=dtype, kv_bits=kv_bits)
    check_target(target)
