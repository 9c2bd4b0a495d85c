"""Fixtures: scripted checkpoints, built once a session."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from spec_server import CacheOptions, Engine, Limits

EMOJI, HAN = list("😀".encode()), list("漢".encode())

SCRIPT_S = ["al", "pha ", "be", "ta ga", "mma ", "del", "ta2"]
SCRIPT_K = ["<think>", "\nadd ", "them\n", "</think>", "\n\n4", "2."]


def _module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Scripts: S (stop strings), U (characters over several tokens), K (a thought)."""
    folder: Path = _module("chain_checkpoint").build(
        tmp_path_factory.mktemp("models") / "chain",
        {"S": SCRIPT_S, "U": ["h", "i", " ", *EMOJI, *HAN, "!"], "K": SCRIPT_K},
        extra_tokens=[*SCRIPT_S, *SCRIPT_K],
    )
    return folder


CALL = [
    "<tool_call>",
    '\n{"na',
    'me": "get_we',
    'ather", "argu',
    'ments": {"city": "Pa',
    'ris"}}\n',
]
AGAIN = ['}</tool_call>\n<tool_call>{"name": "now", "arg', 'uments": {}}</tool', "_call>", "\ndone"]
BROKEN = ["<tool_call>{bro", "ken</tool", "_call", "> then"]
OPENED = ["hm", "m\n", "</think>", "\n\n4", "2."]
TOOLS_TEMPLATE = (
    "{% if messages[0].role == 'assistant' %}"
    "{{ raise_exception('The conversation must begin with the user.') }}{% endif %}"
    "{% if tools %}<tools>{{ tools | length }}</tools><tool_call>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking %}<think>\n{% else %}{{ messages[-1].content[-1:] }}{% endif %}"
    "{% endif %}"
)


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Scripts: S and U as in `chain`, K a thought and then two words, T a tool call, P two calls
    and a word, B a call that does not parse; where the template opens a thought, the rest of one
    and then K's words. With every end token banned they go on as "!!!"."""
    calls = [*CALL, "</tool_call>"]
    pair = ["<tool_call>{", '"name": "get_weather", "arguments": {"city": "Rome"}', *AGAIN]
    folder: Path = _module("chain_checkpoint").build(
        tmp_path_factory.mktemp("models") / "scripted",
        {
            "S": SCRIPT_S,
            "U": ["h", "i", " ", *EMOJI, *HAN, "!"],
            "K": SCRIPT_K,
            "T": calls,
            "P": pair,
            "B": BROKEN,
            "\n": OPENED,
        },
        extra_tokens=[*SCRIPT_S, *SCRIPT_K, *calls, *pair, *BROKEN, *OPENED[:2]],
        template=TOOLS_TEMPLATE,
        positions=256,
    )
    return folder


@pytest.fixture(scope="session")
def scripted_engine(scripted: Path) -> Iterator[Engine]:
    """The scripted checkpoint, drafting by lookup, with a prefix cache."""
    with Engine.load(
        scripted,
        mode="lookup",
        prefix_cache=CacheOptions(16 << 20),
        limits=Limits(max_batch=4, max_queue=64),
    ) as engine:
        yield engine
