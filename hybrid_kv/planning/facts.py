"""A model's sizes from its configuration: weights are counted, not loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from hybrid_kv.errors import ConfigError
from hybrid_kv.models.load import load_config, packed_weight_bytes, resolve_dtype
from hybrid_kv.models.support import inspect_model, max_context, text_config
from hybrid_kv.planning.plan import ModelFacts
from hybrid_kv.types import LayerShape

_STORED_BITS = {16: 16.0, 8: 8.25, 4: 4.5}
"""Bits of a weight with its share of scales, by the nominal width of weight-only quantisation."""


def model_facts(
    spec: str | Path,
    *,
    dtype: str | torch.dtype | None = None,
    layers: int | None = None,
    weight_bits: int = 16,
    dequantize: bool = False,
) -> ModelFacts:
    """Facts for planning, from the configuration alone.

    Args:
        spec: as `load_model`.
        weight_bits: 16, 8 or 4; fewer than 16 for linear layers only, embeddings and output stay.
            Of a GGUF file, 16 stands for the bits that it has.
        dequantize: a GGUF file's weights are unpacked.

    Raises:
        ModelNotFoundError, ConfigError: as `load_model`.
        UnsupportedModelError: the model's attention cannot be tiered.
    """
    if weight_bits not in _STORED_BITS:
        raise ConfigError(f"weight_bits must be 16, 8 or 4, got {weight_bits}")
    config = load_config(spec, layers)
    stored: Any = resolve_dtype(dtype) or getattr(config, "dtype", None) or torch.bfloat16
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=stored)
    shapes, text = inspect_model(model).layers, text_config(model)
    packed = packed_weight_bytes(spec, stored, dequantize=dequantize)
    weights, read = (packed if weight_bits == 16 else None) or _weight_bytes(
        model, stored.itemsize, _STORED_BITS[weight_bits]
    )
    return ModelFacts(
        name=str(spec),
        weight_bytes=weights,
        read_bytes=read,
        layers=shapes,
        window_bytes=_window_bytes(text, shapes, stored.itemsize),
        hidden_size=text.hidden_size,
        intermediate_size=_widest(model, text),
        dtype_bytes=stored.itemsize,
        max_context_tokens=max_context(text),
    )


def _weight_bytes(model: PreTrainedModel, itemsize: int, bits: float) -> tuple[int, int]:
    """Bytes of all weights, and of those that a token reads: of some tables it reads one row."""
    output = model.get_output_embeddings()
    head = getattr(output, "weight", None)
    total, tables, seen = 0.0, 0, set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            packed = isinstance(module, nn.Linear) and parameter is not head and parameter.ndim == 2
            total += parameter.numel() * (bits / 8 if packed and bits < 16 else itemsize)
            if isinstance(module, nn.Embedding) and parameter is not head:
                tables += parameter.numel() * itemsize
    return int(total), int(total) - tables


def _widest(model: PreTrainedModel, text: PreTrainedConfig) -> int:
    """Output channels of the widest linear layer that is not the output over the vocabulary."""
    output = model.get_output_embeddings()
    widths = [
        m.out_features for m in model.modules() if isinstance(m, nn.Linear) and m is not output
    ]
    return max(getattr(text, "intermediate_size", 0) or 0, *widths, 0)


def _window_bytes(text: PreTrainedConfig, tiered: tuple[LayerShape, ...], itemsize: int) -> int:
    """KV of the layers that keep a sliding window, at its full length."""
    others = text.num_hidden_layers - len(tiered)
    window = getattr(text, "sliding_window", None) or 0
    if not others or not window:
        return 0
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int(2 * others * window * heads * dim * itemsize)
