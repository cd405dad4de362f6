"""What the library logs, on stderr."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def logged(*, debug: bool) -> Iterator[None]:
    """A block whose log lines are shown: errors, with their tracebacks, and all if `debug`."""
    logger, handler = logging.getLogger("hybrid_kv"), logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(relativeCreated)7d ms %(name)s: %(message)s"))
    level, shown = logger.level, logging.DEBUG if debug else logging.ERROR
    handler.setLevel(shown)
    logger.addHandler(handler)
    if debug:
        logger.setLevel(shown)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
