"""Trial of two kernels for a prompt's attention: the engine's tiles, and torch's.

Which is faster is the machine's: torch has matrix instructions where the CPU has them, but its
16-bit products may run at half the rate of float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from time import perf_counter

import torch

from hybrid_kv.ops import torch_cpu
from hybrid_kv.ops.native.prompt import attend_prompt
from hybrid_kv.ops.native.trial import least_seconds

_QUERIES, _KEYS = 256, 1024  # one block of either kernel, so that one thread computes it
_CLEARLY = 1.15
"""Times as fast torch's must be to be taken: on less, noise would decide, anew in each process."""


@cache
def tiles_serve(dtype: torch.dtype, dim: int) -> bool:
    """Whether the engine's tiles attend heads of `dim` channels; measured once, in 5 to 25 ms."""
    return measure(dtype, dim, perf_counter) < _CLEARLY


def measure(dtype: torch.dtype, dim: int, clock: Callable[[], float]) -> float:
    """Time of the engine's tiles over that of torch's kernel."""
    q = torch.ones(1, 1, _QUERIES, dim, dtype=dtype)
    k = torch.ones(1, 1, _KEYS, dim, dtype=dtype)
    ours = least_seconds(lambda: attend_prompt(q, k, k, scale=0.1, causal=False).out, clock)
    torchs = least_seconds(lambda: torch_cpu.attend(q, k, k, scale=0.1).out, clock)
    return ours / torchs
