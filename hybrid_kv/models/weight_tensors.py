"""Tensors of the weights of a model: plain ones, modules that have no others, output projections.

Libraries pack weights in three ways: modules of their own (bitsandbytes, gptqmodel,
compressed-tensors), a parameter of a tensor class of their own in a module of torch's (torchao), or
buffers in place of parameters (gptqmodel). Whoever reads weights asks here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeGuard

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hybrid_kv.types import ModelInfo

_PACKS_ANEW = "support_avx512bf16_for_cpu"  # of bitsandbytes' Linear4bit


def is_plain_linear(module: object) -> TypeGuard[nn.Linear]:
    """Whether a module is torch's linear layer, and its weight a matrix of numbers."""
    return type(module) is nn.Linear and type(module._parameters["weight"]) is nn.Parameter


def stored_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and saved buffers of a model by name, each once.

    A tensor that is made of others, as torchao's are, comes as those.
    """
    for name, weight in model.named_parameters():
        yield from _parts(name, weight.detach())
    seen: set[int] = set()
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            saved = name not in module._non_persistent_buffers_set
            if buffer is not None and saved and id(buffer) not in seen:
                seen.add(id(buffer))
                yield from _parts(f"{path}.{name}", buffer)


def keep_as_stored(model: nn.Module) -> None:
    """Stop bitsandbytes from packing 4-bit weights anew in the first forward on a CPU.

    It does so on CPUs with AVX512-BF16, for a kernel of another package. A saved context would then
    belong to another model after a forward than before, and matrices whose rows are no whole number
    of blocks make the forward raise.
    """
    for module in model.modules():
        if hasattr(module, _PACKS_ANEW):
            setattr(module, _PACKS_ANEW, False)


def _parts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    if not hasattr(tensor, "__tensor_flatten__"):
        yield name, tensor
        return
    for part in tensor.__tensor_flatten__()[0]:
        yield from _parts(f"{name}.{part}", getattr(tensor, part))


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as users write it: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def mib(size: int) -> str:
    """A number of bytes in words, in MiB."""
    return f"{size / 2**20:,.0f} MiB"


_NAMES = ("o_proj", "out_proj", "dense", "wo")


def find_outputs(model: PreTrainedModel, info: ModelInfo) -> tuple[Tensor | None, ...]:
    """By tiered layer the weight [hidden, Hq * D], the model's own memory.

    None where the layer has no plain linear projection of that width (packed weights, and weights
    that are elsewhere until their layer runs).
    """
    found: dict[int, Tensor] = {}
    for module in model.modules():
        layer_idx = getattr(module, "layer_idx", None)
        for part in (getattr(module, name, None) for name in _NAMES):
            if isinstance(layer_idx, int) and is_plain_linear(part):
                found[layer_idx] = part.weight.detach()
    return tuple(
        weight if weight is not None and not weight.is_meta and weight.shape[1] == width else None
        for weight, width in (
            (found.get(one.layer_idx), one.num_q_heads * one.head_dim) for one in info.layers
        )
    )
