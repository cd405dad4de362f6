"""Page selection of a layer: the scores of all digests, and the best of them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from benchmarks.gpu_check.pools import in_turn, normal
from benchmarks.gpu_check.record import Recorder
from benchmarks.gpu_check.sizes import Sizes
from benchmarks.gpu_check.timing import gbps, timed
from hybrid_kv.ops import get_ops


def measure(record: Recorder, sizes: Sizes, settings: dict[str, Any]) -> None:
    device = torch.device(settings["device"])
    about = {"pages": sizes.scored_pages, "chosen": sizes.chosen_pages}
    for backend in ("auto", "reference"):
        record.measure(
            f"choose pages, {backend}",
            partial(chosen, device, sizes, backend),
            **about,
        )
    record.measure("top-k alone, torch", partial(top_k, device, sizes), **about)


def chosen(device: torch.device, sizes: Sizes, backend: str) -> dict[str, Any]:
    ops = get_ops(backend)
    size = 2 * sizes.kv_heads * sizes.scored_pages * sizes.dim * sizes.dtype.itemsize
    q = normal((sizes.kv_heads, sizes.group, sizes.dim), sizes.dtype, device)
    lows = [
        normal((sizes.kv_heads, sizes.scored_pages, sizes.dim), sizes.dtype, device)
        for _ in range(in_turn(sizes, size))
    ]
    shape = {"new": 1, "oldest": 2, "newest": 3, "count": sizes.chosen_pages}
    calls = [partial(ops.choose_pages, q, low, low + 1, **shape) for low in lows]
    values = gbps(timed(calls, device, rounds=sizes.rounds, least=sizes.calls), size)
    return {**values, "served_by": ops.served["choose_pages"]}


def top_k(device: torch.device, sizes: Sizes) -> dict[str, Any]:
    scores = normal((sizes.kv_heads, sizes.scored_pages), torch.float32, device)
    call = partial(scores.topk, sizes.chosen_pages, -1, sorted=False)
    return timed([call], device, rounds=sizes.rounds, least=sizes.calls)
