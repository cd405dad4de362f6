"""One new token attends some resident ones: torch's SDPA on dense keys, our back ends on pages."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.gpu_check.pools import in_turn, normal, pool
from benchmarks.gpu_check.record import NotHere, Recorder
from benchmarks.gpu_check.sizes import Sizes
from benchmarks.gpu_check.timing import gbps, timed
from hybrid_kv.ops import device_of, get_ops


def measure(record: Recorder, sizes: Sizes, settings: dict[str, Any]) -> None:
    device = torch.device(settings["device"])
    for tokens in sizes.decode_tokens:
        for by in settings["by"]:
            record.measure(
                f"decode attention, {by}",
                partial(attended, device, sizes, tokens, by),
                tokens=tokens,
            )


def attended(device: torch.device, sizes: Sizes, tokens: int, by: str) -> dict[str, Any]:
    size = 2 * sizes.kv_heads * tokens * sizes.dim * sizes.dtype.itemsize
    layers = in_turn(sizes, size)
    make = sdpa_calls if by == "sdpa" else paged_calls
    calls = make(device, sizes, tokens, layers, by)
    return {
        **gbps(timed(calls, device, rounds=sizes.rounds, least=sizes.calls), size),
        "layers_in_turn": layers,
    }


def sdpa_calls(device: torch.device, sizes: Sizes, tokens: int, layers: int, by: str) -> list[Any]:
    q = normal((1, sizes.q_heads, 1, sizes.dim), sizes.dtype, device)
    shape = (1, sizes.kv_heads, tokens, sizes.dim)
    pairs = [[normal(shape, sizes.dtype, device) for _ in "kv"] for _ in range(layers)]
    return [partial(F.scaled_dot_product_attention, q, k, v, enable_gqa=True) for k, v in pairs]


def paged_calls(device: torch.device, sizes: Sizes, tokens: int, layers: int, by: str) -> list[Any]:
    if by != "reference" and device_of(by) not in (None, device.type):
        raise NotHere(f"{by} serves another type of device than {device.type}")
    ops = get_ops(by)
    q = normal((sizes.kv_heads, sizes.group, sizes.dim), sizes.dtype, device)
    num_pages = tokens // sizes.page_size
    pools = [pool(sizes, num_pages, sizes.page_size, device) for _ in range(layers)]
    slots = torch.stack([torch.randperm(num_pages) for _ in range(sizes.kv_heads)])[:, None]
    slots, seen = slots.to(device), torch.tensor([tokens - 1], device=device)
    options = {"scale": sizes.dim**-0.5, "tail_fill": sizes.page_size}
    calls = [partial(ops.attend_pages, q, pages, slots, seen, **options) for pages in pools]
    calls[0]()
    if (served := ops.served["attend_pages"]) != by:
        raise NotHere(f"{by} has no kernel for this shape, {served} served")
    return calls
