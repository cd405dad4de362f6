"""What every index refuses, in one place; nothing here reads all keys at search time."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from hybrid_kv.errors import ConfigError, NonFiniteError, ShapeError


def check_keys(keys: Tensor) -> None:
    """Raises ShapeError unless keys are [Hkv, N, D]."""
    if keys.dim() != 3:
        raise ShapeError(f"keys must be [Hkv, N, D], got shape {list(keys.shape)}")


def check_appended(keys: Tensor, known: Tensor) -> None:
    """Raises ShapeError unless keys hold the known rows, or more, for the same heads."""
    check_keys(keys)
    heads, rows, dim = known.shape
    if (keys.shape[0], keys.shape[2]) != (heads, dim) or keys.shape[1] < rows:
        raise ShapeError(
            f"keys must be [{heads}, N >= {rows}, {dim}], got shape {list(keys.shape)}; "
            "add takes the whole array, known rows first"
        )


def refuse_search(
    queries: Tensor, keys: Tensor, top_k: int, most: int, near: Tensor | None
) -> NoReturn:
    """Says what is wrong with a search.

    Raises:
        ShapeError: queries [Hkv, M, D] do not fit keys [Hkv, N, D], or near is not [Hkv, M, W]
            int64 for them.
        ConfigError: not 1 <= top_k <= most.
    """
    heads, _, dim = keys.shape
    if queries.dim() != 3 or (queries.shape[0], queries.shape[2]) != (heads, dim):
        raise ShapeError(
            f"queries must be [{heads}, M, {dim}] as the keys have {heads} KV heads of "
            f"head_dim {dim}, got shape {list(queries.shape)}"
        )
    if top_k < 1:
        raise ConfigError(f"top_k must be at least 1, got {top_k}; ask for at least one key")
    if most < top_k:
        raise ConfigError(f"most must be at least top_k {top_k}, got {most}; leave it out")
    got = "none" if near is None else f"{near.dtype} of shape {list(near.shape)}"
    raise ShapeError(
        f"near must be int64 {[*queries.shape[:2], 'W']} as the queries are, got {got}; leave it "
        "out for other queries"
    )


def check_samples(samples: Tensor, keys: Tensor) -> None:
    """Raises ShapeError unless samples [Hkv, G, M, D] fit keys [Hkv, N, D]."""
    heads, _, dim = keys.shape
    if samples.dim() != 4 or (samples.shape[0], samples.shape[3]) != (heads, dim):
        raise ShapeError(
            f"samples must be [{heads}, G, M, {dim}] as the keys have {heads} KV heads of "
            f"head_dim {dim}, got shape {list(samples.shape)}"
        )


def check_nearest(nearest: Tensor, samples: Tensor | None, keys: Tensor) -> None:
    """Raises ShapeError unless nearest [Hkv, G, M, K] int32 belong to samples and name keys."""
    given = None if samples is None else samples.shape[:3]
    if nearest.dim() != 4 or nearest.shape[:3] != given or nearest.dtype != torch.int32:
        expected = "absent without samples" if given is None else f"int32 {[*given, 'K']}"
        raise ShapeError(
            f"nearest must be {expected}, got {nearest.dtype} of shape {list(nearest.shape)}"
        )
    if nearest.numel() and not 0 <= int(nearest.min()) <= int(nearest.max()) < keys.shape[1]:
        raise ShapeError(
            f"nearest must name rows 0..{keys.shape[1] - 1} of the keys, got "
            f"{int(nearest.min())}..{int(nearest.max())}"
        )


def check_finite(keys: Tensor, first_row: int = 0) -> None:
    """Raises NonFiniteError naming the first KV head and row >= first_row with NaN or infinity.

    Two reductions (both carry NaN) replace a mask as large as the keys.
    """
    new = keys[:, first_row:]
    if new.numel() == 0 or bool(torch.isfinite(torch.stack([new.amin(), new.amax()])).all()):
        return
    head, row = (~torch.isfinite(new).all(-1)).nonzero()[0].tolist()
    raise NonFiniteError(
        f"keys of KV head {head}, row {row + first_row} are not finite; "
        "check the model's weights and dtype"
    )
