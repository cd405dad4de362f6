"""Layers of a cache that are transformers' own, as a saved context holds them.

They are of three kinds. A layer of linear attention, of a short convolution or of Mamba has states
of one size at any context. A layer that is attention as well, as Falcon-H1's and Zamba2's, has keys
and values of all tokens beside them. A layer without attention, as one of experts alone, has
nothing. All of it goes to one block of tensors as it is, and comes back into memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import LinearAttentionAndFullAttentionLayer

from hybrid_kv.models.cache_state import STATE_KINDS, is_fixed, states_of

_KV = ("keys", "values")

_NoAttention: type | None = getattr(cache_utils, "DummyLayer", None)  # not in transformers 5.19


def _is_both(layer: Any) -> bool:
    """Whether a layer holds states, and keys and values of all tokens."""
    return type(layer) is LinearAttentionAndFullAttentionLayer


def is_own(layer: Any) -> bool:
    """Whether a layer is one of these kinds."""
    return is_fixed(layer) or _is_both(layer) or type(layer) is _NoAttention


def tensors_of(layer: Any) -> dict[str, Tensor]:
    """The tensors that a layer holds, its own memory, whose first axis is the row of the batch.

    States by kind and number, as 'conv-0'; keys and values [1, Hkv, N, D].
    """
    tensors = states_of(layer)
    if _is_both(layer):
        tensors |= {name: getattr(layer, name) for name in _KV}
    return tensors


def check_tensors(
    layer: Any, tensors: Mapping[str, Tensor], num_tokens: int, dtype: torch.dtype
) -> None:
    """Looks whether an empty layer can go on from tensors after so many tokens.

    What sizes states must have nobody but the model's code knows.

    Args:
        dtype: of keys and values.

    Raises:
        ValueError: they are not of one row, not named as the layer's are, or keys and values not
            those of these tokens.
    """
    if type(layer) is _NoAttention:
        if tensors:
            raise ValueError(f"a layer without attention must have no states, got {[*tensors]}")
        return
    known = {f"{kind}-{number}" for kind in STATE_KINDS for number in range(layer.number_of_states)}
    states = [name for name in tensors if name not in _KV or not _is_both(layer)]
    if not states or not known.issuperset(states):
        raise ValueError(f"states must be of {', '.join(sorted(known))}, got {', '.join(states)}")
    if any(tensor.shape[:1] != (1,) for tensor in tensors.values()):
        raise ValueError("states must be of one row")
    if _is_both(layer):
        k, v = (tensors[name] for name in _KV)
        if k.ndim != 4 or k.shape[:3] != v.shape[:3] or k.shape[2] != num_tokens:
            raise ValueError(
                f"keys and values must be of {num_tokens} tokens, got {list(k.shape)} and "
                f"{list(v.shape)}"
            )
        if {k.dtype, v.dtype} != {dtype}:
            raise ValueError(f"keys and values must be {dtype}, got {k.dtype} and {v.dtype}")


def take_tensors(layer: Any, tensors: Mapping[str, Tensor], device: torch.device) -> None:
    """Lets an empty layer go on from tensors, which are copied; see `check_tensors`."""
    for name, tensor in tensors.items():
        if name in _KV:
            continue
        kind, _, number = name.partition("-")
        given: Any = {f"{kind}_states": tensor.to(device)}
        layer.lazy_initialization(**given, state_idx=int(number))
        getattr(layer, f"{kind}_states")[int(number)].copy_(tensor)
        layer.has_previous_state[int(number)] = True
    if _is_both(layer):
        k, v = (tensors[name].to(device, copy=True) for name in _KV)
        layer.lazy_initialization(k, v)
        layer.keys, layer.values = k, v
