"""Memory of the layers that are not tiered: sliding windows, and states of a fixed size.

One token passes the model on the meta device, where nothing is computed; its cache then has keys,
values and states in the shapes and dtypes that they will have.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from hybrid_kv.errors import UnsupportedModelError
from hybrid_kv.models.cache_argument import passing
from hybrid_kv.models.fixed_state import states_of
from hybrid_kv.models.support import text_config

_BLOCK = 64
"""Tokens whose products with one another linear attention makes at a time."""


class OtherLayers(NamedTuple):
    """num_layers: those that are not tiered. window_bytes: keys and values of their windows at full
    length. untiered_kv_bytes: of a token in layers that keep all of them. fixed_bytes: states that
    have one size at any context, as linear attention keeps. linear_width: see `ModelFacts`.
    """

    num_layers: int
    window_bytes: int
    untiered_kv_bytes: int
    fixed_bytes: int
    linear_width: int


@torch.no_grad()
def other_layers(model: PreTrainedModel, num_tiered: int) -> OtherLayers:
    """Memory of a model on the meta device beside its tiered layers, for one sequence.

    Raises:
        UnsupportedModelError: the model cannot be passed without being computed.
    """
    config = text_config(model)
    cache = DynamicCache(config=config)
    count = len(cache.layers) - num_tiered
    if not count:
        return OtherLayers(0, 0, 0, 0, 0)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("batched_mm")  # others look at numbers, or at dtypes
    token = torch.zeros(1, 1, dtype=torch.long, device="meta")
    try:
        model(input_ids=token, use_cache=True, **passing(cache))
    except Exception as error:  # of any kind, in the model's own code
        raise UnsupportedModelError(
            f"what the layers of {type(model).__name__} hold that are not tiered cannot be found "
            f"without computing it ({str(error).partition(chr(10))[0]})"
        ) from error
    windows = untiered = 0
    for layer in cache.layers:
        if isinstance(layer, DynamicSlidingWindowLayer):
            windows += layer.sliding_window * _kv_bytes(layer)
        elif isinstance(layer, DynamicLayer) and type(layer) is not DynamicLayer:
            untiered += _kv_bytes(layer)
    states = [state for layer in cache.layers for state in states_of(layer).values()]
    # [1, heads, key channels, value channels] of a linear attention; those of kernels have 3 axes.
    widths = [x.shape[1] * (x.shape[2] + x.shape[3] + _BLOCK) for x in states if x.ndim == 4]
    fixed = sum(state.nbytes for state in states)
    return OtherLayers(count, windows, untiered, fixed, max(widths, default=0))


def _kv_bytes(layer: DynamicLayer) -> int:
    """Keys and values of one token."""
    return sum(entry.nbytes for entry in (layer.keys, layer.values) if entry is not None)
