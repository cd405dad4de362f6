"""Kernels against their definitions, on the device and at the sizes of a decode step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_check.pools import normal, pool
from benchmarks.gpu_check.record import Recorder
from benchmarks.gpu_check.sizes import Sizes
from hybrid_kv.ops import Ops, get_ops
from hybrid_kv.types import HIDDEN, PartialAttention

_PAGES = (1, 7, 43)
_NEW = (1, 4, 16)


def measure(record: Recorder, sizes: Sizes, settings: dict[str, Any]) -> None:
    device = torch.device(settings["device"])
    works: dict[str, Callable[..., dict[str, Any]]] = {
        "attend": attend,
        "merge": merge,
        "append and digests": append,
        "nearest keys": nearest,
    }
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for name, work in works.items():
            what = f"{name} against its definition"
            record.measure(what, partial(work, sizes, device, dtype), dtype=str(dtype))


def attend(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """1 to 43 pages, 1 to 16 new tokens, with a softcap, and with everything hidden."""
    ops, worst = get_ops("auto"), 0.0
    for count in _PAGES:
        pages = pool(sizes, count + 2, sizes.page_size, device)
        pages = pages._replace(k=pages.k.to(dtype), v=pages.v.to(dtype))
        for new in _NEW:
            q = normal((sizes.kv_heads, sizes.group * new, sizes.dim), dtype, device)
            slots = torch.arange(count, device=device).expand(sizes.kv_heads, new, -1)
            last = count * sizes.page_size
            for softcap, first in ((None, last - new), (30.0, last - new), (None, -new - 1)):
                at = torch.arange(first, first + new, device=device)
                fill = sizes.page_size
                both = [
                    one.attend_pages(
                        q, pages, slots, at, scale=0.1, softcap=softcap, tail_fill=fill
                    )
                    for one in (ops, Ops("reference"))
                ]
                worst = max(worst, _differ(both[0], both[1]))
    return {"largest_difference": worst, "served_by": ops.served["attend_pages"]}


def merge(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    ops = get_ops("auto")
    shape = (1, sizes.kv_heads, sizes.group, sizes.dim)
    empty = PartialAttention(
        torch.zeros(shape, dtype=dtype, device=device),
        torch.full(shape[:-1], -torch.inf, device=device),
    )
    some = PartialAttention(normal(shape, dtype, device), normal(shape[:-1], torch.float32, device))
    cases = [[some, some], [some, empty], [empty, empty], [empty, some, some]]
    worst = max(_differ(ops.merge(c, dtype), Ops("reference").merge(c, dtype)) for c in cases)
    return {"largest_difference": worst, "served_by": ops.served["merge"]}


def append(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """A page is filled token by token; its digest follows."""
    ops, worst = get_ops("auto"), 0.0
    made = pool(sizes, 3, sizes.page_size, device)
    bounds = [made.k.new_zeros(sizes.kv_heads, 3, sizes.dim, dtype=dtype) for _ in range(2)]
    pages = made._replace(
        **{"k": made.k.to(dtype), "v": made.v.to(dtype)},
        **{"positions": torch.full_like(made.positions, HIDDEN)},
        **{"key_min": bounds[0], "key_max": bounds[1]},
    )
    exact = type(pages)(*(t if t is None else t.clone() for t in pages))
    for place in range(sizes.page_size, 2 * sizes.page_size):
        k, v = (normal((sizes.kv_heads, 1, sizes.dim), dtype, device) for _ in "kv")
        for target, one in ((pages, ops), (exact, Ops("reference"))):
            one.append(target, k, v, range(place, place + 1), place)
    for mine, defined in zip(pages, exact, strict=True):
        assert mine is not None
        assert defined is not None
        worst = max(worst, float((mine[..., 1, :].double() - defined[..., 1, :]).abs().max()))
    return {"largest_difference": worst, "served_by": ops.served["append"]}


def nearest(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Found keys may differ where scores are equal; their scores may not."""
    ops = get_ops("auto")
    q = normal((sizes.kv_heads, sizes.reference_queries, sizes.dim), dtype, device)
    keys = normal((sizes.kv_heads, min(sizes.keys, 2**14) + 5, sizes.dim), dtype, device)
    found = ops.nearest_keys(q, keys, sizes.nearest)
    every = torch.matmul(q.float(), keys.float().transpose(1, 2))
    best = every.topk(sizes.nearest).values
    scores = every.gather(-1, found.long()).sort(descending=True).values
    worst = float((scores - best).abs().max() / best.abs().max())
    return {"largest_difference": worst, "served_by": ops.served["nearest_keys"]}


def _differ(one: PartialAttention, other: PartialAttention) -> float:
    """The largest difference of outputs; log-sum-exps must be infinite at the same places."""
    if not torch.equal(one.lse.isinf(), other.lse.isinf()):
        raise ValueError("log-sum-exps are infinite at different places")
    pairs: list[tuple[Tensor, Tensor]] = [(one.out, other.out), (one.lse, other.lse)]
    return max(float((a.double() - b.double()).nan_to_num(0, 0, 0).abs().max()) for a, b in pairs)
