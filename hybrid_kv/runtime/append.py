"""Storing new tokens of a layer: what every step and every piece of a prompt begins with."""

from __future__ import annotations

from torch import Tensor

from hybrid_kv.errors import ShapeError
from hybrid_kv.plugins import Method
from hybrid_kv.runtime.means import Means
from hybrid_kv.store import LayerKV
from hybrid_kv.types import LayerShape


def new_store(shape: LayerShape, means: Means, k: Tensor) -> LayerKV:
    """An empty store for rows like those of the first keys k [B, Hkv, T, D]."""
    capacity = max(means.reserved_tokens, k.shape[2])
    return LayerKV(
        *(shape, means.page_size, k.shape[0], k.dtype, k.device, capacity, means.ops),
        pinned=means.pinned_on(k.device),
    )


def stores_as_is(method: Method) -> bool:
    """Whether a method stores keys and values as the model gives them."""
    return type(method).write is Method.write


def reads_alike(method: Method) -> bool:
    """Whether a method reads the same in every step, as the class that defines `read` says."""
    owner = next(one for one in type(method).__mro__ if "read" in vars(one))
    return bool(vars(owner).get("reads_alike", False))


def append(
    store: LayerKV, means: Means, method: Method, k: Tensor, v: Tensor, valid: Tensor | None
) -> None:
    """Stores new tokens k, v [B, Hkv, T, D] as a layer's method writes them.

    Args:
        valid: [B, T] bool leaves padding out; None where there is none.

    Raises:
        ShapeError: the number of rows has changed.
        NonFiniteError: it is one token, in host memory, and its key is not finite. Who brings
            several watches them.
    """
    if k.shape[0] != len(store.rows):
        raise ShapeError(
            f"batch must stay at {len(store.rows)} rows, got {k.shape[0]}; use a new cache"
        )
    layer_idx = store.shape.layer_idx
    if k.shape[2] == 1:
        means.finite.watch_new(layer_idx, k, v, valid)
    if not stores_as_is(method):
        k, v = method.write(layer_idx, k, v, store.next_positions(k.shape[2], valid))
    for number, row in enumerate(store.rows):
        own_k, own_v = k[number], v[number]
        if valid is not None:
            own_k, own_v = own_k[:, valid[number]], own_v[:, valid[number]]
        row.table.append(own_k, own_v, row.length)
        row.length += own_k.shape[1]
