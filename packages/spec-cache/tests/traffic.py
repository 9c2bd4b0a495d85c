"""A server's traffic on a cache directory, checked hit by hit; run as a program by other tests.

    python traffic.py DIRECTORY DISK_BYTES NAMESPACE SEED CONVERSATIONS

Writes a line when the first files are there, and one when it is done.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from rows import BLOCK, converse

from spec_cache import Namespace, PrefixCache


def main() -> None:
    directory, disk_bytes, target, seed, conversations = sys.argv[1:]
    rng = random.Random(int(seed))
    namespace = Namespace(target)
    complaints: list[str] = []
    with PrefixCache(60_000, int(disk_bytes), directory, BLOCK, report=complaints.append) as cache:
        for number in range(int(conversations)):
            converse(cache, namespace, rng)
            if number == 2:
                cache.flush()
                print("begun", flush=True)
        cache.flush()
        stats = cache.stats()
    used = sum(p.stat().st_size for p in Path(directory).rglob("*") if p.is_file())
    assert not stats.disk_off, stats.disk_off
    assert stats.hits > 0
    assert all("vanished" in text for text in complaints), complaints
    print("done", used, flush=True)


if __name__ == "__main__":
    main()
