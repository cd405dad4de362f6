"""A layer's prompt and its evidence: queries that are collected for methods and indexes, and what
they weighed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from hybrid_kv.ops import Ops
from hybrid_kv.plugins import Placement
from hybrid_kv.rotary import Rotary, Samples
from hybrid_kv.runtime.step import attend, attend_causal, group_queries, merge_partials
from hybrid_kv.store import LayerStore, Row
from hybrid_kv.transfer import Executor
from hybrid_kv.types import Evidence, LayerShape, Needs, PartialAttention

if TYPE_CHECKING:
    from hybrid_kv.runtime.cache_context import CacheContext
    from hybrid_kv.runtime.sparse_prefill import SparsePrefill

_FEWEST = 64
"""Queries of a chunk that are attended if any are: by tiles, as all of them would be."""
_NOTED_TOKENS = 64
"""Queries of a chunk of a long later turn that are kept, spread evenly, to learn from."""


class EvidenceCollector:
    """Samples one row's queries evenly over a prompt whose length is not known in advance.

    Keeps every stride-th query and doubles the stride when twice the wanted number is held, so the
    sample stays even, deterministic and bounded.
    """

    def __init__(self, needs: Needs) -> None:
        self._needs = needs
        self._stride = 1
        self._seen = 0
        self._sampled: list[Tensor] = []
        self._last: list[Tensor] = []  # chunks, of which the first may have more than is needed
        self._sums: Tensor | None = None

    @property
    def wants_sums(self) -> bool:
        """Whether `add_masses` is to be called for what is observed."""
        return self._needs.column_sums

    def observe(self, q: Tensor) -> None:
        """Takes the queries [Hq, T, D] of the next T prompt tokens of the row."""
        count = q.shape[1]
        if self._needs.sampled_queries:
            first = -self._seen % self._stride
            self._sampled.append(q[:, first :: self._stride].clone())
            while sum(part.shape[1] for part in self._sampled) >= 2 * self._needs.sampled_queries:
                self._sampled = [
                    torch.cat(self._sampled, 1)[:, ::2].clone()
                ]  # a view would keep all
                self._stride *= 2
        if self._needs.last_queries:
            self._last.append(q[:, -self._needs.last_queries :].clone())
            held = sum(part.shape[1] for part in self._last)
            while held - self._last[0].shape[1] >= self._needs.last_queries:
                held -= self._last.pop(0).shape[1]
        self._seen += count

    def add_masses(self, sums: Tensor) -> None:
        """Adds the weights [Hq, N] that the queries observed last gave to all N keys so far."""
        if self._sums is not None:
            sums[:, : self._sums.shape[1]] += self._sums
        self._sums = sums

    def branch(self) -> EvidenceCollector:
        """One that has seen the same, and goes on alone."""
        other = copy(self)  # tensors are replaced, never written to
        other._sampled, other._last = list(self._sampled), list(self._last)
        return other

    def evidence(self, scale: float = 1.0, softcap: float | None = None) -> Evidence:
        """Evidence of what was seen so far, of queries whose scores become logits in this way."""
        sampled = torch.cat(self._sampled, 1) if self._sampled else None
        last = None
        if self._last:
            last = torch.cat(self._last, 1)[:, -self._needs.last_queries :].contiguous()
        count = 0 if sampled is None else sampled.shape[1]
        # After a halving the first sample is still position 0, and the stride the distance.
        positions = torch.arange(count) * self._stride
        return Evidence(self._seen, sampled, last, positions, self._sums, scale, softcap)


def note_queries(store: LayerStore, q: Tensor) -> None:
    """Lets indexes learn later from some queries of q [B, Hq, T, D], those of a long later turn."""
    count, heads = q.shape[2], store.shape.num_kv_heads
    step = max(1, count // _NOTED_TOKENS)
    some = range((count - 1) % step, count, step)
    for row in store.rows:
        indexes = [span.extent.index for span in row.chain.spans]
        known = [index.aging for index in indexes if index is not None]
        agings = [aging for aging in known if aging is not None]
        if not agings:
            continue
        asked = q[row.number][:, some.start :: step].unflatten(0, (heads, -1)).cpu()
        for place, token in enumerate(some):
            for aging in agings:
                aging.ask(asked[:, :, place].clone(), row.length - count + token)


class AskedRows:
    """Rows of a prompt that pass in chunks: of `num_rows` the last `asked` are asked for."""

    def __init__(self, asked: int, num_rows: int) -> None:
        self._asked, self._left = asked, num_rows

    def among(self, count: int) -> int:
        """How many of the next `count` rows are asked for, their last ones; these have passed."""
        self._left -= count
        return min(count, max(0, self._asked - self._left))


PromptMark: TypeAlias = "tuple[Sequence[EvidenceCollector], Sequence[SparsePrefill]]"
"""Copies of a prompt's collectors and sparse prefills, by row, to go back to."""


class LayerPrompt:
    """The prompt of a layer as far as it was seen, by row.

    logits: scale and softcap by which the prompt's scores became logits. sparse: block-sparse
    attention of each row, kept beyond the prompt's end; empty where attention is exact. asked: the
    queries whose attention somebody will look at, while these pass; None for all.
    """

    def __init__(self, shape: LayerShape) -> None:
        self.logits: tuple[float, float | None] = (shape.head_dim**-0.5, None)
        self._shape = shape
        self._collectors: Sequence[EvidenceCollector] = ()
        self._kept: tuple[Evidence, ...] | None = None
        self.sparse: Sequence[SparsePrefill] = ()
        self.asked: AskedRows | None = None

    def begin(
        self, needs: Needs, num_rows: int, device: torch.device, error: float | None = None
    ) -> None:
        """Begins to collect what is needed, for each row.

        Args:
            device: of the layer.
            error: that block-sparse attention aims at; None for exact attention.

        Raises:
            ConfigError: weights of all queries are needed, and attention is not exact.
        """
        if error is not None:
            from hybrid_kv.runtime.sparse_prefill import SparsePrefill, check_sparse

            check_sparse(needs, num_layers=1)
            given = error, self._shape.num_kv_heads, device
            self.sparse = [SparsePrefill(*given) for _ in range(num_rows)]
        if needs.queries:
            self._collectors = [EvidenceCollector(needs) for _ in range(num_rows)]

    def attend(
        self,
        means: CacheContext,
        store: LayerStore,
        q: Tensor,
        valid: Tensor | None,
        *,
        scale: float,
        softcap: float | None,
    ) -> PartialAttention:
        """Attention of the next tokens q [B, Hq, T, D], which are stored; see `attend_exact`.

        Args:
            valid: [B, T] bool, False for padding.
        """
        masses: list[Tensor] = []
        logits: dict[str, Any] = {"scale": scale, "softcap": softcap}
        if any(collector.wants_sums for collector in self._collectors):
            part, masses = attend_with_masses(means.ops, store, q, valid, **logits)
        elif self.sparse:
            attends = [partial(one.attend, means.ops, **logits) for one in self.sparse]
            part = _by_sequence(store, q, valid, attends)
        else:
            part = self._attend_asked(means, store, q, valid, **logits)
        self._observe(store.rows, q, masses, valid, **logits)
        return part

    def _attend_asked(
        self, means: CacheContext, store: LayerStore, q: Tensor, valid: Tensor | None, **logits: Any
    ) -> PartialAttention:
        """As `attend_exact`; out 0 and lse -inf for queries that nobody asks for."""
        count = q.shape[2]
        wanted = count if self.asked is None else self.asked.among(count)
        wanted = max(wanted, min(count, _FEWEST)) if wanted else 0
        if valid is not None or wanted == count:
            return attend_exact(means.ops, means.executor, store, q, valid, **logits)
        out = torch.zeros_like(q)
        lse = torch.full(q.shape[:3], -torch.inf, dtype=torch.float32, device=q.device)
        if wanted:
            some = q[:, :, -wanted:]
            part = attend_exact(means.ops, means.executor, store, some, None, **logits)
            out[:, :, -wanted:], lse[:, :, -wanted:] = part.out, part.lse
        return PartialAttention(out, lse)

    def _observe(
        self,
        rows: Sequence[Row],
        q: Tensor,
        masses: Sequence[Tensor],
        valid: Tensor | None,
        *,
        scale: float,
        softcap: float | None,
    ) -> None:
        """Takes the queries q [B, Hq, T, D] of the next tokens, which are stored.

        Args:
            masses: by row the weights [Hq, N] that its N entries got from them; empty where nobody
                wants them. valid: [B, T] bool, False for padding.
        """
        self.logits = scale, softcap
        for row, collector in zip(rows, self._collectors, strict=False):
            new = slice(None) if valid is None else valid[row.number]
            collector.observe(q[row.number][:, new])
            if collector.wants_sums:
                collector.add_masses(masses[row.number])

    def evidence(self) -> tuple[Evidence, ...]:
        """Evidence that was collected, one per row; empty if nobody asked for it.

        After the prompt's end only what was kept is still there.
        """
        if self._kept is not None:
            return self._kept
        return tuple(collector.evidence(*self.logits) for collector in self._collectors)

    def keep(self) -> None:
        """Keeps the evidence beyond the prompt's end."""
        self._kept = self.evidence()

    def samples(
        self, seen: Evidence, placement: Placement | None, rotary: Rotary
    ) -> Samples | None:
        """Samples of a row's evidence that an index may learn from; None for none."""
        if placement is not None and placement.learns is not None:
            seen = seen.narrowed(placement.learns)
        return seen.samples(self._shape.num_kv_heads, rotary)

    def end(self) -> None:
        """Forgets what was not kept: entries have left, and the prompt cannot be ended again."""
        self._collectors = ()

    # Rows, and going back -------------------------------------------------------------------------

    def forked(self) -> LayerPrompt:
        """The prompt of a layer of another cache, which continues from the same entries."""
        return copy(self)

    def fork(self, sources: Sequence[int]) -> None:
        """Row r is one of the prompt that row sources[r] had; all of it has been observed."""
        if self._collectors:
            self._collectors = [self._collectors[source] for source in sources]
        if self.sparse:
            self.sparse = [self.sparse[source].branch() for source in sources]

    def mark(self) -> PromptMark:
        """Evidence that has been collected and what was learned, for `go_back`."""
        return [one.branch() for one in self._collectors], [one.branch() for one in self.sparse]

    def go_back(self, mark: PromptMark) -> None:
        """Forgets what was collected since."""
        self._collectors, self.sparse = list(mark[0]), list(mark[1])


def attend_exact(
    ops: Ops,
    executor: Executor,
    layer: LayerStore,
    q: Tensor,
    valid: Tensor | None,
    *,
    scale: float,
    softcap: float | None,
) -> PartialAttention:
    """Causal attention of the newest tokens, already appended, over both tiers.

    Args:
        q: [B, Hq, T, D].
        valid: [B, T] bool, False for padding; None where there is none. Padding gets out 0.

    Returns:
        out [B, Hq, T, D], lse [B, Hq, T].
    """
    untouched = not any(row.gone_tokens for row in layer.rows)
    if valid is None and untouched and layer.resident.in_order:
        view = layer.resident.view()
        return attend_causal(ops, q, view.k, view.v, scale=scale, softcap=softcap)
    out = torch.zeros_like(q)
    lse = torch.full(q.shape[:3], -torch.inf, dtype=torch.float32, device=q.device)
    for number, row in enumerate(layer.rows):
        new = slice(None) if valid is None else valid[number]
        part = _attend_row(ops, executor, row, q[number][:, new], scale, softcap)
        out[number][:, new], lse[number][:, new] = part.out.to(out.dtype), part.lse
    return PartialAttention(out, lse)


def attend_with_masses(
    ops: Ops,
    layer: LayerStore,
    q: Tensor,
    valid: Tensor | None,
    *,
    scale: float,
    softcap: float | None,
) -> tuple[PartialAttention, list[Tensor]]:
    """As `attend_exact` for a prompt, all of which is resident; and by row the softmax weights
    [Hq, N] float32 that its N entries got.
    """
    if valid is None and layer.resident.in_order:
        view = layer.resident.view()
        part, masses = ops.attend_with_masses(q, view.k, view.v, scale=scale, softcap=softcap)
        return part, list(masses)
    by_row = []

    def attend_row(q: Tensor, k: Tensor, v: Tensor) -> PartialAttention:
        part, masses = ops.attend_with_masses(
            q[None], k[None], v[None], scale=scale, softcap=softcap
        )
        by_row.append(masses[0])
        return part

    return _by_sequence(layer, q, valid, [attend_row] * len(layer.rows)), by_row


def _by_sequence(
    layer: LayerStore,
    q: Tensor,
    valid: Tensor | None,
    attends: Sequence[Callable[[Tensor, Tensor, Tensor], PartialAttention]],
) -> PartialAttention:
    """Attention of each sequence of a prompt by its own function, as `attend_exact`.

    Args:
        attends: take q [Hq, T, D], k, v [Hkv, N, D] without padding; give out [1, Hq, T, D].
    """
    out = torch.zeros_like(q)
    lse = torch.full(q.shape[:3], -torch.inf, dtype=torch.float32, device=q.device)
    for number, (row, attend_row) in enumerate(zip(layer.rows, attends, strict=True)):
        new = slice(None) if valid is None else valid[number]
        part = attend_row(q[number][:, new], *row.table.view())
        out[number][:, new], lse[number][:, new] = part.out[0].to(out.dtype), part.lse[0]
    return PartialAttention(out, lse)


def _attend_row(
    ops: Ops,
    executor: Executor,
    row: Row,
    q: Tensor,
    scale: float,
    softcap: float | None,
) -> PartialAttention:
    # Table order is the order of positions and the new tokens are its end, so causality holds by
    # place; all cold entries are older than every new token.
    k, v = row.table.view()
    parts = [attend_causal(ops, q[None], k[None], v[None], scale=scale, softcap=softcap)]
    grouped = group_queries(q[None], k.shape[0])
    for span in () if row.shadows else row.chain.spans:
        far = (executor.to_device(t[None], q.device) for t in span.extent.first(span.length))
        part = attend(ops, grouped, *far, scale=scale, softcap=softcap)
        shape = parts[0].out.shape
        parts.append(PartialAttention(part.out.reshape(shape), part.lse.reshape(shape[:-1])))
    # What the method keeps of offloaded entries are copies: the originals are attended.
    offloads = row.placement is not None and row.placement.offloads and not row.shadows
    if row.kept is not None and not offloads:
        from hybrid_kv.runtime.decode import attend_entries

        kept = row.kept.seen_from(row.length - q.shape[1])
        part = attend_entries(ops, grouped[0], kept, scale, softcap)
        shape = parts[0].out.shape
        parts.append(PartialAttention(part.out.reshape(shape), part.lse.reshape(shape[:-1])))
    out, lse = merge_partials(parts)
    return PartialAttention(out[0], lse[0])
