"""Triton's interpreter as the launcher of an emulated device: a kernel is one launch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any
from unittest import mock

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from hybrid_kv.ops import devices
from tests.device.machine import Machine
from tests.device.pinned import Borrowed
from tests.device.tensors import DeviceTensor, value_of


@contextmanager
def launching(machine: Machine) -> Iterator[None]:
    """Triton's kernels run on the machine's devices; torch's where they are not interpreted."""
    if os.environ.get("TRITON_INTERPRET") != "1" or find_spec("triton") is None:
        absent = devices.BackendState(None, "no kernels on an emulated device: not interpreted")
        with mock.patch.object(devices, "triton_state", _state(absent)):
            yield
        return
    import triton.runtime.interpreter as interpreter

    inner = interpreter.GridExecutor.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        tensors = [a for a in tree_leaves((args, kwargs)) if isinstance(a, Tensor)]
        indexes = {a.index for a in tensors if isinstance(a, DeviceTensor)}
        if len(indexes) > 1:
            raise ValueError("Pointer arguments lie on several devices")
        for one in tensors:
            if not isinstance(one, DeviceTensor) and one.numel() and not machine.is_pinned(one):
                raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
        index = indexes.pop() if indexes else machine.device

        def held(value: Any) -> Any:
            is_host = isinstance(value, Tensor) and not isinstance(value, DeviceTensor)
            return machine.borrow(value, index, is_copy=False) if is_host else value_of(value)

        def run() -> None:
            inner(self, *tree_map(_reached, plain), **tree_map(_reached, named))

        plain, named = tree_map(held, list(args)), tree_map(held, kwargs)
        name = getattr(self.fn, "__name__", "kernel")
        given = tree_map(value_of, list(args)), sorted(tree_map(value_of, kwargs).items())
        operands = (*given[0], *given[1], str(self.grid) if _plain(self.grid) else "")
        machine.launch(name, index, run, *operands)

    serving = devices.BackendState("cuda", "interpreted on an emulated device, for tests")
    with (
        mock.patch.object(interpreter.GridExecutor, "__call__", call),
        mock.patch.object(devices, "triton_state", _state(serving)),
    ):
        yield


def _reached(value: object) -> object:
    return value.reach() if isinstance(value, Borrowed) else value


def _plain(grid: object) -> bool:
    return isinstance(grid, (tuple, list))


def _state(serving: devices.BackendState) -> Any:
    from functools import cache

    return cache(lambda: serving)
