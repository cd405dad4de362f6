"""Lists of candidates: one for each KV head and token, with the best of all that were found."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid_kv.ops.sketch_select import DeviceCodes
from hybrid_kv.ops.triton._common import padded

_ELEMENTS = 4096
"""Scores of a group that are looked at together."""


class Lists(NamedTuple):
    """Candidates as they are found, in whatever order programs run.

    ids: [Hkv, T, width] int32, the first of them. counts: [Hkv, T] int32, how many there are.
    rows: [Hkv, T, capacity] int32, all of them. scores: [Hkv, M, capacity] float32, theirs.
    """

    ids: Tensor
    counts: Tensor
    rows: Tensor
    scores: Tensor

    @classmethod
    def of(cls, by: DeviceCodes, num_queries: int, new: int, width: int) -> Lists:
        """Memory of undefined content, with room for every key."""
        heads, capacity, device = len(by.codes), keys_in(by), by.codes.device
        return cls(
            torch.empty(heads, new, width, dtype=torch.int32, device=device),
            torch.empty(heads, new, dtype=torch.int32, device=device),
            torch.empty(heads, new, capacity, dtype=torch.int32, device=device),
            torch.empty(heads, num_queries, capacity, dtype=torch.float32, device=device),
        )

    @property
    def width(self) -> int:
        return self.ids.shape[2]

    @property
    def capacity(self) -> int:
        return self.rows.shape[2]


def keys_in(by: DeviceCodes) -> int:
    """Keys that there may be."""
    return by.codes.shape[1] + by.recent.shape[1]


def empty(by: DeviceCodes, limit: Tensor, lists: Lists) -> None:
    """Empties the lists; where all keys have room in one there is no limit."""
    heads, new, width = lists.ids.shape
    group = limit.shape[1] // new
    _empty_kernel[(heads * new,)](
        limit,
        by.state,
        lists.counts,
        lists.ids,
        group,
        new,
        WIDTH=width,
        BLOCK=padded(width),
        GROUP=padded(group),
    )


def keep_best(lists: Lists) -> None:
    """Where more was found than a list is wide, its ids become the best of each query: see
    `sketch_select.best_of_each`. Which they are hangs on no order in which programs ran.
    """
    heads, new, width = lists.ids.shape
    group = lists.scores.shape[1] // new
    _best_kernel[(heads * new,)](
        *lists,
        lists.capacity,
        new,
        WIDTH=width,
        GROUP=group,
        BLOCK_ROWS=padded(group),
        BLOCK=max(16, _ELEMENTS // padded(group)),
        num_warps=8,
    )


@triton.jit
def _empty_kernel(
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


@triton.jit
def _in_order(rows, scores, queries, members, places, found, capacity):
    """[BLOCK_ROWS, BLOCK] as `sketch_select.in_order` has it, -1 for what there is not; and rows.

    Args:
        rows: of the list. scores: of all queries.
    """
    there = places < found
    row = tl.load(rows + places, mask=there, other=0).to(tl.int64)
    real = members[:, None] & there[None, :]
    score = tl.load(scores + queries[:, None] * capacity + places[None, :], mask=real, other=0.0)
    bits = score.to(tl.int32, bitcast=True)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648
    return tl.where(real, ordered * 2147483648 + (2147483647 - row)[None, :], -1), row


@triton.jit
def _best_kernel(
    ids,
    count,
    rows,
    scores,
    capacity,
    new,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Finds bit by bit where the best of each query end, fewer and fewer until all have room."""
    list_ = tl.program_id(0).to(tl.int64)
    head, token = list_ // new, list_ % new
    member = tl.arange(0, BLOCK_ROWS)
    members, queries = member < GROUP, (head * GROUP + member) * new + token
    found = tl.load(count + list_)
    rows += list_ * capacity
    last = tl.zeros((BLOCK_ROWS,), tl.int64)
    number, kept = WIDTH + 0, found
    while kept > WIDTH:
        last = tl.zeros((BLOCK_ROWS,), tl.int64)
        for step in range(63):
            tried = last + (tl.full((), 4611686018427387904, tl.int64) >> step)
            reach = tl.zeros((BLOCK_ROWS,), tl.int32)
            for begin in range(0, found, BLOCK):
                places = begin + tl.arange(0, BLOCK)
                order, _ = _in_order(rows, scores, queries, members, places, found, capacity)
                reach += tl.sum((order >= tried[:, None]).to(tl.int32), 1)
            last = tl.where(reach >= number, tried, last)
        kept = kept * 0
        for begin in range(0, found, BLOCK):
            places = begin + tl.arange(0, BLOCK)
            order, _ = _in_order(rows, scores, queries, members, places, found, capacity)
            kept += tl.sum(tl.max((order >= last[:, None]).to(tl.int32), 0), 0)
        number = tl.maximum(number // 2, WIDTH // GROUP)
    if found > WIDTH:
        listed = found * 0
        for begin in range(0, found, BLOCK):
            places = begin + tl.arange(0, BLOCK)
            order, row = _in_order(rows, scores, queries, members, places, found, capacity)
            best = tl.max((order >= last[:, None]).to(tl.int32), 0)
            place = listed + tl.cumsum(best, 0) - 1
            tl.store(ids + list_ * WIDTH + place, row.to(tl.int32), mask=best > 0)
            listed += tl.sum(best, 0)
        for begin in range(0, WIDTH, BLOCK):  # there may be room left
            places = begin + tl.arange(0, BLOCK)
            behind = (places >= listed) & (places < WIDTH)
            tl.store(ids + list_ * WIDTH + places, tl.full((BLOCK,), -1, tl.int32), mask=behind)
