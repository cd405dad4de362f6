"""Decode steps on the CPU: linear layers whose 16-bit weights the engine reads faster than torch.

The product of a matrix and a few tokens waits for memory, and how near to memory's speed torch
comes depends on the CPU, the shape, the dtype and the number of tokens. So each of these is tried
once per process, on the model's own weights, in a tenth of a second, most of it spent waiting for
the other side's threads to fall asleep, and the faster one serves from then on. The weights are
never touched: while a step passes, a linear layer's `forward` is ours.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from statistics import median
from time import perf_counter, sleep
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional

from hybrid_kv.models.forwards import replaced
from hybrid_kv.models.linear_product import LinearProduct, StepThread
from hybrid_kv.models.weight_tensors import is_plain_linear
from hybrid_kv.ops.native.library import engine_state
from hybrid_kv.ops.native.linear import MAX_TOKENS, linear, multiplies
from hybrid_kv.ops.native.workers import pool_here

_LEAST_GAIN = 1.05
_ROUNDS = 2
"""Of each way, so many times all pieces."""
_PIECES = 11
_REST_S = 0.02
"""OpenMP's threads spin for 9 ms behind a loop of torch's, each on a core that the engine's threads
want, and the other way round. Who is timed right behind the other is timed at its worst."""
_PIECE_BYTES = 2**23
"""Of weights for one timed product: a millisecond or less."""
_LEAST_BYTES = 2**18
"""Smaller matrices are left alone: their products wait for calls and not for memory."""


class Products(NamedTuple):
    """Products that are equally fast, of which one trial tells.

    shape: [outputs, inputs] of the weights.
    """

    dtype: torch.dtype
    shape: torch.Size
    tokens: int


@dataclass(frozen=True, slots=True)
class ProductTrial:
    """Rates at which weights are read, in GB/s: by torch's linear layer, and by the engine's."""

    torch_gbps: float
    engine_gbps: float

    @property
    def pays(self) -> bool:
        """Whether the engine is faster by more than a repetition would differ."""
        return self.engine_gbps > _LEAST_GAIN * self.torch_gbps


_trials: dict[Products, ProductTrial] = {}


def trial(products: Products, weights: Iterable[Tensor]) -> ProductTrial:
    """The trial of some products, measured once per process, in some .1 s.

    Args:
        weights: matrices of this shape, which are read.
    """
    found = _trials.get(products)
    if found is None:
        found = _trials[products] = measure(weights, products.tokens, perf_counter)
    return found


def try_products(dtype: torch.dtype, num_outputs: int, num_inputs: int) -> ProductTrial | None:
    """The trial for one token and a matrix of some shape, of which it makes up some rows.

    None where there is no engine.
    """
    if engine_state().isa is None:
        return None
    rows = _PIECE_BYTES // (num_inputs * dtype.itemsize) * _PIECES
    weight = torch.ones(max(1, min(num_outputs, rows)), num_inputs, dtype=dtype)
    return trial(Products(dtype, torch.Size((num_outputs, num_inputs)), 1), [weight])


def measure(
    weights: Iterable[Tensor],
    tokens: int,
    clock: Callable[[], float],
    rest: Callable[[float], None] = sleep,
) -> ProductTrial:
    """Times either way on pieces of `weights`, by itself and twice, as a step is made by one of
    them; the better time of the two counts, since other work on the machine only adds to it.

    Args:
        rest: lets so many seconds pass.
    """
    pieces = list(islice(_pieces(weights), _PIECES))
    x = pieces[0].new_ones(tokens, pieces[0].shape[1])
    pool = pool_here()
    ways: list[Callable[[Tensor], Tensor]] = [
        lambda weight: functional.linear(x, weight),
        lambda weight: linear(x, weight, pool=pool),
    ]
    best = [0.0, 0.0]
    for number in [0, 1] * _ROUNDS:
        rest(_REST_S)
        ways[number](pieces[-1])  # sets things up, and wakes threads
        best[number] = max(best[number], _rate(ways[number], pieces, clock))
    return ProductTrial(*best)


def _rate(
    way: Callable[[Tensor], Tensor], pieces: Sequence[Tensor], clock: Callable[[], float]
) -> float:
    """GB/s, the median over pieces, each of which is in memory again when its turn comes."""
    rates = []
    for piece in pieces:
        begin = clock()
        way(piece)
        rates.append(piece.nbytes / max(clock() - begin, 1e-9) / 1e9)
    return median(rates)


def _pieces(weights: Iterable[Tensor]) -> Iterator[Tensor]:
    """Rows of matrices, so many at a time as a trial reads in a millisecond."""
    for weight in weights:
        yield from weight.detach().split(max(1, _PIECE_BYTES // (weight[0].nbytes or 1)))


class FewTokens:
    """The linear layers of a model, and the block in which the engine may multiply for them.

    Only plain 16-bit matrices in host memory that nobody else works on take part: accelerate sets a
    hook, others a forward.
    """

    def __init__(self, model: nn.Module) -> None:
        able = engine_state().isa is not None
        modules = [m for m in model.modules() if _is_plain(m)] if able else []
        self._step = StepThread()
        self._products = [(m, LinearProduct(m, self._step, self._pays)) for m in modules]
        self._alike: dict[torch.Size, list[nn.Linear]] = defaultdict(list)
        for module in modules:
            self._alike[module.weight.shape].append(module)

    @contextmanager
    def served(self, num_tokens: int) -> Iterator[None]:
        """A block in which a forward of so many tokens, over all rows, takes what is fastest."""
        may = 0 < num_tokens <= MAX_TOKENS and not torch.is_grad_enabled()
        if not (may and self._products) or torch.is_autocast_enabled("cpu"):
            yield
            return
        self._step.begin(pool_here())
        try:
            with replaced((m, product) for m, product in self._products if _is_own(m)):
                yield
        finally:
            self._step.end()

    def try_all(self) -> None:
        """Makes the trials of every number of tokens now, which steps would make in passing."""
        for alike in self._alike.values():
            weight = alike[0].weight
            for tokens in range(1, MAX_TOKENS + 1):
                if multiplies(weight[:tokens], weight, None):
                    self._try(weight, tokens)

    def _pays(self, weight: Tensor, tokens: int) -> bool:
        found = _trials.get(Products(weight.dtype, weight.shape, tokens))
        return (self._try(weight, tokens) if found is None else found).pays

    def _try(self, weight: Tensor, tokens: int) -> ProductTrial:
        products = Products(weight.dtype, weight.shape, tokens)
        alike = (module.weight for module in self._alike.get(weight.shape, ()))
        # Any of them may be another one by now, and this one may have come later.
        same = [w for w in alike if (w.dtype, w.shape) == products[:2]]
        return trial(products, [w for w in same if multiplies(w[:tokens], w, None)] or [weight])


def _is_own(module: nn.Linear) -> bool:
    """Whether nobody has given a layer another forward, or another class with one, meanwhile."""
    return "forward" not in module.__dict__ and type(module) is nn.Linear


def _is_plain(module: nn.Module) -> TypeGuard[nn.Linear]:
    return (
        is_plain_linear(module)
        and module.weight.device.type == "cpu"
        and module.weight.dtype in (torch.bfloat16, torch.float16)
        and module.weight.nbytes >= _LEAST_BYTES
        and not hasattr(module, "_hf_hook")
    )
