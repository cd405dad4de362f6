"""Weights packed as libraries do it that are not installed: a tensor class, and buffers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from hybrid_kv.models.packed_linear import PackedEmbedding, PackedLinear


class Codes(Tensor):
    """A matrix in 8 bits with a scale for each row, as torchao's: a tensor made of two others.

    It says nothing but its product: whoever reads its numbers is an error.
    """

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Codes:
        made: Codes = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype)
        made.codes, made.scale = codes, scale
        return made

    @classmethod
    def of(cls, weight: Tensor) -> Codes:
        scale = weight.float().abs().amax(1, keepdim=True) / 127
        return cls((weight / scale).round().to(torch.int8), scale, weight.dtype)

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["codes", "scale"], self.dtype

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.linear:
            x, weight, *rest = args
            return func(x, (weight.codes * weight.scale).to(x.dtype), *rest, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            (weight,) = args
            return cls(weight.codes, weight.scale, weight.dtype)
        raise NotImplementedError(f"{func} reads the numbers of a packed weight")


class BufferLinear(nn.Module):
    """A linear layer whose packed weight lies in buffers, as gptqmodel's."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        packed = Codes.of(plain.weight.detach())
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.register_buffer("qweight", packed.codes)
        self.register_buffer("scales", packed.scale)
        self.bias = plain.bias

    def forward(self, x: Tensor) -> Tensor:
        weight = self.get_buffer("qweight") * self.get_buffer("scales")
        return functional.linear(x, weight.to(x.dtype), self.bias)


def as_tensor_class(model: PreTrainedModel) -> PreTrainedModel:
    """The model, the weights of its layers packed in place."""
    for _, module in _linears(model):
        module.weight = nn.Parameter(Codes.of(module.weight.detach()), requires_grad=False)
    return model


def as_buffers(model: PreTrainedModel) -> PreTrainedModel:
    """The model, with other modules in place of its layers' linear ones."""
    for path, module in _linears(model):
        model.set_submodule(path, BufferLinear(module))
    return model


def _linears(model: PreTrainedModel) -> list[tuple[str, nn.Linear]]:
    head = model.get_output_embeddings()
    return [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    ]


def packed_modules(model: nn.Module) -> Iterator[PackedEmbedding | PackedLinear]:
    """The modules of a model whose weights are packed in blocks."""
    kinds = PackedEmbedding, PackedLinear
    return (module for module in model.modules() if isinstance(module, kinds))
