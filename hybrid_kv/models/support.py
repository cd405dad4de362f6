"""Facts of a model that a tiered cache needs, with RoPE and weights; refusals of other models.

The rotation of queries by position is found out by asking the model: one token, two positions.
Configurations say how a model works in a dozen ways, and code may do otherwise: layers without
positions, norms behind the rotation, frequencies of their own for some layers. A single token
attends to itself alone, whatever its position, so that all layers see the same hidden states, and
its queries at two positions differ by the rotation and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, TypeGuard
from warnings import warn

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from hybrid_kv.errors import (
    BackendUnavailable,
    BackendWarning,
    ConfigError,
    UnsupportedModelError,
    said,
)
from hybrid_kv.models.cache_layers import keeps_keys, tiered_layers
from hybrid_kv.models.cache_state import CACHE_ARGUMENT
from hybrid_kv.ops import device_of, get_ops
from hybrid_kv.ops.devices import backends_on, too_old, triton_state
from hybrid_kv.ops.operations import FUSED
from hybrid_kv.rotary import Rotary
from hybrid_kv.types import LayerShape, ModelInfo

_LENGTH_DEPENDENT = ("dynamic", "longrope")
_NAME = "hybrid_kv_one_token"
AWAY = 37
"""Positions between the two tokens: fast channels turn often, slow ones enough to be seen."""
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
"""Largest difference of two queries over their largest entry."""
_TOLD_CHARACTERS = 160
"""Of an error's first line; every head's report has the reason."""


def find_rotary(model: PreTrainedModel, info: ModelInfo) -> tuple[Rotary, ...]:
    """Rotation of queries by each tiered layer, or the reason why it is not understood."""
    try:
        asked = run_one_token(model).queries
    except Exception as error:  # whatever a model raises here, it can be served without an answer
        return tuple(Rotary(reason=told(error)) for _ in info.layers)
    known = list(_frequencies(model))
    return tuple(_explain(asked.get(shape.layer_idx), known) for shape in info.layers)


def _explain(queries: Tensor | None, known: list[tuple[tuple[float, ...], str]]) -> Rotary:
    """The rotation between queries [2, Hq, D] of one token at positions 0 and AWAY."""
    if queries is None or queries.device.type == "meta":
        return Rotary(reason="the layer's queries were not seen")
    here, there = queries.float()
    bound = TOLERANCE.get(queries.dtype, 4e-2) * float(here.abs().max())
    if float((here - there).abs().max()) <= bound:
        return Rotary(reason="the layer does not turn its queries", still=True)
    away = torch.full((1,), AWAY, device=here.device)
    for frequencies, kind in known:
        if 2 * len(frequencies) > here.shape[-1]:
            continue
        for interleaved in (False, True):
            rotary = Rotary(frequencies, interleaved)
            if float((rotary.turn(here[:, None], away)[:, 0] - there).abs().max()) <= bound:
                if kind in _LENGTH_DEPENDENT:
                    return Rotary(reason=f"RoPE of type {kind} depends on the length")
                return rotary
    return Rotary(reason="the layer turns its queries in a way that is not known")


def _frequencies(model: PreTrainedModel) -> Iterator[tuple[tuple[float, ...], str]]:
    """All that the model's rotary modules hold, with the type of their RoPE; the longest first."""
    found: dict[tuple[float, ...], str] = {}
    for module in model.modules():
        kinds = getattr(module, "rope_type", "default")
        for name, buffer in module.named_buffers(recurse=False):
            if not name.endswith("inv_freq") or "original" in name or buffer.device.type == "meta":
                continue
            layer_type = name.removesuffix("inv_freq").rstrip("_")
            kind = kinds.get(layer_type, "default") if isinstance(kinds, dict) else str(kinds)
            found[tuple(buffer.flatten().tolist())] = kind
    yield from sorted(found.items(), key=lambda item: -len(item[0]))


# One token run through a model, with what its layers made of it -----------------------------------


@dataclass(slots=True)
class OneToken:
    """Record of a forward of one token.

    queries: [2, Hq, D] by layer_idx, at positions 0 and AWAY; attention: the module that asked.
    stacks: all lists of modules that were run; entered: by module of a stack what it was given.
    """

    queries: dict[int, Tensor] = field(default_factory=dict)
    attention: dict[int, nn.Module] = field(default_factory=dict)
    stacks: list[nn.ModuleList] = field(default_factory=list)
    entered: dict[nn.Module, Tensor] = field(default_factory=dict)


def run_one_token(model: PreTrainedModel) -> OneToken:
    """Runs the token. Raises whatever the model raises."""
    AttentionInterface.register(_NAME, _attend_oneself)
    device = next(model.parameters()).device
    token = torch.ones(2, 1, dtype=torch.long, device=device)
    positions = torch.tensor([[0], [AWAY]], device=device)
    config = model.config.get_text_config(decoder=True)
    before, modes = config._attn_implementation, [(one, one.training) for one in model.modules()]
    found = OneToken(stacks=[m for m in model.modules() if isinstance(m, nn.ModuleList)])
    hooks = [
        layer.register_forward_pre_hook(_note_entered, with_kwargs=True)
        for stack in found.stacks
        for layer in stack
    ]
    config._attn_implementation = _NAME
    model.eval()
    noted = _seen.set(found)
    try:
        with torch.inference_mode():
            model(input_ids=token, position_ids=positions, use_cache=False)
        return found
    finally:
        _seen.reset(noted)
        for hook in hooks:
            hook.remove()
        config._attn_implementation = before
        for module, is_training in modes:  # parts may have modes of their own
            module.training = is_training


def told(error: Exception) -> str:
    """Words for a model that could not be asked."""
    line = next(iter(str(error).splitlines()), "")[:_TOLD_CHARACTERS]
    return f"the model cannot be asked ({type(error).__name__}{line and f': {line}'})"


def _note_entered(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    hidden = entering(args, kwargs)
    if hidden is not None:
        _seen.get().entered.setdefault(module, hidden.clone())


def entering(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The hidden states [B, T, width] among the arguments of a decoder layer."""
    hidden = args[0] if args else kwargs.get("hidden_states")
    return hidden if isinstance(hidden, Tensor) and hidden.ndim == 3 else None


def _attend_oneself(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention of one token [2, H, 1, D] to itself, whose queries are noted by layer."""
    seen, layer_idx = _seen.get(), int(getattr(module, "layer_idx", -1))
    if layer_idx not in seen.queries:
        seen.queries[layer_idx], seen.attention[layer_idx] = query[:, :, 0].clone(), module
    # Softmax over one key: its value, for each query head of its group.
    out = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
    return out.transpose(1, 2).contiguous(), None


_seen: ContextVar[OneToken] = ContextVar("what one token shows")


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


_UNSERVED = {  # by the setting that tells
    "index_topk": "selects keys with a learned indexer (DSA), which needs every key at hand",
    "kv_lora_rank": "uses multi-head latent attention (MLA), whose cache holds no keys",
    "rel_extent": "adds a bias by distance ('position_bias') to its scores",
}


def _refuse(model: PreTrainedModel, config: PreTrainedConfig) -> None:
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{name} is an encoder-decoder; hybrid_kv serves decoder-only models"
        )
    for setting, why in _UNSERVED.items():
        if getattr(config, setting, None) is not None:
            raise UnsupportedModelError(f"{name} {why}; hybrid_kv serves grouped-query attention")
    if CACHE_ARGUMENT not in signature(model.forward).parameters or not keeps_keys(config):
        raise UnsupportedModelError(
            f"{name} keeps no keys and values, so nothing can be tiered; use it without hybrid_kv"
        )
    if config.model_type == "minimax":
        raise UnsupportedModelError(
            f"{name} takes a cache of its own class alone, MiniMaxCache; use it without hybrid_kv, "
            "or a model such as MiniMax-M2"
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


# Weights ------------------------------------------------------------------------------------------
#
# Libraries pack them in three ways: modules of their own (bitsandbytes, gptqmodel,
# compressed-tensors), a parameter of a tensor class of their own in a module of torch's (torchao),
# or buffers in place of parameters (gptqmodel). Whoever reads weights asks here.

_PACKS_ANEW = "support_avx512bf16_for_cpu"  # of bitsandbytes' Linear4bit


def has_own_forward(kind: type[nn.Module]) -> bool:
    """Whether nobody has put another forward into a class."""
    return kind.forward.__module__ == kind.__module__


def is_plain_linear(module: object) -> TypeGuard[nn.Linear]:
    """Whether a module is torch's linear layer, and its weight a matrix of numbers."""
    if type(module) is not nn.Linear or not has_own_forward(nn.Linear):
        return False
    return type(module._parameters["weight"]) is nn.Parameter


def keep_as_stored(model: nn.Module) -> None:
    """Stop bitsandbytes from packing 4-bit weights anew in the first forward on a CPU.

    It does so on CPUs with AVX512-BF16, for a kernel of another package. A saved context would then
    belong to another model after a forward than before, and matrices whose rows are no whole number
    of blocks make the forward raise.
    """
    for module in model.modules():
        if hasattr(module, _PACKS_ANEW):
            setattr(module, _PACKS_ANEW, False)
