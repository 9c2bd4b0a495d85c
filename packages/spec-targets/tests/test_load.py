"""Loading says in one sentence what is wrong, and runs nothing of the checkpoint."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import mlx.core as mx
import pytest

from spec_core import InvalidValueError, SpecError
from spec_targets import (
    IncompleteTargetError,
    TargetError,
    TargetNotFoundError,
    UnsupportedTargetError,
    load_target,
)

GOLDEN = Path(__file__).parent / "golden" / "e2e_qwen3" / "target"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole checkpoint, to be damaged."""
    copied = tmp_path / "model"
    shutil.copytree(GOLDEN, copied)
    return copied


def _reconfigure(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def _sentence(error: pytest.ExceptionInfo[SpecError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def test_a_folder_loads_with_its_own_dtype_or_another(folder: Path) -> None:
    tokens = mx.array([[1, 2, 3]])
    for dtype, expected in ((None, mx.float32), ("bfloat16", mx.bfloat16)):
        target = load_target(folder, dtype=dtype).target
        logits = target.forward(tokens, target.new_state(1)).logits
        assert logits is not None
        assert logits.dtype == expected


def test_end_tokens_of_generation_config_count(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    assert load_target(folder).config["eos_token_id"] == [2, 7]


def test_a_missing_tokenizer_is_named_only_when_asked_for(folder: Path) -> None:
    loaded = load_target(folder)
    with pytest.raises(IncompleteTargetError, match="no tokenizer") as error:
        _ = loaded.tokenizer
    _sentence(error)


def test_a_broken_tokenizer_is_one_sentence(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(IncompleteTargetError, match="no usable tokenizer") as error:
        _ = load_target(folder).tokenizer
    _sentence(error)


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(TargetNotFoundError, match="no folder") as error:
        load_target(tmp_path / "nothing" / "here")
    _sentence(error)


def test_a_file_is_not_a_folder(folder: Path) -> None:
    with pytest.raises(TargetNotFoundError, match="is a file"):
        load_target(folder / "config.json")


def _ask_hub(home: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    code = (
        "from spec_targets import load_target, TargetNotFoundError\n"
        "try: load_target('nobody/nothing')\n"
        "except TargetNotFoundError as error: print(error)\n"
    )
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env={"HF_HOME": str(home), "PYTHONPATH": ":".join(sys.path), **env},
    )


def test_an_unreachable_hub_is_named(tmp_path: Path) -> None:
    run = _ask_hub(tmp_path, {"HF_HUB_OFFLINE": "1"})
    assert run.stdout.startswith("nobody/nothing is neither a folder nor in the local hub cache")
    assert run.stdout.count("\n") == 1


def test_a_hub_that_never_answers_is_given_up(tmp_path: Path) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        hub = {
            "HF_HUB_OFFLINE": "0",
            "HF_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}",
        }
        run = _ask_hub(tmp_path, hub)
    assert run.stdout.startswith("nobody/nothing is neither a folder nor in the local hub cache")


def test_no_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(IncompleteTargetError, match=r"no config\.json") as error:
        load_target(folder)
    _sentence(error)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"model_type": 3}'])
def test_config_that_says_nothing(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(IncompleteTargetError, match=r"config\.json") as error:
        load_target(folder)
    _sentence(error)


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(IncompleteTargetError, match="no weights") as error:
        load_target(folder)
    _sentence(error)


@pytest.mark.parametrize("size", [0, 5, 100, 20000])
def test_a_truncated_file_is_named(folder: Path, size: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(IncompleteTargetError, match=r"model\.safetensors") as error:
        load_target(folder)
    _sentence(error)


def test_a_missing_shard_is_named(folder: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(IncompleteTargetError, match=r"lacks model-00002-of-00002\.safetensors"):
        load_target(folder)


def test_a_library_that_is_not_there_is_named(folder: Path) -> None:
    with pytest.raises(InvalidValueError, match="through is 'mlx'"):
        load_target(folder, through="mlx")  # type: ignore[arg-type]
    if find_spec("mlx_vlm") is None:
        with pytest.raises(UnsupportedTargetError, match="not installed; install spec-targets"):
            load_target(folder, through="vlm")


@pytest.mark.parametrize("model_type", ["no_such_model", "../etc", "os.path", ""])
def test_unknown_model_types_are_refused(folder: Path, model_type: str) -> None:
    _reconfigure(folder, model_type=model_type)
    with pytest.raises(UnsupportedTargetError, match="model type") as error:
        load_target(folder)
    _sentence(error)


@pytest.mark.parametrize("positions", [0, -5, "many", True])
def test_a_context_window_that_is_none_is_refused(folder: Path, positions: object) -> None:
    _reconfigure(folder, max_position_embeddings=positions)
    with pytest.raises(TargetError, match=r"max_position_embeddings is .* at least 1") as error:
        load_target(folder)
    _sentence(error)


def test_weights_that_are_no_numbers_are_named(folder: Path) -> None:
    weights = mx.load(str(folder / "model.safetensors"))
    assert isinstance(weights, dict)
    weights["model.norm.weight"] *= float("nan")
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    with pytest.raises(TargetError, match="not numbers \\(NaN\\)") as error:
        load_target(folder)
    _sentence(error)


def test_missing_tensors_are_one_sentence(folder: Path) -> None:
    weights = mx.load(str(folder / "model.safetensors"))
    assert isinstance(weights, dict)
    weights.pop("model.norm.weight")
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    with pytest.raises(TargetError, match=r"model\.norm\.weight") as error:
        load_target(folder)
    _sentence(error)


def test_code_of_a_checkpoint_runs_only_if_trusted(folder: Path) -> None:
    (folder / "custom.py").write_text(
        f"open({str(folder / 'ran')!r}, 'w').close()\nfrom mlx_lm.models.qwen3 import *\n"
    )
    _reconfigure(folder, model_file="custom.py")
    with pytest.raises(UnsupportedTargetError, match="trust_remote_code"):
        load_target(folder)
    assert not (folder / "ran").exists()
    load_target(folder, trust_remote_code=True)
    assert (folder / "ran").exists()


def test_options_out_of_range(folder: Path) -> None:
    with pytest.raises(InvalidValueError, match="dtype is 'int8'"):
        load_target(folder, dtype="int8")
    with pytest.raises(InvalidValueError, match="kv_bits is 2"):
        load_target(folder, kv_bits=2)


def test_importing_mlx_lm_leaves_the_limits_of_the_process_alone(folder: Path) -> None:
    code = (
        "import resource as r\n"
        "before = r.getrlimit(r.RLIMIT_NOFILE)\n"
        "from spec_targets import load_target\n"
        f"load_target({str(folder)!r})\n"
        "print(before == r.getrlimit(r.RLIMIT_NOFILE), r.setrlimit.__module__)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={"HF_HUB_OFFLINE": "1", "PYTHONPATH": ":".join(sys.path)},
    )
    assert run.stdout.split() == ["True", "resource"], run.stderr
