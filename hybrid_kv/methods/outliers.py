"""Numbers that stand out of a row are kept apart, as they are: so many of each row."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hybrid_kv.errors import ConfigError


def count_of(ratio: float, dim: int) -> int:
    """Outliers of a row of `dim` numbers."""
    return math.ceil(ratio * dim)


def outliers(rows: Tensor, ratio: float, distance: Tensor) -> tuple[Tensor, Tensor]:
    """Where in a row [..., D] those lie that have the largest distance, and what they are.

    Returns:
        places [..., m] int16 and numbers [..., m] in the dtype of rows, m = ceil(ratio * D).
    """
    if rows.shape[-1] > torch.iinfo(torch.int16).max:
        raise ConfigError(f"head_dim must be below 32768 for outliers, got {rows.shape[-1]}")
    places = distance.topk(count_of(ratio, rows.shape[-1])).indices
    return places.to(torch.int16), rows.gather(-1, places)


def put_back(rows: Tensor, places: Tensor, numbers: Tensor) -> Tensor:
    """Rows [..., D] with the outliers in their places."""
    return rows.scatter(-1, places.long(), numbers.to(rows.dtype))
