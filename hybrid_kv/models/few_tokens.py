"""Decode steps on the CPU: linear layers whose 16-bit weights the engine reads faster than torch.

The product of a matrix and a few tokens waits for memory, and how near to memory's speed torch
comes depends on the CPU, the shape, the dtype and the number of tokens. So each of these is tried
once per process, on the model's own weights, and the faster one serves from then on. A trial waits
until the other side's threads have fallen asleep, for most of a tenth of a second: all shapes of a
model are tried at once. The weights are never touched: while a step passes, a linear layer's
`forward` is ours.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from statistics import median
from threading import get_ident
from time import perf_counter, sleep
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn import functional

from hybrid_kv.models.cache_state import replaced
from hybrid_kv.models.support import has_own_forward, is_plain_linear
from hybrid_kv.ops.native.library import Pool, check, engine_state, pool_here, trials
from hybrid_kv.ops.native.linear import MAX_TOKENS, BoundLinear, bind, linear, multiplies

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
    try_together(products.tokens, {products: weights})
    return _trials[products]


def try_together(tokens: int, wanted: Mapping[Products, Iterable[Tensor]]) -> None:
    """Makes the trials of products of so many tokens that are not known, in .1 s for the first and
    some .02 s for each more.

    Args:
        wanted: with matrices of each shape.
    """
    new = {products: weights for products, weights in wanted.items() if products not in _trials}
    if new:
        found = measure(list(new.values()), tokens, perf_counter)
        for products, one in zip(new, found, strict=True):
            _trials[products] = trials.agree(products, one)


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
    sets: Sequence[Iterable[Tensor]],
    tokens: int,
    clock: Callable[[], float],
    rest: Callable[[float], None] = sleep,
) -> list[ProductTrial]:
    """Times either way on pieces of each set of weights, by itself and twice, as a step is made by
    one of them; the better time of the two counts, since other work on the machine only adds to it.

    Args:
        rest: lets so many seconds pass.
    """
    pieces = [list(islice(_pieces(weights), _PIECES)) for weights in sets]
    inputs = [some[0].new_ones(tokens, some[0].shape[1]) for some in pieces]
    ways: list[Callable[[Tensor, Tensor], Tensor]] = [
        functional.linear,
        partial(linear, pool=pool_here()),
    ]
    best = [[0.0, 0.0] for _ in sets]
    for number in [0, 1] * _ROUNDS:
        rest(_REST_S)
        for x, some, rates in zip(inputs, pieces, best, strict=True):
            way = partial(ways[number], x)
            way(some[-1])  # sets things up, and wakes threads
            rates[number] = max(rates[number], _rate(way, some, clock))
    return [ProductTrial(*rates) for rates in best]


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
        self._products = [(m, LinearProduct(m, self._step, self.pays)) for m in modules]

    @contextmanager
    def served(self, num_tokens: int) -> Iterator[None]:
        """A block in which a forward of so many tokens, over all rows, takes what is fastest."""
        may = 0 < num_tokens <= MAX_TOKENS and not torch.is_grad_enabled()
        may = may and has_own_forward(nn.Linear)
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
        for tokens in range(1, MAX_TOKENS + 1):
            try_together(tokens, self._of_this_model(tokens))

    def pays(self, weight: Tensor, tokens: int) -> bool:
        """Whether the engine multiplies a weight with so many tokens faster than torch; of small
        ones, which are not tried, it is taken to.
        """
        if is_small(weight):
            return True
        products = Products(weight.dtype, weight.shape, tokens)
        if products not in _trials:  # what was exchanged meanwhile may have a shape of its own
            try_together(tokens, {products: [weight], **self._of_this_model(tokens)})
        return _trials[products].pays

    def _of_this_model(self, tokens: int) -> dict[Products, list[Tensor]]:
        """Products of so many tokens that its layers make now, with the weights of each."""
        found = defaultdict[Products, list[Tensor]](list)
        for module, _ in self._products:
            weight = getattr(module, "weight", None)  # another one by now, or none
            if weight is None or weight.ndim != 2:
                continue
            if multiplies(weight[:tokens], weight, None):
                found[Products(weight.dtype, weight.shape, tokens)].append(weight)
        return dict(found)


def is_small(weight: Tensor) -> bool:
    """Whether a product with a matrix waits for its call and not for memory."""
    return weight.nbytes < _LEAST_BYTES


def _is_own(module: nn.Linear) -> bool:
    """Whether nobody has given a layer another forward, or another class with one, meanwhile."""
    return "forward" not in module.__dict__ and type(module) is nn.Linear


def _is_plain(module: nn.Module) -> TypeGuard[nn.Linear]:
    return (
        is_plain_linear(module)
        and module.weight.device.type == "cpu"
        and module.weight.dtype in (torch.bfloat16, torch.float16)
        and not is_small(module.weight)
        and not hasattr(module, "_hf_hook")
    )


# The forward of a linear layer: its product, looked up once ---------------------------------------
#
#   step begins -> StepThread: this thread and its pool
#   first call  -> `_unbound`: whether the engine takes it, the trial, `bind`
#   later calls -> `__call__`: still as bound? -> the engine's function, or torch's
#
# What does not change is bound. What may change between two calls is compared by `__call__`, in one
# frame of Python, and only there; whatever differs is looked up anew.

Decide: TypeAlias = Callable[[Tensor, int], bool]
"""Whether the engine multiplies a weight [N, K] with so many tokens faster than torch."""


class StepThread:
    """The thread whose decode step passes, and its pool of workers; 0 while none does."""

    __slots__ = ("ident", "pool")

    def __init__(self) -> None:
        self.ident: int = 0
        self.pool: Pool | None = None

    def begin(self, pool: Pool | None) -> None:
        """The calling thread begins a step."""
        self.ident, self.pool = get_ident(), pool

    def end(self) -> None:
        """No step passes."""
        self.ident, self.pool = 0, None


class LinearProduct:
    """Computes what `nn.Linear.forward` does, by the engine or by torch as a trial has found.

    Torch serves where gradients or autocast are on, in a graph of torch.compile, in another thread
    than the step's, and wherever `multiplies` is false.

    Args:
        module: whose weight and bias are read at each call.
        step: shared by all products of a model.
        decide: makes the trial where there is none.
    """

    __slots__ = ("_bound", "_decide", "_module", "_parameters", "_step")

    def __init__(self, module: nn.Linear, step: StepThread, decide: Decide) -> None:
        self._module, self._step, self._decide = module, step, decide
        # Not by `module.weight`: that asks a function of Python.
        self._parameters = module._parameters
        # By shape of the inputs, and whether the engine serves it.
        self._bound: dict[torch.Size, tuple[BoundLinear, bool]] = {}

    def __call__(self, x: Tensor) -> Tensor:
        """The product of x [..., K] with the weight [N, K]."""
        if is_dynamo_compiling():
            return functional.linear(x, self._module.weight, self._module.bias)
        known = self._bound.get(x.shape)
        if known is None:
            return self._unbound(x)
        bound, is_engines = known
        weight, bias = self._parameters.get("weight"), self._parameters.get("bias")
        step = self._step
        if (
            step.ident != get_ident()
            or step.pool is not bound.pool
            or torch.is_grad_enabled()
            or torch.is_autocast_enabled("cpu")
            or x.__class__ is not Tensor
            or x.dtype is not bound.weight.dtype
            or not x.is_cpu
            or weight.__class__ is not nn.Parameter
            or (bias is not None and bias.__class__ is not nn.Parameter)
            # `.data = ` exchanges what an object holds: that it is the same says nothing.
            or (weight.data_ptr(), weight.dtype, weight.shape, weight.stride()) != bound.weight
            or (
                bound.bias
                != (
                    None
                    if bias is None
                    else (bias.data_ptr(), bias.dtype, bias.shape, bias.stride())
                )
            )
        ):
            return self._unbound(x)
        if not is_engines:
            return functional.linear(x, weight, bias)
        x = x.contiguous()
        out = x.new_empty(bound.out_shape)
        if status := bound.multiply(x.data_ptr(), out.data_ptr()):
            check(bound.engine, status)
        return out

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the module, or a pickle, made while a step passes has torch's own forward."""
        return partial, (nn.Linear.forward, self._module)

    def _unbound(self, x: Tensor) -> Tensor:
        """As `__call__`, where nothing is bound for inputs of this shape, or not any more."""
        weight, bias, step = self._module.weight, self._module.bias, self._step
        if (
            step.ident != get_ident()
            or torch.is_grad_enabled()
            or torch.is_autocast_enabled("cpu")
            or not multiplies(x, weight, bias)
        ):
            return functional.linear(x, weight, bias)
        pool = step.pool
        is_engines = self._decide(weight, x.numel() // x.shape[-1])
        self._bound[x.shape] = bind(x, weight, bias, pool=pool), is_engines
        if not is_engines:
            return functional.linear(x, weight, bias)
        return linear(x, weight, bias, pool=pool)
