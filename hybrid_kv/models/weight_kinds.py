"""Bytes of a model's weights: plain, or in a named kind in which people store them.

A kind says which layout linear layers, experts, embedding table and output projection have. Nothing
is packed here; the sizes are those that a library or llama.cpp's quantiser arrives at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from hybrid_kv.errors import (
    ConfigError,
    unknown_name,
)
from hybrid_kv.models.support import is_plain_linear
from hybrid_kv.ops.native.linear import PACKED_KINDS
from hybrid_kv.types import ModelInfo


class StoredWeight(NamedTuple):
    """A parameter of a model, or what of it has one layout, and the bytes that it takes."""

    target: str
    layout: str
    num_bytes: int


class _Layout(NamedTuple):
    """Bytes of a block of `values` numbers of a row; 0 stands for the whole row, whose bytes are
    its numbers and `bytes`.
    """

    values: int
    bytes: int


_LAYOUTS: Mapping[str, _Layout] = MappingProxyType(
    {
        "bfloat16": _Layout(1, 2),
        "int8": _Layout(0, 2),
        "int4": _Layout(128, 64 + 4),
        "mxfp4": _Layout(32, 16 + 1),
        "nf4": _Layout(64, 32 + 4),
        **{name: _Layout(kind.values, kind.bytes) for name, kind in PACKED_KINDS.items()},
    }
)
"""int8: a 16-bit scale a row. int4: a 16-bit scale and zero for 128 numbers. mxfp4: an 8-bit
exponent for 32. nf4: a 32-bit scale for 64. The others: GGUF's."""
_NARROW_ROWS = MappingProxyType({"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"})
"""Layouts of llama.cpp's quantiser where a row is no whole number of blocks of 256."""


@dataclass(frozen=True, slots=True)
class WeightKind:
    """Layouts of a model's matrices; None stands for the dtype that the model computes in.

    linear: of linear layers and of experts. head: of the output projection, and of an embedding
    table that is one with it. table: of any other embedding table. better: of the share
    `better_share` of value and down projections. experts_only, linear_only: what is packed of both.
    """

    linear: str
    head: str | None = None
    table: str | None = None
    better: str | None = None
    better_share: float = 0.0
    experts_only: bool = False
    linear_only: bool = False


WEIGHT_KINDS: Mapping[str, WeightKind] = MappingProxyType(
    {
        "bf16": WeightKind("bfloat16", "bfloat16", "bfloat16"),
        "int8": WeightKind("int8"),
        "int4": WeightKind("int4"),
        "nf4": WeightKind("nf4"),
        "mxfp4": WeightKind("mxfp4", experts_only=True),
        "q4_0": WeightKind("Q4_0", "Q6_K", "Q4_0"),
        "q4_k_s": WeightKind("Q4_K", "Q6_K", "Q4_K", "Q5_K", 1 / 8),
        "q4_k_m": WeightKind("Q4_K", "Q6_K", "Q4_K", "Q6_K", 1 / 2),
        "q5_k_m": WeightKind("Q5_K", "Q6_K", "Q5_K", "Q6_K", 1 / 2),
        "q6_k": WeightKind("Q6_K", "Q6_K", "Q6_K"),
        "q8_0": WeightKind("Q8_0", "Q8_0", "Q8_0"),
    }
)
"""Named kinds. int8 and int4 are weight-only quantisation as torchao, AWQ and GPTQ have it:
embedding table and output projection stay in 16 bit. nf4 is that of bitsandbytes. mxfp4 is
gpt-oss's own: experts alone. The others are files of llama.cpp, whose head has 6 bits; norms and
biases always stay plain."""
_BETTER = ("v_proj", "down_proj")
_OF_LIBRARIES = ("int8", "int4", "nf4")

BLOCKS: Mapping[str, str] = MappingProxyType({"int8": "Q8_0", "int4": "Q4_1"})
"""Layouts of int8 and int4 on a CPU, where the engine multiplies blocks. Of the layouts of 4 bits
Q4_1 errs least where values are rounded to the nearest: .078 of the root mean square of normal
weights, Q4_0 .086, IQ4_NL .080."""
HEAD_BLOCKS = "Q8_0"
"""Of the output projection there: its rounding moves every token."""
STORED = ("awq", "compressed-tensors", "gptq", "mxfp4")
"""Methods whose checkpoints go into blocks on a CPU, by `stored_checkpoint` or `stored_experts`."""


def weight_kind(name: str, device: str | None = None) -> WeightKind:
    """The kind of that name.

    Args:
        device: where the weights would be, in words; None where that does not matter.

    Raises:
        ConfigError: there is none, or it is a GGUF file's and not for that device.
    """
    if name not in WEIGHT_KINDS:
        raise unknown_name("weights", name, WEIGHT_KINDS)
    kind = WEIGHT_KINDS[name]
    if device == "cpu" and name in BLOCKS:
        return WeightKind(BLOCKS[name], HEAD_BLOCKS)
    if kind.linear in PACKED_KINDS and device not in (None, "cpu"):
        raise ConfigError(
            f"weights='{name}' is of GGUF files, which are multiplied on the CPU, got device "
            f"'{device}'; plan for the CPU, or with weights='int4' or 'int8'"
        )
    # The libraries of a GPU leave experts plain, whose matrices are no linear layers.
    return replace(kind, linear_only=True) if name in _OF_LIBRARIES and device else kind


def kind_of_checkpoint(config: PreTrainedConfig, device: str | None = None) -> WeightKind | None:
    """The kind that a checkpoint's weights have once they are loaded; None for plain.

    Args:
        device: as of `weight_kind`.

    Raises:
        ConfigError: its configuration says one whose bytes are not known here.
    """
    told: Any = getattr(config, "quantization_config", None)
    if told is None:
        return None
    said: Mapping[str, Any] = told if isinstance(told, Mapping) else told.to_dict()
    method, bits = said.get("quant_method"), said.get("bits")
    if device == "cpu" and method in STORED:
        from hybrid_kv.models.stored_codes import UnfitError, stored_layout

        with suppress(UnfitError):  # which its library would read
            return WeightKind(stored_layout(said).kind)
    if method == "compressed-tensors":  # unpacked while they are read
        return None
    if method == "bitsandbytes":
        return WEIGHT_KINDS["nf4" if said.get("load_in_4bit") else "int8"]
    if method == "mxfp4":
        return WEIGHT_KINDS["mxfp4"]
    if method == "torchao":
        bits = _bits_of_torchao(said)
    if method in ("awq", "gptq", "torchao") and bits in (4, 8):
        return WEIGHT_KINDS[f"int{bits}"]
    raise ConfigError(
        f"the checkpoint's weights are packed by '{method}', whose bytes are not known here; name "
        f"the nearest kind as weights, one of {', '.join(WEIGHT_KINDS)}"
    )


def _bits_of_torchao(said: Mapping[str, Any]) -> int | None:
    """Bits of torchao's weight-only kinds, from the name of their configuration."""
    name = said.get("quant_type", {}).get("default", {}).get("_type", "")
    return {"Int4WeightOnlyConfig": 4, "Int8WeightOnlyConfig": 8}.get(name)


def stored_weights(model: PreTrainedModel, kind: WeightKind | None) -> Iterator[StoredWeight]:
    """Size of each parameter of a model in a kind; in the model's own dtypes for None."""
    head = getattr(model.get_output_embeddings(), "weight", None)
    for target, weight in model.named_parameters():
        owner = model.get_submodule(target.rpartition(".")[0])
        for layout, share in _layouts(target, weight, owner, kind, is_head=weight is head):
            if layout is None:
                plain = str(weight.dtype).removeprefix("torch.")
                yield StoredWeight(target, plain, weight.nbytes)
            else:
                name, size = _packed(layout, weight.shape)
                yield StoredWeight(target, name, round(share * size))


def read_share(model: PreTrainedModel, target: str) -> float:
    """The share of a parameter that one token reads: of an embedding table that is no output
    projection next to nothing, of a mixture's experts those that it is routed to.
    """
    weight = model.get_parameter(target)
    owner = model.get_submodule(target.rpartition(".")[0])
    head = getattr(model.get_output_embeddings(), "weight", None)
    if isinstance(owner, nn.Embedding) and weight is not head:
        return 0.0
    return _routed_share(model.config.get_text_config(decoder=True)) if _experts(target) else 1.0


def _layouts(
    target: str, weight: nn.Parameter, owner: nn.Module, kind: WeightKind | None, *, is_head: bool
) -> list[tuple[str | None, float]]:
    """Layouts of a parameter, each with the share of parameters of its role that have it."""
    if kind is None:
        return [(None, 1.0)]
    if is_head:
        return [(kind.head, 1.0)]
    if isinstance(owner, nn.Embedding):
        return [(kind.table, 1.0)]
    is_expert = _experts(target) and weight.ndim == 3 and not kind.linear_only
    is_linear = isinstance(owner, nn.Linear) and weight.ndim == 2 and not kind.experts_only
    if not is_expert and not is_linear:
        return [(None, 1.0)]
    if kind.better is not None and any(name in target.split(".") for name in _BETTER):
        return [(kind.better, kind.better_share), (kind.linear, 1 - kind.better_share)]
    return [(kind.linear, 1.0)]


def _packed(layout: str, shape: torch.Size) -> tuple[str, int]:
    """The layout that rows of a length have, and the bytes of all of them."""
    rows, columns = shape[:-1].numel(), shape[-1]
    if layout in _NARROW_ROWS and columns % _LAYOUTS[layout].values:
        layout = _NARROW_ROWS[layout]
    values, block = _LAYOUTS[layout]
    return layout, rows * (columns + block if not values else -(-columns // values) * block)


def _experts(target: str) -> bool:
    return "experts" in target.split(".")


def _routed_share(config: PreTrainedConfig) -> float:
    """Experts that a token is routed to, of all; 1 where the configuration does not say."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    count = next((found for name in names if (found := getattr(config, name, None))), None)
    routed = getattr(config, "num_experts_per_tok", None)
    return 1.0 if not count or not routed else min(1.0, routed / count)


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
