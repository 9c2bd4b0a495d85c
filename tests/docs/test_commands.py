"""The page of the commands is what the commands say."""

from __future__ import annotations

import runpy

from .blocks import ROOT


def test_the_page_of_the_commands_is_up_to_date() -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "command_help.py"))
    stale = "docs/commands.md is stale; run: uv run python tools/command_help.py"
    assert tool["PAGE"].read_text(encoding="utf-8") == tool["page"](), stale
