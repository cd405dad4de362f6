"""One layer of a cache: what it holds, what it has seen of its prompt, and what is leaving it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hybrid_kv.attended import Attended
from hybrid_kv.entries import Entries
from hybrid_kv.errors import ShapeError
from hybrid_kv.plugins import Method, Placement
from hybrid_kv.rotary import Rotary, Samples
from hybrid_kv.runtime.absorb import Keeper
from hybrid_kv.runtime.device_plan import DevicePlan, reads_alike, store_reserved
from hybrid_kv.runtime.evidence import EvidenceCollector
from hybrid_kv.runtime.exact import attend_exact
from hybrid_kv.runtime.foreseen import Foreseen
from hybrid_kv.runtime.means import Means
from hybrid_kv.runtime.plan import CompiledStep, compile_step
from hybrid_kv.runtime.spill import Absorb, Departure, FindNearest
from hybrid_kv.runtime.step import Found, Step
from hybrid_kv.store import LayerKV, Row, RowMark
from hybrid_kv.types import (
    Demotion,
    Evidence,
    LayerShape,
    Needs,
    PartialAttention,
    Read,
    SearchResult,
)

_log = logging.getLogger(__name__)

_NOTED_TOKENS = 64
"""Of a chunk of a long later turn so many queries are kept, spread evenly, to learn from."""
_FOLLOWED_TOKENS = 128
"""Of a long later turn a method is told of so many at a time."""


@dataclass(frozen=True, slots=True)
class LayerMark:
    """Where a layer stood; collectors: of its prompt, where that had not ended."""

    store: LayerKV | None
    is_sealed: bool
    rows: Sequence[RowMark]
    collectors: Sequence[EvidenceCollector]

    @property
    def lengths(self) -> list[int]:
        """Tokens by row."""
        return [row.length for row in self.rows]


class TieredLayer:
    """The entries of one layer under the cache's method, for all batch rows.

    It is *unsealed* while its prompt is computed: everything is resident, attention exact. Sealing
    asks the method where entries shall live. What leaves the window then departs in two steps: it
    stays resident until its copy has arrived, and whoever reads or changes the layer settles it
    first.

    store: the entries; None before the first token. leaving: what is on its way out of the window.
    """

    def __init__(self, shape: LayerShape, rotary: Rotary, means: Means) -> None:
        self.shape, self.rotary, self.means = shape, rotary, means
        self.store: LayerKV | None = None
        self._collectors: list[EvidenceCollector] = []
        self._samples_left: Sequence[Samples | None] = ()  # of a prompt of which nothing has left
        self._kept_evidence: tuple[Evidence, ...] | None = None
        self.leaving: Departure | None = None
        self._mark: LayerMark | None = None  # while a forward runs that may be taken back
        self._keeper: Keeper | None = None  # of a method that keeps entries; from the prompt's end
        self._logits: tuple[float, float | None] = (shape.head_dim**-0.5, None)
        self.method = means.method.of_layer(shape.layer_idx)
        self._stores_as_is = type(self.method).write is Method.write
        self._is_steady = self._stores_as_is and reads_alike(self.method)
        self._compiled: CompiledStep | None = None  # how the last step was made
        self._num_plans = 0

    @property
    def is_open(self) -> bool:
        """Whether there are tokens of a prompt that has not ended."""
        return self.store is not None and self.store.placement is None

    @property
    def is_sealed(self) -> bool:
        return self.store is not None and self.store.placement is not None

    @property
    def num_rows(self) -> int:
        """Batch rows, 0 before the first token."""
        return 0 if self.store is None else len(self.store.rows)

    @property
    def held(self) -> LayerKV:
        """The store of a layer that has one.

        Raises:
            ShapeError: it has not: no token was stored.
        """
        if self.store is None:
            raise ShapeError(
                f"layer {self.shape.layer_idx} must hold a token before it is asked, got none; "
                "pass keys and values with the first queries"
            )
        return self.store

    # New tokens ---------------------------------------------------------------------------------

    def append(self, k: Tensor, v: Tensor, valid: Tensor | None) -> None:
        """Stores new tokens k, v [B, Hkv, T, D]; valid [B, T] bool leaves padding out.

        Raises:
            NonFiniteError: it is one, in host memory, and its key is not finite. Who brings several
                watches them.
        """
        store = self.store or self._open(k)
        if k.shape[0] != len(store.rows):
            raise ShapeError(
                f"batch must stay at {len(store.rows)} rows, got {k.shape[0]}; use a new cache"
            )
        method = self.method
        if k.shape[2] == 1:
            self.means.finite.watch_new(self.shape.layer_idx, k, v, valid)
        if not self._stores_as_is:
            positions = store.next_positions(k.shape[2], valid)
            k, v = method.write(self.shape.layer_idx, k, v, positions)
        for number, row in enumerate(store.rows):
            own_k, own_v = k[number], v[number]
            if valid is not None:
                own_k, own_v = own_k[:, valid[number]], own_v[:, valid[number]]
            row.table.append(own_k, own_v, row.length)
            row.length += own_k.shape[1]

    def _open(self, k: Tensor) -> LayerKV:
        means, rows = self.means, k.shape[0]
        capacity = max(means.reserved_tokens, k.shape[2])
        self.store = LayerKV(
            *(self.shape, means.page_size, rows, k.dtype, k.device, capacity, means.ops),
            pinned=means.pinned if k.device.type == "cuda" else None,
        )
        needs = self.method.needs | means.watched
        if needs.sampled_queries or needs.last_queries or needs.column_sums:
            self._collectors = [EvidenceCollector(needs) for _ in range(rows)]
        return self.store

    # Attention ----------------------------------------------------------------------------------

    def step(
        self,
        q: Tensor,
        scale: float,
        softcap: float | None,
        *,
        new: tuple[Tensor, Tensor] | None = None,
        found: Found | None = None,
        ahead: Foreseen | None = None,
        asked: SearchResult | None = None,
    ) -> Step:
        """A step of q [B, Hq, T, D].

        Args:
            new: k, v [B, Hkv, T, D] of its tokens, which `attend` stores; None where they are.
            found, ahead, asked: see `Step`.
        """
        means = self.means
        return Step(
            ops=means.ops,
            executor=means.executor,
            phases=means.phases,
            work=means.work,
            layer=self.store or self.held,
            q=q,
            new=q.shape[2],
            scale=scale,
            softcap=softcap,
            at_home=q.is_cpu and means.executor.at_once,
            found=found,
            ahead=ahead,
            asked=asked,
            unstored=new,
        )

    def attend(
        self, step: Step, read: Read | None = None, *, widening: int = 1
    ) -> PartialAttention:
        """Stores the step's tokens, and attends what the method reads for it.

        Args:
            read: what to read instead; None asks the method.
            widening: times so many cold entries.

        Returns:
            out [B, Hq, T, D] in the dtype of q, lse [B, Hq, T] float32.

        Raises:
            NonFiniteError: see `append`.
        """
        if read is None:
            read = self.method.read(self.shape.layer_idx, step.q)
        if widening != 1:
            read = read.widened(widening)
        compiled = self._compiled
        if step.unstored is not None and self.shape.layer_idx in self.means.numbers.reserved:
            store_reserved(step, self.means.numbers)
        if compiled is not None and not compiled.serves(step, read):
            compiled = None
        new = step.unstored
        if new is not None and (
            compiled is None or not self._stores_as_is or not compiled.plan.takes(new)
        ):
            self._store(step)
            if compiled is not None and not compiled.serves(step, read):  # pages have moved
                compiled = None
        if compiled is None:
            numbers = self.means.numbers if self._is_steady else None
            compiled = self._compiled = compile_step(step, read, numbers)
            self._num_plans += 1
        part = compiled.plan.attend(step)
        if self._keeper is not None and self._keeper.follows:
            logits = step.scale, step.softcap
            self._follow(self._keeper, step.q, part.lse, *logits)
        return part

    def device_plan(self) -> DevicePlan | None:
        """How its next step is made where it can be advanced already; see `KVCache.advance`."""
        if self._compiled is None or self.store is None or self.leaving is not None:
            return None
        return self._compiled.device_plan(self.store.rows)

    def renew_plan(self) -> None:
        """Makes the plan of the next step anew where something has changed since the last one."""
        compiled, store = self._compiled, self.store
        if compiled is None or store is None or not compiled.stamp.reason:
            return
        shape = compiled.next_shape(store.rows)
        if shape is not None and isinstance(compiled.plan, DevicePlan) and self.leaving is None:
            q = torch.empty(shape[0], dtype=shape[1], device=store.resident.pool.device)
            step = self.step(q, *self._logits)  # of which only the shape counts
            self._compiled = compile_step(step, compiled.plan.read, self.means.numbers)
            self._num_plans += 1

    def take_back_reserved(self) -> None:
        """Gives up the place of a token that was not stored in it."""
        numbers = self.means.numbers
        if self.shape.layer_idx in numbers.reserved:
            row = self.held.rows[0]
            numbers.reserved.discard(self.shape.layer_idx)
            row.length -= 1
            row.table.truncate(row.table.num_tokens - 1)

    def describe_step(self) -> dict[str, Any]:
        """JSON-ready: whether the last decode step was one call of the engine.

        code, reason: why it was not, empty where it was, None before the first step. plans: how
        many were made for the steps so far.
        """
        told = {"layer": self.shape.layer_idx, "plans": self._num_plans}
        if self._compiled is None:
            return {**told, "one_call": False, "code": None, "reason": None}
        code, text = self._compiled.plan.reason or ("", "")
        return {**told, "one_call": not code, "code": code, "reason": text}

    def _store(self, step: Step) -> None:
        """Stores a step's tokens before the rest of it."""
        assert step.unstored is not None
        new, step.unstored = step.unstored, None
        self.append(*new, None)

    def _follow(
        self,
        keeper: Keeper,
        q: Tensor,
        lse: Tensor,
        scale: float,
        softcap: float | None,
        ago: int = 0,
    ) -> None:
        """Tells the method what was attended; it may keep something else from now on.

        Args:
            q: [B, Hq, T, D]. lse: [B, Hq, T]. ago: so many tokens have been stored after these.
        """
        rows = self.held.rows
        attended = Attended(
            *(q, lse, [row.kept for row in rows], [row.length - ago for row in rows]),
            *(scale, softcap),
            lambda row: rows[row].resident_keys(),
        )
        answer = keeper.after(attended, [row.gone_tokens for row in rows])
        if answer is None:
            return
        for row, new in zip(rows, answer, strict=True):
            old, positions = row.kept, None
            if new is old:
                continue
            if row.placement is not None and row.placement.offloads and new is not None:
                if old is not None and new.same_rows(old):
                    row.kept = new
                    continue
                positions = self.means.executor.send(new.positions).open()
            row.keep(new, positions)

    def attend_exact(
        self, q: Tensor, valid: Tensor | None, *, scale: float, softcap: float | None
    ) -> PartialAttention:
        """Everything stored, for many new tokens q [B, Hq, T, D]; watches those of a prompt."""
        means, store = self.means, self.held
        part = attend_exact(
            means.ops, means.executor, store, q, valid, scale=scale, softcap=softcap
        )
        if self.is_open:
            self._logits = scale, softcap
            for row, collector in zip(store.rows, self._collectors, strict=False):
                new = slice(None) if valid is None else valid[row.number]
                own = q[row.number][:, new]
                collector.observe(own)
                if collector.wants_sums:
                    lse, (keys, _) = part.lse[row.number][:, new], row.table.view()
                    collector.add_masses(own, lse, keys, scale=scale, softcap=softcap)
        else:
            if valid is None:
                self._note(q)
            if self._keeper is not None and self._keeper.follows:
                self._follow_many(self._keeper, q, part.lse, valid, scale, softcap)
        return part

    def _note(self, q: Tensor) -> None:
        """Lets the indexes learn later from some queries of a long later turn."""
        count, heads = q.shape[2], self.shape.num_kv_heads
        step = max(1, count // _NOTED_TOKENS)
        some = range((count - 1) % step, count, step)
        for row in self.held.rows:
            indexes = [span.extent.index for span in row.chain.spans]
            known = [index.aging for index in indexes if index is not None]
            agings = [aging for aging in known if aging is not None]
            if not agings:
                continue
            asked = q[row.number][:, some.start :: step].unflatten(0, (heads, -1)).cpu()
            for place, token in enumerate(some):
                for aging in agings:
                    aging.ask(asked[:, :, place].clone(), row.length - count + token)

    def _follow_many(
        self,
        keeper: Keeper,
        q: Tensor,
        lse: Tensor,
        valid: Tensor | None,
        scale: float,
        softcap: float | None,
    ) -> None:
        """Follows a long later turn, some tokens at a time: their weights take memory."""
        if valid is not None:  # padding to the front, where it weighs nothing
            order = valid.int().argsort(dim=1, stable=True)[:, None]
            q, lse = q.take_along_dim(order[..., None], 2), lse.take_along_dim(order, 2)
            lse = lse.masked_fill(lse == -torch.inf, torch.inf)
        count = q.shape[2]
        for start in range(0, count, _FOLLOWED_TOKENS):
            some = slice(start, min(count, start + _FOLLOWED_TOKENS))
            part = q[:, :, some], lse[:, :, some]
            self._follow(keeper, *part, scale, softcap, ago=count - some.stop)

    # The prompt's end ---------------------------------------------------------------------------

    def evidence(self) -> tuple[Evidence, ...]:
        """What was collected, one per batch row; empty if nobody asked for it.

        After the layer was sealed only what is watched is still there.
        """
        if self._kept_evidence is not None:
            return self._kept_evidence
        return tuple(collector.evidence(*self._logits) for collector in self._collectors)

    def seal(self, evidence: tuple[Evidence, ...] | None = None) -> None:
        """Ends the prompt: entries begin to move to where the method wants them.

        Args:
            evidence: what another cache collected of the same prompt; None for what this one did.
        """
        means, store = self.means, self.held
        if evidence is None:
            evidence = self.evidence()
            if means.watched != Needs():
                self._kept_evidence = evidence
        placement = self.method.seal(self.shape.layer_idx, evidence)
        shadows = means.audits and placement.drops
        store.seal(placement.shadowed() if shadows else placement, shadows=shadows)
        self._begin_decoding(store, placement)
        with self._sealing():
            self._depart(evidence, is_prompt=True)
            self.settle_arrived()
        _log.debug("layer %d sealed at %d tokens", self.shape.layer_idx, store.longest)

    def _begin_decoding(self, store: LayerKV, placement: Placement) -> None:
        """Makes what serves the entries of a sealed store as they leave its window."""
        means, pool = self.means, store.resident.pool
        if placement.rest is Demotion.ABSORB:
            self._keeper = Keeper(self.method, self.shape, pool.dtype, pool.device)
        store.select = means.selectors.of(store)

    def take(self, store: LayerKV, placement: Placement) -> None:
        """Goes on from a sealed store of another cache, in the place of its own prompt.

        Args:
            placement: what the method asked for; that of the store may have shadows beside it.
        """
        if self.store is not None:
            raise ShapeError(
                f"layer {self.shape.layer_idx} must be empty to take what another cache held, got "
                f"{self.store.longest} tokens in it; use a new cache"
            )
        self.store = store
        self._begin_decoding(store, placement)

    def go_on_from(self, store: LayerKV) -> None:
        """Takes a branch of its store, or what it was branched from, in that store's place."""
        self.store, self._compiled = store, None

    @contextmanager
    def _sealing(self) -> Iterator[None]:
        """A part of ending a prompt, which has not ended and can be ended again if this fails."""
        try:
            yield
        except BaseException:
            self.held.unseal()
            raise

    # What leaves the window ---------------------------------------------------------------------

    def move_on(self, *, settle: bool = True) -> None:
        """Ends a step: what has left the window begins to depart.

        Args:
            settle: what has arrived at once; else no entry changes yet.
        """
        if self.store is None or self.store.placement is None or self.leaving is not None:
            return
        for row in self.store.rows:
            if row.table.num_tokens >= row.full_tokens:  # hardly ever
                start, stop = row.outside()
                if start < stop:
                    self._depart()
                    if settle:
                        self.settle_arrived()
                    return

    def settle_arrived(self) -> None:
        """Ends the departure of what has arrived already."""
        if self.leaving is not None and self.leaving.arrived:
            self.settle()

    def _depart(self, evidence: Sequence[Evidence] = (), *, is_prompt: bool = False) -> None:
        """All that leaves the window leaves here: at the prompt's end, then page by page.

        Args:
            evidence: of the prompt, one per row; empty after it.
        """
        means, horizon = self.means, self.method.needs.horizon_tokens
        asked = [self._samples(seen, horizon) for seen in evidence]
        if is_prompt:
            self._samples_left = asked
        elif self._samples_left:
            some = zip(self.held.rows, self._samples_left, strict=False)
            asked = [None if row.chain.spans else samples for row, samples in some]
        nearest = self.finder()
        absorb = None if self._keeper is None else self._absorbs(self._keeper, evidence, is_prompt)
        with means.phases.measure("transfer"):
            leaving = Departure(
                *(means.executor, self.held, asked),
                nearest=nearest,
                absorb=absorb,
                is_prompt=is_prompt,
            )
        if leaving:
            if all(row.chain.spans or row.overflow() is not None for row in self.held.rows):
                self._samples_left = ()
            self.leaving = leaving

    def _absorbs(self, keeper: Keeper, evidence: Sequence[Evidence], is_prompt: bool) -> Absorb:
        def absorb(row: Row, left: Entries) -> Entries | None:
            seen = None
            if is_prompt:
                scale, softcap = self._logits
                plain = Evidence(row.length, scale=scale, softcap=softcap)
                known = evidence[row.number] if evidence else plain
                seen = replace(known, keys=row.table.view()[0])
            gone = row.gone_tokens + left.lengths[0]
            return keeper.absorb(row.number, row.kept, left, seen, gone)

        return absorb

    def _samples(self, seen: Evidence, horizon: int) -> Samples | None:
        """What an index may learn from, turned to where decoding will ask."""
        placement = self.held.placement
        if placement is not None and placement.learns is not None:
            seen = seen.narrowed(placement.learns)
        asked = seen.samples(self.shape.num_kv_heads, self.rotary)
        return None if asked is None else asked.ahead(seen.num_tokens, horizon)

    def wait_for_leaving(self) -> None:
        """Returns when the copies of what is leaving have arrived; nothing else changes."""
        if self.leaving is not None:
            with self.means.phases.measure("wait"):
                self.leaving.wait()

    def settle(self) -> None:
        """Ends what is leaving; whoever reads or changes the layer does this first."""
        self.wait_for_leaving()
        leaving, self.leaving = self.leaving, None
        if leaving is None:
            return
        sealing = self._sealing() if leaving.is_prompt else nullcontext()
        with self.means.phases.measure("transfer"), sealing:
            leaving.end(self.means.builds)
        if leaving.is_prompt:
            self._collectors = []
            if self._mark is not None and self._mark.lengths == self.lengths:
                self._mark = self._marked()  # the prompt has ended before anything new came

    def reset(self) -> None:
        """Forgets all entries."""
        self.store, self._collectors, self._kept_evidence, self.leaving = None, [], None, None
        self._samples_left = ()
        self._keeper = None
        self._compiled = None  # it holds on to the entries that it describes

    def forget_leaving(self) -> None:
        """Gives up what is leaving: its entries are about to be forgotten as well."""
        self.leaving = None

    def finder(self) -> FindNearest | None:
        """What finds the best keys of a new index's samples; on the host the index is quicker."""
        far = self.held.resident.pool.device.type != "cpu"
        return self.nearest_keys if far and self.method.needs.nearest_keys else None

    def nearest_keys(self, samples: Tensor, keys: Tensor) -> Tensor:
        """The best of keys [Hkv, N, D] for samples [Hkv, G, M, D]: [Hkv, G, M, K] int32."""
        means = self.means
        count = min(self.method.needs.nearest_keys, keys.shape[1])
        found = means.ops.nearest_keys(samples.flatten(1, 2), keys, count)
        return found.view(*samples.shape[:3], count)

    # Rows ---------------------------------------------------------------------------------------

    def crop(self, count: int) -> None:
        """Forgets the newest `count` tokens of every row.

        Raises:
            MethodError: the method has lost what would be the window; nothing was forgotten.
        """
        self.check_crop(count)
        if self.store is not None:
            for row in self.store.rows:
                row.crop(min(count, row.length))

    def forked(self, means: Means) -> TieredLayer:
        """A layer of another cache, of the same method, that continues from the same entries."""
        new = copy(self)
        new.means, new._mark = means, None
        new._compiled = None
        if self.store is not None:
            new.store = self.store.forked()
            new.store.select = means.selectors.of(new.store)
        return new

    @property
    def lengths(self) -> list[int]:
        """Tokens stored by row; empty before the first."""
        return [] if self.store is None else [row.length for row in self.store.rows]

    # A forward that may fail --------------------------------------------------------------------

    def mark(self) -> None:
        """Notes where the layer stands, for `go_back`; what is leaving it leaves before."""
        self.settle()
        self._mark = self._marked()

    def _marked(self) -> LayerMark:
        store = self.store
        rows = [] if store is None else [row.mark() for row in store.rows]
        collectors = [] if self.is_sealed else [one.branch() for one in self._collectors]
        return LayerMark(store, self.is_sealed, rows, collectors)

    def forget_mark(self) -> None:
        """From now on there is nothing to go back to."""
        self._mark = None

    def go_back(self) -> bool:
        """Takes back what came since `mark`; False where that cannot be done, see `Row.go_back`.

        A prompt that has ended since as it was then stays ended.
        """
        mark, self._mark = self._mark, None
        leaving, self.leaving = self.leaving, None
        if leaving is not None:
            leaving.wait()  # then nobody writes to memory that is let go
            if leaving.is_prompt:
                self.held.unseal()
        if mark is None or mark.store is None:
            self.reset()
            return True
        store = self.held
        if store is not mark.store or len(store.rows) != len(mark.rows):
            return False
        if not self.is_sealed:
            self._collectors = list(mark.collectors)
        elif not mark.is_sealed and self._moves_entries:
            return False
        return all(row.go_back(own) for row, own in zip(store.rows, mark.rows, strict=True))

    @property
    def _moves_entries(self) -> bool:
        place = self.held.placement
        return place is not None and place.rest is not Demotion.KEEP

    def check_crop(self, count: int) -> None:
        """Raises MethodError where `crop` would."""
        self.settle()
        if self.store is not None:
            for row in self.store.rows:
                row.check_crop(min(count, row.length))

    def fork(self, sources: Sequence[int]) -> None:
        """Row r continues from row sources[r]; pages are copied on write only."""
        self.settle()
        self._compiled = None  # it holds on to the entries that it describes
        if self.store is not None:
            self.store.fork(sources)
        if self._collectors:
            # Observation is over once rows fork, so rows may share what was observed.
            self._collectors = [self._collectors[source] for source in sources]
        if self._samples_left:
            self._samples_left = [self._samples_left[source] for source in sources]
