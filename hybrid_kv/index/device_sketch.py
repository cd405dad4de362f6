"""A sketch that is searched where the queries are: a step of decoding then has no host in it."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hybrid_kv.index._base import SavedIndex
from hybrid_kv.index._device_keys import (
    DeviceKeys,
    ExpectedRecall,
    SelectGoal,
    SketchTransform,
    learn,
)
from hybrid_kv.index._sketch_head import HeadSketch, restored_tier
from hybrid_kv.index._sketch_learn import SketchReport, TierReport
from hybrid_kv.index.auto import AutoIndex
from hybrid_kv.index.sketch import SketchIndex
from hybrid_kv.ops import Ops
from hybrid_kv.ops.sketch_codes import SketchMap, blocks_of, rows_of
from hybrid_kv.ops.sketch_select import MARGIN, DeviceCodes
from hybrid_kv.plugins import DeviceIndex
from hybrid_kv.types import Candidates, SearchResult


class DeviceSketch(DeviceIndex):
    """Codes of a layer's keys on the device of the queries; the keys stay in host memory.

    A search reads the codes there and ranks what they put first by the stored keys, which kernels
    read over the bus. Keys that come later are searched as they are, `LATER_KEYS` of them.

    Args:
        ops: what searches.
        learned: how keys become codes.
        codes: [Hkv, n, B] of the first keys that it will be built over; None to make them then.
        dtype: of the keys.
    """

    ranks = True

    def __init__(
        self, ops: Ops, learned: SketchTransform, dtype: torch.dtype, codes: Tensor | None = None
    ) -> None:
        super().__init__(SketchIndex.Params())
        self._ops, self.learned, self._given = ops, learned, codes
        self._there = DeviceKeys(ops, learned, dtype, 0 if codes is None else codes.shape[1])
        self._keys: Tensor | None = None

    def __len__(self) -> int:
        return 0 if self._keys is None else self._keys.shape[1]

    @property
    def codes(self) -> DeviceCodes:
        """The codes that a search reads; another value after they have outgrown their room."""
        return self._there.codes

    @property
    def memory_bytes(self) -> int:
        """Host memory: none where the codes lie on a GPU."""
        codes = self._there.codes
        return codes.nbytes if codes.codes.device.type == "cpu" else 0

    @torch.no_grad()
    def build(self, keys: Tensor, samples: Tensor | None, nearest: Tensor | None = None) -> None:
        """See `Index.build`: codes that were given are those of the first keys."""
        given, self._given = self._given, None
        self._keys = keys
        self._there.fill(keys, given)

    @torch.no_grad()
    def add(self, keys: Tensor) -> None:
        """See `Index.add`."""
        known, self._keys = len(self), keys
        self._there.append(keys, known)

    def on_host(self, empty: SketchIndex | AutoIndex) -> SavedIndex:
        """The same codes, searched on the host and with a form in a file; the device is waited for.

        Args:
            empty: an index of the kind that is wanted, which stays as it is.
        """
        learned, coded = self.learned, self._there.coded
        plan, rows = learned.plan, self._there.codes.codes[:, :coded].cpu()
        sketches, reports = {}, []
        for head, promise in enumerate(learned.promises):
            key_map, query_map, start, mean = (
                part[head].cpu().contiguous()
                for part in (learned.key_map, learned.query_map, learned.start, learned.mean)
            )
            by = SketchMap(plan, key_map, plan.zeros - start, query_map)
            tier = restored_tier(by, blocks_of(rows[head]), None, coded)
            sketches[head] = HeadSketch([tier], promise.num_rerank, mean=mean)
            reports.append(
                SketchReport(
                    *("sketch", "codes that a device has made"),
                    tiers=(TierReport(plan.code_bytes, coded),),
                    num_rerank=promise.num_rerank,
                    recall=promise.recall,
                    mass=promise.mass,
                )
            )
        return type(empty).serving(empty.params, self._known, reports, sketches)

    @property
    def _known(self) -> Tensor:
        assert self._keys is not None
        return self._keys

    def see(self, length: int) -> Hashable:
        """See `DeviceIndex.see`."""
        there = self._there
        there.tell(length, there.coded)
        codes = there.codes.codes  # larger ones may come to lie where older ones were freed
        return codes.data_ptr(), codes.shape

    @property
    def seen(self) -> Tensor:
        """See `DeviceIndex.seen`."""
        return self._there.codes.state[0]

    def candidates(self, queries: Tensor, keys: Tensor, new: int, top_k: int) -> Candidates:
        """See `DeviceIndex.candidates`."""
        times, width = self.learned.times(top_k), self.learned.width(top_k)
        return self._ops.find_by_sketch(
            self._there.codes, queries, keys, new=new, width=width, times=times
        )

    def search(
        self, queries: Tensor, top_k: int, most: int | None = None, near: Tensor | None = None
    ) -> SearchResult:
        """See `Index.search`: for queries on the host, that of the device, which is waited for."""
        top_k, heads = min(top_k, len(self)), len(queries)
        there = queries.to(self.learned.key_map.device)
        self.see(len(self))
        found = self.candidates(there, self._known, queries.shape[1], max(1, top_k))
        best = found.scores.topk(min(top_k, found.scores.shape[-1]), -1)
        ids = found.ids.gather(-1, best.indices).long().cpu()
        scored = heads * queries.shape[1] * len(self)
        read = self.selection_bytes(queries.shape[1], top_k)
        return SearchResult(ids, best.values.cpu(), scored, read_bytes=read)

    def selection_bytes(self, queries: int, top_k: int) -> int:
        """See `DeviceIndex.selection_bytes`: codes, some of them twice, later keys, and the keys
        that are aimed at for ranking.
        """
        codes, keys = self._there.codes, self._known
        count, coded = self._there.count, self._there.coded
        sampled = min(codes.num_samples, coded)
        row, heads = keys.shape[2] * keys.itemsize, len(keys)
        width = self.learned.width(top_k)
        times = MARGIN * self.learned.times(top_k)
        ranked = [min(width, queries * times * p.num_rerank) for p in self.learned.promises]
        maps = codes.query_map.nbytes + codes.mean.nbytes
        scanned = heads * ((coded + sampled) * codes.codes.shape[2] + (count - coded) * row)
        return int(scanned + maps + sum(ranked) * row)

    def describe(self) -> list[dict[str, Any]]:
        lost = self._there.codes.lost.tolist()
        size = self.learned.plan.code_bytes
        return [
            {
                **{"serves": "device sketch", "reason": f"codes of {size} B a key fit"},
                **{"num_rerank": one.num_rerank, "recall": one.recall, "mass": one.mass},
                "lost_candidates": count,
            }
            for one, count in zip(self.learned.promises, lost, strict=True)
        ]


def longest_code(index: SketchIndex | AutoIndex) -> int:
    """Bytes of the longest code of a key that an index has; 0 where all heads are scanned."""
    tiers = [tier for sketch, _ in index.sketched.values() for tier in sketch.tiers]
    return max((tier.map.plan.code_bytes for tier in tiers), default=0)


def restored(
    ops: Ops, index: SketchIndex | AutoIndex, device: torch.device, dtype: torch.dtype, goals: Any
) -> tuple[partial[DeviceSketch], partial[DeviceSketch]] | None:
    """As `sketch_of`, from what `DeviceSketch.on_host` gave; None where that has not made `index`.

    Raises:
        torch.OutOfMemoryError: the device has too little memory.
    """
    heads = [index.sketched.get(head) for head in range(len(index.describe()))]
    sketches = [one[0] for one in heads if one is not None and one[0].mean is not None]
    counts = {sketch.count for sketch in sketches}
    plans = {tier.map.plan for sketch in sketches for tier in sketch.tiers}
    if not sketches or len(sketches) < len(heads) or len(counts) != 1 or len(plans) != 1:
        return None
    (plan,), (count,) = plans, counts
    maps = [sketch.tiers[0].map for sketch in sketches]
    key_map = torch.stack([one.key_map for one in maps]).to(device)
    start = torch.stack([plan.zeros - one.key_offset for one in maps]).to(device)
    query_map = torch.stack([one.query_map for one in maps]).to(device)
    mean = torch.stack([one.mean for one in sketches if one.mean is not None]).to(device)
    reports = [one[1] for one in heads if one is not None]
    promises = tuple(ExpectedRecall(told.num_rerank, told.recall, told.mass) for told in reports)
    goal = SelectGoal(goals.check_top_k, goals.target_recall, goals.target_mass)
    learned = SketchTransform(plan, key_map, start, query_map, mean, promises, goal)
    rows = torch.stack([rows_of(sketch.tiers[0].codes, count) for sketch in sketches])
    later = partial(DeviceSketch, ops, learned, dtype)
    return partial(later, rows.to(device)), later


def sketch_of(
    ops: Ops, keys: Tensor, samples: Tensor, code_bytes: int, goals: Any
) -> tuple[partial[DeviceSketch], partial[DeviceSketch]] | None:
    """Makes the indexes of an extent of keys [Hkv, N, D] that are still on their device, and of
    those that follow it; None where there is nothing to learn from.

    Args:
        samples: [Hkv, G, M, D].
        code_bytes: of a key at 128 channels.
        goals: the parameters of a sketch, or of what contains one.
    """
    goal = SelectGoal(goals.check_top_k, goals.target_recall, goals.target_mass)
    found = learn(keys, samples.to(keys.device), code_bytes, goal)
    if found is None:
        return None
    learned, codes = found
    later = partial(DeviceSketch, ops, learned, keys.dtype)
    return partial(later, codes), later
