"""Our command against others', on the same pair and prompts, interleaved prompt by prompt.

Each contender is a program that is started anew for every prompt, prints its own decoding speed,
and is believed; loading is not counted. Contenders: ours plainly and with a drafter, mlx-lm's
generate, and mlx-dspark's generate with the same drafter and cap (from an environment of its own),
both with copies from the text beside the drafter or both without.

With `--serve` each is a server instead, started once and asked over HTTP, so that what a new
process pays is paid in an uncounted trial. A speed then is an answer's tokens over its whole time.
A prompt's computation hardly counts: from the second trial on each server finds it in its cache.

    python benchmarks/peers.py --model TARGET --drafter DRAFTER --mode dspark --caps 7 auto \\
        --mlx-dspark /path/to/venv/bin/mlx-dspark --trials 3 --out result.json

`--float32` casts both checkpoints into temporary folders first, since the others compute in what
a checkpoint holds. `--blas LIBRARY` is preloaded for the others and taken by ours, on one thread
each.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import resources
from importlib.metadata import distributions
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from harness import write

SETS = ("chat", "code", "tool", "math")


READY_SECONDS = 600
_MLX_LM = (sys.executable, "-m", "mlx_lm")


class Contender(Protocol):
    """Something that answers prompts and can be timed."""

    @property
    def name(self) -> str: ...

    def run(self, prompt: str) -> tuple[float, int, float | None]:
        """Tokens a second, tokens, and mean accepted length where it is told."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command line and where its output states speed, tokens and acceptance."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    json: bool = False

    def run(self, prompt: str) -> tuple[float, int, float | None]:
        filled = [part.replace("{prompt}", prompt) for part in self.command]
        ran = subprocess.run(
            filled,
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, **self.environment},
        )
        if ran.returncode:
            raise SystemExit(f"{self.name} failed:\n{ran.stdout}\n{ran.stderr}")
        return self._read(ran.stdout)

    def _read(self, out: str) -> tuple[float, int, float | None]:
        if self.json:
            found = json.loads(out)
            return (
                found["tokens_per_second"],
                found["completion_tokens"],
                found["mean_accept_length"],
            )
        theirs = re.search(r"(\d+) tokens ·.* ([\d.]+) tok/s decode", out)
        if theirs:
            accepted = re.search(r"accept ([\d.]+)/round", out)
            length = float(accepted[1]) if accepted else None
            return float(theirs[2]), int(theirs[1]), length
        plain = re.search(r"Generation: (\d+) tokens, ([\d.]+) tokens-per-sec", out)
        if plain:
            return float(plain[2]), int(plain[1]), None
        raise SystemExit(f"{self.name} states no speed:\n{out}")


class Server:
    """A server that runs from entering to leaving; `{port}` in its command is a free port."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        model: str,
        max_tokens: int,
    ) -> None:
        self.name = name
        self._command, self._environment = command, environment
        self._model, self._max_tokens = model, max_tokens

    def __enter__(self) -> Server:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._base = f"http://127.0.0.1:{port}/v1"
        self._log = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [part.replace("{port}", str(port)) for part in self._command],
            env={**os.environ, **self._environment},
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        until = time.monotonic() + READY_SECONDS
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > until:
                self.__exit__()
                raise SystemExit(f"{self.name} does not serve:\n{self._output()}")
            time.sleep(0.5)
        return self

    def __exit__(self, *raised: object) -> None:
        self._process.kill()
        self._process.wait()

    def run(self, prompt: str) -> tuple[float, int, float | None]:
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": self._max_tokens,
            "temperature": 0,
        }
        request = urllib.request.Request(
            f"{self._base}/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        begun = time.perf_counter()
        with urllib.request.urlopen(request) as response:
            tokens = json.load(response)["usage"]["completion_tokens"]
        return tokens / (time.perf_counter() - begun), tokens, None

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._base}/models", timeout=5):
                return True
        except OSError:
            return False

    def _output(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")


@dataclass(frozen=True, slots=True)
class Plan:
    """What to start: ours and theirs with the same model, drafter, caps and threads.

    Each entry is a name, whose program it is, and options that all its commands take.
    """

    args: argparse.Namespace
    model: Path
    drafter: Path

    def entries(self) -> list[tuple[str, str, tuple[str, ...]]]:
        args = self.args
        found: list[tuple[str, str, tuple[str, ...]]] = [
            ("spec baseline", "spec", ("--mode", "baseline")),
            ("mlx-lm", "mlx-lm", ()),
        ]
        bits = ("--drafter-bits", "none" if args.drafter_bits == "0" else args.drafter_bits)
        for cap, copies in product(args.caps, args.copies):
            name = f"{args.mode} {cap}" + (" with copies" if copies == "yes" else "")
            drafted = ("--mode", args.mode, "--drafter", str(self.drafter), "--max-draft", cap)
            drafted += ("--lookup-drafts" if copies == "yes" else "--no-lookup-drafts",)
            found.append((f"spec {name}", "spec", (*drafted, *bits)))
            if args.mlx_dspark:
                theirs = (*drafted, "--drafter-bits", args.drafter_bits)
                found.append((f"mlx-dspark {name}", "mlx-dspark", theirs))
        return found

    def environment(self, whose: str) -> dict[str, str]:
        threads = {"OPENBLAS_NUM_THREADS": "1"}
        if whose == "spec":
            return {**threads, "SPEC_CPU_BLAS": self.args.blas or "bundled"}
        return {**threads, "LD_PRELOAD": self.args.blas} if self.args.blas else threads

    def commands(self) -> list[Command]:
        """Programs to be started anew for each prompt."""
        model, tokens = ("--model", str(self.model)), str(self.args.max_tokens)
        asked, family = ("--prompt", "{prompt}"), self.args.family
        dspark = (self.args.mlx_dspark, "generate", *(("--family", family) if family else ()))
        heads = {
            "spec": (*self._ours("generate"), "{prompt}", "--json", "--max-tokens", tokens),
            "mlx-lm": (*_MLX_LM, "generate", *asked, "--temp", "0", "--max-tokens", tokens),
            "mlx-dspark": (*dspark, *asked, "--no-stream", "--max-new-tokens", tokens),
        }
        return [
            Command(name, (*heads[whose], *model, *rest), self.environment(whose), whose == "spec")
            for name, whose, rest in self.entries()
        ]

    def servers(self) -> list[Server]:
        """Programs that run until the end."""
        listen = ("--model", str(self.model), "--host", "127.0.0.1", "--port", "{port}")
        heads = {
            "spec": self._ours("serve"),
            "mlx-lm": (*_MLX_LM, "server"),
            "mlx-dspark": (self.args.mlx_dspark, "serve"),
        }
        return [
            Server(
                name,
                (*heads[whose], *listen, *rest),
                self.environment(whose),
                str(self.model),
                self.args.max_tokens,
            )
            for name, whose, rest in self.entries()
        ]

    def _ours(self, verb: str) -> tuple[str, ...]:
        dtype = "float32" if self.args.float32 else "bfloat16"
        return (sys.executable, "-m", "spec_cli", verb, "--dtype", dtype)


def cast(folder: Path, into: Path) -> Path:
    """A copy of a checkpoint whose floating weights are float32."""
    import mlx.core as mx

    shutil.copytree(folder, into, ignore=shutil.ignore_patterns("*.safetensors"))
    for file in folder.glob("*.safetensors"):
        loaded: Any = mx.load(str(file))
        weights = {
            name: array.astype(mx.float32) if mx.issubdtype(array.dtype, mx.floating) else array
            for name, array in loaded.items()
        }
        mx.save_safetensors(str(into / file.name), weights, metadata={"format": "mlx"})
    config = json.loads((into / "config.json").read_text())
    config["torch_dtype"] = config["dtype"] = "float32"
    (into / "config.json").write_text(json.dumps(config, indent=1))
    return into


def prompts_of(sets: Sequence[str], count: int) -> dict[str, list[str]]:
    """Plain prompts of the sets that come with the program."""
    found = {}
    for name in sets:
        file = resources.files("spec_cli") / "prompts" / f"{name}.json"
        entries = json.loads(file.read_text(encoding="utf-8"))
        texts = [entry for entry in entries if isinstance(entry, str)]
        if texts:
            found[name] = texts[:count]
    return found


def version_of(command: str) -> str:
    """mlx-dspark's version, from the environment that its command lies in."""
    prefix = Path(command).resolve().parent.parent
    sites = [str(site) for site in prefix.glob("lib/python*/site-packages")]
    found = next(iter(distributions(name="mlx-dspark", path=sites)), None)
    return "unknown" if found is None else found.version


def compare(
    found: Sequence[Contender], sets: Mapping[str, Sequence[str]], trials: int
) -> list[dict[str, Any]]:
    """Medians over trials of each contender on each set, and against our baseline."""
    rates: dict[str, dict[str, list[float]]] = {one.name: {} for one in found}
    accepts: dict[str, list[float]] = {one.name: [] for one in found}
    for trial in range(trials):
        for name, prompts in sets.items():
            sums = {one.name: [0.0, 0.0] for one in found}
            for index, prompt in enumerate(prompts):
                print(f"trial {trial + 1}/{trials}, {name} {index + 1}", file=sys.stderr)
                for one in found:
                    rate, tokens, length = one.run(prompt)
                    sums[one.name][0] += tokens
                    sums[one.name][1] += tokens / max(rate, 1e-9)
                    accepts[one.name] += [] if length is None else [length]
            for label, (total, seconds) in sums.items():
                rates[label].setdefault(name, []).append(total / seconds)
    base = rates[found[0].name]
    return [
        {
            "name": one.name,
            "mean_accept_length": median(accepts[one.name]) if accepts[one.name] else None,
            "sets": {
                name: {
                    "tokens_per_second": round(median(values), 2),
                    "against_our_baseline": round(
                        median(a / b for a, b in zip(values, base[name], strict=True)), 3
                    ),
                }
                for name, values in rates[one.name].items()
            },
        }
        for one in found
    ]


def main() -> None:
    """Parse arguments, run, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--drafter", required=True, type=Path)
    parser.add_argument("--mode", default="dspark", choices=("dspark", "dflash"))
    parser.add_argument("--caps", nargs="+", default=["7"])
    parser.add_argument("--copies", nargs="+", default=["yes"], choices=("no", "yes"))
    parser.add_argument("--sets", nargs="+", default=list(SETS))
    parser.add_argument("--max-prompts", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--float32", action="store_true", help="else bfloat16")
    parser.add_argument("--blas", help="path of an OpenBLAS")
    parser.add_argument("--mlx-dspark", help="its command")
    parser.add_argument("--drafter-bits", default="0", help="for both; 0 leaves them")
    parser.add_argument("--family", help="mlx-dspark's, where it cannot tell")
    parser.add_argument("--serve", action="store_true", help="compare servers, not commands")
    parser.add_argument("--out")
    args = parser.parse_args()
    if args.serve and args.family:
        parser.error("--family: mlx-dspark's server has no such option; leave out one of the two")
    with tempfile.TemporaryDirectory() as temporary:
        model, drafter = args.model, args.drafter
        if args.float32:
            model = cast(model, Path(temporary, model.name))
            drafter = cast(drafter, Path(temporary, drafter.name))
        plan = Plan(args, model, drafter)
        sets = prompts_of(args.sets, args.max_prompts)
        with ExitStack() as stack:
            found: Sequence[Contender] = plan.commands()
            if args.serve:
                found = [stack.enter_context(server) for server in plan.servers()]
                compare(found, sets, 1)
            result = compare(found, sets, args.trials)
    facts = {
        "pair": [str(args.model.name), str(args.drafter.name)],
        "others_blas": Path(args.blas).name if args.blas else "MLX's own",
        "mlx_dspark": version_of(args.mlx_dspark) if args.mlx_dspark else None,
    }
    write(args.out, {**facts, "runs": result})


if __name__ == "__main__":
    main()
