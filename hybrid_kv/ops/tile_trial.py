"""Trial of two kernels for a prompt's attention: the engine's tiles, and torch's, which has matrix
instructions where the CPU has them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from time import perf_counter

import torch

from hybrid_kv.ops import torch_cpu
from hybrid_kv.ops.native.prompt import attend_prompt, least_seconds

_QUERIES, _KEYS = 256, 1024  # one block of either kernel, so that one thread computes it
_CLEARLY = 1.15
"""Times as fast torch's must be to be taken: on less, noise would decide, anew in each process."""


@cache
def tiles_serve(dtype: torch.dtype, dim: int) -> bool:
    """Whether the engine's tiles attend heads of `dim` channels; measured once, in 5 to 25 ms."""
    return measure(dtype, dim) < _CLEARLY


def measure(dtype: torch.dtype, dim: int, clock: Callable[[], float] = perf_counter) -> float:
    """Time of the engine's tiles over that of torch's kernel."""
    q, k = (torch.ones(1, 1, n, dim, dtype=dtype) for n in (_QUERIES, _KEYS))
    ours = least_seconds(lambda: attend_prompt(q, k, k, scale=0.1, causal=False).out, clock)
    torchs = least_seconds(lambda: torch_cpu.attend(q, k, k, scale=0.1).out, clock)
    return ours / torchs
