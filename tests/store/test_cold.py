from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, ClassVar

import psutil
import pytest
import torch
from torch import Tensor

from hybrid_kv.config import IndexConfig
from hybrid_kv.errors import (
    CapacityError,
    IntegrityError,
    NonFiniteError,
    PinnedMemoryWarning,
)
from hybrid_kv.index.flat import FlatIndex
from hybrid_kv.ops.tail import Tail
from hybrid_kv.plugins import Index
from hybrid_kv.store import ColdExtent, ColdStore, all_finite
from hybrid_kv.store.extent import ComingTail, ExtentView
from hybrid_kv.store.index_builder import run_into
from hybrid_kv.store.integrity import check_cold
from hybrid_kv.store.pinned_allocator import PinnedAllocator
from hybrid_kv.store.search import estimate_unread, search_row, tail_without
from hybrid_kv.types import LayerShape, SearchResult, bytes_per_token
from tests.ops.fake_cudart import Code, FakeCudart, fake_cuda, join_pinning
from tests.store.scene import SHAPE, LaterRunner, flat_index, keys_of


def store(rows: int = 1) -> ColdStore:
    return ColdStore(SHAPE, torch.float32, rows)


def add(cold: ColdStore, start: int, stop: int, row: int = 0, **options: object) -> None:
    positions = torch.arange(start, stop)
    k = keys_of(positions)
    cold.chains[row].append(k, -k, positions, flat_index(), **options)  # type: ignore[arg-type]


def found(cold: ColdStore, row: int, query: Tensor, top_k: int) -> list[int]:
    """Positions that head 0 finds for its only query, best first."""
    parts = search_row(cold.chains[row], query.expand(2, 1, 3), top_k)
    pairs = [
        (score, int(extent.positions[row_id]))
        for extent, result in parts
        for score, row_id in zip(result.scores[0, 0].tolist(), result.ids[0, 0], strict=True)
        if row_id >= 0
    ]
    return [position for _, position in sorted(pairs, reverse=True)]


LARGEST = torch.tensor([1.0, 0.0, 0.0])  # scores a key by its tag


class Later:
    """Work that runs when it is told to, if it was not cancelled."""

    def __init__(self) -> None:
        self.future: Future[None] = Future()

    def begin(self, work: Callable[[], None]) -> Future[None]:
        self.work = work
        return self.future

    def run(self) -> None:
        run_into(self.future, self.work)


def _of_later(length: int = 40) -> tuple[ExtentView, Later, Tail]:
    """Entries whose moments come later, the work, and what they will be."""
    k, later = keys_of(torch.arange(length)), Later()
    view = ExtentView(ColdExtent.of(k, -k, 0), length)
    view.coming = ComingTail(k, -k, later.begin)
    return view, later, Tail.of(k, -k)


def _are_equal(left: Tail, right: Tail) -> bool:
    own, other = left.tensors(), right.tensors()
    return left.count == right.count and all(torch.equal(own[name], other[name]) for name in own)


def test_moments_that_come_later_are_what_they_would_have_been() -> None:
    view, later, want = _of_later()
    assert view.known is None
    later.run()
    assert _are_equal(view.tail(torch.device("cpu")), want)
    assert view.known_is_own
    assert view.tail(torch.device("cpu")) is view.tail(torch.device("cpu"))
    view, later, want = _of_later()
    later.future.cancel()  # as when its executor has ended
    shared = view.share_known()
    assert shared is not None
    assert _are_equal(shared, want)
    assert not view.known_is_own


def test_moments_of_entries_that_are_cut_off_do_not_come() -> None:
    view, later, _ = _of_later()
    view.cut(30)
    later.run()
    k = keys_of(torch.arange(30))
    assert _are_equal(view.tail(torch.device("cpu")), Tail.of(k, -k))


def test_moments_without_copies_follow_the_copies() -> None:
    """A sixteenth of the copies may change before they are taken again."""
    k = keys_of(torch.arange(64))
    view = ExtentView(ColdExtent.of(k, -k, 0), 64)
    early = (torch.arange(64) < 32).expand(2, -1)
    few = early.clone()
    few[0, 32:36] = True
    known = tail_without(view, early)
    assert tail_without(view, few) is known
    assert _are_equal(known, Tail.of(k, -k, early))
    assert _are_equal(tail_without(view, ~early), Tail.of(k, -k, ~early))


def test_moments_that_nobody_has_begun_are_taken_by_who_wants_them() -> None:
    view, later, want = _of_later()
    assert _are_equal(view.tail(torch.device("cpu")), want)
    assert later.future.cancelled()


def test_a_copy_of_the_process_takes_moments_that_are_under_way_elsewhere() -> None:
    view, later, want = _of_later()
    assert later.future.set_running_or_notify_cancel()
    if (child := os.fork()) == 0:
        signal.alarm(20)  # else it waits for a thread that is not here
        same = False
        try:
            same = _are_equal(view.tail(torch.device("cpu")), want)
        finally:
            os._exit(not same)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    later.future.set_result(None)


def test_an_error_of_moments_is_raised_to_who_wants_them() -> None:
    view, later, _ = _of_later()
    assert later.future.set_running_or_notify_cancel()
    later.future.set_exception(MemoryError("of the moments"))
    with pytest.raises(MemoryError, match="of the moments"):
        view.tail(torch.device("cpu"))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        (LayerShape(0, 32, 8, 128), torch.bfloat16),
        (LayerShape(0, 32, 8, 64), torch.bfloat16),
        (LayerShape(0, 6, 2, 72), torch.float16),
        (LayerShape(0, 3, 1, 128), torch.float32),
    ],
)
def test_the_cold_tier_costs_at_most_two_percent_beside_keys_and_values(
    shape: LayerShape, dtype: torch.dtype
) -> None:
    cold = ColdStore(shape, dtype, 1)
    tokens = 1037
    k = torch.ones(shape.num_kv_heads, tokens, shape.head_dim, dtype=dtype)
    cold.chains[0].append(k, k, torch.arange(tokens), flat_index())
    raw = tokens * bytes_per_token(shape, dtype)
    assert cold.kv_bytes == raw
    assert cold.kv_bytes + cold.overhead_bytes + cold.index_bytes <= 1.02 * raw
    # Room for growth is reserved address space, committed as it is written.
    extent = cold.chains[0].spans[0].extent
    reserved = sum(t.numel() * t.itemsize for t in (extent.k, extent.v, extent.positions))
    assert reserved <= 2 * (cold.kv_bytes + cold.overhead_bytes)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_one_number_that_is_not_finite_is_seen_anywhere(value: float, dtype: torch.dtype) -> None:
    for dim in (1, 7, 33):
        k, v = (torch.randn(2, 5, dim).to(dtype) for _ in range(2))
        assert bool(all_finite(k, v, k[:, :0]))
        for place in range(k.numel()):
            spoilt = v.clone()
            spoilt.view(-1)[place] = value
            assert not bool(all_finite(k, spoilt))
            assert not bool(all_finite(spoilt.transpose(1, 2), k)), "rows that do not adjoin"


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("which", ["keys", "values"])
def test_what_is_not_finite_is_refused_by_head_and_position(which: str, value: float) -> None:
    cold = store()
    add(cold, 10, 20)
    k, v = keys_of(torch.arange(20, 26)), -keys_of(torch.arange(20, 26))
    (k if which == "keys" else v)[1, 4, 2] = value
    with pytest.raises(NonFiniteError, match=f"{which} must be finite.*KV head 1 at position 24;"):
        cold.chains[0].append(k, v, torch.arange(20, 26), flat_index())
    assert cold.chains[0].positions() == list(range(10, 20)), "nothing was added and nothing lost"
    check_cold(cold)
    add(cold, 20, 22)
    assert found(cold, 0, LARGEST, 3) == [21, 20, 19]


def test_an_empty_cold_tier_finds_nothing_and_weighs_nothing() -> None:
    cold = store()
    assert search_row(cold.chains[0], torch.randn(2, 1, 3), 5) == []
    assert (cold.chains[0].num_tokens, cold.kv_bytes, cold.overhead_bytes, cold.index_bytes) == (
        0,
    ) * 4
    check_cold(cold)


def test_rows_that_were_forked_share_extents_until_they_add() -> None:
    cold = store()
    add(cold, 0, 9)
    cold.fork([0, 0])
    shared = cold.chains[0].spans[0].extent
    assert cold.chains[1].spans[0].extent is shared
    assert cold.kv_bytes == 9 * 2 * 2 * 3 * 4, "shared entries count once"
    add(cold, 9, 12, row=0)
    add(cold, 9, 11, row=1)
    assert shared.length == 9
    assert cold.chains[0].positions() == list(range(12))
    assert cold.chains[1].positions() == list(range(11))
    assert found(cold, 0, LARGEST, 3) == [11, 10, 9]
    assert found(cold, 1, LARGEST, 3) == [10, 9, 8]
    check_cold(cold)


def test_a_row_does_not_see_what_it_cropped_from_a_shared_extent() -> None:
    cold = store()
    add(cold, 0, 9)
    cold.fork([0, 0])
    cold.chains[1].truncate(5)
    assert found(cold, 0, LARGEST, 2) == [8, 7]
    assert found(cold, 1, LARGEST, 2) == [4, 3]
    assert found(cold, 1, LARGEST, 99) == [4, 3, 2, 1, 0]
    check_cold(cold)


def test_an_index_estimates_no_entry_that_a_row_has_cropped() -> None:
    """SparQ with all channels: the weight is exact, the value the mean."""
    cold, positions = store(), torch.arange(9)
    k = keys_of(positions)
    cold.chains[0].append(k, -k, positions, IndexConfig(kind="query_channels").build)
    cold.fork([0, 0])
    cold.chains[1].truncate(5)
    queries, nothing = LARGEST.expand(2, 1, 3), torch.full((2, 1, 1), -1)
    for chain, count in zip(cold.chains, (9, 5), strict=True):
        part = estimate_unread(chain.spans[0], queries, nothing, scale=1.0, softcap=None)
        torch.testing.assert_close(part.lse, k[:, None, :count, 0].logsumexp(-1))
        torch.testing.assert_close(part.out, -k[:, :count].mean(1, keepdim=True))


def test_a_crop_is_forgotten_for_good_when_the_row_goes_on() -> None:
    cold = store()
    add(cold, 0, 9)
    cold.chains[0].truncate(5)
    add(cold, 5, 7)
    assert cold.chains[0].positions() == list(range(7))
    assert found(cold, 0, LARGEST, 3) == [6, 5, 4]
    check_cold(cold)


def test_no_entry_is_found_twice_across_extents() -> None:
    cold = store()
    add(cold, 0, 5)
    for start in range(5, 20, 5):
        cold.fork([0, 0])  # every piece starts an extent of its own
        add(cold, start, start + 5)
        cold.fork([0])
    assert len(cold.chains[0].spans) == 4
    assert found(cold, 0, LARGEST, 7) == list(range(19, 12, -1))
    assert sorted(found(cold, 0, LARGEST, 99)) == list(range(20))
    check_cold(cold)


class Learning(FlatIndex):
    """Takes long to build, as one that learns does; the scan stands in for it."""

    def stand_in(self, keys: Tensor, samples: Tensor | None) -> Index:
        return IndexConfig(kind="flat").build()  # type: ignore[no-any-return]


def learn(cold: ColdStore, start: int, stop: int, runner: LaterRunner, row: int = 0) -> None:
    positions = torch.arange(start, stop)
    k = keys_of(positions)
    cold.chains[row].append(k, -k, positions, lambda: Learning(FlatIndex.Params()), None, runner)


def serving(cold: ColdStore, row: int = 0) -> str:
    index = cold.chains[row].spans[0].extent.index
    assert index is not None
    return "stand-in" if index.builder.pending else "index"


def test_a_row_is_served_while_its_index_is_built_and_after() -> None:
    cold, runner = store(), LaterRunner()
    learn(cold, 0, 9, runner)
    assert serving(cold) == "stand-in"
    assert found(cold, 0, LARGEST, 2) == [8, 7]
    check_cold(cold)
    cold.settle()
    assert serving(cold) == "stand-in", "it is not built yet"
    runner.finish()
    cold.settle()
    assert serving(cold) == "index"
    assert found(cold, 0, LARGEST, 2) == [8, 7]
    check_cold(cold)


def test_tokens_that_come_during_a_build_are_served_before_and_after() -> None:
    cold, runner = store(), LaterRunner()
    learn(cold, 0, 9, runner)
    learn(cold, 9, 400, runner)  # the extent moves to a larger array
    assert len(runner.held) == 1, "one build per extent"
    assert found(cold, 0, LARGEST, 2) == [399, 398]
    runner.finish()
    learn(cold, 400, 403, runner)
    cold.settle()
    assert serving(cold) == "index"
    assert found(cold, 0, LARGEST, 4) == [402, 401, 400, 399]
    check_cold(cold)


def test_a_crop_during_a_build_hides_what_it_took() -> None:
    cold, runner = store(), LaterRunner()
    learn(cold, 0, 9, runner)
    cold.chains[0].truncate(5)
    runner.finish()
    cold.settle()
    assert serving(cold) == "index"
    assert found(cold, 0, LARGEST, 2) == [4, 3]
    check_cold(cold)


def test_a_crop_and_other_tokens_make_a_build_stale() -> None:
    cold, runner = store(), LaterRunner()
    learn(cold, 0, 9, runner)
    cold.chains[0].truncate(5)
    learn(cold, 50, 53, runner)
    (build,) = runner.held
    assert build.future.cancelled()
    cold.settle()
    assert found(cold, 0, LARGEST, 9) == [52, 51, 50, 4, 3, 2, 1, 0]
    check_cold(cold)


def test_rows_that_fork_during_a_build_share_it() -> None:
    cold, runner = store(), LaterRunner()
    learn(cold, 0, 9, runner)
    cold.fork([0, 0])
    learn(cold, 9, 12, runner, row=1)
    runner.finish()
    cold.settle()
    assert [serving(cold, row) for row in (0, 1)] == ["index", "index"]
    assert found(cold, 0, LARGEST, 2) == [8, 7]
    assert found(cold, 1, LARGEST, 4) == [11, 10, 9, 8]
    check_cold(cold)


def test_a_branch_settles_what_its_origin_serves() -> None:
    cold, runner = store(), LaterRunner()
    learn(cold, 0, 9, runner)
    branch = cold.branch()
    runner.finish()
    branch.settle()
    branch.release()
    assert serving(cold) == "index"
    check_cold(cold)


@pytest.mark.parametrize("end", ["release", "truncate", "cancel_builds"])
def test_a_build_ends_with_the_last_row_that_wants_it(end: str) -> None:
    cold, runner = store(), LaterRunner()
    learn(cold, 0, 9, runner)
    cold.fork([0, 0])
    cold.chains[1].truncate(0)
    (build,) = runner.held
    assert not build.future.cancelled(), "row 0 still wants it"
    {
        "release": cold.release,
        "truncate": lambda: cold.chains[0].truncate(0),
        "cancel_builds": cold.cancel_builds,
    }[end]()
    assert build.future.cancelled()
    cold.settle()


def test_a_failing_build_leaves_the_row_as_it_was() -> None:
    class Failing(FlatIndex):
        def _rebuild(self, samples: Tensor | None, nearest: Tensor | None) -> None:
            raise MemoryError("index does not fit")

    cold, k = store(), keys_of(torch.arange(9))
    for _ in range(2):  # and does not go away
        with pytest.raises(MemoryError, match="index does not fit"):
            cold.chains[0].append(k, -k, torch.arange(9), lambda: Failing(FlatIndex.Params()))
        assert cold.chains[0].positions() == [], "the tokens stay with their owner"
        check_cold(cold)
    add(cold, 0, 9)
    assert found(cold, 0, LARGEST, 2) == [8, 7]


def test_a_failing_insertion_leaves_the_row_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    cold = store()
    add(cold, 0, 9)
    index = cold.chains[0].spans[0].extent.index
    with monkeypatch.context() as patch:
        patch.setattr(index, "add", lambda keys: (_ for _ in ()).throw(MemoryError("full")))
        with pytest.raises(MemoryError):
            add(cold, 9, 11)
    assert cold.chains[0].positions() == list(range(9))
    add(cold, 9, 12)
    assert cold.chains[0].positions() == list(range(12))
    assert found(cold, 0, LARGEST, 3) == [11, 10, 9]
    check_cold(cold)


def test_searching_without_an_index_is_refused() -> None:
    cold = store()
    k = keys_of(torch.arange(3))
    cold.chains[0].append(k, -k, torch.arange(3), None)
    with pytest.raises(IntegrityError, match="its placement named no index"):
        search_row(cold.chains[0], torch.randn(2, 1, 3), 2)


def test_plain_memory_grows_in_place_and_is_asked_for_generously() -> None:
    cold = ColdStore(LayerShape(0, 2, 2, 8), torch.float32, 1)
    for count in (5000, 3000, 7):
        start = cold.chains[0].num_tokens
        k = torch.randn(2, count, 8)
        cold.chains[0].append(k, -k, torch.arange(start, start + count), None)
        (span,) = cold.chains[0].spans
        assert span.extent.k.shape[1] <= 2 * span.length
        assert torch.equal(span.extent.k[:, start : start + count], k)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCudart]:
    with fake_cuda(monkeypatch) as made:
        yield made


def locked_bytes(cuda: FakeCudart) -> int:
    return sum(cuda.locked.values())


def test_pinned_memory_grows_where_it_lies(cuda: FakeCudart) -> None:
    """It was followed by another extent, one for each later turn; before that it was copied, 17 GB
    in one step 8K tokens after 128K.
    """
    cold = ColdStore(SHAPE, torch.float32, 1, pinned=PinnedAllocator())
    add(cold, 0, 5000)
    (span,) = cold.chains[0].spans
    address = span.extent.k.data_ptr()
    assert locked_bytes(cuda) <= 1.3 * cold.kv_bytes
    for start in range(5000, 5000 + 370 * 30, 370):
        add(cold, start, start + 370)
        check_cold(cold)
    (span,) = cold.chains[0].spans
    assert span.extent.k.data_ptr() == address
    stored = cold.chains[0].num_tokens
    assert locked_bytes(cuda) <= 1.3 * cold.kv_bytes
    assert found(cold, 0, LARGEST, 3) == [stored - 1, stored - 2, stored - 3]
    assert cold.chains[0].positions() == list(range(stored))


def test_room_is_locked_before_it_is_needed(cuda: FakeCudart) -> None:
    """All layers of a model fill up at the same step, which would lock a gigabyte."""
    cold = ColdStore(SHAPE, torch.float32, 1, pinned=PinnedAllocator())
    add(cold, 0, 5000)
    plain, names = cuda.cudaHostRegister, []

    def noted(*words: int) -> Any:
        names.append(threading.current_thread().name)
        return plain(*words)

    cuda.cudaHostRegister = noted  # type: ignore[method-assign]
    for start in range(5000, 8000, 4):
        add(cold, start, start + 4)
        join_pinning()
    assert names
    assert set(names) == {"hybrid-kv-pin"}
    assert len(names) <= 4 * 40, "rows are locked by the hundred"


def test_what_cuda_does_not_let_grow_is_followed_by_another_extent(cuda: FakeCudart) -> None:
    cold = ColdStore(SHAPE, torch.float32, 1, pinned=PinnedAllocator())
    add(cold, 0, 5000)
    cuda.refuses = Code.out_of_memory
    with pytest.warns(PinnedMemoryWarning):
        add(cold, 5000, 7000)
    add(cold, 7000, 9000)
    check_cold(cold)
    first, second = cold.chains[0].spans
    assert (first.length, second.length) == (5000, 4000), "plain memory grows as it likes"
    assert found(cold, 0, LARGEST, 2) == [8999, 8998]
    assert cold.chains[0].positions() == list(range(9000))


def test_a_row_has_few_extents_however_long_it_becomes(cuda: FakeCudart) -> None:
    """Address space is outgrown by a chat that began small."""
    chain = ColdStore(LayerShape(0, 1, 1, 2), torch.bfloat16, 1, pinned=PinnedAllocator()).chains[0]
    for stored in range(0, 2_000_000, 10_000):
        k = torch.empty(1, 10_000, 2, dtype=torch.bfloat16)
        chain.commit(chain.reserve(torch.arange(stored, stored + 10_000)), None)
        assert k.shape[1] + stored == chain.num_tokens
    assert len(chain.spans) <= 4


def test_a_crop_leaves_pinned_room_to_write_in(cuda: FakeCudart) -> None:
    cold = ColdStore(SHAPE, torch.float32, 1, pinned=PinnedAllocator())
    add(cold, 0, 300)
    for kept, stop in ((290, 500), (100, 900)):  # within what is locked, and beyond it
        cold.chains[0].truncate(kept)
        add(cold, kept, stop)
        assert len(cold.chains[0].spans) == 1
        check_cold(cold)
        assert cold.chains[0].positions() == list(range(stop))
        assert found(cold, 0, LARGEST, 2) == [stop - 1, stop - 2]


def test_a_row_that_cannot_grow_for_lack_of_memory_is_as_before(
    cuda: FakeCudart, monkeypatch: pytest.MonkeyPatch
) -> None:
    cold = ColdStore(SHAPE, torch.float32, 1, pinned=PinnedAllocator())
    add(cold, 0, 5000)
    with monkeypatch.context() as patch:
        patch.setattr(
            psutil, "virtual_memory", lambda: SimpleNamespace(available=2**20, total=2**30)
        )
        with pytest.raises(CapacityError, match="the cache grows by"):
            add(cold, 5000, 100_000)
    check_cold(cold)
    assert cold.chains[0].num_tokens == 5000
    add(cold, 5000, 30_000)
    assert len(cold.chains[0].spans) == 1
    assert found(cold, 0, LARGEST, 1) == [29_999]


@pytest.mark.parametrize("how", ["fork", "branch"])
def test_pinned_rows_of_a_fork_stay_what_they_are(cuda: FakeCudart, how: str) -> None:
    """The first to go on begins an extent, which grows then."""
    cold = ColdStore(SHAPE, torch.float32, 1, pinned=PinnedAllocator())
    add(cold, 0, 5000)
    if how == "fork":
        cold.fork([0, 0])
        first, second = cold.chains
    else:
        first, second = cold.chains[0], cold.branch().chains[0]
    for start in range(5000, 8000, 300):
        k = keys_of(torch.arange(start, start + 300))
        first.append(k, -k, torch.arange(start, start + 300), flat_index())
        second.append(-k, k, torch.arange(start, start + 300), flat_index())
    for chain, sign in ((first, 1), (second, -1)):
        assert [span.length for span in chain.spans] == [5000, 3000]
        k = torch.cat([span.extent.first(span.length)[0] for span in chain.spans], 1)
        assert torch.equal(k[:, :5000], keys_of(torch.arange(5000)))
        assert torch.equal(k[:, 5000:], sign * keys_of(torch.arange(5000, 8000)))
    second.release()
    k = keys_of(torch.arange(8000, 9000))
    first.append(k, -k, torch.arange(8000, 9000), flat_index())
    assert [span.length for span in first.spans] == [5000, 4000]


# Where a search begins


class Asked(FlatIndex):
    """Notes where it was told to begin."""

    near: ClassVar[list[Tensor | None]] = []

    def search(self, *arguments: Any, **options: Any) -> SearchResult:
        self.near.append(arguments[3] if len(arguments) > 3 else None)
        return super().search(*arguments, **options)


def asked(cold: ColdStore, queries: Tensor, top_k: int = 2) -> list[Tensor | None]:
    """What each extent's search was told by a search of row 0."""
    Asked.near.clear()
    search_row(cold.chains[0], queries, top_k)
    return list(Asked.near)


def asking() -> tuple[ColdStore, Tensor]:
    cold, positions = store(), torch.arange(9)
    k = keys_of(positions)
    cold.chains[0].append(k, -k, positions, lambda: Asked(FlatIndex.Params()))
    return cold, LARGEST.expand(2, 1, 3)


def test_a_search_begins_where_the_last_one_ended() -> None:
    cold, queries = asking()
    assert asked(cold, queries) == [None]
    (near,) = asked(cold, queries)
    assert near is not None
    assert near.shape == (2, 1, 2)
    assert near[0, 0].tolist() == [8, 7]


@pytest.mark.parametrize("change", ["more queries", "crop", "branch", "fork"])
def test_a_search_for_something_else_begins_anew(change: str) -> None:
    cold, queries = asking()
    asked(cold, queries)
    if change == "more queries":
        queries = queries.expand(2, 3, 3)
    elif change == "crop":
        cold.chains[0].truncate(5)
    elif change == "branch":
        cold = cold.branch()
    else:
        cold.fork([0])
    assert asked(cold, queries) == [None]
