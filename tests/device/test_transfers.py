"""Transfers between an emulated device and the host, late or ahead of each other."""

from __future__ import annotations

import gc

import pytest
import torch

from hybrid_kv.ops import pinned
from hybrid_kv.transfer import SyncExecutor
from hybrid_kv.transfer.cuda import CudaExecutor
from hybrid_kv.types import PartialAttention
from tests.device import emulated
from tests.device.cuda import values

CUDA = torch.device("cuda", 0)


@pytest.fixture
def executor() -> CudaExecutor:
    return CudaExecutor(SyncExecutor())


def test_what_is_sent_may_be_let_go(executor: CudaExecutor) -> None:
    """Its memory is not given out again before the other stream has read it."""
    with emulated(schedule="ahead"):
        sent = executor.send(torch.full((3, 5), 4.0, device="cuda") * 2)
        gc.collect()
        torch.zeros(1, device="cuda")  # the device goes on
        assert sent.open().tolist() == [[8.0] * 5] * 3


def test_parts_of_one_size_are_delivered_one_after_another(executor: CudaExecutor) -> None:
    with emulated(schedule="late"):
        delivered = [
            executor.deliver(
                PartialAttention(torch.full((2, 3, 7), n), torch.full((2, 3), -n)), CUDA
            )
            for n in (1.0, 2.0, 3.0)
        ]
        for number, part in enumerate(delivered, 1):
            assert (values(part.out) == number).all()
            assert (values(part.lse) == -number).all()


def test_what_is_kept_is_its_own_while_others_are_under_way(executor: CudaExecutor) -> None:
    with emulated(schedule="late"):
        first, second = (executor.keep(torch.full((5,), n, device="cuda")) for n in (1.0, 2.0))
        assert second.open().tolist() == [2.0] * 5  # whose copy came last
        assert first.open().tolist() == [1.0] * 5


def test_what_was_kept_stays_when_the_area_is_used_again(executor: CudaExecutor) -> None:
    with emulated(schedule="late"):
        first = executor.keep(torch.full((5,), 1.0, device="cuda")).open()
        second = executor.keep(torch.full((5,), 2.0, device="cuda")).open()
        assert first.tolist() == [1.0] * 5
        assert second.tolist() == [2.0] * 5


@pytest.mark.parametrize("to_device", [True, False])
def test_page_locked_memory_is_in_use_until_copies_are_over(
    to_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An array's release waits for the device: it would read memory that is somebody else's."""
    monkeypatch.setattr(pinned, "HUGE_PAGE_BYTES", 1)  # of any size it is locked by itself
    with emulated(schedule="late"):
        array = pinned.pinned_array([5, 3], torch.float32).fill_(6)
        assert array.is_pinned()
        there = torch.zeros(5, 3, device="cuda")
        if to_device:
            there.copy_(array, non_blocking=True)
        else:
            array.copy_(there, non_blocking=True)
        del array
        gc.collect()
        assert (values(there) == 6 * to_device).all()
