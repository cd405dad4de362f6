"""What the library logs, on stderr."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def logged(*, to_stderr: bool) -> Iterator[None]:
    """A block whose log lines, from DEBUG on, are shown if `to_stderr`."""
    if not to_stderr:
        yield
        return
    logger, handler = logging.getLogger("hybrid_kv"), logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(relativeCreated)7d ms %(name)s: %(message)s"))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
