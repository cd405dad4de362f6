"""How fast the host reads keys and values at random places, with huge pages and without.

One job a number of threads, which the engine's pool takes from HYBRID_KV_THREADS when it starts.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_check.record import NotHere, Recorder
from benchmarks.gpu_check.sizes import Sizes
from benchmarks.gpu_check.timing import timed
from hybrid_kv.ops import get_ops
from hybrid_kv.ops.host_memory import host_array

_HALF = torch.bfloat16


def measure(record: Recorder, sizes: Sizes, settings: dict[str, Any]) -> None:
    for name, allocate in (("huge pages", host_array), ("small pages", small_pages)):
        record.measure(
            f"host gather, {name}",
            partial(gathered, sizes, allocate),
            rows=sizes.host_rows,
            row_bytes=sizes.dim * _HALF.itemsize,
        )


def gathered(sizes: Sizes, allocate: Callable[..., Tensor]) -> dict[str, Any]:
    """Attention of one query a head over rows of its own: every row is a key and a value."""
    heads, rows, dim = sizes.kv_heads, sizes.host_rows, sizes.dim
    k, v = (allocate((heads, rows, dim), _HALF).fill_(1) for _ in "kv")
    random = torch.Generator().manual_seed(0)
    lists = [
        torch.randint(rows, (heads, 1, sizes.host_ids), generator=random)
        for _ in range(sizes.rounds)
    ]
    ops, q = get_ops("auto"), torch.ones(heads, 1, dim, dtype=_HALF)
    calls = [partial(ops.attend_retrieved, q, k, v, ids, scale=1.0) for ids in lists]
    values = timed(calls, torch.device("cpu"), rounds=sizes.rounds, least=sizes.calls)
    read = 2 * heads * sizes.host_ids
    return {
        **values,
        "gbps": read * dim * _HALF.itemsize / values["us"] / 1e3,
        "ns_per_row": 1e3 * values["us"] / read,
        "served_by": ops.served["attend_retrieved"],
    }


def small_pages(size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A host tensor whose pages the system is told not to make large."""
    if not hasattr(mmap, "MADV_NOHUGEPAGE"):
        raise NotHere("this system cannot be told to use small pages")
    count = dtype.itemsize
    for extent in size:
        count *= extent
    pages = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    except OSError as error:
        raise NotHere(f"this system cannot be told to use small pages: {error}") from None
    return torch.frombuffer(pages, dtype=dtype).view(*size)
