"""Matrices packed as gptqmodel, autoawq and compressed-tensors publish it, number by number."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Rounded:
    """Whole numbers [K, N], scales and zeros [G, N], and the group of each input [K]."""

    numbers: Tensor
    scales: Tensor
    zeros: Tensor
    groups: Tensor

    @property
    def weight(self) -> Tensor:
        """[N, K] in float32."""
        numbers = self.numbers.float() - self.zeros[self.groups].float()
        return (numbers * self.scales[self.groups].float()).t().contiguous()


def rounded(
    weight: Tensor,
    *,
    bits: int = 4,
    group: int = 32,
    symmetric: bool = False,
    shuffled: bool = False,
    dtype: torch.dtype = torch.float16,
) -> Rounded:
    """A matrix [N, K] rounded by groups of inputs; shuffled: which come in no order."""
    columns = weight.shape[1]
    size = group if group > 0 else columns
    groups = torch.arange(columns) // size
    if shuffled:
        groups = groups[torch.randperm(columns)]
    most = 2**bits - 1
    scales, zeros = [], []
    for one in range(int(groups.max()) + 1):
        part = weight[:, groups == one].float()
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        if symmetric:
            high = torch.maximum(high, -low)
            low = -high
        scale = ((high - low) / most).to(dtype)
        zero = torch.full_like(low, 2 ** (bits - 1)) if symmetric else (-low / scale).round()
        scales.append(scale)
        zeros.append(zero.clamp(0, most).int())
    scale, zero = torch.stack(scales), torch.stack(zeros)
    steps = weight.float().t() / scale[groups].float()
    return Rounded((steps.round() + zero[groups]).clamp(0, most).int(), scale, zero, groups)


def words(numbers: Tensor, bits: int) -> Tensor:
    """Words [n, k * bits / 32] in int32 of numbers [n, k], the first in the lowest bits."""
    fields = 32 // bits
    wide = numbers.long().view(len(numbers), -1, fields)
    total = sum(wide[:, :, place] << bits * place for place in range(fields))
    assert isinstance(total, Tensor)
    return torch.where(total >= 2**31, total - 2**32, total).int()


def gptq(it: Rounded, bits: int = 4, *, version: int = 1) -> dict[str, Tensor]:
    """As gptqmodel writes it, version 1 with zeros less one."""
    zeros = words(it.zeros, bits)
    if version == 1:
        zeros = zeros - sum(1 << shift for shift in range(0, 32, bits))
    return {
        "qweight": words(it.numbers.t(), bits).t().contiguous(),
        "qzeros": zeros.contiguous(),
        "scales": it.scales.contiguous(),
        "g_idx": it.groups.int(),
    }


def awq(it: Rounded) -> dict[str, Tensor]:
    """As autoawq's gemm kernel has it."""

    def interleaved(numbers: Tensor) -> Tensor:
        return numbers.view(len(numbers), -1, 8)[:, :, AWQ_ORDER].reshape(numbers.shape)

    return {
        "qweight": words(interleaved(it.numbers), 4).contiguous(),
        "qzeros": words(interleaved(it.zeros), 4).contiguous(),
        "scales": it.scales.contiguous(),
    }


def compressed(
    it: Rounded, bits: int = 4, *, zeros: bool = False, groups: bool = False
) -> dict[str, Tensor]:
    """As compressed-tensors' pack-quantized has it."""
    tensors = {
        "weight_packed": words(it.numbers.t(), bits).contiguous(),
        "weight_scale": it.scales.t().contiguous(),
        "weight_shape": torch.tensor(it.numbers.t().shape),
    }
    if zeros:
        tensors["weight_zero_point"] = words(it.zeros, bits).t().contiguous()
    if groups:
        tensors["weight_g_idx"] = it.groups.int()
    return tensors


Pack = Callable[[Rounded], Mapping[str, Tensor]]


def save_packed(
    path: Path, model: PreTrainedModel, pack: Pack, told: Mapping[str, Any], **options: Any
) -> dict[str, Tensor]:
    """Saves a model whose linear layers are packed, the head left plain. `options` as of `rounded`.

    Returns:
        The weights of its plain twin, by name.
    """
    torch.manual_seed(7)
    model.save_pretrained(path)
    tensors, plain = {}, {}
    for name, weight in model.state_dict().items():
        plain[name] = weight.clone()
        if "_proj.weight" not in name:
            tensors[name] = weight.clone()
            continue
        it = rounded(weight, **options)
        plain[name] = it.weight.to(weight.dtype)
        for leaf, tensor in pack(it).items():
            tensors[f"{name.removesuffix('.weight')}.{leaf}"] = tensor
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    file = path / "config.json"
    config = {**json.loads(file.read_text()), "quantization_config": dict(told)}
    file.write_text(json.dumps(config))
    return plain


_PACKED = re.compile(r"(_proj|\.w[123])\.weight")


def save_mixture(
    path: Path,
    model: PreTrainedModel,
    pack: Pack,
    told: Mapping[str, Any],
    packed: re.Pattern[str] = _PACKED,
    **options: Any,
) -> Path:
    """Saves a model with matrices packed one by one, those of each expert as well, under the hub's
    names; beside it, in the folder `twin`, the same numbers plain.

    Args:
        packed: what is found in the names of what is packed. options: as of `rounded`.
    """
    torch.manual_seed(7)
    model.save_pretrained(path / "twin")
    plain = load_file(path / "twin" / "model.safetensors")
    tensors = {}
    for name, weight in plain.items():
        if not packed.search(name):
            tensors[name] = weight.clone()
            continue
        it = rounded(weight, **options)
        plain[name] = it.weight
        for leaf, tensor in pack(it).items():
            tensors[f"{name.removesuffix('.weight')}.{leaf}"] = tensor
    for folder, those in ((path, tensors), (path / "twin", plain)):
        save_file(those, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "twin" / "config.json").read_text())
    config["quantization_config"] = dict(told)
    (path / "config.json").write_text(json.dumps(config))
    return path
