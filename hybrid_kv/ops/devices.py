"""Device back ends: which are here, looked up when first asked, and where their kernels run."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from importlib import import_module

import torch
from torch import Tensor

DEVICE_BACKENDS = ("triton", "flashinfer")

_MIN_CAPABILITY = (8, 0)
"""Ampere: the oldest GPUs that Triton supports and that multiply bfloat16."""


@dataclass(frozen=True, slots=True)
class BackendState:
    """Whether a device back end can serve, on which type of device, or why it cannot."""

    device_type: str | None
    detail: str


@cache
def triton_state() -> BackendState:
    """On a GPU, or on the CPU where TRITON_INTERPRET=1 asks for the interpreter."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        reason = _import_failure("triton", "hybrid-kv[triton]")
        interpreted = "interpreted on the CPU, for tests (TRITON_INTERPRET=1)"
        return BackendState(None, reason) if reason else BackendState("cpu", interpreted)
    return _on_gpu("triton", "hybrid-kv[triton]")


@cache
def flashinfer_state() -> BackendState:
    """Importable and with a GPU: the import alone succeeds without one."""
    return _on_gpu("flashinfer", "hybrid-kv[flashinfer]")


def device_states() -> dict[str, BackendState]:
    """The device back ends by name."""
    return dict(zip(DEVICE_BACKENDS, (triton_state(), flashinfer_state()), strict=True))


@cache
def backends_on(device_type: str) -> frozenset[str]:
    """Names of the device back ends that serve tensors on a type of device."""
    if device_type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return frozenset()  # nothing is imported to learn that
    states = device_states().items()
    return frozenset(name for name, state in states if state.device_type == device_type)


def on(tensor: Tensor) -> AbstractContextManager[object]:
    """Kernels are launched on the device of a tensor rather than on the current one."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def _on_gpu(module: str, extra: str) -> BackendState:
    if not torch.cuda.is_available():
        return BackendState(None, "torch sees no NVIDIA GPU")
    capability = torch.cuda.get_device_capability()
    if capability < _MIN_CAPABILITY:
        return BackendState(
            None, f"the GPU has compute capability {_dotted(capability)}, 8.0 at least is needed"
        )
    if reason := _import_failure(module, extra):
        return BackendState(None, reason)
    return BackendState("cuda", f"kernels for compute capability {_dotted(capability)}")


def _import_failure(module: str, extra: str) -> str:
    try:
        import_module(module)
    except ModuleNotFoundError as error:
        if error.name == module:
            return f"{module} is not installed (pip install '{extra}')"
        return f"the import of {module} fails: {error}"
    except Exception as error:  # a broken wheel may raise anything
        return f"the import of {module} fails: {error}"
    return ""


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
