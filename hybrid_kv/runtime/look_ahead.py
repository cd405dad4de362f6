"""Searching a layer while the layer before it computes, by a prediction of its query.

The residual stream changes little from one layer to the next, so that the projections of a layer,
applied to what enters the layer before, give nearly its query. The host searches with that, wider
than the budget; the true query, when it is there, ranks what was found exactly and attends the
best. InfiniGen (Lee et al. 2024, arXiv:2406.19707, section 4.2) prefetches by the same observation.

How much is lost differs by layer: the first ones change the stream too much. So in mode "auto" each
layer is on trial in its first steps, in which it is searched twice (docs/lab.md has figures).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import wait
from copy import copy
from typing import Any, Protocol

from torch import Tensor

from hybrid_kv.rotary import Rotary
from hybrid_kv.runtime.cold import ColdOps, ColdPart, ColdPlan
from hybrid_kv.runtime.look_ahead_state import LookAheadResults, LookAheadState, best_named
from hybrid_kv.runtime.step import ColdBudget, Step
from hybrid_kv.store import LayerStore, Row
from hybrid_kv.transfer import Executor, Transfer
from hybrid_kv.types import Foresight, LayerShape, PartialAttention, TokenBudget

_log = logging.getLogger(__name__)


class _Leaving(Protocol):
    @property
    def departure(self) -> object | None: ...
    @property
    def has_arrived(self) -> bool: ...


class SearchedLayer(Protocol):
    """A layer of a cache, as it is searched ahead; see `LayerCache`."""

    shape: LayerShape
    rotary: Rotary

    @property
    def is_sealed(self) -> bool: ...
    @property
    def held(self) -> LayerStore: ...
    @property
    def leaving(self) -> _Leaving: ...
    def settle(self) -> None: ...


class LookAhead:
    """The searches of a cache that run ahead.

    under_way: by layer; taken one by one as the layers attend.

    Args:
        foresight: as the method wants it.
        unforeseen: see `ModelInfo`.
    """

    def __init__(
        self, executor: Executor, foresight: Foresight, unforeseen: Mapping[int, str] | None
    ) -> None:
        self._executor, self._foresight = executor, foresight
        self._unforeseen = unforeseen or {}
        self._standings: dict[int, LookAheadState] = {}
        self.under_way: dict[int, LookAheadResults] = {}

    def fork(self) -> LookAhead:
        """The searches of another cache of the model: what is known of a layer holds there too."""
        new = copy(self)
        new.under_way = {}
        return new

    def standing(self, layer_idx: int) -> LookAheadState:
        """Look-ahead state of a layer, made when it is asked for first."""
        if layer_idx not in self._standings:
            want = self._foresight
            known = LookAheadState(want.factor, want.mode == "auto", self._why_not(layer_idx))
            self._standings[layer_idx] = known
        return self._standings[layer_idx]

    def _why_not(self, layer_idx: int) -> str:
        if self._foresight.mode == "auto" and self._executor.at_once:
            return "the model computes where the search runs, so that nothing would be hidden"
        return self._unforeseen.get(layer_idx, "nothing predicts its query")

    def wants(self, layer: SearchedLayer) -> bool:
        """Whether a prediction of a layer's query is of use in this step."""
        if not layer.is_sealed:
            return False
        standing = self.standing(layer.shape.layer_idx)
        if standing.reason:
            return False
        if layer.leaving.departure is not None:
            if not layer.leaving.has_arrived:
                return False
            layer.settle()  # now: keys must not come while the search runs
        cold = False
        for row in layer.held.rows:
            for span in row.chain.spans:
                cold, index = True, span.extent.index
                if index is not None and index.builder.pending is not None:
                    index.settle(span.extent.keys)
                if index is None:
                    return False
                if index.selector is not None:
                    standing.reason = "its device finds entries by itself"
                    return False
                if index.serving.page_tokens > 1:
                    standing.reason = "its index finds whole pages, which no query ranks by key"
                    return False
        return cold

    def begin(self, layer: SearchedLayer, queries: Tensor, budget: TokenBudget) -> None:
        """Begins to search a layer that `wants` it.

        Args:
            queries: [B, Hq, 1, D] as predicted, not turned by position yet.
        """
        layer_idx, held = layer.shape.layer_idx, layer.held
        standing = self.standing(layer_idx)
        grouped = queries.reshape(len(queries), held.shape.num_kv_heads, -1, queries.shape[-1])
        parcel = self._executor.send(grouped)
        standing.searches += 1
        ahead = LookAheadResults(held, parcel, layer.rotary, budget, standing)
        self.under_way[layer_idx] = ahead
        ahead.future = self._executor.ahead(ahead.search)

    def take(self, layer_idx: int) -> LookAheadResults | None:
        """Search that was begun for a layer in this step, once; None for nothing."""
        return self.under_way.pop(layer_idx, None)

    def forget(self) -> None:
        """Ends what was begun and nobody took; only then may the cache change otherwise."""
        if self.under_way:
            left = [one.future for one in self.under_way.values() if one.future is not None]
            self.under_way.clear()
            wait(left)

    def describe(self, layer_idx: int) -> dict[str, Any]:
        """JSON-ready: a layer's state ("on", "trial", "off"), the reason where it is off, times
        its budget how many entries are searched for (factor), lost_mass of its trial so far, and
        how many searches were begun ahead.
        """
        one = self.standing(layer_idx)
        state = "off" if one.reason else "trial" if one.on_trial else "on"
        told = {"layer": layer_idx, "state": state, "reason": one.reason}
        return {**told, "factor": one.factor, "lost_mass": one.lost, "searches": one.searches}


class ForeseenPart:
    """The cold entries of a row whose layer was searched ahead: the best of what was found so.

    In a trial the row searches as well, which serves, and what would have been lost is noted.

    Args:
        ops: how they are attended op by op. plan: as one call; None where that cannot be.
    """

    def __init__(self, row: Row, budget: ColdBudget, ops: ColdOps, plan: ColdPlan | None) -> None:
        self._row, self._budget = row, budget
        self._ops, self._plan = ops, plan
        self._part: ColdPart = plan or ops

    def follow(self) -> bool:
        return self._part.follow()

    def described(self) -> list[tuple[str, object]]:
        return self._part.described()

    def attend(self, step: Step, q: Tensor, near: Transfer | None) -> PartialAttention:
        ahead, budget, ops = step.ahead, self._budget, self._ops
        assert ahead is not None
        begin = step.phases.now()
        ahead.wait()
        step.phases.book("wait", begin)
        if not step.at_home:
            step.work.transfer_bytes += q.nbytes  # the prediction, of the same shape
        named = ahead.named(self._row, budget)
        if named is None:
            return self._part.attend(step, q, near)
        if ahead.on_trial:
            found = ops.search(step, q, near)
            ahead.compare(named, q, found, step.scale, step.softcap)
        elif self._plan is not None:
            return self._plan.attend(step, q, named=[result for _, result in named])
        else:
            assert isinstance(budget, TokenBudget)
            found = ops.search(step, q, near, best_named(named, q, budget.most))
        return ops.attend_found(step, q, found)
