"""Prompts on CPUs without 16-bit matrix instructions: a layer works in float32 while one passes.

There torch's 16-bit matrix products are an order of magnitude slower than those in float32, and
widening a layer's matrices costs less than a product with 64 tokens. A prompt goes through the
model layer by layer, so one widened layer is held at a time. The weights themselves are never
touched: for that time a linear layer's `forward` is one that holds a wide copy. Single tokens stay
as they are, since they wait for memory and not for arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from time import perf_counter
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from hybrid_kv.models.forwards import replaced
from hybrid_kv.models.weight_tensors import is_plain_linear

MIN_TOKENS = 64
"""Fewer tokens, over all rows, than these are computed with the weights as they are."""

_NARROW = (torch.bfloat16, torch.float16)
_CHANNELS, _ROUNDS = 512, 2
_LEAST_GAIN = 1.5  # far from where noise would decide


@dataclass(frozen=True, slots=True)
class WideningTrial:
    """Rates of this process's CPU for `MIN_TOKENS` tokens in one dtype, in GFLOP/s."""

    own_gflops: float
    widened_gflops: float

    @property
    def pays(self) -> bool:
        """Whether widening, its own cost included, is clearly faster."""
        return self.widened_gflops > _LEAST_GAIN * self.own_gflops


@cache
def trial(dtype: torch.dtype) -> WideningTrial:
    """The trial of a dtype, measured once per process, in 2 to 20 ms."""
    return measure(dtype, perf_counter)


def measure(dtype: torch.dtype, clock: Callable[[], float]) -> WideningTrial:
    """Times a product with the weights as they are, and one that widens them first."""
    x = torch.ones(MIN_TOKENS, _CHANNELS, dtype=dtype)
    w = torch.ones(_CHANNELS, _CHANNELS, dtype=dtype)
    own = _seconds(lambda: linear(x, w), clock)
    widened = _seconds(lambda: _forward(w.float(), None, x), clock)
    work = 2e-9 * MIN_TOKENS * _CHANNELS**2
    return WideningTrial(own_gflops=work / own, widened_gflops=work / widened)


def _seconds(call: Callable[[], Tensor], clock: Callable[[], float]) -> float:
    """The least of a few rounds; the first, which sets things up, does not count."""
    call()
    times = []
    for _ in range(_ROUNDS):
        begin = clock()
        call()
        times.append(clock() - begin)
    return max(min(times), 1e-9)


@contextmanager
def widened(layer: nn.Module, num_tokens: int) -> Iterator[None]:
    """A block in which a layer's linear layers work in float32, where that pays."""
    with replaced((module, _widened_forward(module)) for module in _chosen(layer, num_tokens)):
        yield


def _widened_forward(module: nn.Linear) -> Callable[[Tensor], Tensor]:
    bias = None if module.bias is None else module.bias.detach().float()
    return partial(_forward, module.weight.detach().float(), bias)


def widened_bytes(layer: nn.Module, num_tokens: int) -> int:
    """Bytes that `widened` takes while its block runs."""
    itemsize = torch.float32.itemsize
    return sum(itemsize * m.weight.numel() for m in _chosen(layer, num_tokens))


def _chosen(layer: nn.Module, num_tokens: int) -> list[nn.Linear]:
    if num_tokens < MIN_TOKENS:
        return []
    return [m for m in layer.modules() if _may_widen(m) and trial(m.weight.dtype).pays]


def _may_widen(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Plain 16-bit matrices in host memory that nobody else works on.

    Accelerate, which fetches weights when they are needed, sets a hook and a forward.
    """
    return (
        is_plain_linear(module)
        and module.weight.device.type == "cpu"
        and module.weight.dtype in _NARROW
        and "forward" not in module.__dict__
        and not hasattr(module, "_hf_hook")
    )


def _forward(weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    return linear(x.float(), weight, bias).to(x.dtype)
