"""A model spread over devices: every layer's entries, queries and results stay on its own device.

The second device is torch's `meta`: it computes shapes and no values, and refuses to be mixed with
tensors of the host, as a second GPU would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_kv.config import HybridConfig
from hybrid_kv.models.rollback import Checkpoint
from hybrid_kv.runtime import KVCache
from hybrid_kv.store import PageTable
from hybrid_kv.transfer import SyncExecutor
from hybrid_kv.transfer.cuda import Copies, CudaExecutor
from hybrid_kv.types import LayerShape, ModelInfo
from tests.kit import held

SHAPE = LayerShape(layer_idx=0, num_q_heads=6, num_kv_heads=2, head_dim=24)
DEVICES = [torch.device("cpu"), torch.device("meta"), torch.device("cpu")]
METHODS: dict[str, dict[str, Any]] = {
    "full": {},
    "quest": {"page_budget": 2, "dense_layers": 0},
    "streaming_llm": {"sink_tokens": 4, "window_tokens": 8},
    "hybrid": {"sink_tokens": 4, "window_tokens": 8, "cold": {"top_k": 3, "index": "flat"}},
    "retrieval_attention": {"sink_tokens": 4, "window_tokens": 8, "cold": {"top_k": "all"}},
}


class MetaLane:
    """What comes from `meta` are zeros; what goes there is nothing."""

    def __init__(self) -> None:
        self.sent = self.returned = 0

    def out(self, copies: Copies) -> MetaLane:
        for target, source in copies:
            assert target.device.type == "cpu"
            assert source.device.type == "meta"
            target.fill_(target.dtype is torch.bool)  # zeros, all of them finite
        self.sent += 1
        return self

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def back(self, target: Tensor, source: Tensor) -> None:
        assert target.device.type == "meta"
        assert source.device.type == "cpu"
        self.returned += 1

    def stage(self, size: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(list(size), dtype=dtype)


@pytest.fixture(autouse=True)
def _no_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions are read back when a prompt is sealed; here there are none to read."""
    plain = PageTable.positions

    def positions(self: PageTable) -> list[int]:
        return [] if self.pool.k.is_meta else plain(self)

    monkeypatch.setattr(PageTable, "positions", positions)


def made(method: str, lane: MetaLane) -> KVCache:
    shapes = [replace(SHAPE, layer_idx=idx) for idx in range(len(DEVICES))]
    config = HybridConfig(method=method, page_size=4, **METHODS[method])
    executor = CudaExecutor(SyncExecutor(), lambda device: lane if device.type == "meta" else None)
    return KVCache(ModelInfo(tuple(shapes)), config, executor)


@pytest.mark.parametrize("method", METHODS)
def test_each_layer_lives_on_its_own_device(method: str) -> None:
    lane = MetaLane()
    cache, alone = made(method, lane), made(method, MetaLane())
    for new in (37, 1, 1, 1, 5, 1, 1, 1, 1, 1):
        q, k = torch.randn(1, 6, new, 24), torch.randn(1, 2, new, 24)
        for idx, device in enumerate(DEVICES):
            q_there, k_there = q.to(device), k.to(device)
            part = cache.attend(idx, q_there, (k_there, k_there), None, scale=0.2)
            assert part.out.device == part.lse.device == device
            assert part.out.shape == q.shape
            if device.type == "cpu":  # the layers on other devices change nothing
                want = alone.attend(idx, q, (k, k), None, scale=0.2)
                assert torch.equal(part.out, want.out)
    for idx, device in enumerate(DEVICES):
        row = held(cache, layer=idx)
        assert row.devices == {device}
        assert all(extent.k.device.type == "cpu" for extent in row.extents)
    offloads = method in ("hybrid", "retrieval_attention")
    assert bool(lane.sent) == bool(lane.returned) == offloads


@pytest.mark.parametrize("method", METHODS)
def test_a_question_on_two_devices_is_rolled_back(method: str) -> None:
    cache = made(method, MetaLane())

    def step(new: int) -> None:
        q, k = torch.randn(1, 6, new, 24), torch.randn(1, 2, new, 24)
        for idx, device in enumerate(DEVICES):
            cache.attend(idx, q.to(device), (k.to(device),) * 2, None, scale=0.2)

    step(37)
    before = Checkpoint.of(cache.layers)
    for _ in range(9):
        step(1)
    before.restore(cache.layers)
    for idx, device in enumerate(DEVICES):
        row = held(cache, layer=idx)
        assert (row.length, row.devices) == (37, {device})
    held(cache).check_integrity()
