"""The search by codes: a limit from a sample, what lies above it, and the exact scores of that.

Seven launches whatever is found. Counts and limits stay on the device, grids follow from room and
not from length, so the launches can be recorded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_kv.ops.devices import on
from hybrid_kv.ops.sketch_select import DeviceCodes, sampled_share
from hybrid_kv.ops.triton._common import padded
from hybrid_kv.ops.triton.sketch_limit import rank_limit
from hybrid_kv.ops.triton.sketch_query import quantise
from hybrid_kv.ops.triton.sketch_rank import exact_scores
from hybrid_kv.ops.triton.sketch_scan import find_recent, scan
from hybrid_kv.types import Candidates


def find(
    by: DeviceCodes, q: Tensor, k: Tensor, *, new: int, width: int, times: float = 1.0
) -> Candidates:
    """See `sketch_select.find`."""
    heads, rows, _ = q.shape
    q, device = q.contiguous(), q.device
    ids = torch.empty(heads, new, width, dtype=torch.int32, device=device)
    count = torch.empty(heads, new, dtype=torch.int32, device=device)
    with on(q):
        codes, scales = quantise(by, q)
        sample = torch.empty(heads, rows, by.num_samples, dtype=torch.float32, device=device)
        empty = torch.empty(0, dtype=torch.float32, device=device)
        scan(by, q, codes, scales, empty, sample, ids, count, new=new, is_sample=True)
        limit = rank_limit(sample, by.wanted, sampled_share(by, times))
        _prepare(by, limit, ids, count, rows=rows, new=new)
        scan(by, q, codes, scales, limit, empty, ids, count, new=new, is_sample=False)
        find_recent(by, q, scales, limit, ids, count, new=new)
        scores = exact_scores(q, k, ids, lost=(count, by.lost))
    return Candidates(ids, scores)


def _prepare(
    by: DeviceCodes, limit: Tensor, ids: Tensor, count: Tensor, *, rows: int, new: int
) -> None:
    """Empties the lists of candidates; where all keys have room in one there is no limit."""
    heads, _, width = ids.shape
    _prepare_kernel[(heads * new,)](
        limit,
        by.state,
        count,
        ids,
        rows // new,
        new,
        WIDTH=width,
        BLOCK=padded(width),
        GROUP=padded(rows // new),
    )


@triton.jit
def _prepare_kernel(
    limit,
    state,
    count,
    ids,
    group,
    new,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Empties a list of candidates; where all keys have room in it there is no limit."""
    list_ = tl.program_id(0).to(tl.int64)
    head, token = list_ // new, list_ % new
    places = tl.arange(0, BLOCK)
    tl.store(ids + list_ * WIDTH + places, tl.full((BLOCK,), -1, tl.int32), mask=places < WIDTH)
    tl.store(count + list_, 0)
    member = tl.arange(0, GROUP)
    # A bound rather than a mask of one value: the interpreter widens that to integers.
    bound = tl.where(tl.load(state) <= WIDTH, group, 0)
    at = (head * group + member) * new + token
    tl.store(limit + at, tl.full((GROUP,), -float("inf"), tl.float32), mask=member < bound)
