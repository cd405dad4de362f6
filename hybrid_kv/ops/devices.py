"""Device back ends: which are here, where their kernels run, and how arrays get to a device.

Back ends are looked up when first asked for. No thread waits for a copy.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from importlib import import_module

import numpy as np
import numpy.typing as npt
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


def device_state(name: str) -> BackendState:
    """State of one of DEVICE_BACKENDS; the others are not looked at."""
    return triton_state() if name == "triton" else flashinfer_state()


@cache
def backends_on(device_type: str, requested: str = "auto") -> frozenset[str]:
    """Names of the device back ends that serve tensors on a type of device.

    FlashInfer serves only those who ask for it, so for others it is not even imported.
    """
    if device_type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return frozenset()  # nothing is imported to learn that
    names = ("triton", "flashinfer") if requested == "flashinfer" else ("triton",)
    return frozenset(name for name in names if device_state(name).device_type == device_type)


def too_old(device: torch.device) -> str | None:
    """Reason why kernels of ours cannot run on a CUDA device, None where they can."""
    capability = torch.cuda.get_device_capability(device)
    if capability >= _MIN_CAPABILITY:
        return None
    return (
        f"{device} has compute capability {_dotted(capability)}, {_dotted(_MIN_CAPABILITY)} at "
        "least is needed"
    )


def on(tensor: Tensor) -> AbstractContextManager[object]:
    """Kernels are launched on the device of a tensor rather than on the current one."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def _on_gpu(module: str, extra: str) -> BackendState:
    if not torch.cuda.is_available():
        return BackendState(None, "torch sees no NVIDIA GPU")
    device = torch.device("cuda", torch.cuda.current_device())
    if reason := too_old(device) or _import_failure(module, extra):
        return BackendState(None, reason)
    capability = _dotted(torch.cuda.get_device_capability(device))
    return BackendState("cuda", f"kernels for compute capability {capability}")


def _import_failure(module: str, extra: str) -> str:
    try:
        import_module(module)
    except ModuleNotFoundError as error:
        if error.name == module:
            return f"{module} is not installed (pip install '{extra}')"
        return f"the import of {module} fails: {_first_line(error)}"
    except (Exception, SystemExit) as error:  # a broken wheel may raise anything
        return f"the import of {module} fails: {_first_line(error)}"
    return ""


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


# Arrays on their way to a device ------------------------------------------------------------------

_KEPT = 64
"""Uploads that are remembered."""


def staged(tensor: Tensor, device: torch.device) -> Tensor:
    """A small tensor on a device; one of the host goes by way of pinned memory.

    A plain copy to a GPU is waited for until all is done that the GPU was told before.
    """
    if device.type == "cpu" or not tensor.is_cpu:
        return tensor.to(device)
    from hybrid_kv.ops.pinned import pinned_empty

    return pinned_empty(tensor.shape, tensor.dtype).copy_(tensor).to(device, non_blocking=True)


class Uploads:
    """Copies index arrays to devices through pinned staging.

    What went last is kept by its content: the page tables of a model's layers are mostly alike, and
    then one upload serves them all.

    sent: copies made to devices that are not the host.
    """

    def __init__(self) -> None:
        self._last: OrderedDict[tuple[torch.device, str, bytes], Tensor] = OrderedDict()
        self.sent = 0

    def __call__(self, array: npt.NDArray[np.int64], device: torch.device) -> Tensor:
        """A one-dimensional array on a device; not to be written."""
        if device.type == "cpu":
            return torch.from_numpy(array)
        key = device, array.dtype.str, array.tobytes()
        if (there := self._last.get(key)) is not None:
            self._last.move_to_end(key)
            return there
        self.sent += 1
        self._last[key] = there = staged(torch.from_numpy(array), device)
        if len(self._last) > _KEPT:
            self._last.popitem(last=False)
        return there
