"""Choice of the back end of an op: by what was asked for, what is here, what the op is given."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TypeVar

import torch
from torch import Tensor

from hybrid_kv.ops import native
from hybrid_kv.ops.devices import DEVICE_BACKENDS, backends_on, device_state
from hybrid_kv.ops.native.workers import Pool, pool_here
from hybrid_kv.ops.operations import BY_NAME, Need, Operation
from hybrid_kv.ops.upload import Uploads

R = TypeVar("R")

BACKENDS = ("auto", "reference", "torch_cpu", "torch_cuda", "native", "triton", "flashinfer")
OPS = tuple(BY_NAME)

FUSED = {"torch_cpu": "cpu", "torch_cuda": "cuda"}
"""Torch's own fused kernels, with the type of device that each is for."""

_HALVES = (torch.bfloat16, torch.float16)
_FLOATS = (torch.float32, *_HALVES)
_NATIVE, _NONE = frozenset({"native"}), frozenset[str]()


def choose_backend(
    requested: str,
    op: str,
    *,
    device_type: str,
    dtype: torch.dtype,
    here: Collection[str] = (),
    plain: bool = True,
    pairs: bool = True,
    few: bool = True,
    suited: bool = True,
) -> str:
    """The back end that computes one call: the first of the op's row whose needs the call meets.

    "reference", "torch_cpu" and "torch_cuda" use torch and nothing else. Any other name goes first
    where it has the op; what it has not, or cannot express, is computed as under "auto" and in the
    end by the definition.

    Args:
        requested: a name of BACKENDS.
        op: a name of OPS.
        here: the back ends beside torch's that are installed and reach the tensors.
        plain: attend, attend_causal: what torch has fused kernels for (no softcap, no sliding
            window); attend_pages: what FlashInfer has kernels for.
        pairs: there are queries and keys; torch's kernels take neither without the other.
        few: attend_visible, attend_ragged: few queries; the engine reads each key once for all of
            them. append: one token.
        suited: attend, attend_causal, attend_with_masses: the engine has a kernel for such queries,
            and torch no faster one here. attend_blocks: nobody goes backwards, for which there is
            no kernel.
    """
    backends = BY_NAME[op].by
    if requested in ("reference", *FUSED):
        backends = {name: by for name, by in backends.items() if name == requested}
    elif requested in backends:
        backends = {requested: backends[requested], **backends}
    for name, by in backends.items():
        asked = name == requested
        met: dict[Need, bool] = {
            "here": name in here,
            "asked": asked,
            "cpu": device_type == "cpu",
            "cuda": device_type == "cuda",
            # On the CPU Triton is its interpreter, which is for tests.
            "compiled": device_type != "cpu" or asked,
            "floats": dtype in _FLOATS,
            "halves": dtype in _HALVES,
            "plain": plain,
            "pairs": pairs,
            "few": few,
            "suited": suited,
        }
        if all(met[need] for need in by.needs):
            return name
    return "reference"


chosen = cache(choose_backend)  # each step asks a few times in the same words


@dataclass(frozen=True, slots=True)
class ChosenBackend:
    """One requested back end, whose ops are computed by what `choose_backend` says.

    served: what computed the latest call of each op. uploads: index arrays on their devices.
    """

    backend: str = "auto"
    served: dict[str, str] = field(default_factory=dict, compare=False, repr=False)
    uploads: Uploads = field(default_factory=Uploads, compare=False, repr=False)

    @property
    def why_op_by_op(self) -> str | None:
        """Reason why the engine makes no decode step of a layer in one call; None where it may."""
        if self.backend in ("reference", *FUSED, *DEVICE_BACKENDS):
            return f"backend '{self.backend}' computes each op"
        if os.environ.get("HYBRID_KV_ONE_CALL") == "0":
            return "HYBRID_KV_ONE_CALL=0"
        return why_unavailable("native")

    @property
    def pool(self) -> Pool | None:
        """The threads that share the calling thread's work; None for itself alone."""
        return pool_here()

    def _here(self, at: Tensor) -> frozenset[str]:
        return backends_on(at.device.type, self.backend)

    def _choose(
        self,
        op: Operation[object],
        at: Tensor,
        far: Tensor | None = None,
        /,
        *,
        native: bool = False,
        **facts: bool,
    ) -> str:
        """The back end of a call, put on record.

        Args:
            at: on the device that computes. far: a tensor that kernels must reach.
            native: whether the engine reads the tensors. facts: others as `choose_backend` takes.
        """
        here = _NATIVE if native else _NONE
        if op.has_kernels and (far is None or reaches(at, far)):
            here = here | self._here(at)
        name = chosen(
            self.backend, op.name, device_type=at.device.type, dtype=at.dtype, here=here, **facts
        )
        self.served[op.name] = name
        return name

    def bound(self, op: Operation[R], name: str) -> Callable[..., R]:
        """The function of a back end, with the attribute of these ops that it uses."""
        by = op.by[name]
        function: Callable[..., R] = by.function
        return partial(function, **{by.uses: getattr(self, by.uses)}) if by.uses else function

    def _take(
        self, op: Operation[R], at: Tensor, far: Tensor | None = None, /, **facts: bool
    ) -> Callable[..., R]:
        """The function that computes a call; see `_choose`."""
        return self.bound(op, self._choose(op, at, far, **facts))


def reaches(near: Tensor, far: Tensor) -> bool:
    """Whether kernels on the device of one tensor read the other where it lies."""
    return near.device == far.device or far.is_pinned()


def device_of(backend: str) -> str | None:
    """The only type of device whose models a back end is for; None: any, or it is not there."""
    if backend in FUSED:
        return FUSED[backend]
    return device_state(backend).device_type if backend in DEVICE_BACKENDS else None


def why_unavailable(backend: str) -> str | None:
    """Reason why a known back end cannot serve on this machine, None where it can."""
    if backend == "torch_cuda" and not torch.cuda.is_available():
        return "torch sees no NVIDIA GPU"
    if backend == "native":
        state = native.engine_state()
        return state.detail if state.isa is None else None
    if backend in DEVICE_BACKENDS:
        device = device_state(backend)
        return device.detail if device.device_type is None else None
    return None
