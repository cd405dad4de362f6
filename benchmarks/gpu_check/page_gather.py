"""Pages picked from host memory by a kernel that reads them over the bus, at three page sizes."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from benchmarks.gpu_check.pools import host_pool, pool
from benchmarks.gpu_check.record import NotHere, Recorder, need_cuda
from benchmarks.gpu_check.sizes import Sizes
from benchmarks.gpu_check.timing import timed
from hybrid_kv.ops import get_ops


def measure(record: Recorder, sizes: Sizes, settings: dict[str, Any]) -> None:
    device = torch.device(settings["device"])
    for tokens in sizes.gathered_page_tokens:
        piece = tokens * sizes.dim * sizes.dtype.itemsize
        for pinned in (True, False):
            record.measure(
                "page gather",
                partial(gathered, device, sizes, tokens, pinned),
                piece_bytes=piece,
                pages_per_head=sizes.gathered_pages,
                pinned=pinned,
            )


def gathered(device: torch.device, sizes: Sizes, page_size: int, pinned: bool) -> dict[str, Any]:
    """Copies K and V of pages, each head's own, to the device."""
    page_bytes = 2 * sizes.kv_heads * page_size * sizes.dim * sizes.dtype.itemsize
    slots = max(sizes.gathered_pages, sizes.gather_source_bytes // page_bytes)
    if pinned:
        need_cuda(device)
    source = host_pool(sizes, slots, page_size, pinned)
    target = pool(sizes, sizes.gathered_pages, page_size, device)
    here = torch.arange(sizes.gathered_pages, device=device).expand(sizes.kv_heads, -1)
    lists = [
        torch.stack([torch.randperm(slots)[: sizes.gathered_pages] for _ in here]).to(device)
        for _ in range(4)
    ]
    ops = get_ops("auto")
    calls = [partial(ops.copy_pages, source, target, there, here) for there in lists]
    values = timed(calls, device, rounds=sizes.rounds, least=len(lists))
    served = ops.served["copy_pages"]
    if pinned and served != "triton":
        raise NotHere(f"pinned pages are read by Triton's kernel, and {served} served")
    size = page_bytes * sizes.gathered_pages
    return {**values, "gbps": size / values["us"] / 1e3, "served_by": served}
