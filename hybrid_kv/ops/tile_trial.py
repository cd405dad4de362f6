"""Trial of two kernels for a prompt's attention: the engine's tiles in float32, and torch's.

Which is faster is the machine's: torch has matrix instructions where the CPU has them, but its
16-bit products may run at half the rate of float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from time import perf_counter

import torch
from torch import Tensor

from hybrid_kv.ops import torch_cpu
from hybrid_kv.ops.native.prompt import attend_prompt

_QUERIES, _KEYS = 256, 1024  # one block of either kernel, so that one thread computes it
_ROUNDS = 2
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
    ours = _seconds(lambda: attend_prompt(q, k, k, scale=0.1, causal=False).out, clock)
    torchs = _seconds(lambda: torch_cpu.attend(q, k, k, scale=0.1).out, clock)
    return ours / torchs


def _seconds(call: Callable[[], Tensor], clock: Callable[[], float]) -> float:
    """The least of a few rounds; the first, which sets things up, does not count."""
    call()
    times = []
    for _ in range(_ROUNDS):
        begin = clock()
        call()
        times.append(clock() - begin)
    return max(min(times), 1e-9)
