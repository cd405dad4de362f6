"""Where the command begins: nothing is imported before Ctrl-C is looked after."""

import gc
import os
import signal
from types import FrameType
from typing import NoReturn

from hybrid_kv.cli import ENDED, INTERRUPTED


def main() -> NoReturn:
    """Runs the command line and leaves with its exit code."""
    # An interrupt in the middle of an import may surface as any error, or be printed and ignored.
    previous = signal.signal(signal.SIGINT, _leave)
    from hybrid_kv.cli.main import app

    signal.signal(signal.SIGINT, previous)
    try:
        app()
    finally:
        gc.freeze()  # else the interpreter searches all objects for cycles once more: 1.3 s of CPU
    raise SystemExit(0)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    """Ends the process at once: nothing has been begun that could be lost."""
    os.write(2, f"{ENDED}\n".encode())
    os._exit(INTERRUPTED)
