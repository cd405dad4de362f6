"""The forward of a linear layer while a decode step passes: its product, looked up once.

    step begins -> StepThread: this thread and its pool
    first call  -> `_unbound`: whether the engine takes it, the trial, `bind`
    later calls -> `__call__`: still as bound? -> the engine's function, or torch's

What does not change is bound. What may change between two calls is compared by `__call__`, in one
frame of Python, and only there; whatever differs is looked up anew.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import get_ident
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn import functional

from hybrid_kv.ops.native.library import check
from hybrid_kv.ops.native.linear import BoundLinear, bind, linear, multiplies
from hybrid_kv.ops.native.workers import Pool

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
