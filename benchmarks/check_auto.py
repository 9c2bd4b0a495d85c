"""Whether `auto` kept its promise in a `spec benchmark --json` result.

On hard-to-guess sets at least 0.98 of plain decoding; on the others within 3 % of the best fixed
length. Exits with 1 if it did not.

    python benchmarks/check_auto.py result.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spec_cli.bench.trial import drafter_of

HARD = ("bytes", "prose", "foreign")
NEVER_SLOWER, CLOSE = 0.98, 0.97


def findings(result: dict[str, Any]) -> Iterator[tuple[str, str, float, float]]:
    """(setting, set, figure, what it must reach)."""
    for run in result["runs"]:
        if run["max_draft"] != "auto":
            continue
        fixed = [
            other
            for other in result["runs"]
            if drafter_of(other["mode"]) == drafter_of(run["mode"]) and other["max_draft"] != "auto"
        ]
        for name, one in run["sets"].items():
            if name in HARD:
                yield run["mode"], name, one["speedup"], NEVER_SLOWER
                continue
            speeds = [other["sets"][name]["speedup"] for other in fixed]
            yield run["mode"], name, one["speedup"] / max([1.0, *speeds]), CLOSE


def main() -> None:
    """Print every figure; exit with 1 if one is too small."""
    found = list(findings(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
    for mode, name, figure, wanted in found:
        verdict = "ok" if figure >= wanted else "TOO SLOW"
        against = "plain" if name in HARD else "best"
        print(f"{mode:13} {name:8} {figure:.3f} of {against} (at least {wanted})  {verdict}")
    sys.exit(any(figure < wanted for *_, figure, wanted in found) or not found)


if __name__ == "__main__":
    main()
