"""Heads as Locret trains them, but drawn: same seed, same heads."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_kv.types import LayerShape


def draw_heads(shape: LayerShape, width: int = 24) -> tuple[Tensor, Tensor]:
    """fc1 [width, (Hq + 2 Hkv) * D] and fc2 [Hkv, width] of a layer."""
    random = torch.Generator().manual_seed(7 + shape.layer_idx)
    channels = (shape.num_q_heads + 2 * shape.num_kv_heads) * shape.head_dim
    into = torch.randn(width, channels, generator=random) / channels**0.5
    return into, torch.randn(shape.num_kv_heads, width, generator=random)
