"""Audit: what a method misses, measured while it runs.

Every so many steps one KV head of one layer, in rotation, is attended exactly as well, beside the
steps that follow; the difference is what the approximation cost. No retrieval is trusted blindly.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hybrid_kv.store import ColdExtent, LayerStore
from hybrid_kv.transfer import Executor, Transfer
from hybrid_kv.types import LayerShape, PartialAttention, TokenBudget

_Z = 1.96
_BLOCK = 2**15
"""Keys whose logits are computed together."""


class Target(NamedTuple):
    """The head that is looked at."""

    layer_idx: int
    kv_head: int


class Finding(NamedTuple):
    """Result of one look at one head, means over the query heads of its group.

    recall: share of the exact best cold entries, as many as the budget's top_k, that the search
        ranked; None where no cold entries were searched.
    missed_mass: softmax mass of the stored entries that no exact attention read; what is estimated
        of them does not count.
    missed_by_index: the part of it that the index lost: what the exact best cold entries, as many
        as were attended, hold beyond those that were. The budget lost the rest.
    output_error: relative L2 distance of the output from exact attention's.
    mass_error: the mass that the step took for all entries, less the true one, as a share of it:
        below 0 what is missing after the estimate, above 0 what was estimated too much.
    """

    target: Target
    recall: float | None
    missed_mass: float
    output_error: float
    missed_by_index: float = 0.0
    mass_error: float = 0.0


class Estimate(NamedTuple):
    """A mean with half the width of its 95% confidence interval (NaN from a single value)."""

    mean: float
    half_width: float
    looks: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate | None:
        """None of no values."""
        if not values:
            return None
        spread = stdev(values) if len(values) > 1 else math.nan
        return cls(fmean(values), _Z * spread / math.sqrt(len(values)), len(values))


@dataclass(slots=True)
class Audit:
    """Findings of one cache, and whose turn it is.

    Args:
        every: decode steps from one look to the next.
        layers: the tiered layers.
    """

    every: int
    layers: Sequence[LayerShape]
    findings: list[Finding] = field(default_factory=list)
    _steps: int = 0
    _turns: Iterator[Target] = field(init=False)
    _next: Target | None = None

    def __post_init__(self) -> None:
        self._turns = _in_turn(self.layers)

    def due(self, layer_idx: int) -> Target | None:
        """The head of this layer that shall be looked at in this step; None mostly."""
        if layer_idx == self.layers[0].layer_idx:
            self._steps += 1
            if self._steps % self.every == 0:
                self._next = next(self._turns)
        if self._next is None or self._next.layer_idx != layer_idx:
            return None
        target, self._next = self._next, None
        return target

    def recall(self, layer_idx: int | None = None) -> Estimate | None:
        """Of the cold entries that should have been found; of one layer, or of all."""
        values = [f.recall for f in self._of(layer_idx) if f.recall is not None]
        return Estimate.of(values)

    def missed_mass(self, layer_idx: int | None = None) -> Estimate | None:
        """Of the softmax over all stored entries, what no exact attention read."""
        return Estimate.of([f.missed_mass for f in self._of(layer_idx)])

    def mass_error(self, layer_idx: int | None = None) -> Estimate | None:
        """Of the mass of all entries what was estimated too much, below 0 what is missing."""
        return Estimate.of([f.mass_error for f in self._of(layer_idx)])

    def mass_error_size(self, layer_idx: int | None = None) -> Estimate | None:
        """The same without its sign, look by look: errors of two heads do not cancel."""
        return Estimate.of([abs(f.mass_error) for f in self._of(layer_idx)])

    def missed_by_index(self, layer_idx: int | None = None) -> Estimate | None:
        """The part of the missed mass that a perfect index would have found."""
        return Estimate.of([f.missed_by_index for f in self._of(layer_idx)])

    def output_error(self, layer_idx: int | None = None) -> Estimate | None:
        """Relative L2 distance of a head's output."""
        return Estimate.of([f.output_error for f in self._of(layer_idx)])

    def since(self, first: int) -> Audit:
        """The findings from number `first` on, alone."""
        return Audit(self.every, self.layers, self.findings[first:])

    def heads(self) -> list[Finding]:
        """Each head that was looked at: the means of its looks."""
        return [self._mean(target) for target in sorted(self.looks())]

    def looks(self) -> Counter[Target]:
        """Number of looks at each head."""
        return Counter(finding.target for finding in self.findings)

    def _mean(self, target: Target) -> Finding:
        own = [finding for finding in self.findings if finding.target == target]
        recalls = [finding.recall for finding in own if finding.recall is not None]
        return Finding(
            target,
            fmean(recalls) if recalls else None,
            fmean(finding.missed_mass for finding in own),
            fmean(finding.output_error for finding in own),
            fmean(finding.missed_by_index for finding in own),
            fmean(finding.mass_error for finding in own),
        )

    def _of(self, layer_idx: int | None) -> list[Finding]:
        return [f for f in self.findings if layer_idx in (None, f.target.layer_idx)]


def _in_turn(layers: Sequence[LayerShape]) -> Iterator[Target]:
    """All heads again and again, shuffled: few looks at a deep model see all of its depth."""
    heads = [
        Target(shape.layer_idx, head) for shape in layers for head in range(shape.num_kv_heads)
    ]
    draw = random.Random(0)
    while True:
        yield from draw.sample(heads, len(heads))


class WatchedPart(Protocol):
    """Results of a search in one extent: ids [Hkv, M, K], -1 for none; bias: log weights, of
    samples that stand for others.
    """

    @property
    def extent(self) -> ColdExtent: ...
    @property
    def ids(self) -> Tensor: ...
    @property
    def bias(self) -> Tensor | None: ...


class WatchedRetrieval(Protocol):
    """Results of a search for one row, as `Look` reads them: by extent; `ranked` is None where the
    budget cut nothing, `estimated` [Hkv, M] the log-sum-exp of what is estimated, None for nothing.
    """

    @property
    def parts(self) -> Sequence[WatchedPart]: ...
    @property
    def ranked(self) -> Sequence[Tensor] | None: ...
    @property
    def estimated(self) -> Tensor | None: ...


class WatchedStep(Protocol):
    """A decode step of one layer, as `Look` reads it.

    grouped: the queries [B, Hkv, G * T, D]. found: by row, what was retrieved under which budget.
    """

    @property
    def layer(self) -> LayerStore: ...
    @property
    def executor(self) -> Executor: ...
    @property
    def grouped(self) -> Tensor: ...
    @property
    def scale(self) -> float: ...
    @property
    def softcap(self) -> float | None: ...
    @property
    def found(self) -> Mapping[int, tuple[TokenBudget, WatchedRetrieval]] | None: ...


class Look:
    """One head of one row in one step: what was attended, and what there was to attend.

    Nothing is computed before `finding`, which may run in another thread while the cache goes on:
    the resident entries are copied, cold ones are written once, and where they were cropped and
    written over meanwhile there is no finding.

    Args:
        row: of the batch.
        part: out [B, Hq, 1, D], lse [B, Hq, 1]: what the step computed.
        step: of one new token; `found` holds what was retrieved.
    """

    def __init__(self, step: WatchedStep, row: int, target: Target, part: PartialAttention) -> None:
        self._target, self._scale, self._softcap = target, step.scale, step.softcap
        layer, head = step.layer, target.kv_head
        heads = slice(head * layer.shape.group_size, (head + 1) * layer.shape.group_size)
        near = layer.rows[row].table.view()
        taken = (part.out[row, heads, 0], part.lse[row, heads, 0], *(t[head] for t in near))
        self._parcels: tuple[Transfer, ...] = tuple(
            step.executor.send(tensor.clone()) for tensor in (step.grouped[row, head], *taken)
        )
        self._cold = [
            (span.extent, span.length, span.extent.rewritten)
            for span in layer.rows[row].chain.spans
        ]
        copied = step.layer.rows[row].copied
        self._copied = None if copied is None else copied[head].clone()
        self._budget, self._found, self._ranked = None, [], None
        self._estimated, self._samples = None, False
        if step.found is not None and row in step.found:
            self._budget, found = step.found[row]
            self._found = [(one.extent, one.ids[head].clone()) for one in found.parts]
            self._samples = any(one.bias is not None for one in found.parts)
            if found.estimated is not None:
                self._estimated = found.estimated[head].clone()
            if found.ranked is not None:
                self._ranked = [
                    (one.extent, ids[head].clone())
                    for one, ids in zip(found.parts, found.ranked, strict=True)
                ]

    _budget: TokenBudget | None
    _copied: Tensor | None
    _found: list[tuple[ColdExtent, Tensor]]
    _ranked: list[tuple[ColdExtent, Tensor]] | None
    _estimated: Tensor | None
    _samples: bool

    def finding(self) -> Finding | None:
        """Attends exactly; None where the entries are no longer those of the step."""
        q, out, lse, k, v = (parcel.open().float() for parcel in self._parcels)
        exact = _Sums(q, self._scale, self._softcap)
        exact.add(k, v)
        cold = [
            exact.add(
                extent.k[self._target.kv_head, :length], extent.v[self._target.kv_head, :length]
            )
            for extent, length, _ in self._cold
        ]
        if any(extent.rewritten != before for extent, _, before in self._cold):
            return None
        whole = (lse - exact.lse).exp()
        error = (out - exact.out).norm(dim=-1) / exact.out.norm(dim=-1).clamp_min(1e-30)
        recall, lost = self._compared(cold, exact.lse)
        return Finding(
            self._target,
            recall,
            float(self._missed(cold, exact.lse, whole).clamp(0, 1).mean()),
            float(error.mean()),
            lost,
            float((whole - 1).mean()),
        )

    def _missed(self, logits: list[Tensor], total: Tensor, whole: Tensor) -> Tensor:
        """[M] mass of what no exact attention read.

        Args:
            logits: of cold entries, [M, N] by extent. total: [M] log-sum-exp of all entries.
            whole: [M] what the step took for the mass of all, as a share of it.
        """
        if self._samples:  # their weights are not their masses; all that is not cold is read
            unread = torch.cat(logits, 1).masked_fill(self._mask(logits, self._found), -torch.inf)
            return (unread.logsumexp(-1) - total).exp()
        if self._estimated is None:
            return 1 - whole
        return 1 - whole + (self._estimated - total).exp()

    def _compared(self, logits: list[Tensor], total: Tensor) -> tuple[float | None, float]:
        """Recall, and the mass that the index lost, of cold entries with logits [M, N] by extent.

        Args:
            total: [M] log-sum-exp of all entries.
        """
        if self._budget is None:
            return None, 0.0
        every = torch.cat(logits, 1)
        if self._copied is not None:  # attended on the device, which no search has to find
            every = every.masked_fill(self._copied, -torch.inf)
        attended = self._mask(logits, self._found)
        ranked = attended if self._ranked is None else self._mask(logits, self._ranked)
        ids = every.topk(min(self._budget.top_k, every.shape[1]), -1).indices
        hits = ranked.gather(1, ids)[every.gather(1, ids) > -torch.inf]
        recall = float(hits.float().mean()) if hits.numel() else None
        # What as many of the exact best would hold, query by query.
        weights = (every - total[:, None]).exp()
        best = weights.sort(-1, descending=True).values.cumsum(-1)
        counts = attended.sum(1)
        ideal = best.gather(1, (counts - 1).clamp_min(0)[:, None])[:, 0] * (counts > 0)
        lost = ideal - (weights * attended).sum(1)
        return recall, float(lost.clamp_min(0).mean())

    def _mask(self, logits: list[Tensor], found: list[tuple[ColdExtent, Tensor]]) -> Tensor:
        """[M, N] bool: the entries of all extents that are among those found."""
        masks = []
        for (extent, _, _), scores in zip(self._cold, logits, strict=True):
            hit = torch.zeros(scores.shape[0], scores.shape[1] + 1, dtype=torch.bool)
            for owner, ids in found:
                if owner is extent:
                    hit.scatter_(1, ids.where(ids >= 0, scores.shape[1]), value=True)
            masks.append(hit[:, :-1])
        return torch.cat(masks, 1)


class _Sums:
    """Exact attention of queries [M, D] over entries that come in parts."""

    def __init__(self, q: Tensor, scale: float, softcap: float | None) -> None:
        self._q, self._softcap = q * scale, softcap
        self.lse = torch.full(q.shape[:1], -torch.inf)
        self.out = torch.zeros_like(q)

    def add(self, k: Tensor, v: Tensor) -> Tensor:
        """Takes k, v [N, D]; returns their logits [M, N]."""
        logits = torch.empty(self._q.shape[0], k.shape[0])
        for start in range(0, k.shape[0], _BLOCK):
            block = slice(start, start + _BLOCK)
            some = self._q @ k[block].float().T
            if self._softcap is not None:
                some = self._softcap * torch.tanh(some / self._softcap)
            logits[:, block] = some
            lse = torch.logaddexp(self.lse, some.logsumexp(-1))
            kept = (self.lse - lse).exp()[:, None]
            self.out = self.out * kept + (some - lse[:, None]).exp() @ v[block].float()
            self.lse = lse
        return logits
