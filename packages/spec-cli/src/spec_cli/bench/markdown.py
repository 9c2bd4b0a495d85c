"""A report as Markdown."""

from __future__ import annotations

from spec_cli.bench.report import NOTES, Grid, Report, grids, versions
from spec_cli.bench.verdict import verdict
from spec_cli.sizes import counted


def markdown(report: Report) -> str:
    """A page: the verdict, the tables, and how it was measured."""
    context = report.context
    sets = ", ".join(f"{count} {name}" for name, count in context.prompts.items())
    stamps = ", ".join(f"{name} {number}" for name, number in versions().items())
    return "\n\n".join(
        [
            f"# {context.model}, {context.dtype}",
            verdict(report.results),
            *(_table(grid) for grid in grids(report)),
            f"Measured on {context.device}: {sets} prompts, {context.max_tokens} tokens at most, "
            f"{counted(context.trials, 'trial')}. {' '.join(NOTES)}",
            f"```console\n$ {context.command}\n```",
            f"{stamps}\n",
        ]
    )


def _table(grid: Grid) -> str:
    lines = [grid.headings, ("---", *("---:" for _ in grid.headings[1:])), *grid.rows]
    return "\n".join("| " + " | ".join(cell or " " for cell in line) + " |" for line in lines)
