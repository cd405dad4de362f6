"""Keys and values in 8 bits: one scale for each token and head, and what that loses."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from hybrid_kv.errors import ConfigError, said

Compression: TypeAlias = Literal["int8"]

_LARGEST = 127
_BLOCK = 2**16  # rows at a time: their float32 copies are small


def checked_compression(value: object) -> Compression | None:
    """Raises ConfigError for one that there is not."""
    if value is None or value == "int8":
        return value
    raise ConfigError(f"compress must be 'int8' or left out, got {said(value)}")


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes int8 and scales float32 [..., N] of x [..., N, D]."""
    wide = x.float()
    scales = wide.abs().amax(-1) / _LARGEST
    codes = wide / scales.clamp_min(torch.finfo(torch.float32).tiny)[..., None]
    return codes.round().clamp(-_LARGEST, _LARGEST).to(torch.int8), scales


def unrounded(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Entries from their rounded form: [..., N, D] in `dtype`, in memory of their own."""
    back = torch.empty(codes.shape, dtype=dtype)
    for start in range(0, codes.shape[-2], _BLOCK):
        rows = slice(start, start + _BLOCK)
        back[..., rows, :] = codes[..., rows, :].float() * scales[..., rows, None]
    return back


def relative_error(x: Tensor, back: Tensor) -> float:
    """Root mean square of what was lost over that of x; 0 for nothing."""
    lost = (x.float() - back.float()).square().sum(dtype=torch.float64)
    whole = x.float().square().sum(dtype=torch.float64)
    return float((lost / whole).sqrt()) if whole else 0.0
