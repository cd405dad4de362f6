"""A thread in the background leaves the cores to decoding."""

from __future__ import annotations

import threading

import pytest
import torch

from hybrid_kv.ops.native.library import work_alone


def test_torch_works_alone_in_a_thread_that_does_and_in_no_other() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    if torch.get_num_threads() < 2:
        pytest.skip("this torch has one thread")
    counts = {}

    def run(name: str, alone: bool) -> None:
        if alone:
            work_alone()
        torch.ones(2, 2) @ torch.ones(2, 2)
        counts[name] = torch.get_num_threads()

    try:
        for name, alone in (("builds", True), ("begins later", False)):
            thread = threading.Thread(target=run, args=(name, alone))
            thread.start()
            thread.join()
        assert counts == {"builds": 1, "begins later": 2}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
