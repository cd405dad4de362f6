"""One decode step of one layer: what it works with, partial results over parts of the entries and
their exact merge, and why it is not made in the fastest way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from hybrid_kv.errors import ShapeError
from hybrid_kv.ops import Ops
from hybrid_kv.store import LayerStore, Retrieved, Row
from hybrid_kv.transfer import Executor
from hybrid_kv.types import PartialAttention, SearchResult, TokenBudget, Work
from hybrid_kv.watch.phases import Phases

if TYPE_CHECKING:
    from hybrid_kv.runtime.look_ahead_state import LookAheadResults

ColdBudget: TypeAlias = TokenBudget | Literal["all"]
Found: TypeAlias = dict[int, tuple[TokenBudget, Retrieved]]
"""By row what a step has retrieved, and under which budget."""


@dataclass(slots=True)
class Step:
    """One step of one layer: its means, its queries, and where it counts what it did.

    q: [B, Hq, T, D]. new: T. at_home: whether the host searches where the queries lie, so that
    nothing travels. found: takes what was retrieved, where somebody looks at it. ahead: what was
    searched before q was known. asked: what the search of the first extent of the only row finds,
    where it was asked together with other caches. unstored: k, v [B, Hkv, T, D] of the new tokens
    until the layer stores them.
    """

    ops: Ops
    executor: Executor
    phases: Phases
    work: Work
    layer: LayerStore
    q: Tensor
    new: int
    scale: float
    softcap: float | None
    at_home: bool
    found: Found | None = None
    ahead: LookAheadResults | None = None
    asked: SearchResult | None = None
    unstored: tuple[Tensor, Tensor] | None = None
    _grouped: Tensor | None = None

    @property
    def grouped(self) -> Tensor:
        """The queries as [B, Hkv, M, D], M = G * T with row g * T + t."""
        if self._grouped is None:
            q = self.q
            self._grouped = q.reshape(len(q), self.layer.shape.num_kv_heads, -1, q.shape[3])
        return self._grouped

    @property
    def row_bytes(self) -> int:
        """Bytes of the key and the value of an entry of one KV head."""
        return 2 * self.layer.shape.head_dim * self.layer.resident.pool.dtype.itemsize

    def query_positions(self, row: int) -> Tensor:
        """[T]; every new token of a decode step is a real one."""
        end = self.layer.rows[row].length
        return torch.arange(end - self.new, end, device=self.q.device)


def name_of_new(layer_idx: int) -> str:
    """Name of the new keys and values of a layer, for an error."""
    return f"keys and values of layer {layer_idx}"


def stacked(rows: Sequence[PartialAttention]) -> PartialAttention:
    """The rows' parts as one part of a batch."""
    if len(rows) == 1:
        return PartialAttention(rows[0].out[None], rows[0].lse[None])
    return PartialAttention(
        torch.stack([part.out for part in rows]), torch.stack([part.lse for part in rows])
    )


# What is read, and counted ------------------------------------------------------------------------


def pinned_pages(row: Row, new: int) -> tuple[int, int]:
    """Counts of pages that a step of `new` tokens reads at the table's start and end."""
    place, pages, size = row.placement, len(row.table.pages), row.page_size
    sinks = place.sink_tokens // size if place is not None else 0
    window = place.window_tokens if place is not None else 0
    # The window of the first new token, and the later ones: all see themselves and each other.
    recent = max(1, window) + new - 1
    tail = 1 + -(-max(0, recent - row.table.tail_fill) // size)
    return min(sinks, pages), min(tail, pages)


def reads_all(budget: ColdBudget | None, stored: int) -> bool:
    """Whether a budget is for all stored entries, so that nothing has to be chosen."""
    return budget is not None and (budget == "all" or budget.top_k >= stored)


def count_cold(work: Work, entries: int, most: int) -> None:
    """Books cold entries attended by all query heads of a row together, and by one at most."""
    work.attended += entries
    work.retrieved += entries
    work.most_retrieved = max(work.most_retrieved, most)


# Why a step is not made in the fastest way --------------------------------------------------------


class PlanReason(NamedTuple):
    """Reason why a step is no single call. code: one of a fixed set; text: in words."""

    code: str
    text: str


@dataclass(slots=True)
class GraphUse:
    """Record of the last forward as one graph.

    reason: why it was not a replay; None where it was. captures, replays: so far.
    """

    reason: PlanReason | None = None
    captures: int = 0
    replays: int = 0

    def describe(self) -> dict[str, Any]:
        """JSON-ready."""
        code, text = self.reason or ("", "")
        counts = {"captures": self.captures, "replays": self.replays}
        return {"code": code, "reason": text, **counts}


def group_queries(q: Tensor, num_kv_heads: int) -> Tensor:
    """[B, Hq, T, D] -> [B, Hkv, M, D], M = G * T with row g * T + t; a view where q allows it."""
    batch, num_q_heads, new, dim = q.shape
    if num_q_heads % num_kv_heads:
        raise ShapeError(
            f"query heads must be a multiple of the {num_kv_heads} KV heads, got {num_q_heads}"
        )
    return q.reshape(batch, num_kv_heads, num_q_heads // num_kv_heads * new, dim)


def attend(
    ops: Ops,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    bias: Tensor | None = None,
) -> PartialAttention:
    """Every grouped query over every entry of its KV head.

    Args:
        q: [B, Hkv, M, D].
        k, v: [B, Hkv, N, D]; N = 0 gives an empty part.
        bias: additive logits, broadcastable to [B, Hkv, M, N].
    """
    if k.shape[2] == 0:
        return empty_partial(q)
    return ops.attend(q, k, v, scale=scale, bias=bias, softcap=softcap)


def attend_causal(
    ops: Ops, q: Tensor, k: Tensor, v: Tensor, *, scale: float, softcap: float | None = None
) -> PartialAttention:
    """The newest T positions over all N, each up to itself.

    Args:
        q: [B, Hq, T, D].
        k, v: [B, Hkv, N, D] oldest first, N >= T.

    Returns:
        out [B, Hq, T, D], lse [B, Hq, T].
    """
    new, stored = q.shape[2], k.shape[2]
    if stored < new:
        raise ShapeError(f"k must hold the {new} new positions at least, got {stored}")
    if new == 1:  # nothing is hidden from the newest token
        grouped = group_queries(q, k.shape[1])
        out, lse = ops.attend(grouped, k, v, scale=scale, softcap=softcap)
        return PartialAttention(out.reshape(q.shape), lse.reshape(q.shape[:3]))
    return ops.attend_causal(q, k, v, scale=scale, softcap=softcap)


def merge_partials(
    parts: Sequence[PartialAttention],
    *,
    dtype: torch.dtype | None = None,
    ops: Ops | None = None,
) -> PartialAttention:
    """Attention over the union of disjoint parts.

    The parts must not share an entry; who names the parts answers for that.

    Args:
        parts: at least one; out [..., D] of any float dtype, lse [...] natural log, -inf where a
            part is empty.
        dtype: of out; that of the first part if None.
        ops: what computes it; the best back end if None.

    Returns:
        out [..., D] in `dtype`, computed in float32; lse [...] float32. Merging only empty parts
        gives an empty part, never NaN.

    Raises:
        ShapeError: no parts, or parts of different shapes.
    """
    if not parts:
        raise ShapeError("parts must hold at least one partial attention, got none")
    first = parts[0]
    dtype = dtype or first.out.dtype
    if len(parts) == 1:
        return PartialAttention(first.out.to(dtype), first.lse)
    for part in parts:
        if part.out.shape != first.out.shape or part.lse.shape != part.out.shape[:-1]:
            raise ShapeError(
                f"parts must have out {tuple(first.out.shape)} and lse without its last axis, "
                f"got out {tuple(part.out.shape)} and lse {tuple(part.lse.shape)}"
            )
    return (ops or Ops()).merge(parts, dtype)


def empty_partial(like: Tensor) -> PartialAttention:
    """The part that changes nothing when merged, for queries `like` [..., D]."""
    lse = torch.full(like.shape[:-1], -torch.inf, dtype=torch.float32, device=like.device)
    return PartialAttention(torch.zeros_like(like), lse)


def apply_sink(part: PartialAttention, sink_logits: Tensor) -> Tensor:
    """Output with one learned sink logit per query head in the softmax denominator (gpt-oss).

    Args:
        part: out [B, Hq, T, D], lse [B, Hq, T], already merged.
        sink_logits: [Hq], natural-log units.
    """
    keep = torch.sigmoid(part.lse - sink_logits.float()[None, :, None])
    return part.out * keep[..., None].to(part.out.dtype)
