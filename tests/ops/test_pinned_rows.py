"""Page-locked rows that grow where they lie; copies keep within what was locked at once."""

from __future__ import annotations

import gc
import mmap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch

from hybrid_kv.errors import PinnedMemoryWarning
from hybrid_kv.ops import get_ops, pinned
from hybrid_kv.ops.pinned import PinnedRows, bus_copies, pinned_array
from tests.ops.fake_cudart import Code, FakeCudart, fake_cuda

SIZES = [((2, 3, 40_000, 24), torch.float32), ((2, 1, 5000, 7), torch.float16)]
"""Rows of 96 bytes, on huge pages, and of 14."""


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCudart]:
    with fake_cuda(monkeypatch) as made:
        yield made


@pytest.mark.parametrize(("size", "dtype"), SIZES)
def test_more_rows_are_locked_where_they_lie(
    cuda: FakeCudart, size: tuple[int, ...], dtype: torch.dtype
) -> None:
    made = PinnedRows(size, dtype)
    address, arrays = made.rows.data_ptr(), made.rows.flatten(0, 1)
    assert cuda.locked == {}, "address space alone"
    assert made.lock(5)
    first = made.locked
    arrays[:, :first] = 1.5
    assert made.lock(first + 1)
    arrays[:, first : made.locked] = 2.5
    assert len(cuda.locked) == 2 * len(arrays)
    for own in arrays:
        ends = [own.data_ptr(), own[first:].data_ptr(), own[made.locked :].data_ptr()]
        for start, stop in pairwise(ends):
            assert cuda.locked[start] == stop - start
    assert made.rows.data_ptr() == address
    assert (arrays[:, :first] == 1.5).all()
    assert (arrays[:, first : made.locked] == 2.5).all()
    assert made.lock(made.capacity)
    assert not made.lock(made.capacity + 1)
    assert made.capacity >= size[2]


def test_all_is_unlocked_with_the_last_view(cuda: FakeCudart) -> None:
    made = PinnedRows((2, 3, 900, 24), torch.float32)
    assert made.lock(100)
    assert made.lock(500)
    view = made.rows[1, 2, :7]
    del made
    gc.collect()
    assert len(cuda.locked) == 12
    del view
    gc.collect()
    assert cuda.locked == {}
    assert "unregister, unmapped" not in cuda.calls


def test_what_cuda_refuses_further_on_leaves_what_is_there(cuda: FakeCudart) -> None:
    made = PinnedRows((2, 3, 900, 24), torch.float32)
    assert made.lock(100)
    before, locked = made.locked, dict(cuda.locked)
    plain = cuda.cudaHostRegister
    calls: list[int] = []

    def refuses_the_fifth(address: int, num_bytes: int, flags: int) -> Code:
        calls.append(address)
        return Code.out_of_memory if len(calls) == 5 else plain(address, num_bytes, flags)

    cuda.cudaHostRegister = refuses_the_fifth  # type: ignore[method-assign]
    with pytest.warns(PinnedMemoryWarning, match="out of memory"):
        assert not made.lock(500)
    assert (made.locked, cuda.locked) == (before, locked), "all or nothing"
    assert not made.grows
    assert not made.lock(500)
    assert len(calls) == 5, "it is not asked again"
    assert made.lock(before)


def test_rows_of_which_cuda_refuses_the_first_are_plain_memory(cuda: FakeCudart) -> None:
    cuda.refuses = Code.out_of_memory
    made = PinnedRows((2, 3, 900, 24), torch.float32)
    with pytest.warns(PinnedMemoryWarning):
        assert made.lock(100)
    assert made.locked == made.capacity
    made.rows[..., -1, :] = 1
    assert cuda.locked == {}


@pytest.mark.parametrize("there", [None, 12345])
def test_rows_that_kernels_reach_elsewhere_do_not_grow(
    cuda: FakeCudart, there: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There a range that is locked later need not follow the one before it (WSL2)."""
    monkeypatch.setattr(pinned, "device_address", lambda _: there)
    made = PinnedRows((2, 3, 900, 24), torch.float32)
    assert made.lock(100)
    assert not made.grows
    assert not made.lock(made.locked + 1)


def test_without_cuda_all_rows_are_there_at_once() -> None:
    made = PinnedRows((2, 3, 900, 24), torch.float32)
    assert made.lock(100)
    assert made.locked == made.capacity


def test_several_threads_lock_each_row_once(cuda: FakeCudart) -> None:
    made = PinnedRows((2, 3, 4000, 24), torch.float32)
    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(made.lock, [3900, 200, 1000, 3900, 2000, 400, 3000, 100]))
    assert made.locked >= 3900
    assert sum(cuda.locked.values()) == 6 * made.locked * 96


@pytest.mark.parametrize("back", [False, True])
def test_copies_keep_within_what_was_locked_at_once(cuda: FakeCudart, back: bool) -> None:
    made = PinnedRows((2, 3, 900, 24), torch.float32)
    for count in (100, 300, 800):
        assert made.lock(count)
    ends = {start + size for start, size in cuda.locked.items()}
    made.rows[:, :, :750] = torch.randn(2, 3, 750, 24)
    host = made.rows[:1, :, 50:750]
    there = torch.empty(host.shape)
    device = torch.empty(host.shape, device="meta")  # as a device, it is not the host
    parts = list(bus_copies(host, device) if back else bus_copies(device, host))
    assert len(parts) == 9
    for pair in parts:
        mine, its = pair if back else pair[::-1]
        assert mine.shape == its.shape
        start, stop = mine.data_ptr(), mine.data_ptr() + mine.nbytes
        assert mine.is_contiguous()
        assert not any(start < end < stop for end in ends)
    if not back:
        for target, source in bus_copies(there, host):
            target.copy_(source)
        assert torch.equal(there, host)


def test_what_lies_in_one_range_is_one_copy(cuda: FakeCudart) -> None:
    whole = pinned_array([3, 2**18], torch.float32)
    plain = torch.ones(5, 7)
    for host in (whole, whole[1], plain, torch.tensor(1.5), torch.ones(0, 3), plain[:, 1]):
        ((target, source),) = bus_copies(torch.empty(host.shape, device="meta"), host)
        assert target.shape == source.shape == host.shape
        assert source.is_contiguous()


@pytest.mark.gpu
def test_a_gpu_copies_and_reads_rows_of_several_ranges() -> None:
    """Its kernels go on behind a range as if it were one."""
    made = PinnedRows((2, 3, 900, 24), torch.float32)
    for count in (100, 300, 800):
        made.lock(count)
    count = min(750, made.locked)
    host = made.rows[0, :, :count]
    host.copy_(torch.randn(3, count, 24))
    there = torch.empty(host.shape, device="cuda")
    for target, source in bus_copies(there, host):
        target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(there.cpu(), host)
    ids = torch.arange(count, dtype=torch.int32, device="cuda").expand(3, 1, -1).contiguous()
    q = torch.randn(3, 2, 24, device="cuda")
    found = get_ops("auto").score_candidates(q, made.rows[0], ids)
    torch.testing.assert_close(found.cpu(), (q @ there.mT).cpu(), atol=1e-4, rtol=1e-4)


def test_pages_of_the_system_are_what_is_locked(cuda: FakeCudart) -> None:
    made = PinnedRows((1, 5000, 33), torch.float16)
    for count in (1, 1400, 4100):
        assert made.lock(count)
    for address, num_bytes in cuda.locked.items():
        assert address % mmap.PAGESIZE == num_bytes % mmap.PAGESIZE == 0
