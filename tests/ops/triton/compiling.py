"""Compiles what the ops would launch, for GPUs that are not there.

`launches_of(call)` runs an op on CPU tensors with the launch taken out: what is recorded are the
kernels with the very arguments and tile sizes that a GPU would be given.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

_NAMES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.uint8: "u8",
}
_OPTIONS = ("num_warps", "num_stages")


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, int]

    @property
    def name(self) -> str:
        return str(self.kernel.fn.__name__)

    def compile(self, capability: int) -> Any:
        """The kernel for `sm_<capability>`, specialised as Triton's own launcher would."""
        signature: dict[str, Any] = {}
        constants: dict[Any, Any] = {}
        attributes: dict[Any, Any] = {}
        for place, parameter in enumerate(self.kernel.params):
            value = self.arguments[parameter.name]
            is_one = isinstance(value, int) and value == 1 and not parameter.do_not_specialize
            if parameter.is_constexpr or is_one:
                signature[parameter.name], constants[place,] = "constexpr", value
                continue
            signature[parameter.name] = _type(value)
            if not parameter.do_not_specialize:
                attributes |= _alignment((place,), value)
        source = ASTSource(self.kernel, signature, constants, attributes)
        target = GPUTarget("cuda", capability, 32)
        return triton.compile(source, target=target, options=self.options)


class Resources(NamedTuple):
    """What a compiled kernel takes: registers and bytes of its stack, which holds what spilled, by
    thread, bytes of shared memory by block.
    """

    registers: int
    stack_bytes: int
    shared_bytes: int


@cache
def why_no_compiler() -> str:
    """Why nothing can be compiled or read here; '' where both can."""
    for name in ("ptxas", "cuobjdump"):
        try:
            getattr(triton.knobs.nvidia, name)
        except RuntimeError as error:
            return f"{name} is missing: {error}"
    return ""


def resources(compiled: Any) -> Resources:
    """Read from the machine code, as no GPU has loaded it."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (found,) = re.findall(r"REG:(\d+) STACK:(\d+) .* LOCAL:(\d+)", told)
    registers, stack, local = map(int, found)
    return Resources(registers, stack + local, compiled.metadata.shared)


def _type(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_type(part) for part in value)
    if isinstance(value, Tensor):
        return "*" + _NAMES[value.dtype]
    if isinstance(value, int):
        return "i32" if value < 2**31 else "i64"
    return "fp32"


def _alignment(place: tuple[int, ...], value: Any) -> dict[Any, Any]:
    if isinstance(value, tuple):
        parts = [_alignment((*place, i), part) for i, part in enumerate(value)]
        return {key: aligned for part in parts for key, aligned in part.items()}
    if isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0):
        return {place: [["tt.divisibility", 16]]}
    return {}


def launches_of(call: Callable[[], object], patch: pytest.MonkeyPatch) -> list[Launch]:
    """What `call` launches."""
    found = []

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        names = [parameter.name for parameter in kernel.params]
        options = {key: kwargs.pop(key) for key in _OPTIONS if key in kwargs}
        found.append(Launch(kernel, dict(zip(names, args, strict=False)) | kwargs, options))

    with patch.context() as patched:
        patched.setattr(JITFunction, "run", record)
        call()
    return found
