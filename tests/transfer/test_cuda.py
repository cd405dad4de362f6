from __future__ import annotations

from concurrent.futures import Future

import pytest
import torch

from hybrid_kv.transfer import SyncExecutor
from hybrid_kv.transfer.cuda import CudaExecutor
from hybrid_kv.types import PartialAttention
from tests.transfer.late import LateLane

HOST = torch.device("cpu")


def executor() -> tuple[CudaExecutor, LateLane]:
    lane = LateLane()
    return CudaExecutor(SyncExecutor(), lambda device: lane), lane


def test_a_parcel_has_arrived_when_it_was_waited_for() -> None:
    ours, _ = executor()
    value = torch.randn(3, 5)
    parcel = ours.send(value)
    assert not parcel.arrived
    assert torch.equal(parcel.open(), value)
    assert parcel.arrived


def test_waiting_for_a_parcel_brings_those_before_it_and_none_after_it() -> None:
    ours, _ = executor()
    first, second, third = (ours.send(torch.full([2], float(i))) for i in range(3))
    assert second.open().tolist() == [1, 1]
    assert first.arrived
    assert not third.arrived


def test_a_strided_tensor_leaves_in_one_copy() -> None:
    ours, lane = executor()
    value = torch.randn(4, 6, 3).transpose(0, 1)
    assert torch.equal(ours.send(value).open(), value)
    assert lane.staged == [(6, 4, 3)]


def test_a_place_that_waits_is_filled_block_by_block() -> None:
    ours, lane = executor()
    value, place = torch.randn(3, 5, 7), torch.zeros(3, 9, 7)
    parcel = ours.send(value, place[:, 2:7])
    assert [len(mark.copies) for mark in lane.pending] == [3]
    assert all(t.is_contiguous() for pair in lane.pending[0].copies for t in pair)
    parcel.open()
    assert torch.equal(place[:, 2:7], value)
    assert place[:, :2].eq(0).all()
    assert place[:, 7:].eq(0).all()
    assert lane.staged == []


def test_memory_of_a_parcel_that_nobody_opens_is_kept_until_it_has_arrived() -> None:
    ours, lane = executor()
    ours.send(torch.ones(2))
    place = lane.pending[0].copies[0][0]
    ours.send(torch.ones(2))
    assert len(ours._under_way) == 2
    ours.send(torch.ones(2)).open()
    assert place.tolist() == [1, 1]
    ours.send(torch.ones(2))
    assert len(ours._under_way) == 1, "those that have arrived are let go"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_part_travels_as_one(dtype: torch.dtype) -> None:
    ours, lane = executor()
    out, lse = torch.randn(1, 2, 3, 9).to(dtype), torch.randn(1, 2, 3)
    there = ours.deliver(PartialAttention(out, lse), HOST)
    assert torch.equal(there.out, out)
    assert torch.equal(there.lse, lse)
    assert lane.returned == 1


def test_entries_come_back_head_by_head_as_they_lie() -> None:
    """An extent has room behind its entries: as one tensor they went by way of plain memory."""
    ours, lane = executor()
    room = torch.randn(3, 3009, 72)
    there = ours.to_device(room[None, :, :3007], HOST)
    assert torch.equal(there, room[None, :, :3007])
    assert [piece.data_ptr() for piece in lane.pieces] == [head.data_ptr() for head in room]
    assert all(piece.is_contiguous() for piece in lane.pieces)


def test_small_plain_tensors_are_staged_and_large_ones_are_not_copied_twice() -> None:
    ours, lane = executor()
    small, large = torch.arange(37), torch.zeros(2**20 + 1, dtype=torch.uint8)
    assert torch.equal(ours.to_device(small, HOST), small)
    assert lane.staged == [(37,)]
    ours.to_device(large, HOST)
    assert lane.staged == [(37,)]
    assert lane.pieces[1].data_ptr() == large.data_ptr()


def test_what_is_kept_for_long_only_passes_through_locked_memory() -> None:
    """Torch's pool would round each up to a power of two, and never give it back."""
    ours, lane = executor()
    for number in range(5):
        samples, nearest = torch.full([3, 5], float(number)), torch.full([3, 7], number)
        parcels = [ours.keep(samples), ours.keep(nearest)]
        assert not any(parcel.arrived for parcel in parcels)
        kept = [parcel.open() for parcel in parcels]
        assert torch.equal(kept[0], samples)
        assert torch.equal(kept[1], nearest)
        assert parcels[0].open() is kept[0]
    assert lane.staged == []
    assert ours._area.num_bytes == 2 * 256
    ours.keep(samples)  # nobody opens it
    ours.keep(samples).open()
    assert ours._area.num_bytes == 2 * 256


def test_kept_tensors_that_need_more_room_leave_the_others_alone() -> None:
    ours, _ = executor()
    values = [torch.randn(count) for count in (5, 700, 9)]
    parcels = [ours.keep(value) for value in values]
    assert all(torch.equal(p.open(), v) for p, v in zip(parcels, values, strict=True))


def test_host_tensors_stay_where_they_are() -> None:
    ours = CudaExecutor(SyncExecutor())
    value = torch.randn(3)
    assert ours.send(value).open() is value
    assert ours.to_device(value, HOST) is value


def test_builds_go_to_whoever_builds_and_closing_waits_for_copies() -> None:
    class Builder(SyncExecutor):
        closed = False

        def close(self) -> None:
            self.closed = True

    builder, lane = Builder(), LateLane()
    ours = CudaExecutor(builder, lambda device: lane)
    build: Future[None] = ours.background(lambda: None)
    assert build.done()
    ours.send(torch.ones(2))
    ours.close()
    assert builder.closed
    assert not lane.pending


@pytest.mark.gpu(real=True)
def test_on_a_gpu_queries_leave_beside_what_it_computes_and_results_come_before_what_follows() -> (
    None
):
    ours, device = CudaExecutor(SyncExecutor()), torch.device("cuda")
    value = torch.randn(8, 4, 128, device=device)
    big = torch.randn(4096, 4096, device=device)
    parcels = []
    for _ in range(20):
        big = (big @ big).clamp(-1, 1)
        parcels.append(ours.send(value + big[0, 0]))
    assert not parcels[-1].arrived
    expected = (value + big[0, 0]).cpu()
    assert torch.equal(parcels[-1].open(), expected)
    part = PartialAttention(torch.randn(1, 8, 4, 128), torch.randn(1, 8, 4))
    for there, here in zip(ours.deliver(part, device), part, strict=True):
        assert torch.equal(there.cpu(), here)
    place = torch.empty(8, 9, 128)
    ours.send(value, place[:, 2:6]).open()
    assert torch.equal(place[:, 2:6], value.cpu())
