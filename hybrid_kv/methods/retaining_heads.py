"""Locret's trained heads: two matrices of each layer, read from a file."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from hybrid_kv.errors import ConfigError
from hybrid_kv.types import LayerShape, ModelInfo

_WAY_OUT = (
    "name a .safetensors or PyTorch file with layers.N.self_attn.fc1.weight and fc2.weight for "
    "each layer N, as Locret's training writes it, or choose 'snapkv', which needs none"
)
NO_HEADS = f"heads must be a file of trained heads, got none; {_WAY_OUT}"


class RetainingHeads:
    """By layer fc1 [R, (Hq + 2 Hkv) * D] and fc2 [Hkv, R], float32 (Locret, section 3.1)."""

    def __init__(self, weights: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        self._weights = dict(weights)

    @classmethod
    def load(cls, path: str, info: ModelInfo) -> RetainingHeads:
        """Those of a model.

        Raises:
            ConfigError: there is no such file, or these are no heads of this model.
        """
        if not path:
            raise ConfigError(NO_HEADS)
        name = f"heads '{path}'"
        try:
            file = Path(path)
            safe = file.suffix == ".safetensors"
            found = load_file(file) if safe else torch.load(file, "cpu", weights_only=True)
        except (OSError, SafetensorError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            reason = getattr(error, "strerror", None) or "it is no such file"
            raise ConfigError(
                f"{name} must be a file of trained heads, got none: {reason}; {_WAY_OUT}"
            ) from None
        if not isinstance(found, Mapping):
            kind = type(found).__name__
            raise ConfigError(f"{name} must hold named tensors, got a {kind}; {_WAY_OUT}")
        by_end = {".".join(str(key).split(".")[-5:]): value for key, value in found.items()}
        return cls({one.layer_idx: _of_layer(by_end, one, name) for one in info.layers})

    def of(self, layer_idx: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """fc1 and fc2 of a layer, on a device, where they stay."""
        first, second = self._weights[layer_idx]
        self._weights[layer_idx] = first.to(device), second.to(device)
        return self._weights[layer_idx]


def _of_layer(found: Mapping[str, object], shape: LayerShape, name: str) -> tuple[Tensor, Tensor]:
    both = []
    for part in ("fc1", "fc2"):
        key = f"layers.{shape.layer_idx}.self_attn.{part}.weight"
        weight = found.get(key)
        if not isinstance(weight, Tensor):
            raise ConfigError(f"{name} must hold {key}, got no tensor of that name; {_WAY_OUT}")
        both.append(weight.float())
    channels = (shape.num_q_heads + 2 * shape.num_kv_heads) * shape.head_dim
    into, out = both
    width = into.shape[0] if into.dim() == 2 else 0
    if into.shape != (width, channels) or out.shape != (shape.num_kv_heads, width):
        raise ConfigError(
            f"{name} must be of this model: of layer {shape.layer_idx} fc1 [R, {channels}] and fc2 "
            f"[{shape.num_kv_heads}, R], got {list(into.shape)} and {list(out.shape)}; {_WAY_OUT}"
        )
    return into, out
