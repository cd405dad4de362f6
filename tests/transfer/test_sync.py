from __future__ import annotations

import pytest
import torch

from hybrid_kv.transfer import SyncExecutor
from hybrid_kv.types import PartialAttention


def test_work_is_done_when_it_was_started() -> None:
    done: list[int] = []
    assert SyncExecutor().background(lambda: done.append(1)).done()
    assert done == [1]


def test_an_error_comes_out_of_result_and_not_out_of_background() -> None:
    def fail() -> None:
        raise ValueError("of the work")

    future = SyncExecutor().background(fail)
    with pytest.raises(ValueError, match="of the work"):
        future.result()


def test_values_survive_both_ways() -> None:
    executor, value, host = SyncExecutor(), torch.randn(3, 5), torch.device("cpu")
    parcel = executor.send(value)
    assert parcel.arrived
    assert torch.equal(parcel.open(), value)
    assert torch.equal(executor.to_device(value, host), value)
    part = PartialAttention(value, value[:, 0])
    for there, here in zip(executor.deliver(part, host), part, strict=True):
        assert torch.equal(there, here)


def test_a_tensor_can_be_sent_to_a_place_that_waits_for_it() -> None:
    value, place = torch.randn(3, 5, 7), torch.zeros(3, 9, 7)
    parcel = SyncExecutor().send(value, place[:, 2:7])
    assert torch.equal(place[:, 2:7], value)
    assert torch.equal(parcel.open(), value)
    assert place[:, :2].eq(0).all()
