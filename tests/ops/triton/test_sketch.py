"""Selection by sketch: kernels against the definition, interpreted or on a GPU."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hybrid_kv.index._device_keys import SelectGoal, learn
from hybrid_kv.ops import sketch_select
from hybrid_kv.ops.dispatch import Ops
from hybrid_kv.ops.sketch_select import DeviceCodes, QueryCodes
from hybrid_kv.ops.tail import Tail
from hybrid_kv.planning import designs
from hybrid_kv.types import Candidates, PartialAttention
from tests.index.sketch_heads import seen_heads
from tests.ops.triton.where import needs_kernels
from tests.pairs import in_pairs
from tests.tolerances import TOLERANCES, Tolerance

needs_kernels()
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered in log")
HEADS, GROUP, DIM, KEYS, LATER = 2, 3, 72, 637, 90
FLOAT32 = TOLERANCES[torch.float32]


def scene(
    device: str, dtype: torch.dtype, size: int, *, new: int = 1, wanted: int = 30
) -> tuple[DeviceCodes, Tensor, Tensor]:
    """Codes of 637 keys with 90 later ones in a ring of 64, 26 of which have codes as well;
    all keys; queries [Hkv, M, D].
    """
    keys, samples, later = seen_heads(HEADS, KEYS + LATER, dim=DIM, group=GROUP, positions=64)
    found = learn(keys[:, :KEYS], samples, size, SelectGoal(20, 0.9, 0.9))
    assert found is not None
    coded, room = KEYS + 26, 64
    codes = found[0].codes_for(coded + 39, room, dtype)
    keys = keys.to(dtype)
    sketch_select.encode(codes, keys[:, :coded], 0)
    at = torch.arange(coded, KEYS + LATER)
    codes.recent[:, at % room] = keys[:, coded:]
    codes.state.copy_(torch.tensor([KEYS + LATER, coded]))
    codes.wanted.fill_(wanted)
    there = {
        name: getattr(codes, name).to(device)
        for name in DeviceCodes.__dataclass_fields__
        if name != "plan"
    }
    q = later[:, :, :new].flatten(1, 2).to(dtype)
    return replace(codes, **there), keys.to(device), q.to(device)


def lists(ids: Tensor) -> list[list[int]]:
    return [sorted(row[row >= 0].tolist()) for row in ids.flatten(0, 1)]


@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        *((32, dtype) for dtype in TOLERANCES),
        *((16, torch.bfloat16), (24, torch.float16), (48, torch.float32), (64, torch.bfloat16)),
    ],
    ids=str,
)
def test_codes_of_keys_are_those_of_the_definition(
    ops: Ops, device: str, size: int, dtype: torch.dtype
) -> None:
    codes, keys, _ = scene(device, dtype, size)
    defined = codes.codes.clone()
    codes.codes.zero_()
    ops.encode_sketch(codes, keys[:, 37 : KEYS + 26], 37)
    assert ops.served == {"encode_sketch": "triton"}
    assert not codes.codes[:, :37].any()
    mine, expected = (
        sketch_select.unpacked(rows[:, 37 : KEYS + 26], codes.plan).int()
        for rows in (codes.codes, defined)
    )
    # Sums of another order may round a value that lies between two codes to the other one.
    assert int((mine - expected).abs().max()) <= 1
    assert float((mine != expected).float().mean()) < 1e-3


@pytest.mark.parametrize(
    ("dtype", "size", "new"), in_pairs(list(TOLERANCES), (32, 48), (1, 2)), ids=str
)
def test_what_lies_above_the_limit_is_found(
    ops: Ops, device: str, size: int, new: int, dtype: torch.dtype
) -> None:
    from hybrid_kv.ops.triton import sketch_find

    codes, keys, q = scene(device, dtype, size, new=new)
    found = ops.find_by_sketch(codes, q, keys, new=new, width=512)
    assert ops.served == {"find_by_sketch": "triton"}
    own, scales = sketch_find.quantise(codes, q)
    queries = QueryCodes(own.float(), *(part.contiguous() for part in scales.unbind(-1)))
    defined = sketch_select.quantise(codes, q)
    assert int((queries.codes - defined.codes).abs().max()) <= 1
    torch.testing.assert_close(queries.shift, defined.shift, **FLOAT32)
    limit = sketch_select.threshold(codes, queries, 512, 1.0)
    expected = sketch_select.candidates(codes, q, queries, limit, new=new, width=512)
    assert lists(found.ids) == lists(expected)
    counts = [len(row) for row in lists(found.ids)]
    assert min(counts) > 20
    assert max(counts) < 500
    exact = sketch_select.exact_scores(q, keys, found.ids)
    torch.testing.assert_close(found.scores, exact, **FLOAT32)
    assert not codes.lost.any()


def test_a_row_that_sees_less_finds_nothing_beyond(ops: Ops, device: str) -> None:
    codes, keys, q = scene(device, torch.float32, 32)
    codes.state[0].fill_(400)
    found = ops.find_by_sketch(codes, q, keys, new=1, width=512)
    assert 10 < int(found.ids.max()) < 400
    codes.state[0].fill_(0)
    assert int(ops.find_by_sketch(codes, q, keys, new=1, width=512).ids.max()) == -1


def test_keys_that_all_have_room_are_all_ranked(ops: Ops, device: str) -> None:
    codes, keys, q = scene(device, torch.float32, 32)
    found = ops.find_by_sketch(codes, q, keys, new=1, width=1024)
    assert lists(found.ids) == [list(range(KEYS + LATER))] * HEADS


def test_what_has_no_room_is_counted(ops: Ops, device: str) -> None:
    codes, keys, q = scene(device, torch.float32, 32)
    whole = ops.find_by_sketch(codes, q, keys, new=1, width=512)
    counts = [len(row) for row in lists(whole.ids)]
    for times in (1, 2):
        found = ops.find_by_sketch(codes, q, keys, new=1, width=32)
        assert codes.lost.tolist() == [times * (count - 32) for count in counts]
    assert all(16 < len(row) <= 32 for row in lists(found.ids))


@pytest.mark.parametrize(("new", "width"), [(1, 48), (2, 50)])
def test_a_full_list_keeps_the_best_of_each_query_and_not_those_that_came_first(
    ops: Ops, device: str, new: int, width: int
) -> None:
    """Keys in the order of their scores, the best last, and later ones among the best."""
    codes, keys, q = scene(device, torch.float32, 32, new=new, wanted=400)
    order = (keys @ q[:, :1].mT)[..., 0].argsort(-1)
    keys = keys.take_along_dim(order[..., None], 1)
    coded, room = KEYS + 26, codes.recent.shape[1]
    sketch_select.encode(codes, keys[:, :coded], 0)
    later = torch.arange(coded, KEYS + LATER, device=device)
    codes.recent[:, later % room] = keys[:, coded:]
    found = ops.find_by_sketch(codes, q, keys, new=new, width=width)
    expected = sketch_select.find(codes, q, keys, new=new, width=width)
    assert lists(found.ids) == lists(expected.ids)
    exact = sketch_select.exact_scores(q, keys, found.ids)
    torch.testing.assert_close(found.scores, exact, **FLOAT32)
    for head in range(HEADS):
        for token in range(new):
            kept = found.ids[head, token]
            assert int((kept >= 0).sum()) > width // 2
            for exact in (q[head, token::new] @ keys[head].T).topk(5, -1).indices:
                assert len(set(exact.tolist()) & set(kept.tolist())) >= 3


@pytest.mark.parametrize("width", [48, 90])
def test_lists_of_heads_and_tokens_are_their_own(ops: Ops, device: str, width: int) -> None:
    """Heads find other keys in another order, tokens rank them otherwise, and no list has room."""
    new = 3
    codes, keys, q = scene(device, torch.float32, 32, new=new, wanted=200)
    coded, room = KEYS + 26, codes.recent.shape[1]
    order = (keys @ q[:, :1].mT)[..., 0].argsort(-1)
    order[1] = order[1].flip(0)  # the best first
    keys = keys.take_along_dim(order[..., None], 1)
    sketch_select.encode(codes, keys[:, :coded], 0)
    later = torch.arange(coded, KEYS + LATER, device=device)
    codes.recent[:, later % room] = keys[:, coded:]
    found = ops.find_by_sketch(codes, q, keys, new=new, width=width)
    expected = sketch_select.find(codes, q, keys, new=new, width=width)
    assert codes.lost.min() > 2 * 3 * width
    assert lists(found.ids) == lists(expected.ids)
    whole = {frozenset(row) for row in lists(found.ids)}
    assert len(whole) == HEADS * new
    assert max(map(len, whole)) <= width


class Dirty(TorchDispatchMode):
    """Memory that is taken holds what another search may have left there: rows and scores that
    could be right.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.empty.memory_format:
            out.fill_(1e4 if out.is_floating_point() else 7)
        return out


@pytest.mark.parametrize(("new", "width"), [(1, 512), (2, 512), (2, 48)])
def test_what_memory_held_before_has_no_part_in_a_search(
    ops: Ops, device: str, new: int, width: int
) -> None:
    """Graphs of rows share memory, and replay one after another."""
    codes, keys, q = scene(device, torch.float32, 32, new=new)
    expected = sketch_select.find(codes, q, keys, new=new, width=width)
    v = torch.randn(HEADS, KEYS + LATER, 40, device=device)
    with Dirty():
        found = ops.find_by_sketch(codes, q, keys, new=new, width=width)
        limit = ops.best_limit(found.scores, 20)
        part = ops.attend_candidates(found, v, limit, scale=0.1)
    assert lists(found.ids) == lists(expected.ids)
    exact = sketch_select.exact_scores(q, keys, found.ids)
    torch.testing.assert_close(found.scores, exact, **FLOAT32)
    attended = sketch_select.attend(found, v, limit, scale=0.1)
    torch.testing.assert_close(part.out, attended.out, **FLOAT32)
    torch.testing.assert_close(part.lse, attended.lse, **FLOAT32)


def test_of_equal_keys_a_full_list_keeps_the_first(ops: Ops, device: str) -> None:
    codes, keys, q = scene(device, torch.float32, 32)
    # Of whole numbers all sums are exact, so that equal keys score alike whatever adds them up.
    q, keys = q.round(), keys[:, :1].round().expand(-1, KEYS + LATER, -1).contiguous()
    sketch_select.encode(codes, keys[:, : KEYS + 26], 0)
    codes.recent.copy_(keys[:, :64])
    found = ops.find_by_sketch(codes, q, keys, new=1, width=100)
    assert [len(row) for row in lists(found.ids)] == [100] * HEADS
    assert lists(sketch_select.find(codes, q, keys, new=1, width=100).ids) == lists(found.ids)


def test_many_tokens_are_searched_for_some_at_a_time(
    ops: Ops, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hybrid_kv.ops.triton import sketch_find

    codes, keys, q = scene(device, torch.float32, 32, new=3)
    together = ops.find_by_sketch(codes, q, keys, new=3, width=128)
    one = 4 * (1 + GROUP) * HEADS * (codes.codes.shape[1] + codes.recent.shape[1])
    monkeypatch.setattr(sketch_find, "_LISTED_BYTES", 2 * one)
    found = ops.find_by_sketch(codes, q, keys, new=3, width=128)
    assert lists(found.ids) == lists(together.ids)
    exact = sketch_select.exact_scores(q, keys, found.ids)
    torch.testing.assert_close(found.scores, exact, **FLOAT32)


@pytest.mark.parametrize("top_k", [1, 20, 100, 2000])
def test_the_limit_is_the_score_of_the_last_that_is_attended(
    ops: Ops, device: str, top_k: int
) -> None:
    scores = torch.randn(2, 6, 300)
    scores[:, 1:3, 17:] = -torch.inf
    scores[0, 0] = 0.25
    expected = sketch_select.best_limit(scores, top_k)
    assert torch.equal(ops.best_limit(scores.to(device), top_k).cpu(), expected)


@pytest.mark.parametrize(
    ("dtype", "new", "softcap"), in_pairs(list(TOLERANCES), (1, 2), (None, 3.0)), ids=str
)
def test_the_best_are_attended_as_defined(
    ops: Ops,
    device: str,
    new: int,
    dtype: torch.dtype,
    tolerance: Tolerance,
    softcap: float | None,
) -> None:
    codes, keys, q = scene(device, dtype, 32, new=new)
    found = ops.find_by_sketch(codes, q, keys, new=new, width=300)
    v = torch.randn(HEADS, keys.shape[1], 40).to(dtype).to(device)
    limit = ops.best_limit(found.scores, 20)
    part = ops.attend_candidates(found, v, limit, scale=0.1, softcap=softcap)
    assert set(ops.served.values()) == {"triton"}
    exact = sketch_select.attend(found, v, limit, scale=0.1, softcap=softcap)
    torch.testing.assert_close(part.out, exact.out, **tolerance)
    torch.testing.assert_close(part.lse, exact.lse, **FLOAT32)


_TAKES_MEMORY = ("aten.empty", "aten.empty_like", "aten.new_empty")


class Launches(TorchDispatchMode):
    """Counts what a device is told while this is entered: kernels, and torch's operations beside
    them, but for views and memory that is taken.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()
        self.others: list[str] = []
        self._within = False
        names = ("find", "scan", "lists")
        for name in (*(f"sketch_{name}" for name in names), "paged", "unread"):
            module = import_module(f"hybrid_kv.ops.triton.{name}")
            for kernel, value in vars(module).copy().items():
                if kernel.endswith("_kernel"):
                    monkeypatch.setattr(module, kernel, self._counted(kernel, value))

    def _counted(self, name: str, kernel: Any) -> Any:
        def launch(*args: Any, grid: Any, **options: Any) -> None:
            self.kernels[name] += 1
            self._within = True  # the interpreter is made of torch as well
            try:
                kernel[grid](*args, **options)
            finally:
                self._within = False

        launcher = MagicMock()
        launcher.__getitem__.side_effect = lambda grid: partial(launch, grid=grid)
        return launcher

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket)
        if not (self._within or func.is_view or name in _TAKES_MEMORY):
            self.others.append(name)
        return func(*args, **(kwargs or {}))


def test_a_step_is_thirteen_kernels_and_nothing_that_waits(
    ops: Ops, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing but kernels is launched; torch is not asked for a value, a copy or another tensor.

    The plan of a step counts one more, which brings the queries to where a recording reads them.
    """
    codes, keys, q = scene(device, torch.float32, 32)
    v, q = torch.randn(keys.shape).to(device), q.contiguous()
    known = Tail.of(keys, v)
    with Launches(monkeypatch) as seen:
        found = ops.find_by_sketch(codes, q, keys, new=1, width=300)
        limit = ops.best_limit(found.scores, 20)
        out, lse, discount = ops.attend_unread(
            *(known, q, found.scores, limit, slice(0, 300), codes.state[0]), scale=0.1
        )
        part = ops.attend_candidates(found, v, limit, scale=0.1, discount=discount)
        part = ops.merge([part, PartialAttention(out, lse)], torch.float32)
    assert seen.kernels == {
        "_quantise_kernel": 1,
        "_scan_kernel": 2,  # of the sample, and of all
        "_limit_kernel": 2,  # of the sample, and of what is attended
        "_empty_kernel": 1,
        "_best_kernel": 1,
        "_recent_kernel": 1,
        "_rank_kernel": 1,
        "_attend_kernel": 1,
        "_reduce_kernel": 1,
        "_unread_kernel": 1,
        "_merge_kernel": 1,  # of what is attended with what is estimated
    }
    assert sum(seen.kernels.values()) + 1 == designs.SELECT_KERNELS
    assert seen.others == []
    assert all(tensor.device.type == device for tensor in (*found, limit, *part))


class Allocated(TorchDispatchMode):
    """Adds up the bytes of memory that is taken while this is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.empty.memory_format:
            self.num_bytes += out.nbytes
        return out


def test_a_search_takes_the_memory_that_plans_count(ops: Ops, device: str) -> None:
    codes, keys, q = scene(device, torch.float32, 32)
    with Allocated() as seen:
        found = ops.find_by_sketch(codes, q, keys, new=1, width=64)
    capacity, later = codes.codes.shape[1], codes.recent.shape[1]
    counted = sketch_select.scratch_bytes(capacity, later, HEADS, GROUP)
    queries = HEADS * GROUP * (2 * codes.plan.num_dims + 4 * 3 + 4) + 4 * HEADS
    assert seen.num_bytes - found.ids.nbytes - found.scores.nbytes - queries == counted


def test_an_empty_list_is_attended_as_nothing(ops: Ops, device: str) -> None:
    ids = torch.full((2, 1, 40), -1, dtype=torch.int32, device=device)
    scores = torch.full((2, 3, 40), -torch.inf, device=device)
    v = torch.randn(2, 9, DIM, device=device)
    part = ops.attend_candidates(Candidates(ids, scores), v, scores[..., 0], scale=1.0)
    assert not part.out.any()
    assert (part.lse == -torch.inf).all()
