"""Where a prompt's hidden states wait between two layers: beside the weights, or in host memory.

Between its layers a prompt is one tensor of full length: 8 GiB at 1M tokens of Llama-3-8B, which a
card of 24 GB does not have beside the weights and a layer's keys and values. Nobody needs all of it
at once, so it may lie in pinned host memory, from where each chunk goes to the weights and back:
twice its bytes over the bus for each layer, little beside attention to so many keys.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hybrid_kv.store.memory import allocate

StatesPlace: TypeAlias = Literal["auto", "device", "host"]

_SHARE = 2 / 3
"""Of the free device memory, for what has a prompt's full length; the rest is for chunks, for what
stays of layers that are done, and for what the allocator cannot use."""


def lie_on_host(setting: StatesPlace, states: int, layer_kv: int, free: int) -> bool:
    """Whether a prompt's hidden states lie in host memory, and a layer leaves before the next.

    Args:
        states: bytes of the hidden states. layer_kv: of K and V of the widest layer, of which
            there are two where layers overlap. free: of the device, beside the weights.
    """
    if setting == "auto":
        return states + 2 * layer_kv > _SHARE * free
    return setting == "host"


def host_states(like: Tensor, num_tokens: int) -> Tensor:
    """An empty tensor [B, num_tokens, width] in host memory for pieces like [B, T, width].

    Raises:
        CapacityError: host memory does not suffice.
    """
    rows, _, width = like.shape
    size, host = (rows, num_tokens, width), torch.device("cpu")
    return allocate(size, like.dtype, host, pinned=like.device.type == "cuda")


def bring(value: Any, device: torch.device) -> Any:
    """Tensors, those in tuples too, on `device`; all else as it is."""
    if isinstance(value, tuple):
        return tuple(bring(item, device) for item in value)
    # Copies and what reads them are in the order of one stream.
    return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value


def put(states: Tensor, start: int, piece: Tensor) -> None:
    """Writes a piece [B, T, width] to host states; they are there after `arrived`."""
    states[:, start : start + piece.shape[1]].copy_(piece, non_blocking=True)


def arrived(device: torch.device) -> None:
    """Returns when all that was put has arrived from `device`: the host may read it."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def free_bytes(device: torch.device) -> int:
    """Memory of a CUDA device for tensors: what nobody has, and what torch keeps ready."""
    free = int(torch.cuda.mem_get_info(device)[0])
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def token_table(model: nn.Module, owner: nn.Module) -> nn.Embedding | None:
    """The embeddings that begin the only stack of decoder layers, from which states can go to the
    host; None where something is added to them, or the weights lie on several devices.
    """
    tables = [child for child in owner.children() if isinstance(child, nn.Embedding)]
    devices = {weight.device for weight in model.parameters()}
    if not isinstance(model, PreTrainedModel) or len(tables) != 1 or len(devices) != 1:
        return None
    return tables[0] if tables[0] is model.get_input_embeddings() else None
