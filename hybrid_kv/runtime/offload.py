"""Offload: entries that leave the device tier of a layer, for the host tier or for good.

All that a method does not want resident leaves at the prompt's end, then page by page.
Entries on their way stay resident until their copies have arrived, so that each has one owner at
any time and no step waits for a copy that the device can make beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

from torch import Tensor

from hybrid_kv.ops import Ops
from hybrid_kv.ops.tail import Tail
from hybrid_kv.plugins import Method
from hybrid_kv.rotary import Rotary, Samples
from hybrid_kv.runtime.cache_context import CacheContext
from hybrid_kv.runtime.layer_prompt import LayerPrompt
from hybrid_kv.store import LayerStore, Overflow, Reservation, Row, check_finite
from hybrid_kv.store.extent import ComingTail
from hybrid_kv.store.index_builder import BuildRunner, MakeIndex
from hybrid_kv.transfer import Executor, Transfer
from hybrid_kv.types import Evidence

if TYPE_CHECKING:
    from hybrid_kv.runtime.checked_method import Absorbed, CheckedMethod

FindNearest: TypeAlias = Callable[[Tensor, Tensor], Tensor]
Absorb: TypeAlias = "Callable[[Row, Overflow], Absorbed]"
"""Function of the method that says what it keeps of entries that have left its window."""

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


class Offload:
    """Pages outside the windows of a layer's rows, on their way.

    Between its beginning and its end nothing else may change the layer.

    under_way: copies in the order in which they left; none where all are made at once.

    Args:
        samples: per row queries that were observed during the prompt, for a new index; empty after
            the prompt.
        nearest: finds the best keys of samples [Hkv, G, M, D] among keys [Hkv, N, D] where both
            lie; None to leave that to the index.
        absorb: asks the method what it keeps, before anything moves; None where it keeps nothing.
        is_prompt: whether the layer has just been sealed; its memory is given back then.
    """

    def __init__(
        self,
        executor: Executor,
        layer: LayerStore,
        samples: Sequence[Samples | None] = (),
        *,
        nearest: FindNearest | None = None,
        absorb: Absorb | None = None,
        is_prompt: bool = False,
    ) -> None:
        self._layer, self.is_prompt = layer, is_prompt
        offloads = layer.placement is not None and layer.placement.offloads
        self._exactly = is_prompt and absorb is not None
        leaving = []
        for row in layer.rows:
            overflow = Overflow.of_prompt(row) if self._exactly else Overflow.of(row)
            if overflow is not None:
                kept = None if absorb is None else absorb(row, overflow)
                leaving.append((row, overflow, kept))
        self._rows: list[_LeavingRow] = []
        for row, overflow, kept in leaving:
            asked, spill = samples[row.number] if samples else None, None
            count = overflow.positions.shape[0]
            if offloads and count:
                spill = _Spill.begin(executor, layer, row, overflow, asked, nearest)
            self._rows.append(_LeavingRow(row, count, overflow.pages, spill, kept))
        self.under_way = [] if executor.at_once else self._parcels()

    @property
    def arrived(self) -> bool:
        """Whether `wait` would return at once."""
        return not self.under_way or all(parcel.arrived for parcel in self.under_way)

    def wait(self) -> None:
        """Returns when all copies have arrived."""
        for parcel in reversed(self.under_way):
            parcel.open()

    def _parcels(self) -> list[Transfer]:
        kept = [parcel for row in self._rows if row.kept for parcel in row.kept.parcels]
        return kept + [parcel for row in self._rows if row.spill for parcel in row.spill.parcels]

    def end(self, runner: BuildRunner) -> None:
        """Hands what has arrived over to the cold tier, whose indexes may be built now.

        Raises:
            NonFiniteError: a key or value is NaN or infinite; its row is as it was before.
            MethodError: so is what the method keeps; all rows are as they were before.
        """
        layer = self._layer
        for leaving in self._rows:
            if leaving.kept is not None:
                leaving.kept.check()
        for leaving in self._rows:
            row = leaving.row
            if leaving.spill is not None:
                leaving.spill.commit(row, runner)
            else:
                row.dropped += leaving.count
            row.table.remove(*leaving.pages)
            if leaving.kept is not None:
                leaving.kept.commit(row)
        if self.is_prompt:
            if any(leaving.count for leaving in self._rows):
                layer.compact(exactly=self._exactly)
            if layer.placement is not None and layer.placement.digests:
                layer.resident.pool.enable_digests()


@dataclass(frozen=True, slots=True)
class _LeavingRow:
    """`count` tokens of a row, what becomes of them and what the method keeps.

    pages: of its table, from .. to, that are taken out when they have left.
    """

    row: Row
    count: int
    pages: tuple[int, int]
    spill: _Spill | None
    kept: Absorbed | None


@dataclass(frozen=True, slots=True)
class _Spill:
    """The pages of one row, and where they will lie.

    entries: [] bool, whether all of them are numbers; when it was opened, they lie there.
    samples: what an index learns from; their queries [Hkv, G, M, D] are `asked` when they have
        arrived. nearest: [Hkv, G, M, K], the best of the entries for each.
    moments: of the entries, if they begin a row, where they were taken. sent: the same on their way
        to a host that searches. coming: the same, of entries that lie on it.
    select: makes the indexes of this row where its device finds entries by itself; then nothing
        that they learned from has to travel.
    """

    reserved: Reservation
    entries: Transfer
    samples: Samples | None = None
    asked: Transfer | None = None
    nearest: Transfer | None = None
    moments: Tail | None = None
    sent: Mapping[str, Transfer] = field(default_factory=dict)
    coming: ComingTail | None = None
    select: tuple[MakeIndex, MakeIndex] | None = None

    @classmethod
    def begin(
        cls,
        executor: Executor,
        layer: LayerStore,
        row: Row,
        overflow: Overflow,
        samples: Samples | None,
        find_nearest: FindNearest | None,
    ) -> _Spill:
        # First what looks at the entries where they lie: then they leave beside what comes next.
        reserved, select = row.chain.reserve(overflow.positions), None
        sums_up = row.placement is not None and row.placement.moments and not row.chain.spans
        on_host = executor.at_once and overflow.k.is_cpu
        moments = Tail.of(overflow.k, overflow.v) if sums_up and not on_host else None
        if samples is not None and layer.select is not None:
            select = layer.select(overflow.k, samples.queries, reserved.k)
        entries = executor.offload(overflow.k, overflow.v, (reserved.k, reserved.v))
        sent, coming = {}, None
        if sums_up and on_host:  # they lie there now, and nobody writes to them again
            coming = ComingTail(reserved.k, reserved.v, executor.soon)
        if moments is not None and select is None:
            sent = {name: executor.keep(tensor) for name, tensor in moments.tensors().items()}
        if samples is None or select is not None:
            return cls(reserved, entries, moments=moments, sent=sent, coming=coming, select=select)
        nearest = None if find_nearest is None else find_nearest(samples.queries, overflow.k)
        return cls(
            reserved,
            entries,
            samples,
            executor.keep(samples.queries),
            None if nearest is None else executor.keep(nearest),
            moments,
            sent,
            coming,
        )

    @property
    def parcels(self) -> list[Transfer]:
        return [*filter(None, (self.entries, *self.sent.values(), self.asked, self.nearest))]

    def commit(self, row: Row, runner: BuildRunner) -> None:
        new = self.reserved
        if not self.entries.open():
            check_finite(new.k, new.v, new.positions)
        make_index = row.placement.index if row.placement is not None else None
        if self.select is not None:
            make_index, row.later_index = self.select
        elif row.later_index is not None:
            make_index = row.later_index
        samples, nearest = self.samples, None if self.nearest is None else self.nearest.open()
        if samples is not None and self.asked is not None:
            samples = replace(samples, queries=self.asked.open())
        row.chain.commit(new, make_index, samples, runner, nearest)
        if self.moments is not None:
            new.span.known, new.span.known_is_own = self._known(self.moments), True
        if self.coming is not None:
            new.span.coming = self.coming

    def _known(self, moments: Tail) -> Tail:
        if not self.sent:
            return moments
        return Tail(moments.count, **{name: one.open() for name, one in self.sent.items()})
