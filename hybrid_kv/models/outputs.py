"""The output projections of a model's attention, for methods that weigh values by them."""

from __future__ import annotations

from torch import Tensor
from transformers import PreTrainedModel

from hybrid_kv.models.weight_tensors import is_plain_linear
from hybrid_kv.types import ModelInfo

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
