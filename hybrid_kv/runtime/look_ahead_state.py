"""Search results of a layer from before its queries were known, and their ranking of them."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from statistics import fmean

import torch
from torch import Tensor

from hybrid_kv.rotary import Rotary
from hybrid_kv.store import ColdExtent, LayerStore, Retrieved, Row
from hybrid_kv.store.search import ByExtent, best_of, logits_of_found, search_row
from hybrid_kv.transfer import Transfer
from hybrid_kv.types import SearchResult, TokenBudget


def rank_named(queries: Tensor, keys: Tensor, ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The best of named keys by dot product.

    Args:
        queries: [H, M, D] on the host, any float dtype.
        keys: [H, N, D].
        ids: [H, M, C] int64 rows of keys, each once for a query; -1 for none.
        count: how many are wanted.

    Returns:
        ids [H, M, min(count, C)], best first, -1 for none; scores, the same, float32, -inf for
        none.
    """
    heads, num_queries, width = ids.shape
    flat = ids.clamp_min(0).view(heads, num_queries * width)
    named = torch.stack([own[rows] for own, rows in zip(keys, flat, strict=True)])
    named = named.view(heads, num_queries, width, keys.shape[2]).float()
    scores = torch.matmul(named, queries.float()[..., None])[..., 0]
    scores.masked_fill_(ids < 0, -torch.inf)
    best = scores.topk(min(count, width), -1)
    found = ids.gather(-1, best.indices)
    return found.masked_fill_(best.values == -torch.inf, -1), best.values


TRIAL_LOOKS = 8
"""Rows of steps that a trial looks at."""
MOST_LOST = 0.01
"""Of the softmax mass that a layer's own search finds, on average over looks and query heads: a
layer that loses more in its trial is not searched ahead."""


@dataclass(slots=True)
class LookAheadState:
    """State of the look-ahead of one layer.

    factor: times its budget, so many entries are searched for; the widest until a trial has ended.
    on_trial: whether the layer's own search is made as well and serves; meanwhile the narrowest
    factor that loses little is looked for. reason: why it is not searched ahead; empty while it is.
    lost: mean loss in the trial at `factor`. searches: that were begun ahead.
    """

    factor: int
    on_trial: bool
    reason: str = ""
    lost: float | None = None
    searches: int = 0
    _looks: list[list[float]] = field(default_factory=list)

    @property
    def factors(self) -> list[int]:
        """Factors that a trial compares."""
        return [*(2**n for n in range(self.factor.bit_length()) if 2**n < self.factor), self.factor]

    def note(self, losses: list[float]) -> None:
        """One more look of the trial, by factor; it ends when it has seen enough."""
        self._looks.append(losses)
        means = [fmean(of_factor) for of_factor in zip(*self._looks, strict=True)]
        self.lost = means[-1]
        if len(self._looks) < TRIAL_LOOKS:
            return
        self.on_trial, kept = False, [lost <= MOST_LOST for lost in means]
        if any(kept):
            self.lost, self.factor = means[kept.index(True)], self.factors[kept.index(True)]
        else:
            self.reason = f"{self.lost:.1%} of what its search finds is lost, over {MOST_LOST:.1%}"
        self._looks.clear()


class LookAheadResults:
    """Results of the search ahead for the rows of one layer in one step.

    future: of `search`, once it was begun.

    Args:
        parcel: predicted queries [B, Hkv, G, D], not turned by position yet.
    """

    def __init__(
        self,
        layer: LayerStore,
        parcel: Transfer,
        rotary: Rotary,
        budget: TokenBudget,
        standing: LookAheadState,
    ) -> None:
        self.future: Future[None] | None = None
        self._standing, self._budget = standing, budget
        self._parcel, self._rotary = parcel, rotary
        self._width, self._most = standing.factor * budget.width, standing.factor * budget.most
        self._rows = [row for row in layer.rows if row.chain.num_tokens > budget.top_k]
        # The new token is not stored yet: its position is the number of those that are.
        self._positions = [row.length for row in self._rows]
        self._found: dict[int, ByExtent] = {}

    def search(self) -> None:
        """Runs beside the model; the cold tier must not change before `wait` has returned."""
        with torch.no_grad():
            queries = self._parcel.open()
            for row, position in zip(self._rows, self._positions, strict=True):
                own = queries[row.number]
                turned = self._rotary.turn(own, torch.full((own.shape[1],), position))
                self._found[row.number] = search_row(
                    row.chain, turned, self._width, self._most, copied=row.copied
                )

    def wait(self) -> None:
        """Until the search has ended.

        Raises:
            Exception: what it raised.
        """
        future, self.future = self.future, None
        if future is None:
            return
        try:
            future.result()
        finally:
            del future  # this frame hangs on an error, and the error on the future
        if any(result.bias is not None for one in self._found.values() for _, result in one):
            self._standing.reason = "its index weighs what it finds by the query that asked"
            self._found = {}

    @property
    def on_trial(self) -> bool:
        """Whether the layer's own search is made as well, and serves."""
        return self._standing.on_trial

    def named(self, row: Row, budget: TokenBudget | str) -> ByExtent | None:
        """Results of the search ahead for a row; None for none, or for another budget."""
        return self._found.get(row.number) if budget == self._budget else None

    def compare(
        self,
        ahead: ByExtent,
        queries: Tensor,
        found: Retrieved,
        scale: float,
        softcap: float | None,
    ) -> None:
        """Notes, in a trial, how much of what the true queries [Hkv, G, D] found would have been
        lost with what was found ahead.
        """
        parts = found.ranked or [part.ids for part in found.parts]
        most = max(ids.shape[-1] for ids in parts)
        if not most:
            return

        def mass(results: list[SearchResult]) -> Tensor:
            logits = [logits_of_found(result, scale, softcap) for result in results]
            return torch.cat(logits, -1).logsumexp(-1)

        true = mass(
            [
                _ranked(part.extent, queries, ids, most)
                for part, ids in zip(found.parts, parts, strict=True)
            ]
        )
        losses = []
        for factor in self._standing.factors:
            best = mass([result for _, result in best_named(ahead, queries, most, factor * most)])
            losses.append(float(1 - (best - true).exp().clamp_max(1.0).mean()))
        self._standing.note(losses)


def best_named(found: ByExtent, queries: Tensor, most: int, among: int | None = None) -> ByExtent:
    """The best by the true queries [Hkv, G, D], of all that was found or of the first so many."""
    ranked = []
    for extent, result in found:
        best = _ranked(extent, queries, result.ids[..., :among], most)
        both = best.scored + result.scored
        read = (best.read_bytes or 0) + (result.read_bytes or 0)
        ranked.append((extent, best._replace(scored=both, read_bytes=read)))
    return best_of(ranked, most)


def _ranked(extent: ColdExtent, queries: Tensor, ids: Tensor, most: int) -> SearchResult:
    count, keys = ids.numel(), extent.keys
    read = count * keys.shape[2] * keys.itemsize
    return SearchResult(*rank_named(queries, keys, ids, most), scored=count, read_bytes=read)
