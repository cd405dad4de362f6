"""A layer's keys on its device: learned codes of the older ones, and the newest as they are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from hybrid_kv.index._sketch_head import QuerySpace, plan_of, sketch_map
from hybrid_kv.index._sketch_learn import hold_out_block
from hybrid_kv.ops import Ops
from hybrid_kv.ops.devices import staged
from hybrid_kv.ops.pinned import bus_copies
from hybrid_kv.ops.sketch_codes import MAX_DIMS, SketchPlan
from hybrid_kv.ops.sketch_select import (
    DeviceCodes,
    QueryCodes,
    code_scores,
    encode,
    quantise,
    scratch_bytes,
)

_CHECKED = 64
"""Held-out queries of a KV head."""
_LEARNED_KEYS = 2**16
_LEAST_WIDTH, _MOST_WIDTH = 256, 4096
_ROOM = 4
"""Places for candidates of a KV head, per candidate of one query: most groups agree in half."""
_FIRST_SHARE = 8
"""At most one dim in so many has 8 bits."""


@dataclass(frozen=True, slots=True)
class SelectGoal:
    """Goal of a device's search, which says when candidates are enough: both shares of the exact
    `top_k` answers are reached.
    """

    top_k: int
    recall: float
    mass: float


@dataclass(frozen=True, slots=True)
class ExpectedRecall:
    """Recall that held-out queries of one KV head reach with `num_rerank` candidates."""

    num_rerank: int
    recall: float
    mass: float


@dataclass(frozen=True, slots=True, eq=False)
class SketchTransform:
    """Transform of keys and queries of a layer to codes, see `DeviceCodes`; all on its device."""

    plan: SketchPlan
    key_map: Tensor
    start: Tensor
    query_map: Tensor
    mean: Tensor
    promises: tuple[ExpectedRecall, ...]
    goal: SelectGoal

    def codes_for(self, capacity: int, room: int, dtype: torch.dtype) -> DeviceCodes:
        """Room for codes of `capacity` keys and for `room` later ones; none is there yet.

        Raises:
            torch.OutOfMemoryError: the device has too little memory.
        """
        heads, _, dim = self.key_map.shape
        device = self.key_map.device
        size = (heads, capacity, self.plan.code_bytes)
        # Zeros, not what memory happens to hold: a key of NaN would be no number times no weight.
        return DeviceCodes(
            self.plan,
            torch.zeros(size, dtype=torch.uint8, device=device),
            torch.zeros(heads, room, dim, dtype=dtype, device=device),
            *(self.key_map, self.start, self.query_map, self.mean),
            torch.tensor([one.num_rerank for one in self.promises], dtype=torch.int32).to(device),
            torch.zeros(2, dtype=torch.int32, device=device),
            torch.zeros(heads, dtype=torch.int64, device=device),
        )

    def width(self, top_k: int) -> int:
        """Places for the candidates of a KV head and token: a power of two."""
        ranked = max((one.num_rerank for one in self.promises), default=1)
        wanted = _ROOM * max(top_k, int(ranked * self.times(top_k)))
        return min(_MOST_WIDTH, max(_LEAST_WIDTH, 1 << (wanted - 1).bit_length()))

    def times(self, top_k: int) -> float:
        """The check was for so many results; to find more, more are ranked."""
        return max(1.0, top_k / self.goal.top_k)


def learn(
    keys: Tensor, samples: Tensor, code_bytes: int, goal: SelectGoal
) -> tuple[SketchTransform, Tensor] | None:
    """From keys [Hkv, N, D] and queries [Hkv, G, M, D], where both lie; the keys' codes with it.

    Args:
        samples: where there are none the keys stand in for them.
        code_bytes: of a key at 128 channels, a name of `_sketch_plans`.

    Returns:
        None where the keys have too few channels for such codes.
    """
    heads, num_keys, dim = keys.shape
    plan = plan_of(code_bytes, dim)
    if plan is None:
        return None
    if not samples.shape[2]:
        samples = keys[:, None]
    split = [hold_out_block(own, max(1, _CHECKED // samples.shape[1])) for own in samples]
    maps, means = [], []
    for own, (build, _) in zip(keys, split, strict=True):
        space = QuerySpace.learn(own, build.flatten(0, 1))
        largest = space.largest(own, min(dim, MAX_DIMS // _FIRST_SHARE))
        maps.append(sketch_map(space, plan, largest))
        means.append(space.mean.float())
    device = keys.device
    key_map, query_map = (
        torch.stack([getattr(one, name) for one in maps]).to(device)
        for name in ("key_map", "query_map")
    )
    start = torch.stack([plan.zeros - one.key_offset for one in maps]).to(device)
    made = plan, key_map, start, query_map, torch.stack(means).to(device)
    unproven = SketchTransform(*made, (ExpectedRecall(0, 0.0, 0.0),) * heads, goal)
    codes = unproven.codes_for(num_keys, 0, keys.dtype)
    for first in range(0, num_keys, _LEARNED_KEYS):
        encode(codes, keys[:, first : first + _LEARNED_KEYS], first)
    checks = torch.stack([check.flatten(0, 1) for _, check in split])
    return SketchTransform(*made, tuple(_promises(codes, keys, checks, goal)), goal), codes.codes


def _promises(
    codes: DeviceCodes, keys: Tensor, checks: Tensor, goal: SelectGoal
) -> Iterator[ExpectedRecall]:
    """Sizes that each head takes for queries [Hkv, Q, D] that its codes did not learn from."""
    queries = quantise(codes, checks)
    scale = keys.shape[-1] ** -0.5
    if not checks.shape[1]:  # a prompt of a few tokens: nothing is promised
        yield from (ExpectedRecall(_MOST_WIDTH // _ROOM, 0.0, 0.0) for _ in keys)
        return
    for head, own in enumerate(keys):
        q = checks[head].float()
        blocks = own.split(_LEARNED_KEYS)
        firsts = list(accumulate((len(block) for block in blocks), initial=0))
        best, ids = _best(q, blocks, firsts, min(goal.top_k, len(own)))
        by = QueryCodes(*(part[head : head + 1] for part in queries))
        ranks = torch.ones_like(ids)
        at = codes.codes[head][ids]  # [Q, K, B]
        each = QueryCodes(*(part[head][:, None] for part in queries))
        own_scores = code_scores(at, codes.plan, each)[:, 0]
        for first, block in zip(firsts, blocks, strict=False):
            some = codes.codes[head : head + 1, first : first + len(block)]
            ranked = code_scores(some, codes.plan, by)[0].sort(-1).values
            ranks += len(block) - torch.searchsorted(ranked, own_scores, right=True)
        yield _enough((best * scale).softmax(-1), ranks, goal)


def _best(
    q: Tensor, blocks: tuple[Tensor, ...], firsts: list[int], count: int
) -> tuple[Tensor, Tensor]:
    """Exact scores and rows [Q, count] of the best keys."""
    best, ids = q.new_empty(len(q), 0), torch.empty(len(q), 0, dtype=torch.int64, device=q.device)
    for first, block in zip(firsts, blocks, strict=False):
        found = (q @ block.float().T).topk(min(count, len(block)), -1)
        best, ids = torch.cat([best, found.values], 1), torch.cat([ids, found.indices + first], 1)
        best, order = best.topk(min(count, best.shape[1]), -1)
        ids = ids.gather(1, order)
    return best, ids


def _enough(weights: Tensor, ranks: Tensor, goal: SelectGoal) -> ExpectedRecall:
    """Candidates that reach the goal, from the ranks [Q, K] of the best keys and their weights."""
    order = ranks.flatten().argsort(stable=True)
    ranked = ranks.flatten()[order]
    share = torch.arange(1, len(order) + 1, device=order.device) / len(order)
    mass = weights.flatten()[order].double().cumsum(0) / len(weights)
    enough = (share >= goal.recall) & (mass >= goal.mass)
    most = torch.searchsorted(ranked, torch.full_like(ranked[:1], _MOST_WIDTH // _ROOM), right=True)
    last = torch.where(enough.any(), enough.int().argmax(), len(order) - 1)
    last = torch.minimum(last, (most[0] - 1).clamp_min(0))
    found = torch.searchsorted(ranked, ranked[last], right=True) - 1
    kept = torch.stack([ranked[last].double(), share[found].double(), mass[found]])
    num, recall, held = kept.tolist()
    return ExpectedRecall(int(min(max(num, ranks.shape[1]), _MOST_WIDTH // _ROOM)), recall, held)


LATER_KEYS = 4096
"""The newest keys that came after the prompt stay on the device as they are; older ones get codes.
Codes that were learned from other keys lose a fifth of what is wanted of these (docs/lab.md)."""
_LEAST_ROOM, _ROOM_SHARE = 256, 16
_BLOCK_KEYS = 2**14
_STAGED_BYTES = 2**20
"""Up to here later keys of all heads go as one copy through staging memory."""


def with_room(num_keys: int) -> int:
    """Number of codes that are allocated for so many keys: those which follow move nothing."""
    return num_keys + max(_LEAST_ROOM, num_keys // _ROOM_SHARE)


def device_bytes(num_keys: int, num_heads: int, head_dim: int, itemsize: int, code: int) -> int:
    """Bytes of a device for a layer's codes of `code` bytes a key, its later keys and its maps."""
    maps = 4 * head_dim * (2 * head_dim + 2)
    later = LATER_KEYS * head_dim * itemsize
    return num_heads * (with_room(num_keys) * code + later + maps)


def search_bytes(num_keys: int, num_heads: int, group: int) -> int:
    """Bytes of a device that a search of a layer takes for one token, and gives back behind it."""
    return scratch_bytes(with_room(num_keys), LATER_KEYS, num_heads, group)


class DeviceKeys:
    """Copies of a layer's keys on its device: codes of the older ones, and the latest as they are.

    codes: what a search reads; another value after it has outgrown its room. count, coded: keys
    that are searched and keys that have a code, as the device was told.

    Args:
        ops: what makes codes.
        learned: how keys become codes.
        dtype: of the keys.
        num_codes: keys for which there is room.

    Raises:
        torch.OutOfMemoryError: the device has too little memory.
    """

    def __init__(
        self, ops: Ops, learned: SketchTransform, dtype: torch.dtype, num_codes: int
    ) -> None:
        self._ops = ops
        self.codes: DeviceCodes = learned.codes_for(with_room(num_codes), LATER_KEYS, dtype)
        self.count = self.coded = 0

    def fill(self, keys: Tensor, codes: Tensor | None) -> None:
        """Begins again with keys [Hkv, N, D] of the host.

        Args:
            codes: [Hkv, n, B] of the first n keys, if they are known.
        """
        count, coded = keys.shape[1], 0
        if codes is not None and codes.shape[1] <= count:
            coded = codes.shape[1]
            self.codes.codes[:, :coded] = codes
        self.tell(0, coded)
        if count - coded > LATER_KEYS:
            self._encode(keys, coded, count - LATER_KEYS)
        self._take_later(keys, self.coded)

    def append(self, keys: Tensor, known: int) -> None:
        """Takes the rows of keys [Hkv, N, D] from `known` on."""
        count = keys.shape[1]
        if count - self.coded > LATER_KEYS:  # seldom: half of the later ones at once
            stop = max(self.coded, count - LATER_KEYS // 2)
            self._encode(keys, self.coded, min(stop, count))
        self._take_later(keys, known)

    def _take_later(self, keys: Tensor, first: int) -> None:
        """Brings the keys from `first` on that have no code to the device."""
        first, room = max(first, self.coded), LATER_KEYS
        while first < keys.shape[1]:
            place = first % room
            stop = min(keys.shape[1], first + room - place)
            _copy(keys[:, first:stop], self.codes.recent[:, place : place + stop - first])
            first = stop
        self.tell(keys.shape[1], self.coded)

    def _encode(self, keys: Tensor, first: int, stop: int) -> None:
        """Makes codes of the keys first..stop, which were read back from the host."""
        if stop > self.codes.codes.shape[1]:
            codes = self.codes.codes
            grown = codes.new_zeros(codes.shape[0], with_room(stop), codes.shape[2])
            grown[:, :first] = codes[:, :first]
            self.codes = replace(self.codes, codes=grown)
        for begin in range(first, stop, _BLOCK_KEYS):
            some = keys[:, begin : min(stop, begin + _BLOCK_KEYS)]
            there = torch.empty(some.shape, dtype=some.dtype, device=self.codes.state.device)
            _copy(some, there)
            self._ops.encode_sketch(self.codes, there, begin)
        self.tell(self.count, stop)

    def tell(self, count: int, coded: int) -> None:
        """Tells the device how many keys are searched and have a code; it is not waited for."""
        if count != self.count:
            self.codes.state[0].fill_(count)
        if coded != self.coded:
            self.codes.state[1].fill_(coded)
        self.count, self.coded = count, coded


def _copy(rows: Tensor, there: Tensor) -> None:
    if rows.nbytes <= _STAGED_BYTES:
        there.copy_(staged(rows, there.device))
        return
    for target, source in bus_copies(there, rows):
        target.copy_(source, non_blocking=True)
