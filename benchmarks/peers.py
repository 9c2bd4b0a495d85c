"""Our command against others', on the same pair and prompts, interleaved prompt by prompt.

Each contender is a program that is started anew for every prompt, prints its own decoding speed,
and is believed; loading is not counted. Contenders: ours plainly and with a drafter, mlx-lm's
generate, and mlx-dspark's generate with the same drafter and cap (from an environment of its own).

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
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from statistics import median
from typing import Any

from harness import write

SETS = ("chat", "code", "tool", "math")


@dataclass(frozen=True, slots=True)
class Contender:
    """A command line and where its output states speed, tokens and acceptance."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    json: bool = False

    def run(self, prompt: str) -> tuple[float, int, float | None]:
        """Decoding tokens a second, tokens, and mean accepted length where it is told."""
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


def contenders(args: argparse.Namespace, model: Path, drafter: Path) -> list[Contender]:
    """Ours and theirs; the same model, drafter, caps and threads for all."""
    threads = {"OPENBLAS_NUM_THREADS": "1"}
    preload = {**threads, "LD_PRELOAD": args.blas} if args.blas else threads
    blas = {**threads, "SPEC_CPU_BLAS": args.blas or "bundled"}
    dtype = ("--dtype", "float32" if args.float32 else "bfloat16")
    ours = (sys.executable, "-m", "spec_cli", "generate", "{prompt}", "--json")
    ours += ("--model", str(model), "--max-tokens", str(args.max_tokens), *dtype)
    lm = (sys.executable, "-m", "mlx_lm", "generate", "--model", str(model), "--temp", "0")
    lm += ("--prompt", "{prompt}", "--max-tokens", str(args.max_tokens))
    found = [
        Contender("spec baseline", (*ours, "--mode", "baseline"), blas, json=True),
        Contender("mlx-lm", lm, preload),
    ]
    bits = ("--drafter-bits", "none" if args.drafter_bits == "0" else args.drafter_bits)
    for cap in args.caps:
        drafted = ("--mode", args.mode, "--drafter", str(drafter), "--max-draft", cap)
        found.append(
            Contender(f"spec {args.mode} {cap}", (*ours, *drafted, *bits), blas, json=True)
        )
        if args.mlx_dspark:
            theirs = (args.mlx_dspark, "generate", "--model", str(model), "--prompt", "{prompt}")
            theirs += ("--max-new-tokens", str(args.max_tokens), "--no-stream")
            theirs += (*drafted, "--drafter-bits", args.drafter_bits)
            theirs += ("--family", args.family) if args.family else ()
            found.append(Contender(f"mlx-dspark {args.mode} {cap}", theirs, preload))
    return found


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
            for label, (tokens, seconds) in sums.items():
                rates[label].setdefault(name, []).append(tokens / seconds)
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
    parser.add_argument("--sets", nargs="+", default=list(SETS))
    parser.add_argument("--max-prompts", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--float32", action="store_true", help="else bfloat16")
    parser.add_argument("--blas", help="path of an OpenBLAS")
    parser.add_argument("--mlx-dspark", help="its command")
    parser.add_argument("--drafter-bits", default="0", help="for both; 0 leaves them")
    parser.add_argument("--family", help="mlx-dspark's, where it cannot tell")
    parser.add_argument("--out")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        model, drafter = args.model, args.drafter
        if args.float32:
            model = cast(model, Path(temporary, model.name))
            drafter = cast(drafter, Path(temporary, drafter.name))
        found = contenders(args, model, drafter)
        sets = prompts_of(args.sets, args.max_prompts)
        result = compare(found, sets, args.trials)
    write(args.out, {"pair": [str(args.model.name), str(args.drafter.name)], "runs": result})


if __name__ == "__main__":
    main()
