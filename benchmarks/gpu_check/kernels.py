"""Kernels against their definitions on the host, at the sizes of a decode step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_check.device_select import SearchedLayer
from benchmarks.gpu_check.limits import ROUNDING, Difference, largest
from benchmarks.gpu_check.pools import host_pool, normal, pool
from benchmarks.gpu_check.record import Recorder
from benchmarks.gpu_check.sizes import Sizes
from hybrid_kv.ops import Ops, get_ops
from hybrid_kv.ops.tail import Tail
from hybrid_kv.runtime.select import CODE_BYTES
from hybrid_kv.types import HIDDEN, KEY_BLOCK, BlockMask, PagedKV, PartialAttention

_PAGES = (1, 7, 43)
_NEW = (1, 4, 16)
_CHUNK = (200, 733)
"""New tokens of a prompt and those before them."""
_WIDTH, _TOP_K = 64, 20
_EDGE = 0.02
"""Share of listed keys, or of codes, that may differ: those that lie on an edge within rounding."""
_MOST_KEYS = 2**14


def measure(record: Recorder, sizes: Sizes, settings: dict[str, Any]) -> None:
    device = torch.device(settings["device"])
    works: dict[str, Callable[..., dict[str, Any]]] = {
        "attend": attend,
        "attend blocks": attend_blocks,
        "merge": merge,
        "append and digests": append,
        "nearest keys": nearest,
        "unread": unread,
        "copy pages": copy,
    }
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for name, work in works.items():
            record.measure(name, partial(work, sizes, device, dtype), dtype=str(dtype))
    for size in CODE_BYTES:
        record.measure("sketch", partial(sketch, sizes, device, size), code_bytes=size)


def attend(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """1 to 43 pages, 1 to 16 new tokens, with a softcap, and with everything hidden."""
    ops, found = get_ops("auto"), list[PartialAttention]()
    exact = list[PartialAttention]()
    for count in _PAGES:
        pages = pool(sizes, count + 2, sizes.page_size, device)
        pages = pages._replace(k=pages.k.to(dtype), v=pages.v.to(dtype))
        for new in _NEW:
            q = normal((sizes.kv_heads, sizes.group * new, sizes.dim), dtype, device)
            slots = torch.arange(count, device=device).expand(sizes.kv_heads, new, -1)
            last = count * sizes.page_size
            for softcap, first in ((None, last - new), (30.0, last - new), (None, -new - 1)):
                at = torch.arange(first, first + new, device=device)
                options = {"scale": 0.1, "softcap": softcap, "tail_fill": sizes.page_size}
                found.append(ops.attend_pages(q, pages, slots, at, **options))
                there = _on_host(pages)
                given = (q.cpu(), there, slots.cpu(), at.cpu())
                exact.append(Ops("reference").attend_pages(*given, **options))
    return {**_compared(found, exact, dtype), "served_by": ops.served["attend_pages"]}


def attend_blocks(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """A chunk over half of the key blocks, none of them and all, with and without a softcap."""
    ops, found, exact = get_ops("auto"), list[PartialAttention](), list[PartialAttention]()
    new, old = _CHUNK
    q = normal((1, sizes.q_heads, new, sizes.dim), dtype, device)
    k, v = (normal((1, sizes.kv_heads, old + new, sizes.dim), dtype, device) for _ in "kv")
    tokens = 384 // sizes.group
    blocks = -(-new // tokens), (old + new) // KEY_BLOCK
    for share, softcap in ((0.5, None), (0.5, 30.0), (0.0, None), (1.0, None)):
        listed = torch.rand(1, sizes.kv_heads, *blocks, device=device) < share
        options = {"scale": 0.1, "softcap": softcap}
        found.append(ops.attend_blocks(q, k, v, BlockMask(listed, tokens), **options))
        there = BlockMask(listed.cpu(), tokens)
        exact.append(Ops("reference").attend_blocks(q.cpu(), k.cpu(), v.cpu(), there, **options))
    return {**_compared(found, exact, dtype), "served_by": ops.served["attend_blocks"]}


def merge(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    ops = get_ops("auto")
    shape = (1, sizes.kv_heads, sizes.group, sizes.dim)
    empty = PartialAttention(
        torch.zeros(shape, dtype=dtype, device=device),
        torch.full(shape[:-1], -torch.inf, device=device),
    )
    some = PartialAttention(normal(shape, dtype, device), normal(shape[:-1], torch.float32, device))
    cases = [[some, some], [some, empty], [empty, empty], [empty, some, some]]
    found = [ops.merge(case, dtype) for case in cases]
    exact = [
        Ops("reference").merge([PartialAttention(*(t.cpu() for t in one)) for one in case], dtype)
        for case in cases
    ]
    return {**_compared(found, exact, dtype), "served_by": ops.served["merge"]}


def append(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """A page is filled token by token; its digest follows."""
    ops = get_ops("auto")
    made = pool(sizes, 3, sizes.page_size, device)
    bounds = [made.k.new_zeros(sizes.kv_heads, 3, sizes.dim, dtype=dtype) for _ in range(2)]
    pages = made._replace(
        **{"k": made.k.to(dtype), "v": made.v.to(dtype)},
        **{"positions": torch.full_like(made.positions, HIDDEN)},
        **{"key_min": bounds[0], "key_max": bounds[1]},
    )
    exact = _on_host(pages)
    for place in range(sizes.page_size, 2 * sizes.page_size):
        k, v = (normal((sizes.kv_heads, 1, sizes.dim), dtype, device) for _ in "kv")
        ops.append(pages, k, v, range(place, place + 1), place)
        at = range(place, place + 1)
        Ops("reference").append(exact, k.cpu(), v.cpu(), at, place)
    pairs = zip(pages, exact, strict=True)
    worst = max(largest(a[..., 1, :], b[..., 1, :]) for a, b in pairs if a is not None is not b)
    return {"largest_difference": Difference(worst, 0), "served_by": ops.served["append"]}


def nearest(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Found keys may differ where scores are equal; their scores may not."""
    ops = get_ops("auto")
    q = normal((sizes.kv_heads, sizes.reference_queries, sizes.dim), dtype, device)
    keys = normal((sizes.kv_heads, min(sizes.keys, _MOST_KEYS) + 5, sizes.dim), dtype, device)
    found = ops.nearest_keys(q, keys, sizes.nearest).cpu()
    every = torch.matmul(q.double().cpu(), keys.double().cpu().transpose(1, 2))
    best = every.topk(sizes.nearest).values
    scores = every.gather(-1, found.long()).sort(descending=True).values
    worst = float((scores - best).abs().max() / best.abs().max())
    return {
        "largest_difference": Difference(worst, ROUNDING[dtype]),
        "served_by": ops.served["nearest_keys"],
    }


def unread(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """The estimate for what a search left: of the moments of all, and of what was attended."""
    ops, count = get_ops("auto"), min(sizes.keys, _MOST_KEYS)
    k, v = (normal((sizes.kv_heads, count, sizes.dim), torch.float32, device) for _ in "kv")
    q = normal((sizes.kv_heads, sizes.group, sizes.dim), dtype, device)
    scores = (q.float() @ k.mT).topk(_WIDTH).values
    limit = scores[..., _TOP_K - 1].contiguous()
    known, seen = Tail.of(k, v), torch.tensor(count, device=device)
    own, options = slice(0, _WIDTH), {"scale": sizes.dim**-0.5}
    found = ops.attend_unread(known, q, scores, limit, own, seen, **options)
    host = [t.cpu() for t in (q, scores, limit)]
    there = known.to(torch.device("cpu"))
    exact = Ops("reference").attend_unread(there, *host, own, seen.cpu(), **options)
    worst = {
        f"{name}_difference": Difference(largest(one, other), ROUNDING[torch.float32])
        for name, one, other in zip(found._fields, found, exact, strict=True)
    }
    return {**worst, "served_by": ops.served["attend_unread"]}


def copy(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Pages of the host, page-locked on a GPU, to pages of the device."""
    ops, count = get_ops("auto"), sizes.gathered_pages
    source = host_pool(sizes, 2 * count, sizes.page_size, device.type == "cuda")
    for tensor in (source.k, source.v):
        tensor.copy_(torch.randn(tensor.shape))
    source = source._replace(k=source.k, v=source.v)
    target = pool(sizes, count, sizes.page_size, device)
    there = torch.stack([torch.randperm(2 * count)[:count] for _ in range(sizes.kv_heads)])
    here = torch.arange(count).expand(sizes.kv_heads, -1)
    ops.copy_pages(source, target, there.to(device), here.to(device))
    heads = torch.arange(sizes.kv_heads)[:, None]
    worst = max(
        largest(one, other[heads, there])
        for one, other in ((target.k, source.k), (target.v, source.v))
    )
    return {"largest_difference": Difference(worst, 0), "served_by": ops.served["copy_pages"]}


def sketch(sizes: Sizes, device: torch.device, size: int) -> dict[str, Any]:
    """Codes, what they list, its exact scores, and attention over the best of it."""
    layer = SearchedLayer(sizes, device, size, most_keys=_MOST_KEYS)
    exact, ops = Ops("reference"), layer.ops
    codes = layer.codes.codes.clone()
    exact.encode_sketch(layer.codes, layer.near, 0)
    by_definition = layer.codes.codes.clone()
    ops.encode_sketch(layer.codes, layer.near, 0)
    unequal = float((layer.codes.codes != by_definition).float().mean())
    layer.codes.codes.copy_(codes)

    found, defined = layer.find(ops), layer.find(exact)
    k, q = layer.near.double().cpu(), layer.q.double().cpu()
    ids = found.ids[:, 0].long().cpu()
    keys = k.gather(1, ids.clamp_min(0)[..., None].expand(-1, -1, k.shape[-1]))
    scores = (q @ keys.mT).masked_fill((ids < 0)[:, None], 0)
    there = found.scores.double().cpu().nan_to_num(neginf=0)
    worst = largest(there, scores) / float(scores.abs().max())

    limit = ops.best_limit(found.scores, _TOP_K)
    attended = [one.attend_candidates(found, layer.v, limit, scale=0.1) for one in (ops, exact)]
    return {
        "codes_difference": Difference(unequal, _EDGE),
        "listed_difference": Difference(_unshared(found.ids, defined.ids), _EDGE),
        "scores_difference": Difference(worst, ROUNDING[sizes.dtype]),
        **_compared(attended[:1], attended[1:], sizes.dtype),
        "lost_candidates": int(layer.codes.lost.sum()),
        "served_by": ops.served.get("find_by_sketch"),
    }


def _unshared(one: Tensor, other: Tensor) -> float:
    """Share of listed keys [Hkv, T, C] that only one of two lists has; -1 is no key."""
    only = total = 0
    for mine, theirs in zip(one.flatten(0, 1).tolist(), other.flatten(0, 1).tolist(), strict=True):
        both = {*mine} - {-1}, {*theirs} - {-1}
        only += len(both[0] ^ both[1])
        total += len(both[0] | both[1])
    return only / max(1, total)


def _on_host(pages: PagedKV) -> PagedKV:
    return type(pages)(*(t if t is None else t.cpu().clone() for t in pages))


def _compared(
    found: list[PartialAttention], exact: list[PartialAttention], dtype: torch.dtype
) -> dict[str, Any]:
    """Outputs and log-sum-exps, the latter infinite at the same places.

    Raises:
        ValueError: they are infinite elsewhere.
    """
    outs, lses = [0.0], [0.0]
    for one, other in zip(found, exact, strict=True):
        mine, defined = one.lse.cpu(), other.lse.cpu()
        if not torch.equal(mine.isinf(), defined.isinf()):
            raise ValueError("log-sum-exps are infinite at different places")
        nowhere = mine.isinf()[..., None]
        outs.append(
            largest(one.out.cpu().masked_fill(nowhere, 0), other.out.cpu().masked_fill(nowhere, 0))
        )
        lses.append(largest(mine.nan_to_num(neginf=0), defined.nan_to_num(neginf=0)))
    return {
        "largest_difference": Difference(_worst(outs), ROUNDING[dtype]),
        "lse_difference": Difference(_worst(lses), ROUNDING[torch.float32]),
    }


def _worst(numbers: list[float]) -> float:
    """The largest; not-a-number if any is."""
    return float(torch.tensor(numbers).max())
