"""Layers while a prompt passes, in float32 where that is faster.

On CPUs without 16-bit matrix instructions torch's 16-bit products are up to an order of magnitude
slower than those in float32. Widening costs as much as a product with tens to a hundred tokens, so
whether it pays depends on how many come: a trial at a number near theirs decides. A prompt goes
through the model layer by layer, so one widened layer is held at a time. The weights themselves are
never touched: for that time a linear layer's `forward` is one that holds a wide copy. Single tokens
stay as they are, since they wait for memory and not for arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from hybrid_kv.models.cache_state import replaced
from hybrid_kv.models.support import is_plain_linear
from hybrid_kv.ops.native.library import trials

MIN_TOKENS = 64
"""Fewer tokens, over all rows, than these are computed with the weights as they are."""

MOST_TOKENS = 1024
"""A trial is made with no more: behind them widening is a few percent of a product."""

_NARROW = (torch.bfloat16, torch.float16)
_OUTPUTS, _INPUTS = 256, 512
"""Of the matrix of a trial. What widening costs beside its product depends on the tokens alone."""
_ROUNDS = 2
_LEAST_GAIN = 1.1
_CLEAR = 3.0
"""A round in which one way takes so many times as long as the other needs no repetition."""


class TrialKey(NamedTuple):
    """Products of which one trial tells.

    tokens: a power of two from `MIN_TOKENS` to `MOST_TOKENS`. threads: torch's.
    """

    dtype: torch.dtype
    tokens: int
    threads: int


@dataclass(frozen=True, slots=True)
class WideningTrial:
    """Rates of this process's CPU for some number of tokens in one dtype, in GFLOP/s."""

    own_gflops: float
    widened_gflops: float

    @property
    def pays(self) -> bool:
        """Whether widening, its own cost included, is faster."""
        return self.widened_gflops > _LEAST_GAIN * self.own_gflops


_trials: dict[TrialKey, WideningTrial] = {}


def trial(dtype: torch.dtype, num_tokens: int) -> WideningTrial:
    """The trial for a number of tokens, once for each `TrialKey` of a process, in 1 to 200 ms."""
    key = TrialKey(dtype, tokens_tried(num_tokens), torch.get_num_threads())
    found = _trials.get(key)
    if found is None:
        found = _trials[key] = trials.agree(key, measure(dtype, key.tokens, perf_counter))
    return found


def tokens_tried(num_tokens: int) -> int:
    """Tokens of the trial for `num_tokens`: the power of two that is no larger, within limits.

    No larger, so that widening is never thought cheaper than it is.
    """
    return min(MOST_TOKENS, max(MIN_TOKENS, 1 << num_tokens.bit_length() - 1))


def measure(dtype: torch.dtype, num_tokens: int, clock: Callable[[], float]) -> WideningTrial:
    """Times a product with the weights as they are, and one that widens them first."""
    x = torch.ones(num_tokens, _INPUTS, dtype=dtype)
    w = torch.ones(_OUTPUTS, _INPUTS, dtype=dtype)

    def wide(x: Tensor) -> Tensor:
        return _forward(w.float(), None, x)

    linear(x[:MIN_TOKENS], w), wide(x[:MIN_TOKENS])
    return compared(partial(linear, x, w), partial(wide, x), num_tokens * w.numel(), clock)


def compared(
    own: Callable[[], Tensor], wide: Callable[[], Tensor], work: int, clock: Callable[[], float]
) -> WideningTrial:
    """Times two ways to multiply `work` pairs of numbers, in turn; a clear first round suffices."""
    best = [_seconds(own, clock), _seconds(wide, clock)]
    if max(best) < _CLEAR * min(best):
        again = [[_seconds(own, clock), _seconds(wide, clock)] for _ in range(_ROUNDS)]
        best = [min(times) for times in zip(*again, strict=True)]
    return WideningTrial(2e-9 * work / best[0], 2e-9 * work / best[1])


def _seconds(call: Callable[[], Tensor], clock: Callable[[], float]) -> float:
    begin = clock()
    call()
    return max(clock() - begin, 1e-9)


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
    return [m for m in layer.modules() if _may_widen(m) and trial(m.weight.dtype, num_tokens).pays]


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
