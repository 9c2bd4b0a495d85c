"""What a checkpoint says of answers is honoured, or refused in one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spec_core import SamplingParams
from spec_server.errors import ModelLoadError
from spec_server.generation_config import end_tokens, recommended_sampling

FILE = "generation_config.json"


def write(folder: Path, file: str = FILE, **values: Any) -> Path:
    (folder / file).write_text(json.dumps(values))
    return folder


def test_without_a_file_answers_are_greedy_and_the_tokenizer_says_where_they_end(
    tmp_path: Path,
) -> None:
    assert recommended_sampling(tmp_path) == SamplingParams()
    assert end_tokens(tmp_path) == ()


def test_sampling_counts_where_the_model_samples(tmp_path: Path) -> None:
    values: dict[str, Any] = {"temperature": 0.6, "top_k": 20, "top_p": None}
    assert recommended_sampling(write(tmp_path, **values)) == SamplingParams()
    found = recommended_sampling(write(tmp_path, do_sample=True, **values))
    assert found == SamplingParams(temperature=0.6, top_k=20)


def test_end_tokens_of_both_files_count(tmp_path: Path) -> None:
    write(tmp_path, eos_token_id=[2, 7])
    write(tmp_path, "config.json", eos_token_id=3)
    assert sorted(end_tokens(tmp_path)) == [2, 3, 7]


@pytest.mark.parametrize("value", ["x", -1, [[1]], {"a": 1}, 1.5, True, [2, None]])
@pytest.mark.parametrize("file", [FILE, "config.json"])
def test_an_end_token_that_is_no_token_is_refused(tmp_path: Path, file: str, value: object) -> None:
    with pytest.raises(ModelLoadError, match=f"{file}: eos_token_id is .* a token id or a list"):
        end_tokens(write(tmp_path, file, eos_token_id=value))


@pytest.mark.parametrize(
    ("values", "sentence"),
    [({"do_sample": "yes"}, "do_sample is 'yes'"), ({"do_sample": True, "top_k": "a"}, "top_k")],
)
def test_sampling_out_of_range_is_refused(
    tmp_path: Path, values: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ModelLoadError, match=f"{FILE}: {sentence}"):
        recommended_sampling(write(tmp_path, **values))


@pytest.mark.parametrize("text", ["{bad", "[1]", ""])
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    for read in (recommended_sampling, end_tokens):
        with pytest.raises(ModelLoadError, match=FILE):
            read(tmp_path)
