"""Facts of a model that a tiered cache needs, and refusals of models that lack them."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import Any
from warnings import warn

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from hybrid_kv.errors import (
    BackendUnavailable,
    BackendWarning,
    ConfigError,
    UnsupportedModelError,
    said,
)
from hybrid_kv.models.cache_layers import keeps_keys, tiered_layers
from hybrid_kv.models.forwards import CACHE_ARGUMENT
from hybrid_kv.ops import device_of, get_ops
from hybrid_kv.ops.choice import FUSED
from hybrid_kv.ops.devices import backends_on, too_old, triton_state
from hybrid_kv.types import LayerShape, ModelInfo


def check_model(model: object) -> None:
    """Raises ConfigError unless it is a loaded transformers model."""
    if isinstance(model, PreTrainedModel):
        return
    inner = next(
        (name for name in ("_orig_mod", "module", "model") if _is_model(model, name)), None
    )
    way = "load one with AutoModelForCausalLM.from_pretrained or hybrid_kv.load"
    if inner is not None:
        way = f"pass the model inside it, its attribute '{inner}'"
    raise ConfigError(
        f"model must be a loaded transformers model (PreTrainedModel), got {said(model)}; {way}"
    )


def _is_model(holder: object, name: str) -> bool:
    return isinstance(getattr(holder, name, None), PreTrainedModel)


def text_config(model: PreTrainedModel) -> PreTrainedConfig:
    """The configuration of the decoder that generates text."""
    return model.config.get_text_config(decoder=True)


def text_parts(model: PreTrainedModel, text: PreTrainedConfig) -> list[PreTrainedModel]:
    """The model and what in it leads to the text decoder; not the towers for images or sound."""
    return [
        part
        for part in model.modules()
        if isinstance(part, PreTrainedModel) and (part is model or text_config(part) is text)
    ]


def devices_of(model: PreTrainedModel) -> list[torch.device]:
    """Devices of the model's weights, in the order of its layers; several where it is spread.

    Weights that accelerate fetches when they are needed lie nowhere.
    """
    places = dict.fromkeys(weight.device for weight in model.parameters())
    return [place for place in places if place.type != "meta"]


def check_backend(backend: str, devices: Sequence[torch.device]) -> None:
    """Raises BackendUnavailable where a back end cannot serve a model on these devices.

    Warns:
        BackendWarning: there are no kernels for a GPU, and none were asked for by name.
    """
    get_ops(backend)
    served = device_of(backend)
    if served is not None and any(device.type != served for device in devices):
        raise BackendUnavailable(
            f"backend '{backend}' serves models on {served}, got one on "
            f"{', '.join(map(str, devices))}; use backend='auto'"
        )
    gpus = [device for device in devices if device.type == "cuda"]
    if not gpus or backend in ("reference", *FUSED):
        return
    if not backends_on("cuda", backend):
        warn(
            f"no kernels for the cache's pages serve {gpus[0]}, torch does, more slowly: "
            f"{triton_state().detail}",
            BackendWarning,
            stacklevel=4,
        )
    elif old := [reason for gpu in gpus if (reason := too_old(gpu))]:
        raise BackendUnavailable(
            f"backend '{backend}' cannot serve here: {old[0]}; use backend='torch_cuda', or keep "
            "the model off that GPU (CUDA_VISIBLE_DEVICES)"
        )


def inspect_model(model: PreTrainedModel) -> ModelInfo:
    """Shapes of the layers that can be tiered.

    Raises:
        UnsupportedModelError: the model's attention cannot be served; the message says why.
    """
    config = text_config(model)
    _refuse(model, config)
    return ModelInfo(tuple(_layer_shape(config, idx) for idx in tiered_layers(config)))


def _refuse(model: PreTrainedModel, config: PreTrainedConfig) -> None:
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{name} is an encoder-decoder; hybrid_kv serves decoder-only models"
        )
    if getattr(config, "index_topk", None) is not None:
        raise UnsupportedModelError(
            f"{name} selects keys with a learned indexer (DSA), which needs every key at hand; "
            "hybrid_kv serves grouped-query attention"
        )
    if getattr(config, "kv_lora_rank", None) is not None:
        raise UnsupportedModelError(
            f"{name} uses multi-head latent attention (MLA), whose cache holds latents instead of "
            "keys; hybrid_kv serves grouped-query attention"
        )
    if CACHE_ARGUMENT not in signature(model.forward).parameters or not keeps_keys(config):
        raise UnsupportedModelError(
            f"{name} keeps no keys and values, so nothing can be tiered; use it without hybrid_kv"
        )
    if "chunked_attention" in get_layer_types_and_kwargs(config)[0]:
        raise UnsupportedModelError(
            f"{name} has layers that attend in chunks, which hybrid_kv does not serve; use a model "
            "with full or sliding-window attention"
        )
    if not model._can_set_attn_implementation():
        raise UnsupportedModelError(
            f"{name} does not take attention functions from transformers' AttentionInterface; "
            "hybrid_kv needs a model that does"
        )


def _layer_shape(config: PreTrainedConfig, layer_idx: int) -> LayerShape:
    # Heterogeneous models describe each layer by a configuration of its own.
    per_layer: Any = getattr(config, "per_layer_config", None)
    layer = per_layer[layer_idx] if per_layer is not None else config
    num_q_heads = layer.num_attention_heads
    num_kv_heads = getattr(layer, "num_key_value_heads", None) or num_q_heads
    head_dim = getattr(layer, "head_dim", None) or layer.hidden_size // num_q_heads
    return LayerShape(layer_idx, num_q_heads, num_kv_heads, head_dim)


def max_context(config: PreTrainedConfig) -> int | None:
    """The longest context the model was made for, in tokens; None where it says nothing."""
    return getattr(config, "max_position_embeddings", None)


def check_context(config: PreTrainedConfig, num_tokens: int) -> None:
    """Raises ConfigError where `num_tokens` exceed what the model was made for."""
    limit = max_context(config)
    if limit is not None and num_tokens > limit:
        raise ConfigError(
            f"context must be at most {limit} tokens for this model, got {num_tokens}; shorten the "
            "prompt, ask for fewer new tokens or take a model with a longer context"
        )
