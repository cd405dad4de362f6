"""Budgets of tokens, split into what every step reads and what is chosen."""

from __future__ import annotations

from typing import NamedTuple

from hybrid_kv.config import Params, Tokens
from hybrid_kv.errors import ConfigError

_WINDOW_SHARE = 4
"""Of a budget a fourth is the recent window."""
NO_END = 2**40
"""Tokens of a window that nothing leaves."""


class ResidentParams(Params):
    """sink_tokens, window_tokens: on the device, at start and end (multiples of page_size)."""

    sink_tokens: Tokens = 128
    window_tokens: Tokens = 512


class Split(NamedTuple):
    """Parts of a budget, in tokens; sinks and window are multiples of the page size."""

    sink_tokens: int
    window_tokens: int
    rest: int


def split_budget(tokens: int, page_size: int, *, least: int = 1) -> Split:
    """A page of sinks, a window of a fourth of the budget, at least a page, and the rest.

    What is recent reaches half a page beyond the window on average, because it leaves page by page.
    Where a budget is too small for that, the window is given up, and then the sinks.

    Args:
        least: the rest must be so many.

    Raises:
        ConfigError: it is not.
    """
    newest = page_size // 2
    window = max(page_size, tokens // _WINDOW_SHARE // page_size * page_size)
    for split in ((page_size, window), (page_size, 0), (0, 0)):
        if (rest := tokens - sum(split) - newest) >= least:
            return Split(*split, rest)
    raise ConfigError(
        f"a budget must be at least {newest + least} tokens for the newest and {least} to choose, "
        f"with pages of {page_size}, got {tokens}; raise it or lower page_size"
    )
