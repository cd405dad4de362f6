"""Departures from the window of a layer: all at the prompt's end, then page by page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from torch import Tensor

from hybrid_kv.ops import Ops
from hybrid_kv.plugins import Method
from hybrid_kv.rotary import Rotary, Samples
from hybrid_kv.runtime.cache_context import CacheContext
from hybrid_kv.runtime.layer_prompt import LayerPrompt
from hybrid_kv.runtime.offload import Absorb, FindNearest, Offload
from hybrid_kv.store import LayerStore, Overflow, Row
from hybrid_kv.types import Evidence

if TYPE_CHECKING:
    from hybrid_kv.runtime.checked_method import Absorbed, CheckedMethod

Finder: TypeAlias = Callable[[Method, CacheContext, LayerStore], FindNearest | None]


class Leaving:
    """Entries on their way out of a layer's window: one departure at a time.

    It leaves in two steps. It stays resident until its copy has arrived, and whoever reads or
    changes the layer ends its departure first.

    departure: what is under way; None for nothing.

    Args:
        find: what finds the best keys of a new index's samples; see `nearest_finder`.
    """

    def __init__(self, method: Method, rotary: Rotary, means: CacheContext, find: Finder) -> None:
        self._method, self._rotary, self._means, self._find = method, rotary, means, find
        self.departure: Offload | None = None
        self._samples_left: Sequence[Samples | None] = ()  # of a prompt of which nothing has left

    @property
    def has_arrived(self) -> bool:
        """Whether something is under way that can end without a wait."""
        return self.departure is not None and self.departure.arrived

    def begin_prompt(
        self,
        store: LayerStore,
        keeper: CheckedMethod | None,
        prompt: LayerPrompt,
        evidence: Sequence[Evidence],
    ) -> None:
        """Begins the departure of all that the method does not want resident, at the prompt's end.

        Args:
            evidence: of the prompt, one per row; empty if nobody asked for it.
        """
        horizon, asked = self._method.needs.horizon_tokens, []
        for seen in evidence:
            known = prompt.samples(seen, store.placement, self._rotary)
            asked.append(None if known is None else known.ahead(seen.num_tokens, horizon))
        self._samples_left = asked

        def absorb(row: Row, overflow: Overflow) -> Absorbed:
            assert keeper is not None
            scale, softcap = prompt.logits
            plain = Evidence(row.length, scale=scale, softcap=softcap)
            known = evidence[row.number] if evidence else plain
            seen = replace(known, keys=row.table.view()[0])
            return keeper.take(self._means.executor, row, overflow, seen)

        self._begin(store, asked, None if keeper is None else absorb, is_prompt=True)

    def begin_pages(self, store: LayerStore, keeper: CheckedMethod | None) -> Offload:
        """Pages leave that lie outside of the window, of at least one row."""
        asked: Sequence[Samples | None] = ()
        if self._samples_left:
            some = zip(store.rows, self._samples_left, strict=False)
            asked = [None if row.chain.spans else samples for row, samples in some]

        def absorb(row: Row, overflow: Overflow) -> Absorbed:
            assert keeper is not None
            return keeper.take(self._means.executor, row, overflow, None)

        return self._begin(store, asked, None if keeper is None else absorb)

    def _begin(
        self,
        store: LayerStore,
        asked: Sequence[Samples | None],
        absorb: Absorb | None,
        *,
        is_prompt: bool = False,
    ) -> Offload:
        means, begin = self._means, self._means.phases.now()
        departure = Offload(
            *(means.executor, store, asked),
            nearest=self._find(self._method, means, store) if asked else None,
            absorb=absorb,
            is_prompt=is_prompt,
        )
        means.phases.book("transfer", begin)
        if self._samples_left and all(
            row.chain.spans or Overflow.of(row) is not None for row in store.rows
        ):
            self._samples_left = ()
        self.departure = departure
        return departure

    def wait(self) -> None:
        """Returns when the copies of what is leaving have arrived; nothing else changes."""
        if self.departure is not None:
            with self._means.phases.measure("wait"):
                self.departure.wait()

    def end(self) -> Offload | None:
        """Waits for what is leaving and takes it, for who hands it over; None for nothing."""
        if self.departure is not None and self.departure.under_way:
            self.wait()
        departure, self.departure = self.departure, None
        return departure

    def forget(self) -> None:
        """Gives up what is leaving: its entries are about to be forgotten as well."""
        self.departure = None

    def reset(self) -> None:
        """Forgets the prompt, too: the layer is empty."""
        self.departure, self._samples_left = None, ()

    def fork(self, sources: Sequence[int]) -> None:
        """Row r continues from row sources[r]; nothing is under way."""
        if self._samples_left:
            self._samples_left = [self._samples_left[source] for source in sources]

    def forked(self, means: CacheContext) -> Leaving:
        """Departures of a layer of another cache, which continues from the same entries."""
        new = Leaving(self._method, self._rotary, means, self._find)
        new._samples_left = self._samples_left
        return new


def nearest_finder(method: Method, means: CacheContext, store: LayerStore) -> FindNearest | None:
    """A search for the best keys of a new index's samples; None on the host, where the index is
    quicker.
    """
    if store.resident.pool.device.type == "cpu":
        return None
    most = method.needs.nearest_keys
    return find_by(means.ops, most) if most else None


def find_by(ops: Ops, most: int) -> FindNearest:
    """Finds the best of keys [Hkv, N, D] for samples [Hkv, G, M, D]: [Hkv, G, M, K] int32."""

    def find(samples: Tensor, keys: Tensor) -> Tensor:
        count = min(most, keys.shape[1])
        found = ops.nearest_keys(samples.flatten(1, 2), keys, count)
        return found.view(*samples.shape[:3], count)

    return find
