"""Layers of a cache whose state has one size at any context: linear attention, transformers' own.

A state is the last columns that a convolution has seen, a recurrent sum over all tokens, or both.
It is written over at each token, so that nothing of it can be taken back; it can be copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

_KINDS = ("conv", "recurrent")


def is_fixed(layer: Any) -> TypeGuard[LinearAttentionLayer]:
    """Whether a layer holds a state of a fixed size and nothing else."""
    return type(layer) is LinearAttentionLayer


def is_written_in_place(layer: Any) -> bool:
    """Whether each further token overwrites a layer's states where they lie, of a fixed size."""
    return is_fixed(layer) and all(layer.has_previous_state.values()) and not layer.record_past


def states_of(layer: Any) -> dict[str, Tensor]:
    """The states that a layer holds, by kind and number; {} for one that holds none.

    They are the layer's own tensors, whose first axis is the row of the batch.
    """
    return {
        f"{kind}-{number}": state
        for kind in _KINDS
        for number, state in getattr(layer, f"{kind}_states", {}).items()
        if state is not None
    }


def check_states(layer: LinearAttentionLayer, states: Mapping[str, Tensor]) -> None:
    """Raises ValueError unless a layer can go on from states, of one row and named as it does."""
    numbers = range(layer.number_of_states)
    known = {f"{kind}-{number}" for kind in _KINDS for number in numbers}
    if not states or not known.issuperset(states):
        raise ValueError(f"states must be of {', '.join(sorted(known))}, got {', '.join(states)}")
    if any(state.shape[:1] != (1,) for state in states.values()):
        raise ValueError("states must be of one row")


def take_states(
    layer: LinearAttentionLayer, states: Mapping[str, Tensor], device: torch.device
) -> None:
    """Lets an empty layer go on from states, which are copied to a device; see `check_states`."""
    for name, state in states.items():
        kind, _, number = name.partition("-")
        given: Any = {f"{kind}_states": state.to(device)}
        layer.lazy_initialization(**given, state_idx=int(number))
        getattr(layer, f"{kind}_states")[int(number)].copy_(state)
        layer.has_previous_state[int(number)] = True


def stuck_layers(layers: list[Any]) -> Iterator[int]:
    """The layers of a cache whose states cannot follow when its newest tokens are cropped."""
    for number, layer in enumerate(layers):
        records = getattr(layer, "record_past", False) and layer.is_croppable
        if hasattr(layer, "recurrent_states") and not records:
            yield number
