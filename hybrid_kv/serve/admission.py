"""Admission: the memory that a request needs, and what is left beside that promised to others.

Until the end of its prompt a request has all keys and values where the model computes them; on a
GPU most of them are offloaded then, by its method.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from hybrid_kv.api.llm import LLM
from hybrid_kv.errors import DeviceMemoryError
from hybrid_kv.models.layer_major import free_bytes
from hybrid_kv.runtime import check_host_memory, spare_host_memory
from hybrid_kv.serve.requests import Request
from hybrid_kv.types import bytes_per_token

_SHARE = 0.9
"""Of a device's free memory; the rest is for what a piece of a prompt computes with."""


class RequestMemory(NamedTuple):
    """Bytes of a request when it is at its longest.

    host: keys, values and indexes. device: keys and values at the end of the prompt; 0 where the
    model computes on the host.
    """

    host: int
    device: int


def needed_bytes(llm: LLM, request: Request) -> RequestMemory:
    """Of the prompt and the longest answer."""
    runtime, total = llm.runtime, len(request.ids) + request.max_new_tokens
    host = total * runtime.bytes_per_token((request.config or llm.config).build(), total)
    if free_device_bytes(runtime.device) is None:
        return RequestMemory(host, 0)
    each = sum(bytes_per_token(shape, llm.model.dtype) for shape in runtime.info.layers)
    return RequestMemory(host, total * each)


def free_device_bytes(device: torch.device) -> int | None:
    """Free bytes of a device for tensors; None where the model computes on the host."""
    return free_bytes(device) if device.type == "cuda" else None


def fits(llm: LLM, needed: RequestMemory, coming: Sequence[RequestMemory]) -> bool:
    """Whether a request fits beside what others will take yet."""
    if needed.host > spare_host_memory(sum(each.host for each in coming)):
        return False
    free = free_device_bytes(llm.runtime.device)
    promised = sum(each.device for each in coming)
    return free is None or needed.device <= _SHARE * free - promised


def check(llm: LLM, needed: RequestMemory, held: RequestMemory, num_tokens: int) -> None:
    """Raises CapacityError unless so much is there when `held` is given back.

    Raises:
        CapacityError: the host has too little.
        DeviceMemoryError: the device has.
    """
    check_host_memory(needed.host - held.host, num_tokens)
    free = free_device_bytes(llm.runtime.device)
    if free is not None and needed.device - held.device > _SHARE * free:
        raise DeviceMemoryError(
            f"a prompt with its answer of {num_tokens} tokens needs {needed.device:,} bytes of GPU "
            f"memory until it is computed, of which {int(_SHARE * free + held.device):,} can be "
            "had; shorten it, or take a smaller model or fewer bits for its weights"
        )
