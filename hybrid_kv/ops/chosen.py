"""What computes an op, by what was asked for, what is here and what the op is given."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from hybrid_kv.ops import native
from hybrid_kv.ops.choice import FUSED, choose_backend
from hybrid_kv.ops.devices import DEVICE_BACKENDS, backends_on, device_state
from hybrid_kv.ops.upload import Uploads

NATIVE = frozenset({"native"})

chosen = cache(choose_backend)  # each step asks a few times in the same words


@dataclass(frozen=True, slots=True)
class ChosenBackend:
    """One requested back end, whose ops are computed by what `choose_backend` says.

    served: what computed the latest call of each op. uploads: index arrays on their devices.
    """

    backend: str = "auto"
    served: dict[str, str] = field(default_factory=dict, compare=False, repr=False)
    uploads: Uploads = field(default_factory=Uploads, compare=False, repr=False)

    def _engine_alone(self) -> frozenset[str]:
        """What may do the work of several ops at once: the engine, or nothing."""
        return NATIVE if self.why_op_by_op is None else frozenset()

    @property
    def why_op_by_op(self) -> str | None:
        """Why the engine makes no decode step of a layer in one call; None where it may."""
        if self.backend in ("reference", *FUSED, *DEVICE_BACKENDS):
            return f"backend '{self.backend}' computes each op"
        if os.environ.get("HYBRID_KV_ONE_CALL") == "0":
            return "HYBRID_KV_ONE_CALL=0"
        return why_unavailable("native")

    def _here(self, tensor: Tensor) -> frozenset[str]:
        return backends_on(tensor.device.type, self.backend)

    def _chosen_triton(self, op: str, tensor: Tensor) -> bool:
        return self._choose(op, tensor, here=self._here(tensor)) == "triton"

    def _choose(
        self,
        op: str,
        tensor: Tensor,
        *,
        here: tuple[str, ...] | frozenset[str] = (),
        plain: bool = True,
        pairs: int = 1,
        few: bool = True,
    ) -> str:
        name = chosen(
            self.backend,
            op,
            device_type=tensor.device.type,
            dtype=tensor.dtype,
            here=here,
            plain=plain,
            pairs=min(pairs, 1),
            few=few,
        )
        self.served[op] = name
        return name


def reaches(near: Tensor, far: Tensor) -> bool:
    """Whether kernels on the device of one tensor read the other where it lies."""
    return near.device == far.device or far.is_pinned()


def device_of(backend: str) -> str | None:
    """The only type of device whose models a back end is for; None: any, or it is not there."""
    if backend in FUSED:
        return FUSED[backend]
    return device_state(backend).device_type if backend in DEVICE_BACKENDS else None


def why_unavailable(backend: str) -> str | None:
    """Why a known back end cannot serve on this machine, None where it can."""
    if backend == "torch_cuda" and not torch.cuda.is_available():
        return "torch sees no NVIDIA GPU"
    if backend == "native":
        state = native.engine_state()
        return state.detail if state.isa is None else None
    if backend in DEVICE_BACKENDS:
        device = device_state(backend)
        return device.detail if device.device_type is None else None
    return None
