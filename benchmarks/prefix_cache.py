"""What a kept prefix saves, what a miss costs, and what 500 conversations take.

Drives spec_core's batch with spec_cache's own reuse, as the engine does. Times are medians; cold
and warm take turns. Needs spec_core, spec_targets, spec_drafters and spec_cache only.

    OPENBLAS_NUM_THREADS=1 python benchmarks/prefix_cache.py --out \
        benchmarks/results/prefix-cache-spec-tiny-cpu.json
    python benchmarks/prefix_cache.py --model SMOLLM2 --drafter tests/models/smollm2-135m-dspark \
        --dtype bfloat16 --prefix 7500 --repeat 3 --misses 3 --conversations 0 --out ...
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
from harness import write

from spec_cache import Namespace, PrefixCache, PrefixReuse
from spec_core import Batch, Drafter, Request, Target
from spec_drafters.load import load_drafter
from spec_targets import load_target

ROOT = Path(__file__).parents[1]
BUNDLED = ROOT / "packages" / "spec-cli" / "src" / "spec_cli" / "models"
NAMESPACE = Namespace(target="benchmark")
AT_ONCE = 256 << 20


@dataclass(frozen=True, slots=True)
class Turn:
    """What one request took, in seconds.

    Attributes:
        first: to its first token.
        found: of it, looking its prompt up and restoring what was found.
        delayed: of it, storing chunks.
        kept: to store its prompt, `delayed` included.
    """

    first: float
    found: float
    delayed: float
    kept: float
    answer: tuple[int, ...]
    cached: int


class Runner:
    """Runs requests one at a time, with or without a cache."""

    def __init__(self, target: Target, drafter: Drafter | None, chunk: int, block: int) -> None:
        self.target = target
        self.drafter = drafter
        self._chunk = chunk
        self._block = block
        self._random = random.Random(0)
        probe = target.new_state(1)
        forward = target.forward(mx.array([[1, 2]], dtype=mx.int32), probe, logits="last")
        probe.commit([2])
        mx.eval(forward.logits, probe.pending())
        image = probe.image(0)
        held = image.per_token.values()
        reaches = [p.reach for p in held if p.reach is not None]
        self._exact = bool(image.at_end) or any(r < max(block, chunk) for r in reaches)
        per_token = sum(p.array.nbytes // p.array.shape[0] for p in held)
        self._at_once = 0 if reaches or image.at_end else AT_ONCE // per_token

    def text(self, length: int) -> tuple[int, ...]:
        return tuple(self._random.randrange(self.target.info.vocab_size) for _ in range(length))

    def cache(self, ram: int = 4 << 30, disk: int = 0, folder: Path | None = None) -> PrefixCache:
        return PrefixCache(ram, disk, folder, self._block)

    def reuse(self, cache: PrefixCache) -> PrefixReuse:
        return PrefixReuse(cache, NAMESPACE, exact=self._exact, at_once=self._at_once)

    def run(self, prompt: Sequence[int], cache: PrefixCache | None, tokens: int = 1) -> Turn:
        """One request, from its arrival to its last token."""
        batch = Batch(self.target, self.drafter)
        request = Request(tuple(prompt), max_tokens=tokens)
        reuse = None if cache is None else self.reuse(cache)
        begun, stored, thread, outcome = time.perf_counter(), [0.0], None, None
        if reuse is None:
            prefill = batch.prefill(request)
        else:
            admitted = reuse.admit(batch, request)
            assert admitted is not None
            prefill, thread = admitted
        found = time.perf_counter() - begun
        while outcome is None:
            size = min(self._chunk, prefill.remaining)
            if reuse is not None and thread is not None:
                size = reuse.chunk(thread, prefill.position, size)
            outcome = prefill.step(size)
            stepped = time.perf_counter()
            if reuse is not None and thread is not None:
                reuse.after_chunk(thread, prefill)
                stored.append(time.perf_counter() - stepped)
        first = stepped - begun
        answer = list(outcome.tokens)
        if outcome.finish is None:
            key = batch.join(prefill)
            while batch.rows:
                answer += [t for outcome in batch.step() for t in outcome.tokens]
            if reuse is not None and thread is not None:
                reuse.end_of_turn(thread, answer, batch, key)
        cached = 0 if thread is None else thread.reuse.length
        return Turn(first, found, sum(stored[:-1]), sum(stored), tuple(answer), cached)


def follow_up(
    runner: Runner, prefix: int, new: int, repeat: int, first: int, one_cold: bool
) -> dict[str, Any]:
    """Time to the first token of a second turn, cold and warm in turns; a turn of `first` tokens
    before that does not count. With `one_cold` the first turn, a little shorter and missed by the
    cache, stands for the second one when cold."""
    cold, warm, full = [], [], []
    with runner.cache() as cache:
        for length in (first, *[prefix] * repeat):
            prompt = runner.text(length)
            begun = runner.run(prompt, cache, 16)
            turn = (*prompt, *begun.answer, *runner.text(new))
            cold.append(begun.first if one_cold else runner.run(turn, None).first)
            warm.append(runner.run(turn, cache))
            full.append(runner.run(turn, cache))
    faster = median(cold[1:]) / median(turn.first for turn in warm[1:])
    return {
        "prefix_tokens": prefix,
        "new_tokens": new,
        "cached_tokens": median(turn.cached for turn in warm[1:]),
        "cold_ms": in_ms(cold[1:]),
        "warm_ms": in_ms([turn.first for turn in warm[1:]]),
        "warm_restore_ms": in_ms([turn.found for turn in warm[1:]]),
        "warm_forward_ms": in_ms([turn.first - turn.found for turn in warm[1:]]),
        "times_faster": round(faster, 2),
        "fully_cached_ms": in_ms([turn.first for turn in full[1:]]),
        "fully_cached_restore_ms": in_ms([turn.found for turn in full[1:]]),
    }


def in_ms(seconds: Sequence[float]) -> float:
    """Their median."""
    return round(1e3 * median(seconds), 3)


def miss(runner: Runner, length: int, repeat: int) -> dict[str, Any]:
    """What a prompt that was never seen takes longer for the cache's sake, and what keeping it
    takes once its first token is out."""
    plain, missed = [], []
    with runner.cache() as cache:
        for _ in range(repeat + 1):
            plain.append(runner.run(runner.text(length), None))
            missed.append(runner.run(runner.text(length), cache))
    whole = median(turn.first for turn in plain[1:])
    looked = median(turn.found for turn in missed[1:]) - median(turn.found for turn in plain[1:])
    delayed = median(turn.delayed for turn in missed[1:])
    kept = median(turn.kept for turn in missed[1:])
    return {
        "tokens": length,
        "prefill_ms": round(1e3 * whole, 3),
        "look_up_ms": round(1e3 * looked, 4),
        "stored_before_first_token_ms": round(1e3 * delayed, 3),
        "miss_share": round((looked + delayed) / whole, 5),
        "stored_after_first_token_ms": round(1e3 * (kept - delayed), 3),
        "store_share": round(kept / whole, 5),
    }


def memory(runner: Runner, conversations: int, length: int, ram: int, disk: int) -> dict[str, Any]:
    """The most that distinct conversations take; and decoding of requests that the cache has
    nothing to do with, while it evicts and its thread writes, and once that thread rests."""
    mx.clear_cache()
    own, most, most_disk = mx.get_active_memory(), 0, 0
    beside: list[float] = []
    at_rest: list[float] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        runner.cache(ram, disk, Path(folder) / "cache") as cache,
    ):
        for number in range(conversations):
            runner.run(runner.text(length), cache)
            most = max(most, mx.get_active_memory() - own)
            if number % 10 == 9:
                beside.append(speed(runner))
                most_disk = max(most_disk, size_of(Path(folder)))
                cache.flush()
                at_rest.append(speed(runner))
        cache.flush()
        most_disk = max(most_disk, size_of(Path(folder)))
        seen = cache.stats()
    return {
        "conversations": conversations,
        "tokens_each": length,
        "ram_limit": ram,
        "most_active_over_model": most,
        "ram_used": seen.ram_bytes,
        "bytes_an_entry": seen.ram_bytes // max(1, seen.ram_entries),
        "disk_limit": disk,
        "most_on_disk": most_disk,
        "evicted": seen.evicted_ram,
        "evicted_files": seen.evicted_disk,
        "unrelated_tokens_per_second": {
            "while_it_writes": round(median(beside), 1),
            "while_it_rests": round(median(at_rest), 1),
        },
    }


def size_of(folder: Path) -> int:
    """Bytes of all files, while another thread writes and removes some."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue
    return total


def speed(runner: Runner, tokens: int = 32) -> float:
    """Tokens a second of a request that the cache has nothing to do with."""
    begun = time.perf_counter()
    runner.run((1, 2, 3, 4), None, tokens)
    return tokens / (time.perf_counter() - begun)


def shared(runner: Runner, system: int) -> dict[str, Any]:
    """Bytes after one conversation, and after a second with the same system prompt: as the cache
    counts them, and as MLX does beyond the model's own."""
    prompt = runner.text(system)
    counted, active = [], []
    mx.clear_cache()
    own = mx.get_active_memory()
    with runner.cache() as cache:
        for _ in range(2):
            runner.run((*prompt, *runner.text(24)), cache)
            counted.append(cache.stats().ram_bytes)
            active.append(mx.get_active_memory() - own)
    return {"system_tokens": system, "bytes_counted": counted, "bytes_active": active}


def main() -> None:
    """Parse, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default=str(BUNDLED / "spec-tiny"))
    parser.add_argument("--drafter", default=str(BUNDLED / "spec-tiny-dspark"))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prefix", type=int, default=750)
    parser.add_argument("--first", type=int, help="prefix of the first turns, which do not count")
    parser.add_argument("--one-cold", action="store_true", help="compute long prompts only once")
    parser.add_argument("--new", type=int, default=16, help="tokens of the second turn")
    parser.add_argument("--system", type=int, default=2000)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--misses", type=int, default=9)
    parser.add_argument("--conversations", type=int, default=500)
    parser.add_argument("--length", type=int, default=130, help="tokens of a conversation")
    parser.add_argument("--ram", type=int, default=64, help="MiB")
    parser.add_argument("--disk", type=int, default=128, help="MiB")
    parser.add_argument("--out")
    arguments = parser.parse_args()
    target = load_target(arguments.model, dtype=arguments.dtype).target
    drafter = load_drafter(arguments.drafter, target, dtype=getattr(mx, arguments.dtype))
    runner = Runner(target, drafter, arguments.chunk, arguments.block)
    runner.run(runner.text(arguments.first or arguments.prefix), None, 16)
    parts: dict[str, Any] = {
        "model": Path(arguments.model).name,
        "drafter": Path(arguments.drafter).name,
        "dtype": arguments.dtype,
        "block": arguments.block,
    }
    if arguments.repeat:
        parts["follow_up"] = follow_up(
            runner,
            arguments.prefix,
            arguments.new,
            arguments.repeat,
            arguments.first or arguments.prefix,
            arguments.one_cold,
        )
        print(parts["follow_up"], flush=True)
    if arguments.misses:
        parts["miss"] = miss(runner, arguments.prefix, arguments.misses)
        print(parts["miss"], flush=True)
    if arguments.system:
        parts["shared"] = shared(runner, arguments.system)
    if arguments.conversations:
        parts["memory"] = memory(
            runner,
            arguments.conversations,
            arguments.length,
            arguments.ram << 20,
            arguments.disk << 20,
        )
    write(arguments.out, parts)


if __name__ == "__main__":
    main()
