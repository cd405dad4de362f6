"""The search by codes: a limit from a sample, what lies above it, and the exact scores of that.

Eight launches whatever is found. Counts and limits stay on the device, grids follow from room and
not from length, so the launches can be recorded once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_kv.ops.devices import on
from hybrid_kv.ops.sketch_select import DeviceCodes, sampled_share
from hybrid_kv.ops.triton.sketch_limit import rank_limit
from hybrid_kv.ops.triton.sketch_lists import Lists, empty, keep_best, keys_in
from hybrid_kv.ops.triton.sketch_query import quantise
from hybrid_kv.ops.triton.sketch_rank import exact_scores
from hybrid_kv.ops.triton.sketch_scan import find_recent, scan
from hybrid_kv.types import Candidates

_LISTED_BYTES = 2**27
"""Of lists with room for every key; more tokens than fit are searched for some at a time."""


def find(
    by: DeviceCodes, q: Tensor, k: Tensor, *, new: int, width: int, times: float = 1.0
) -> Candidates:
    """See `sketch_select.find`."""
    group = q.shape[1] // new
    together = max(1, _LISTED_BYTES // (4 * (1 + group) * len(q) * keys_in(by)))
    if new <= together:
        return _find(by, q, k, new=new, width=width, times=times)
    each = q.unflatten(1, (-1, new)).split(together, 2)
    parts = [
        _find(by, some.flatten(1, 2), k, new=some.shape[2], width=width, times=times)
        for some in each
    ]
    scores = [
        part.scores.unflatten(1, (-1, some.shape[2]))
        for part, some in zip(parts, each, strict=True)
    ]
    return Candidates(
        torch.cat([part.ids for part in parts], 1), torch.cat(scores, 2).flatten(1, 2)
    )


def _find(
    by: DeviceCodes, q: Tensor, k: Tensor, *, new: int, width: int, times: float
) -> Candidates:
    heads, rows, _ = q.shape
    q, device = q.contiguous(), q.device
    lists = Lists.of(by, rows, new, width)
    with on(q):
        codes, scales = quantise(by, q)
        sample = torch.empty(heads, rows, by.num_samples, dtype=torch.float32, device=device)
        none = torch.empty(0, dtype=torch.float32, device=device)
        scan(by, q, codes, scales, none, sample, lists, new=new, is_sample=True)
        limit = rank_limit(sample, by.wanted, sampled_share(by, times))
        empty(by, limit, lists)
        scan(by, q, codes, scales, limit, none, lists, new=new, is_sample=False)
        find_recent(by, q, scales, limit, lists, new=new)
        keep_best(lists)
        scores = exact_scores(q, k, lists.ids, lost=(lists.counts, by.lost))
    return Candidates(lists.ids, scores)
