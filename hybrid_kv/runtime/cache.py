"""The KV cache of one conversation: all tiered layers under one method."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from hybrid_kv.config import HybridConfig
from hybrid_kv.ops import get_ops
from hybrid_kv.plugins import Method
from hybrid_kv.runtime.builds import IndexBuilds
from hybrid_kv.runtime.capacity import spare_host_memory
from hybrid_kv.runtime.device_plan import DevicePlan
from hybrid_kv.runtime.finite import FiniteGuard
from hybrid_kv.runtime.layer import TieredLayer
from hybrid_kv.runtime.look_ahead import LookAhead
from hybrid_kv.runtime.means import Means
from hybrid_kv.runtime.numbers import POSITION, StepNumbers
from hybrid_kv.runtime.reasons import GraphUse
from hybrid_kv.runtime.select import Selectors
from hybrid_kv.runtime.step import Found, Step
from hybrid_kv.store import LayerKV
from hybrid_kv.store.ahead import PinnedAhead
from hybrid_kv.transfer import CudaExecutor, Executor, SyncExecutor, ThreadExecutor
from hybrid_kv.types import (
    Demotion,
    Evidence,
    LayerShape,
    ModelInfo,
    Needs,
    PartialAttention,
    TokenBudget,
    Work,
    bytes_per_token,
)
from hybrid_kv.watch.audit import Look
from hybrid_kv.watch.auditor import Auditor
from hybrid_kv.watch.phases import ATTENTION, Phases
from hybrid_kv.watch.places import Places

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A state of a cache to which it can be put back."""

    stores: Mapping[int, LayerKV]
    lengths: Mapping[int, Sequence[int]]


class StepObserver(Protocol):
    """Whoever looks at the steps of a cache."""

    def add(self, step: Step, part: PartialAttention) -> None: ...


class KVCache:
    """Layers, method and executor of one conversation; knows tensors, not model libraries.

    Short inputs after the prompt read through the method, long ones attend exactly; see
    `TieredLayer`. Not safe for use from several threads at once.

    layers: by index, from the beginning. more_prompt: set while a prompt comes in pieces, however
        short the last one. places: takes where steps of one row and token look; None for nobody.
    observer: takes every step through the method, with what it found; None for nobody.
        check_source: raises where memory that entries lie in is gone, as of a file that was cut.

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
        self.more_prompt = self._may_go_back = False
        self._few_tokens = max(1, config.dense_extend_tokens)
        self.means = Means(
            ops=self.ops,
            executor=self.executor,
            finite=self.finite,
            phases=self.phases,
            page_size=config.page_size,
            pinned=PinnedAhead(),
            audits=config.audit_every > 0,
            **self._of_one_conversation(),
        )
        self.layers = self._new_layers()
        self.auditor = self._new_auditor()
        self.places: Places | None = None
        self.observer: StepObserver | None = None
        self.check_source: Callable[[], None] | None = None
        self.graph_use = GraphUse()

    def _of_one_conversation(self) -> dict[str, Any]:
        """What the layers share until `reset`."""
        method = self.config.build()
        method.open(self.info)
        wanted, known = method.foresight, self.info.unforeseen
        ahead = None if wanted is None else LookAhead(self.executor, wanted, known)
        return {
            "method": method,
            "work": Work(),
            "builds": self._new_builds(),
            "look_ahead": ahead,
            "selectors": Selectors(len(self.info.layers)),
            "numbers": self._new_numbers(),
        }

    def _new_numbers(self) -> StepNumbers:
        return StepNumbers([shape.layer_idx for shape in self.info.layers])

    def _new_builds(self) -> IndexBuilds:
        spare = weakref.WeakMethod(self._spare_host_memory)  # no cycle: a dropped cache is freed

        def spare_bytes() -> int:
            measure = spare()
            return 0 if measure is None else measure()

        return IndexBuilds(self.executor, self.phases, spare_bytes)

    def _new_layers(self) -> dict[int, TieredLayer]:
        return {shape.layer_idx: self._new_layer(shape) for shape in self.info.layers}

    def _new_layer(self, shape: LayerShape) -> TieredLayer:
        return TieredLayer(shape, self.info.rotary_of(shape.layer_idx), self.means)

    @property
    def stores(self) -> dict[int, LayerKV]:
        """What the layers hold that have a token; nothing is on its way any more."""
        self._settle_all()
        held = {idx: layer.store for idx, layer in self.layers.items()}
        return {idx: store for idx, store in held.items() if store is not None}

    @property
    def method(self) -> Method:
        return self.means.method

    @property
    def builds(self) -> IndexBuilds:
        return self.means.builds

    @property
    def work(self) -> Work:
        """Counters of what decoding has touched; another one may take their place."""
        return self.means.work

    @work.setter
    def work(self, work: Work) -> None:
        self.means.work = work

    def reserve(self, num_tokens: int) -> None:
        """Announces how many tokens will come, so that memory is taken once."""
        self.means.reserved_tokens = max(self.means.reserved_tokens, num_tokens)

    def look_every(self, steps: int) -> None:
        """From now on audits look every so many decode steps, 0 for never; they begin anew."""
        if self.auditor is not None:
            self.auditor.close()
        self.config = self.config.model_copy(update={"audit_every": steps})
        self.auditor = self._new_auditor()

    def watch(self, needs: Needs) -> None:
        """Collects, from the first token on, more evidence than the method needs, and keeps it."""
        self.means.watched = needs

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
        phases, layer = self.phases, self.layers[layer_idx]
        phases.layer_idx, begin = layer_idx, phases.now()
        few = q.shape[2] <= self._few_tokens and valid is None and not self.more_prompt
        is_sealed = layer.is_sealed
        if few and not is_sealed:
            self.seal_if_open(layer_idx)
            is_sealed = layer.is_sealed
        if layer.leaving is not None:
            layer.settle()
        if not few:
            layer.take_back_reserved()
        if few and is_sealed:
            part = self._decode(layer, q, new, scale, softcap)
        else:
            if new is not None:
                layer.append(*new, valid)
            part = layer.attend_exact(q, valid, scale=scale, softcap=softcap)
        if not (few and self._may_go_back):  # else `end_forward` does
            layer.move_on()
        phases.book(ATTENTION, begin)
        return part

    def _decode(
        self,
        layer: TieredLayer,
        q: Tensor,
        new: tuple[Tensor, Tensor] | None,
        scale: float,
        softcap: float | None,
    ) -> PartialAttention:
        """A step through the method, as wide as the audit asks for and looked at in its turn."""
        auditor, ahead = self.auditor, self.means.look_ahead
        foreseen = ahead.take(layer.shape.layer_idx) if ahead and ahead.under_way else None
        places, observer = self.places if q.shape[2] == 1 else None, self.observer
        if auditor is None and places is None and observer is None:
            return layer.attend(layer.step(q, scale, softcap, new=new, ahead=foreseen))
        target = auditor.due(layer.shape.layer_idx) if auditor and q.shape[2] == 1 else None
        looks = target is not None or places is not None or observer is not None
        found: Found | None = {} if looks else None
        step = layer.step(q, scale, softcap, new=new, found=found, ahead=foreseen)
        factor = 1 if auditor is None else auditor.factor(layer.shape.layer_idx)
        part = layer.attend(step, widening=factor)
        if auditor is not None and target is not None:
            auditor.begin(Look(step, auditor.next_row(len(q)), target, part))
        if places is not None:
            places.add(step, part)
        if observer is not None:
            observer.add(step, part)
        return part

    def end_step(self, layer: TieredLayer) -> None:
        """Ends a layer's decode step: what has left its window departs, in a forward that may be
        taken back when all layers have ended theirs.
        """
        if not self._may_go_back:
            layer.move_on()

    def search_ahead(self, layer_idx: int, predict: Callable[[], Tensor]) -> None:
        """Begins to search a layer that comes later in this forward of one token, if that helps.

        Until the layer attends, or `LookAhead.forget`, nothing else may change the cache.

        Args:
            predict: gives the layer's queries [B, Hq, 1, D], not turned by position yet.
        """
        ahead, layer = self.means.look_ahead, self.layers[layer_idx]
        if ahead is None or not ahead.wants(layer):
            return
        queries, auditor = predict(), self.auditor
        read = self.method.read(layer_idx, queries)
        read = read if auditor is None else read.widened(auditor.factor(layer_idx))
        if isinstance(read.cold, TokenBudget):
            ahead.begin(layer, queries, read.cold)

    def describe_steps(self) -> list[dict[str, Any]]:
        """By layer how its last step was made; see `TieredLayer.describe_step`.

        graph: where steps are to be captured, what became of the last forward as one graph.
        """
        told = [layer.describe_step() for layer in self.layers.values()]
        if not self.config.capture_decode:
            return told
        return [{**one, "graph": self.graph_use.describe()} for one in told]

    def position_on(self, device: torch.device) -> Tensor:
        """[1, 1] int64 on a device: the position of the token that `advance` was told."""
        return self.means.numbers.on(device)[-1:, POSITION : POSITION + 1]

    def describe_look_ahead(self) -> list[dict[str, Any]]:
        """By layer what came of it; see `LookAhead.describe`."""
        ahead = self.means.look_ahead
        return [] if ahead is None else [ahead.describe(layer_idx) for layer_idx in self.layers]

    def load(
        self, layer_idx: int, k: Tensor, v: Tensor, evidence: tuple[Evidence, ...] = ()
    ) -> None:
        """Takes k, v [B, Hkv, N, D] at positions 0..N-1 as a layer's complete prompt.

        Args:
            evidence: what another cache collected while it computed them.
        """
        self.layers[layer_idx].append(k, v, None)
        self.seal(layer_idx, evidence)

    # The prompt's end ---------------------------------------------------------------------------

    def seal_if_open(self, layer_idx: int, *, wait: bool = False) -> None:
        """Ends a layer's prompt unless that has happened or the layer is not tiered; see `seal`."""
        if layer_idx in self.layers and self.layers[layer_idx].is_open:
            self.seal(layer_idx, wait=wait)

    def seal(
        self,
        layer_idx: int,
        evidence: tuple[Evidence, ...] | None = None,
        *,
        wait: bool = False,
    ) -> None:
        """Ends a layer's prompt: its entries move to where the method wants them.

        Called by whoever knows that the prompt is complete; else the first short input does it. On
        a GPU they leave while the next layer computes, and the layer before has left by then.

        Args:
            evidence: see `TieredLayer.seal`.
            wait: until they have left, so that no two layers' prompts share a GPU's memory.
        """
        self._settle_all()
        pinned = self.means.pinned
        pinned.begin()
        self.layers[layer_idx].seal(evidence)
        if wait:
            self.layers[layer_idx].settle()
        if self._unsealed():
            pinned.repeat()
        else:
            pinned.clear()
            longest = self.layers[layer_idx].held.longest
            names = (self.config.method, len(self.layers), longest)
            _log.info("prompt ended: method %s, %d layers, %d tokens", *names)

    def _settle_all(self) -> None:
        layers = list(self.layers.values())
        for layer in reversed(layers):  # the last copy first: with it all others have arrived
            layer.wait_for_leaving()
        for layer in layers:
            layer.settle()

    def _unsealed(self) -> list[LayerShape]:
        """The layers whose prompt is still to be computed or to be ended."""
        return [layer.shape for layer in self.layers.values() if not layer.is_sealed]

    def _spare_host_memory(self) -> int:
        """What cold entries and indexes of the layers to come leave of the host's free memory."""
        held = (layer.store for layer in self.layers.values())
        store = next((store for store in held if store is not None), None)
        if store is None:
            return 0
        tokens = len(store.rows) * max(self.means.reserved_tokens, store.longest)
        dtype = store.resident.pool.dtype
        per_token = sum(
            bytes_per_token(shape, dtype) + self.method.index_bytes_per_token(shape, tokens)
            for shape in self._unsealed()
        )
        return spare_host_memory(tokens * per_token)

    # Forwards that may fail -----------------------------------------------------------------------

    def begin_forward(self) -> None:
        """From now on all layers can be put back to where they are, by `go_back`."""
        self._may_go_back = True
        self._settle_all()
        for layer in self.layers.values():
            layer.mark()

    def advance(self, position: int) -> list[DevicePlan]:
        """Begins a step of one token in all layers: its places are fixed, and devices are told.

        The layers attend it as ever, and store it where it belongs.

        Args:
            position: of the token in the model, padding included.

        Returns:
            By layer how the step is made, as long as that still holds; else nothing, be it that
            some layer cannot begin before its queries are known.
        """
        if self.more_prompt:
            return []
        for layer in self.layers.values():
            layer.renew_plan()
        plans = [layer.device_plan() for layer in self.layers.values()]
        told = [plan for plan in plans if plan is not None]
        if not told or len(told) < len(plans):
            return []
        numbers = self.means.numbers
        for plan in told:
            plan.advance(self.work)
        numbers.here[-1, POSITION] = position
        numbers.send()
        return told if all(layer.device_plan() for layer in self.layers.values()) else []

    def end_forward(self) -> None:
        """What came stays, and what has left the windows in decode steps departs."""
        layers = list(self.layers.values())
        for layer in layers:
            if layer.means.numbers.reserved:
                layer.take_back_reserved()
        self.means.numbers.noted.clear()
        for layer in layers:  # methods are asked here, and may fail, before any entry moves
            layer.move_on(settle=False)
        for layer in layers:
            layer.settle_arrived()
        for layer in layers:
            layer.forget_mark()
        self._may_go_back = False

    def go_back(self) -> bool:
        """Puts all layers back to where they were at `begin_forward`.

        Exact where that forward was a decode step, a piece of a prompt or all of it. What a later
        turn has moved to the cold tier stays there. False where a layer has lost something since;
        then the cache is of no use any more.
        """
        self._may_go_back = False
        self.means.numbers.reserved.clear()
        self.means.numbers.noted.clear()
        if self.means.look_ahead is not None:
            self.means.look_ahead.forget()
        done = [layer.go_back() for layer in self.layers.values()]
        if all(layer.store is None for layer in self.layers.values()):
            self.start_over()  # a method may remember something, too
        return all(done)

    def start_over(self) -> None:
        """Forgets all tokens, but no counter."""
        kept = {"work": self.work, "builds": self.builds}
        self.means.pinned.clear()
        self.means = replace(self.means, **{**self._of_one_conversation(), **kept})
        self.layers = self._new_layers()

    # Going on elsewhere, and going back -----------------------------------------------------------

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
        for layer_idx in self.layers:
            self.seal_if_open(layer_idx)
        self._settle_all()
        new, ahead = copy(self), self.means.look_ahead
        new._owns_executor = new._may_go_back = False
        new.phases, new.finite = Phases(), FiniteGuard(self.executor)
        new.graph_use = GraphUse()
        new.means = replace(
            self.means,
            phases=new.phases,
            pinned=PinnedAhead(),
            builds=new._new_builds(),
            work=Work(),
            look_ahead=None if ahead is None else ahead.fork(),
            numbers=self._new_numbers(),
        )
        new.layers = {idx: layer.forked(new.means) for idx, layer in self.layers.items()}
        new.auditor, new.places = new._new_auditor(), None
        return new

    def checkpoint(self) -> Checkpoint:
        """The state after the prompt, sealed; what comes next can be undone by `restore`.

        Where the method moves entries on as the window advances, the next tokens are taken by a
        branch of the layer: cropping would bring back neither dropped nor offloaded entries.
        """
        for layer_idx in self.layers:
            self.seal_if_open(layer_idx)
        saved = self.stores
        branches: dict[int, LayerKV] = {}
        try:
            for layer_idx, store in saved.items():
                if store.placement is not None and store.placement.rest is not Demotion.KEEP:
                    branches[layer_idx] = store.branch()
        except BaseException:  # memory ran out: all layers stay what they are
            for branch in branches.values():
                branch.cold.release()
            raise
        for layer_idx, branch in branches.items():
            self.layers[layer_idx].go_on_from(branch)
        lengths = {idx: [row.length for row in store.rows] for idx, store in saved.items()}
        return Checkpoint(saved, lengths)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Puts every layer back to where it was."""
        for layer in self.layers.values():
            layer.forget_leaving()
        for layer_idx, store in checkpoint.stores.items():
            layer = self.layers[layer_idx]
            if layer.held is not store:
                layer.held.cold.release()
                layer.go_on_from(store)
            for row, length in zip(store.rows, checkpoint.lengths[layer_idx], strict=True):
                row.crop(row.length - length)

    def reset(self) -> None:
        """Forgets everything; the cache is as new."""
        self.phases.reset()
        self.means.pinned.clear()
        self.means = replace(self.means, **self._of_one_conversation())
        self.layers = self._new_layers()
        if self.auditor is not None:
            self.auditor.close()
        self.auditor = self._new_auditor()
        self.check_source = None

    def close(self) -> None:
        """Gives everything back: what is stored, and index builds that are not done."""
        self.means.pinned.clear()
        for layer in self.layers.values():
            if layer.store is not None:
                layer.store.cold.cancel_builds()
        self.layers = self._new_layers()  # another thread may still look at the old ones
        if self.auditor is not None:
            self.auditor.close()
        if self._owns_executor:
            self.executor.close()

    def _new_auditor(self) -> Auditor | None:
        config = self.config
        if not config.audit_every:
            return None
        # Where findings change what is attended and tokens shall repeat, they must not come late.
        inline = config.index_build == "wait" and config.audit.action != "warn"
        runner = SyncExecutor() if inline else ThreadExecutor(1)
        return Auditor(config.audit_every, config.audit, self.info.layers, runner)

    def check_integrity(self) -> None:
        """Raises IntegrityError unless every stored token has exactly one owner, in every layer."""
        for store in self.stores.values():
            store.check_integrity()


def make_executor(config: HybridConfig, device_type: str = "cpu") -> Executor:
    """What moves entries and builds indexes under these settings, for a model on such a device.

    Raises:
        ConfigError: HYBRID_KV_BUILD_THREADS is no number of threads.
    """
    builds = ThreadExecutor() if config.index_build == "background" else SyncExecutor()
    return CudaExecutor(builds) if device_type == "cuda" else builds
