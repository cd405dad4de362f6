"""Where the command begins: nothing is imported before Ctrl-C is looked after."""

import gc
import os
import signal
import sys
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
        # The interpreter would search all objects for cycles once more: 1.3 s of CPU. Without that
        # search Triton's bindings print pages about what of theirs was not freed.
        if "triton" not in sys.modules:
            gc.freeze()
    raise SystemExit(0)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    """Ends the process at once: nothing has been begun that could be lost."""
    os.write(2, f"{ENDED}\n".encode())
    os._exit(INTERRUPTED)
