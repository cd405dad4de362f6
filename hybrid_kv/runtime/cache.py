"""The KV cache of one conversation: all tiered layers under one method."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from torch import Tensor

from hybrid_kv.config import HybridConfig
from hybrid_kv.errors import ShapeError
from hybrid_kv.ops import get_ops
from hybrid_kv.plugins import Method
from hybrid_kv.rotary import Samples
from hybrid_kv.runtime.builds import IndexBuilds
from hybrid_kv.runtime.capacity import spare_host_memory
from hybrid_kv.runtime.decode import decode
from hybrid_kv.runtime.evidence import EvidenceCollector
from hybrid_kv.runtime.exact import attend_exact
from hybrid_kv.runtime.finite import FiniteGuard, may_hide
from hybrid_kv.runtime.spill import Departure, FindNearest, all_finite
from hybrid_kv.runtime.stand_in import StandIns
from hybrid_kv.runtime.step import Step
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
    Read,
    Work,
    bytes_per_token,
)
from hybrid_kv.watch.audit import Look, Target
from hybrid_kv.watch.auditor import Auditor
from hybrid_kv.watch.phases import ATTENTION, Phases

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A state of a cache to which it can be put back."""

    layers: Mapping[int, LayerKV]
    lengths: Mapping[int, Sequence[int]]


class KVCache:
    """Layers, method and executor of one conversation; knows tensors, not model libraries.

    A layer is *unsealed* while its prompt is computed: everything is resident, attention exact.
    Sealing asks the method where entries shall live; from then on short inputs read through the
    method and long ones attend exactly. Not safe for use from several threads at once.

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
        self.ops = get_ops(config.backend)
        self.method: Method = config.build()
        self.method.open(info)
        self.phases, self.work = Phases(), Work()
        self.builds = self._new_builds()
        self._stand_ins = StandIns(len(info.layers))
        self._pinned = PinnedAhead()
        self.finite = FiniteGuard(self.executor)
        self._watched = Needs()
        self._kept_evidence: dict[int, tuple[Evidence, ...]] = {}
        self.reserved_tokens = 0
        self.more_prompt = False  # set while a prompt comes in pieces, however short the last one
        self._shapes = {shape.layer_idx: shape for shape in info.layers}
        self._layers: dict[int, LayerKV] = {}
        self._evidence: dict[int, list[EvidenceCollector]] = {}
        self._leaving: dict[int, Departure] = {}
        self.auditor = self._new_auditor()

    @property
    def layers(self) -> dict[int, LayerKV]:
        """The stores by layer index; a layer appears with its first token."""
        self._settle_all()
        return self._layers

    def reserve(self, num_tokens: int) -> None:
        """Announces how many tokens will come, so that memory is taken once."""
        self.reserved_tokens = max(self.reserved_tokens, num_tokens)

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
        """
        self.phases.layer_idx = layer_idx
        with self.phases.measure(ATTENTION):
            return self._attend(layer_idx, q, new, valid, scale, softcap)

    def _attend(
        self,
        layer_idx: int,
        q: Tensor,
        new: tuple[Tensor, Tensor] | None,
        valid: Tensor | None,
        scale: float,
        softcap: float | None,
    ) -> PartialAttention:
        few = q.shape[2] <= max(1, self.config.dense_extend_tokens)
        short = few and valid is None and not self.more_prompt
        if short:
            self.seal_if_open(layer_idx)
        self._settle(layer_idx)
        if new is not None:
            self._append(layer_idx, *new, valid)
        layer = self._layers[layer_idx]
        if not self.is_sealed(layer_idx):
            self._observe(layer_idx, q, valid)
        if self.is_sealed(layer_idx) and short:
            part = self._decode(layer, q, scale, softcap)
        else:
            part = attend_exact(
                self.ops, self.executor, layer, q, valid, scale=scale, softcap=softcap
            )
        if self.is_sealed(layer_idx):
            self._demote(layer_idx)
        return part

    def _decode(
        self, layer: LayerKV, q: Tensor, scale: float, softcap: float | None
    ) -> PartialAttention:
        layer_idx = layer.shape.layer_idx
        layer.cold.settle()
        audited = self._audited(layer_idx, q)
        step = Step(
            self.ops,
            self.executor,
            self.phases,
            self.work,
            layer,
            q,
            scale=scale,
            softcap=softcap,
            found=None if audited is None else {},
        )
        part = decode(step, self._widened(layer_idx, self.method.read(layer_idx, q)))
        if audited is not None and self.auditor is not None:
            self.auditor.begin(Look(step, self.auditor.next_row(layer.num_rows), audited, part))
        with self.phases.measure("transfer"):
            for row in range(layer.num_rows):
                self.work.promoted_pages += layer.promote(row)
        return part

    def _audited(self, layer_idx: int, q: Tensor) -> Target | None:
        """The head that is looked at in this step of this layer; steps of one token only."""
        if self.auditor is None or q.shape[2] > 1:
            return None
        return self.auditor.due(layer_idx)

    def _widened(self, layer_idx: int, read: Read) -> Read:
        """With the larger budgets that the audit asks for."""
        factor = 1 if self.auditor is None else self.auditor.factor(layer_idx)
        return read if factor == 1 else read.widened(factor)

    def _append(self, layer_idx: int, k: Tensor, v: Tensor, valid: Tensor | None) -> None:
        layer = self._layers.get(layer_idx)
        if layer is None:
            layer = self._open_layer(self._shapes[layer_idx], k)
        if k.shape[0] != layer.num_rows:
            raise ShapeError(
                f"batch must stay at {layer.num_rows} rows, got {k.shape[0]}; use a new cache"
            )
        if type(self.method).write is not Method.write:
            k, v = self.method.write(layer_idx, k, v, layer.next_positions(k.shape[2], valid))
        layer.append(k, v, valid)

    def watch_finite(self, layer_idx: int, k: Tensor, v: Tensor, valid: Tensor | None) -> None:
        """Looks whether new k, v [B, Hkv, T, D] are finite; `valid` [B, T] is False for padding.

        Raises:
            NonFiniteError: they are not; on a GPU the next forward says so.
        """
        if k.shape[2] == 1 and not may_hide(k):
            return
        if valid is not None:
            k, v = (tensor.transpose(1, 2)[valid] for tensor in (k, v))
        self.finite.watch(f"keys and values of layer {layer_idx}", all_finite(k, v))

    def _open_layer(self, shape: LayerShape, k: Tensor) -> LayerKV:
        capacity = max(self.reserved_tokens, k.shape[2])
        layer = LayerKV(
            *(shape, self.config.page_size, k.shape[0], k.dtype, k.device, capacity, self.ops),
            pinned=self._pinned if k.device.type == "cuda" else None,
        )
        self._layers[shape.layer_idx] = layer
        needs = self.method.needs | self._watched
        if needs.sampled_queries or needs.last_queries:
            rows = range(k.shape[0])
            self._evidence[shape.layer_idx] = [EvidenceCollector(needs) for _ in rows]
        return layer

    def _observe(self, layer_idx: int, q: Tensor, valid: Tensor | None) -> None:
        for row, collector in enumerate(self._evidence.get(layer_idx, ())):
            collector.observe(q[row] if valid is None else q[row][:, valid[row]])

    def watch(self, needs: Needs) -> None:
        """Collects, from the first token on, more evidence than the method needs, and keeps it."""
        self._watched = needs

    def evidence(self, layer_idx: int) -> tuple[Evidence, ...]:
        """What a layer has collected, one per batch row; empty if nobody asked for it.

        After the layer was sealed only what `watch` asked for is still there.
        """
        if layer_idx in self._kept_evidence:
            return self._kept_evidence[layer_idx]
        return tuple(collector.evidence() for collector in self._evidence.get(layer_idx, ()))

    def load(
        self, layer_idx: int, k: Tensor, v: Tensor, evidence: tuple[Evidence, ...] = ()
    ) -> None:
        """Takes k, v [B, Hkv, N, D] at positions 0..N-1 as a layer's complete prompt.

        Args:
            evidence: what another cache collected while it computed them.
        """
        self._append(layer_idx, k, v, None)
        self._seal(layer_idx, evidence)

    def is_sealed(self, layer_idx: int) -> bool:
        layer = self._layers.get(layer_idx)
        return layer is not None and layer.placement is not None

    def seal_if_open(self, layer_idx: int) -> None:
        """Ends a layer's prompt unless that has happened or the layer is not tiered."""
        if layer_idx in self._layers and not self.is_sealed(layer_idx):
            self.seal(layer_idx)

    def seal(self, layer_idx: int) -> None:
        """Ends a layer's prompt: its entries move to where the method wants them.

        Called by whoever knows that the prompt is complete; else the first short input does it. On
        a GPU they leave while the next layer computes, and the layer before has left by then.
        """
        evidence = self.evidence(layer_idx)
        if self._watched != Needs():
            self._kept_evidence[layer_idx] = evidence
        self._seal(layer_idx, evidence)

    def _seal(self, layer_idx: int, evidence: tuple[Evidence, ...]) -> None:
        self._settle_all()
        layer = self._layers[layer_idx]
        layer.seal(self.method.seal(layer_idx, evidence))
        layer.stand_in = self._stand_ins.of(layer)
        rotary, horizon = self.info.rotary_of(layer_idx), self.method.needs.horizon_tokens
        samples = [e.samples(layer.shape.num_kv_heads, rotary) for e in evidence]
        ahead = [
            None if asked is None else asked.ahead(e.num_tokens, horizon)
            for e, asked in zip(evidence, samples, strict=True)
        ]
        self._pinned.begin()
        with self._sealing(layer_idx):
            self._demote(layer_idx, ahead, is_prompt=True)
        _log.debug("layer %d sealed at %d tokens", layer_idx, max(layer.lengths))
        if self._unsealed():
            self._pinned.repeat()
        else:
            self._pinned.clear()
            names = (self.config.method, len(self._layers), max(layer.lengths))
            _log.info("prompt ended: method %s, %d layers, %d tokens", *names)

    def _unsealed(self) -> list[LayerShape]:
        """The layers whose prompt is still to be computed or to be ended."""
        return [shape for shape in self.info.layers if not self.is_sealed(shape.layer_idx)]

    def _new_builds(self) -> IndexBuilds:
        spare = weakref.WeakMethod(self._spare_host_memory)  # no cycle: a dropped cache is freed

        def spare_bytes() -> int:
            measure = spare()
            return 0 if measure is None else measure()

        return IndexBuilds(self.executor, self.phases, spare_bytes)

    def _spare_host_memory(self) -> int:
        """What cold entries and indexes of the layers to come leave of the host's free memory."""
        if not self._layers:
            return 0
        layer = next(iter(self._layers.values()))
        tokens = layer.num_rows * max(self.reserved_tokens, *layer.lengths)
        dtype = layer.resident.pool.dtype
        per_token = sum(
            bytes_per_token(shape, dtype) + self.method.index_bytes_per_token(shape, tokens)
            for shape in self._unsealed()
        )
        return spare_host_memory(tokens * per_token)

    @contextmanager
    def _sealing(self, layer_idx: int) -> Iterator[None]:
        """A part of ending a prompt, which has not ended and can be ended again if this fails."""
        try:
            yield
        except BaseException:
            self._layers[layer_idx].unseal()
            raise

    def _demote(
        self, layer_idx: int, samples: Sequence[Samples | None] = (), *, is_prompt: bool = False
    ) -> None:
        """Begins to move what has left the window, and ends it where nothing has to be waited for.

        Args:
            samples: per row observed queries for a new index; empty after the prompt.
        """
        layer = self._layers[layer_idx]
        if not is_prompt and not layer.overflows:  # nearly every step
            return
        nearest = self._finder(layer)
        with self.phases.measure("transfer"):
            leaving = Departure(self.executor, layer, samples, nearest=nearest, is_prompt=is_prompt)
        if leaving:
            self._leaving[layer_idx] = leaving
            if leaving.arrived:
                self._settle(layer_idx)

    def _finder(self, layer: LayerKV) -> FindNearest | None:
        """What finds the best keys of a new index's samples; on the host the index is quicker."""
        far = layer.resident.pool.device.type != "cpu"
        return self._nearest_keys if far and self.method.needs.nearest_keys else None

    def _nearest_keys(self, samples: Tensor, keys: Tensor) -> Tensor:
        """The best of keys [Hkv, N, D] for samples [Hkv, G, M, D]: [Hkv, G, M, K] int32."""
        count = min(self.method.needs.nearest_keys, keys.shape[1])
        found = self.ops.nearest_keys(samples.flatten(1, 2), keys, count)
        return found.view(*samples.shape[:3], count)

    def _settle(self, layer_idx: int) -> None:
        """Ends what is leaving a layer; whoever reads or changes a layer does this first."""
        if (leaving := self._leaving.pop(layer_idx, None)) is not None:
            with self.phases.measure("wait"):
                leaving.wait()
            sealing = self._sealing(layer_idx) if leaving.is_prompt else nullcontext()
            with self.phases.measure("transfer"), sealing:
                leaving.end(self.builds)
            if leaving.is_prompt:
                self._evidence.pop(layer_idx, None)

    def _settle_all(self) -> None:
        for layer_idx in list(self._leaving):
            self._settle(layer_idx)

    def crop(self, layer_idx: int, count: int) -> None:
        """Forgets the newest `count` tokens of every row of a layer."""
        self._settle(layer_idx)
        if (layer := self._layers.get(layer_idx)) is not None:
            for row in range(layer.num_rows):
                layer.crop(row, min(count, layer.lengths[row]))

    def fork(self, layer_idx: int, sources: Sequence[int]) -> None:
        """Row r of a layer continues from row sources[r]; pages are copied on write only."""
        self._settle(layer_idx)
        if (layer := self._layers.get(layer_idx)) is not None:
            layer.fork(sources)
        if layer_idx in self._evidence:
            # Observation is over once rows fork, so rows may share what was observed.
            rows = self._evidence[layer_idx]
            self._evidence[layer_idx] = [rows[source] for source in sources]

    def checkpoint(self) -> Checkpoint:
        """The state after the prompt, sealed; what comes next can be undone by `restore`.

        Where the method moves entries on as the window advances, the next tokens are taken by a
        branch of the layer: cropping would bring back neither dropped nor offloaded entries.
        """
        for layer_idx in self._layers:
            self.seal_if_open(layer_idx)
        self._settle_all()
        saved = dict(self._layers)
        branches: dict[int, LayerKV] = {}
        try:
            for layer_idx, layer in saved.items():
                if layer.placement is not None and layer.placement.rest is not Demotion.KEEP:
                    branches[layer_idx] = layer.branch()
        except BaseException:  # memory ran out: all layers stay what they are
            for branch in branches.values():
                branch.cold.release()
            raise
        self._layers.update(branches)
        return Checkpoint(saved, {idx: list(layer.lengths) for idx, layer in saved.items()})

    def restore(self, checkpoint: Checkpoint) -> None:
        """Puts every layer back to where it was."""
        self._leaving.clear()
        for layer_idx, layer in checkpoint.layers.items():
            if (current := self._layers[layer_idx]) is not layer:
                current.cold.release()
                self._layers[layer_idx] = layer
            for row, length in enumerate(checkpoint.lengths[layer_idx]):
                layer.crop(row, layer.lengths[row] - length)

    def num_rows(self, layer_idx: int) -> int:
        """Batch rows of a layer, 0 before its first token."""
        layer = self._layers.get(layer_idx)
        return 0 if layer is None else layer.num_rows

    def reset_layer(self, layer_idx: int) -> None:
        """Forgets one layer's entries."""
        self._leaving.pop(layer_idx, None)
        self._layers.pop(layer_idx, None)
        self._evidence.pop(layer_idx, None)
        self._kept_evidence.pop(layer_idx, None)

    def reset(self) -> None:
        """Forgets everything; the cache is as new."""
        self._leaving.clear()
        self._layers.clear()
        self._evidence.clear()
        self._kept_evidence.clear()
        self.method = self.config.build()
        self.method.open(self.info)
        self.phases.reset()
        self.builds = self._new_builds()
        self._stand_ins = StandIns(len(self.info.layers))
        self._pinned.clear()
        self.work = Work()
        if self.auditor is not None:
            self.auditor.close()
        self.auditor = self._new_auditor()

    def close(self) -> None:
        """Gives everything back: what is stored, and index builds that are not done."""
        self._pinned.clear()
        for layer in self._layers.values():
            layer.cold.cancel_builds()
        # New ones: another thread may still look at the old ones.
        self._layers, self._leaving, self._evidence, self._kept_evidence = {}, {}, {}, {}
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
        for layer in self.layers.values():
            layer.check_integrity()


def make_executor(config: HybridConfig, device_type: str = "cpu") -> Executor:
    """What moves entries and builds indexes under these settings, for a model on such a device.

    Raises:
        ConfigError: HYBRID_KV_BUILD_THREADS is no number of threads.
    """
    builds = ThreadExecutor() if config.index_build == "background" else SyncExecutor()
    return CudaExecutor(builds) if device_type == "cuda" else builds
