"""`spec`, and `python -m spec_cli`: how the program starts."""

from __future__ import annotations

import os
import signal
from types import FrameType

INTERRUPTED = 130


def main() -> None:
    """Import the command and run it; Ctrl-C meanwhile ends the process without a word."""
    waits = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if waits:
        signal.signal(signal.SIGINT, _leave)
    from spec_cli.main import main as run

    if waits:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


def _leave(number: int, frame: FrameType | None) -> None:
    """Nothing was begun, so nothing is to be finished."""
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
