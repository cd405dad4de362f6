"""A model's sizes from its configuration: weights are counted, not loaded."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from hybrid_kv.models.load import load_config, packed_weights, resolve_dtype
from hybrid_kv.models.support import inspect_model, max_context, text_config
from hybrid_kv.models.weight_kinds import (
    kind_of_checkpoint,
    read_share,
    stored_weights,
    weight_kind,
)
from hybrid_kv.planning.other_layers import other_layers
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
    )


def _widest(model: PreTrainedModel, text: PreTrainedConfig) -> int:
    """Output channels of the widest linear layer that is not the output over the vocabulary."""
    output = model.get_output_embeddings()
    widths = [
        m.out_features for m in model.modules() if isinstance(m, nn.Linear) and m is not output
    ]
    return max(getattr(text, "intermediate_size", 0) or 0, *widths, 0)
