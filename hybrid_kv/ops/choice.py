"""Choice of the back end of an op: by what was asked for, what is here, what the op is given."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from hybrid_kv.ops import native
from hybrid_kv.ops.devices import DEVICE_BACKENDS, backends_on, device_state
from hybrid_kv.ops.upload import Uploads

BACKENDS = ("auto", "reference", "torch_cpu", "torch_cuda", "native", "triton", "flashinfer")

FUSED = {"torch_cpu": "cpu", "torch_cuda": "cuda"}
"""Torch's own fused kernels, with the type of device that each is for."""
_FUSED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_HALF_DTYPES = (torch.bfloat16, torch.float16)

# What beside the definition computes an op, the first choice of "auto" first.
_CANDIDATES = {
    "attend": ("native", "torch_cpu", "torch_cuda"),
    "attend_visible": ("native",),
    "attend_causal": ("torch_cpu", "torch_cuda"),
    "attend_retrieved": ("native",),
    "attend_ragged": ("native", "triton"),
    "page_scores": ("native", "triton"),
    "choose_pages": ("triton",),
    # FlashInfer compiles for minutes at its first use, so it serves those who ask for it.
    "attend_pages": ("triton", "flashinfer"),
    "merge": ("native", "triton"),
    "append": ("triton",),
    "append_at": ("triton",),
    "choose_listed": ("triton",),
    "update_digests": ("triton",),
    "copy_pages": ("triton",),
    "nearest_keys": ("triton",),
    "encode_sketch": ("triton",),
    "find_by_sketch": ("triton",),
    "attend_candidates": ("triton",),
    "attend_unread": ("triton",),
    "plan_step": ("native",),
    "page_writer": ("native",),
}
OPS = tuple(_CANDIDATES)


def choose_backend(
    requested: str,
    op: str,
    *,
    device_type: str,
    dtype: torch.dtype,
    here: Collection[str] = (),
    plain: bool = True,
    pairs: int = 1,
    few: bool = True,
) -> str:
    """The back end that computes one call.

    "reference", "torch_cpu" and "torch_cuda" use torch and nothing else. Any other name goes first
    where it has the op; what it has not, or cannot express, is computed as under "auto" and in the
    end by the definition.

    Args:
        requested: a name of BACKENDS.
        op: a name of OPS, the methods of `Ops`.
        here: the back ends beside torch's that are installed and reach the tensors.
        plain: attend, attend_causal: what torch has fused kernels for (no softcap, no sliding
            window); attend_pages: what FlashInfer has kernels for.
        pairs: queries times keys; torch's kernels take neither without the other.
        few: attend (without a bias), attend_visible, attend_ragged: few queries; the engine reads
            each key once for all of them, torch's kernel is made for many.
    """
    candidates = _CANDIDATES[op]
    if requested in ("reference", *FUSED):
        candidates = tuple(name for name in candidates if name == requested)
    elif requested in candidates:
        candidates = (requested, *candidates)
    for name in candidates:
        by_name = name == requested
        if name in FUSED:
            fits = device_type == FUSED[name] and dtype in _FUSED_DTYPES and plain and pairs > 0
        elif name == "native":
            fits = device_type == "cpu" and name in here and few
        elif name == "triton":
            # On the CPU Triton is its interpreter, which is for tests.
            fits = name in here and dtype in _FUSED_DTYPES and (device_type != "cpu" or by_name)
        else:
            fits = name in here and dtype in _HALF_DTYPES and plain and by_name
        if fits:
            return name
    return "reference"


# The same by what is here -------------------------------------------------------------------------


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
        """The back end that may do the work of several ops at once: the engine, or nothing."""
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
