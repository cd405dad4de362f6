"""Says before prefill whether a context fits into host memory."""

from __future__ import annotations

import psutil

from hybrid_kv.errors import CapacityError

_MARGIN = 0.95
"""Share of the free memory that may be filled; the rest is for activations and the system."""


def check_host_memory(needed_bytes: int, num_tokens: int) -> None:
    """Raises CapacityError if `needed_bytes` for `num_tokens` exceed what is free now."""
    free = psutil.virtual_memory().available
    if needed_bytes > _MARGIN * free:
        raise CapacityError(
            f"context of {num_tokens} tokens needs {needed_bytes:,} bytes of host memory for its "
            f"KV cache and indexes, {free:,} bytes are free; shorten the prompt or free memory"
        )
