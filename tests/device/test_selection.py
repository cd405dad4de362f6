"""What an emulated device finds by its codes, held to exact scores."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hybrid_kv.index import _device_keys
from hybrid_kv.index.device_sketch import sketch_of
from hybrid_kv.index.sketch import SketchIndex
from hybrid_kv.ops import get_ops
from tests.device import emulated
from tests.device.cuda import values

HEADS, GROUP, KEYS, DIM, TOP_K = 3, 2, 1000, 24, 20


def drawn(*size: int, seed: int = 0) -> Tensor:
    """Numbers whose deviation differs from head to head and from channel to channel."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.rand(size[0], *[1] * (len(size) - 2), size[-1], generator=generator)
    return torch.randn(*size, generator=generator) * (0.1 + 3 * scales**3)


def test_codes_of_each_head_find_the_best_of_its_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_LEAST_WIDTH", "_MOST_WIDTH"):  # less than all keys, so that codes count
        monkeypatch.setattr(_device_keys, name, 256)
    keys, q = drawn(HEADS, KEYS, DIM), drawn(HEADS, GROUP, DIM, seed=2)
    samples = drawn(HEADS, GROUP, 100, DIM, seed=1)
    with emulated(schedule="late", kernels="defined"):
        there, host = keys.cuda(), keys.pin_memory()
        goals = SketchIndex.Params(check_top_k=TOP_K)
        made = sketch_of(get_ops("auto"), there, samples.cuda(), 64, goals)
        assert made is not None
        index = made[0]()
        index.build(host, None)
        index.see(KEYS)
        found = index.candidates(q.cuda(), host, 1, TOP_K)
        ids = values(found.ids)
    exact = (q @ keys.mT).topk(TOP_K).indices
    hits = (exact[..., None] == ids[:, :, None].long()).any(-1)
    assert hits.float().mean() > 0.8
