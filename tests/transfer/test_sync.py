from __future__ import annotations

import pytest
import torch

from hybrid_kv.transfer import SyncExecutor


def test_work_is_done_when_it_was_started() -> None:
    done: list[int] = []
    executor = SyncExecutor()
    assert executor.start(lambda: 7).result() == 7
    assert executor.background(lambda: done.append(1)).done()
    assert done == [1]


@pytest.mark.parametrize("begin", ["start", "background"])
def test_an_error_comes_out_of_result_and_not_out_of_start(begin: str) -> None:
    def fail() -> None:
        raise ValueError("of the work")

    future = getattr(SyncExecutor(), begin)(fail)
    with pytest.raises(ValueError, match="of the work"):
        future.result()


def test_values_survive_both_ways() -> None:
    executor, value = SyncExecutor(), torch.randn(3, 5)
    assert torch.equal(executor.to_host(value), value)
    assert torch.equal(executor.to_device(value, torch.device("cpu")), value)
