"""The KV cache of one conversation: all tiered layers under one method."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from hybrid_kv.config import AuditParams, HybridConfig
from hybrid_kv.ops import get_ops
from hybrid_kv.runtime.cache_context import CacheContext, FiniteGuard, IndexBuilds
from hybrid_kv.runtime.engine_plan import EnginePlan
from hybrid_kv.runtime.layer import LayerCache, Layers
from hybrid_kv.runtime.step import GraphUse, Step
from hybrid_kv.store import LayerStore
from hybrid_kv.transfer import Executor, SyncExecutor, ThreadExecutor
from hybrid_kv.types import (
    Evidence,
    LayerShape,
    ModelInfo,
    PartialAttention,
    TokenBudget,
    Work,
)
from hybrid_kv.watch.phases import ATTENTION, Phases

if TYPE_CHECKING:
    from hybrid_kv.runtime.sparse_prefill import PrefillLoss
    from hybrid_kv.watch.auditor import Auditor


class StepWatcher(Protocol):
    """Whoever looks at decode steps of a cache, and at what they have found."""

    def wants(self, layer_idx: int, q: Tensor) -> bool:
        """Whether to look at the step of a layer that begins, with queries q [B, Hq, T, D]."""
        ...

    def add(self, step: Step, part: PartialAttention) -> None:
        """Takes that step, with what it has found, and what it gave."""
        ...


class KVCache:
    """Layers, method and executor of one conversation; knows tensors, not model libraries.

    Short inputs after the prompt read through the method, long ones attend exactly; see
    `LayerCache`. Not safe for use from several threads at once.

    layers: by index, and what begins or ends in all of them. means: what they share. more_prompt:
        set while a prompt comes in pieces, however short the last one. watchers: look at decode
        steps, the auditor among them. check_source: raises where memory that entries lie in is
        gone, as of a file that was cut.

    Args:
        executor: shared with other caches, whose owner closes it; None for one of its own, as
            `config.index_build` says.
    """

    def __init__(
        self, info: ModelInfo, config: HybridConfig, executor: Executor | None = None
    ) -> None:
        self.info, self.config = info, config
        self.executor: Executor = executor or make_executor(config)
        self._owns_executor = executor is None
        self.ops, self.phases = get_ops(config.backend), Phases()
        self.finite = FiniteGuard(self.executor)
        self.more_prompt = False
        self._few_tokens = max(1, config.dense_extend_tokens)
        self.means = CacheContext(
            ops=self.ops,
            executor=self.executor,
            finite=self.finite,
            phases=self.phases,
            page_size=config.page_size,
            prefill_error=config.prefill_error,
            audits=config.audit_every > 0,
            **self._of_one_conversation(),
        )
        self.layers = Layers(map(self._new_layer, info.layers), self.means)
        self.watchers: list[StepWatcher] = []
        self._auditor: Auditor | None = None
        self.auditor = make_auditor(config, info)
        self.check_source: Callable[[], None] | None = None
        self.graph_use = GraphUse()

    def _of_one_conversation(self) -> dict[str, Any]:
        """The means that the layers share until `reset`."""
        method = self.config.build()
        method.open(self.info)
        return {
            "method": method,
            "method_name": self.config.method,
            "work": Work(),
            "builds": new_builds(self),
            "foresight": method.foresight,
            "unforeseen": self.info.unforeseen,
            "look_ahead": None,
            "shapes": self.info.layers,
            "numbers": None,
            "_selectors": None,
        }

    def _new_layer(self, shape: LayerShape) -> LayerCache:
        return LayerCache(shape, self.info.rotary_of(shape.layer_idx), self.means)

    @property
    def stores(self) -> dict[int, LayerStore]:
        """See `Layers.stores`."""
        return self.layers.stores()

    @property
    def work(self) -> Work:
        """Counters of what decoding has touched; another one may take their place."""
        return self.means.work

    @work.setter
    def work(self, work: Work) -> None:
        self.means.work = work

    @property
    def auditor(self) -> Auditor | None:
        """Looks at some steps beside decoding; another one may take its place, or none."""
        return self._auditor

    @auditor.setter
    def auditor(self, auditor: Auditor | None) -> None:
        others = [one for one in self.watchers if one is not self._auditor]
        self._auditor = auditor
        self.watchers = others if auditor is None else [auditor, *others]

    def look_every(self, steps: int, audit: AuditParams | None = None) -> None:
        """From now on audits look every so many steps, 0 for never; they begin anew, by `audit`."""
        if self.auditor is not None:
            self.auditor.close()
        new = {"audit_every": steps, "audit": audit or self.config.audit}
        self.config = self.config.model_copy(update=new)
        self.auditor = make_auditor(self.config, self.info)

    # Tokens -------------------------------------------------------------------------------------

    def attend(
        self,
        layer_idx: int,
        q: Tensor,
        new: tuple[Tensor, Tensor] | None,
        valid: Tensor | None,
        *,
        scale: float,
        softcap: float | None = None,
    ) -> PartialAttention:
        """Stores the new tokens of a layer and attends with their queries.

        Args:
            q: [B, Hq, T, D].
            new: k, v [B, Hkv, T, D] after RoPE; None where another layer stored them (KV sharing).
            valid: [B, T] bool, False for padding; None where there is none.
            scale: factor on the logits.

        Returns:
            out [B, Hq, T, D] in the dtype of q, lse [B, Hq, T] float32.

        Raises:
            NonFiniteError: a single new key in host memory is not finite.
        """
        phases, layers, layer = self.phases, self.layers, self.layers[layer_idx]
        phases.layer_idx, begin = layer_idx, phases.now()
        few = q.shape[2] <= self._few_tokens and valid is None and not self.more_prompt
        store = layer.store
        if few and (store is None or store.placement is None):
            layers.seal_if_open(layer_idx)
            few = layer.is_sealed
        if layer.leaving.departure is not None:
            layer.settle()
        if few:
            part = self._decode(layer, q, new, scale, softcap)
        else:
            if (numbers := self.means.numbers) is not None:
                numbers.take_back(layer.store)
            if new is not None:
                layer.append(*new, valid)
            part = layer.attend_exact(q, valid, scale=scale, softcap=softcap)
        if not (few and layers.may_go_back):  # else `Layers.end_forward` does
            layer.move_on()
        phases.book(ATTENTION, begin)
        return part

    def _decode(
        self,
        layer: LayerCache,
        q: Tensor,
        new: tuple[Tensor, Tensor] | None,
        scale: float,
        softcap: float | None,
    ) -> PartialAttention:
        """A step through the method, for those who look at it as well."""
        steps, layer_idx, ahead = layer.steps, layer.shape.layer_idx, self.means.look_ahead
        foreseen = ahead.take(layer_idx) if ahead is not None and ahead.under_way else None
        step = steps.make(layer.store or layer.held, q, scale, softcap, new=new, ahead=foreseen)
        if not self.watchers:
            return steps.attend(step)
        looking = [one for one in self.watchers if one.wants(layer_idx, q)]
        step.found = {} if looking else None
        part = steps.attend(step, widening=_widening(self.auditor, layer_idx))
        for watcher in looking:
            watcher.add(step, part)
        return part

    def joint_step(
        self,
        layer_idx: int,
        q: Tensor,
        new: tuple[Tensor, Tensor],
        *,
        scale: float,
        softcap: float | None,
    ) -> tuple[EnginePlan, Step] | None:
        """A step of one token and one row where it is one call of the engine that nobody looks at,
        and which therefore may be made together with those of other caches; else None, and nothing
        was done.

        Args: as of `attend`.
        """
        layer, ahead = self.layers[layer_idx], self.means.look_ahead
        if self.watchers or self.more_prompt or self.phases.observer is not None:
            return None
        if layer.store is None or layer.leaving.departure is not None:
            return None
        if ahead is not None and ahead.under_way:
            return None
        step = layer.steps.make(layer.store, q, scale, softcap, new=new)
        plan = layer.steps.joint_plan(step)
        return None if plan is None else (plan, step)

    def search_ahead(self, layer_idx: int, predict: Callable[[], Tensor]) -> None:
        """Begins to search a layer that comes later in this forward of one token, if that helps.

        Until the layer attends, or `LookAhead.forget`, nothing else may change the cache.

        Args:
            predict: gives the layer's queries [B, Hq, 1, D], not turned by position yet.
        """
        ahead, layer = self.means.searches_ahead(), self.layers[layer_idx]
        if ahead is None or not ahead.wants(layer):
            return
        queries = predict()
        read = self.means.method.read(layer_idx, queries).widened(
            _widening(self.auditor, layer_idx)
        )
        if isinstance(read.cold, TokenBudget):
            ahead.begin(layer, queries, read.cold)

    def describe_steps(self) -> list[dict[str, Any]]:
        """By layer how its last step was made; see `PlannedSteps.describe`.

        graph: where steps are to be captured, what became of the last forward as one graph.
        """
        told = [layer.steps.describe() for layer in self.layers.values()]
        if not self.config.capture_decode:
            return told
        return [{**one, "graph": self.graph_use.describe()} for one in told]

    def prefill_loss(self) -> PrefillLoss | None:
        """The reads and the loss of block-sparse prefill; None where the prompt was exact."""
        layers = self.layers.items()
        sparse = [(idx, one) for idx, layer in layers for one in layer.prompt.sparse]
        if not sparse:
            return None
        from hybrid_kv.runtime.sparse_prefill import prefill_loss

        return prefill_loss(sparse)

    def load(
        self, layer_idx: int, k: Tensor, v: Tensor, evidence: tuple[Evidence, ...] = ()
    ) -> None:
        """Takes k, v [B, Hkv, N, D] at positions 0..N-1 as a layer's complete prompt.

        Args:
            evidence: what another cache collected while it computed them.
        """
        self.layers[layer_idx].append(k, v, None)
        self.layers.seal(layer_idx, evidence)

    # Beginning, and going on elsewhere ------------------------------------------------------------

    def fork(self) -> KVCache:
        """A cache that continues from the same entries; either goes on as if it were alone.

        A prompt that has not ended ends here. Cold entries and their indexes are shared, and what
        either adds is its own. Resident entries are copied, sinks and window; where a method keeps
        everything resident, pages are shared until one of the two writes to them. Counters begin
        anew. Both have one method, which knows nothing of a row, and one executor, which stays this
        cache's to close.

        Raises:
            CapacityError, DeviceMemoryError: the copy does not fit; nothing has changed.
        """
        self.layers.seal_all()
        new, ahead = copy(self), self.means.look_ahead
        new._owns_executor = False
        new.phases, new.finite = Phases(), FiniteGuard(self.executor)
        new.graph_use = GraphUse()
        new.means = means = replace(
            self.means,
            phases=new.phases,
            pinned=None,
            builds=new_builds(new),
            work=Work(),
            look_ahead=None if ahead is None else ahead.fork(),
            numbers=None,
            speculates=False,
        )
        new.layers = Layers([layer.forked(means) for layer in self.layers.values()], means)
        new.watchers = []
        new.auditor = make_auditor(self.config, self.info)
        return new

    def start_over(self) -> None:
        """Forgets all tokens, but no counter; a method may remember something, too."""
        kept = {"work": self.work, "builds": self.means.builds}
        _forget_pinned(self.means)
        self.means = replace(self.means, **{**self._of_one_conversation(), **kept})
        self.layers = Layers(map(self._new_layer, self.info.layers), self.means)

    def reset(self) -> None:
        """Forgets everything; the cache is as new."""
        self.phases.reset()
        self.start_over()
        self.means.work, self.means.builds = Work(), new_builds(self)
        if self.auditor is not None:
            self.auditor.close()
        self.auditor = make_auditor(self.config, self.info)
        self.check_source = None

    def close(self) -> None:
        """Gives everything back: what is stored, and index builds that are not done."""
        for layer in self.layers.values():
            if layer.store is not None:
                layer.store.cold.cancel_builds()
        _forget_pinned(self.means)
        # Another thread may still look at the old ones.
        self.layers = Layers(map(self._new_layer, self.info.layers), self.means)
        if self.auditor is not None:
            self.auditor.close()
        if self._owns_executor:
            self.executor.close()

    def check_integrity(self) -> None:
        """Raises IntegrityError unless every stored token has exactly one owner, in every layer."""
        for store in self.stores.values():
            store.check_integrity()


def _widening(auditor: Auditor | None, layer_idx: int) -> int:
    """Times so many cold entries as the method asks for, where audits say so."""
    return 1 if auditor is None else auditor.factor(layer_idx)


def _forget_pinned(means: CacheContext) -> None:
    """Gives up memory that was made for layers to come."""
    if means.pinned is not None:
        means.pinned.clear()


def new_builds(cache: KVCache) -> IndexBuilds:
    """The index builds of a cache, which they do not keep alive: a dropped one is freed."""
    known = weakref.ref(cache)

    def spare_bytes() -> int:
        found = known()
        return 0 if found is None else found.layers.spare_host_memory()

    return IndexBuilds(cache.executor, cache.phases, spare_bytes)


def make_auditor(config: HybridConfig, info: ModelInfo) -> Auditor | None:
    """An auditor of a cache under these settings; None for none."""
    if not config.audit_every:
        return None
    from hybrid_kv.watch.auditor import Auditor

    # Where findings change what is attended and tokens shall repeat, they must not come late.
    inline = config.index_build == "wait" and config.audit.action != "warn"
    runner = SyncExecutor() if inline else ThreadExecutor(1)
    return Auditor(config.audit_every, config.audit, info.layers, runner)


def make_executor(config: HybridConfig, device_type: str = "cpu") -> Executor:
    """An executor, which moves entries and builds indexes, for a model on such a device.

    Raises:
        ConfigError: HYBRID_KV_BUILD_THREADS is no number of threads.
    """
    builds = ThreadExecutor() if config.index_build == "background" else SyncExecutor()
    if device_type != "cuda":
        return builds
    from hybrid_kv.transfer.cuda import CudaExecutor

    return CudaExecutor(builds)
