"""Sizes of a model from its configuration: weights are counted, not loaded.

Layers of linear attention, whose state has a fixed size, are counted beside those of attention.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from hybrid_kv.errors import UnsupportedModelError
from hybrid_kv.models.cache_state import states_of
from hybrid_kv.models.forwards import passing
from hybrid_kv.models.load import load_config, packed_weights, resolve_dtype
from hybrid_kv.models.support import inspect_model, max_context, text_config
from hybrid_kv.models.weight_kinds import (
    kind_of_checkpoint,
    read_share,
    stored_weights,
    weight_kind,
)
from hybrid_kv.planning.plan import ModelFacts


def model_facts(
    spec: str | Path,
    *,
    dtype: str | torch.dtype | None = None,
    layers: int | None = None,
    weights: str | None = None,
    dequantize: bool = False,
    device: str | None = None,
) -> ModelFacts:
    """Facts for planning, from the configuration alone.

    Args:
        spec: as `load_model`.
        weights: a name of `WEIGHT_KINDS`, in which weights would be stored; None for what the
            checkpoint says, and for a GGUF file's own layouts.
        dequantize: a GGUF file's weights are unpacked.
        device: where the model would run, in words; None where that does not matter.

    Raises:
        ModelNotFoundError, ConfigError: as `load_model`, which refuses packed weights on a GPU.
        UnsupportedModelError: the model's attention cannot be tiered.
    """
    kind = None if weights is None else weight_kind(weights, device)
    config = load_config(spec, layers)
    stored: Any = resolve_dtype(dtype) or getattr(config, "dtype", None) or torch.bfloat16
    in_file = packed_weights(spec, stored, kind=weights, dequantize=dequantize, device=device)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=stored)
    if in_file is None and kind is None and (own := kind_of_checkpoint(config)) is not None:
        kind = weight_kind(own)
    parts = list(stored_weights(model, kind) if in_file is None else in_file)
    by_layout: Counter[str] = Counter()
    for part in parts:
        by_layout[part.layout] += part.num_bytes
    shapes, text = inspect_model(model).layers, text_config(model)
    others = other_layers(model, len(shapes))
    return ModelFacts(
        name=str(spec),
        weight_bytes=by_layout.total(),
        read_bytes=round(sum(read_share(model, part.target) * part.num_bytes for part in parts)),
        layers=shapes,
        window_bytes=others.window_bytes,
        hidden_size=text.hidden_size,
        intermediate_size=_widest(model, text),
        dtype_bytes=stored.itemsize,
        max_context_tokens=max_context(text),
        weights=dict(by_layout.most_common()),
        other_layers=others.num_layers,
        untiered_kv_bytes=others.untiered_kv_bytes,
        fixed_bytes=others.fixed_bytes,
        linear_width=others.linear_width,
        products=_products(model),
    )


def _products(model: PreTrainedModel) -> int:
    """Multiplications of a token with matrices of weights, the output projection left out."""
    head = getattr(model.get_output_embeddings(), "weight", None)
    matrices = [
        (name, weight)
        for name, weight in model.named_parameters()
        if weight.ndim > 1 and weight is not head
    ]
    return round(sum(read_share(model, name) * weight.numel() for name, weight in matrices))


def _widest(model: PreTrainedModel, text: PreTrainedConfig) -> int:
    """Output channels of the widest linear layer that is not the output over the vocabulary."""
    output = model.get_output_embeddings()
    widths = [
        m.out_features for m in model.modules() if isinstance(m, nn.Linear) and m is not output
    ]
    return max(getattr(text, "intermediate_size", 0) or 0, *widths, 0)


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
