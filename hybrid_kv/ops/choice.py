"""Which back end computes an op: one pure function."""

from __future__ import annotations

from collections.abc import Collection

import torch

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
