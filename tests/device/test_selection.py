"""What an emulated device finds by its codes and digests, held to exact scores."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from hybrid_kv.index import _device_learn
from hybrid_kv.index.auto import AutoIndex
from hybrid_kv.index.device_pages import DevicePages
from hybrid_kv.index.device_sketch import sketch_of
from hybrid_kv.ops import get_ops
from tests.device import emulated
from tests.device.cuda import values

HEADS, GROUP, KEYS, DIM, PAGE, TOP_K = 3, 2, 1000, 24, 8, 20


def drawn(*size: int, seed: int = 0) -> Tensor:
    """Numbers whose deviation differs from head to head and from channel to channel."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.rand(size[0], *[1] * (len(size) - 2), size[-1], generator=generator)
    return torch.randn(*size, generator=generator) * (0.1 + 3 * scales**3)


def test_codes_of_each_head_find_the_best_of_its_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_LEAST_WIDTH", "_MOST_WIDTH"):  # less than all keys, so that codes count
        monkeypatch.setattr(_device_learn, name, 256)
    keys, q = drawn(HEADS, KEYS, DIM), drawn(HEADS, GROUP, DIM, seed=2)
    samples = drawn(HEADS, GROUP, 100, DIM, seed=1)
    with emulated(schedule="late", kernels="defined"):
        there, host = keys.cuda(), keys.pin_memory()
        goals = AutoIndex.Params(check_top_k=TOP_K)
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


@pytest.mark.parametrize("num_keys", [KEYS, KEYS - 3])
def test_digests_of_a_device_choose_as_those_of_the_keys(num_keys: int) -> None:
    keys, q = drawn(HEADS, num_keys, DIM), drawn(HEADS, GROUP, DIM, seed=2)
    whole = keys[:, : num_keys // PAGE * PAGE].unflatten(1, (-1, PAGE))
    digests = torch.cat([whole.amax(2), whole.amin(2)], -1)
    chosen = []
    with emulated(schedule="late", kernels="defined"), pytest.MonkeyPatch.context() as patch:
        patch.setattr("hybrid_kv.index.device_pages._TOKENS", 9 * PAGE)
        make = partial(DevicePages, get_ops("auto"), PAGE, torch.device("cuda", 0))
        for given in (digests.cuda(), None):
            index = make(given)
            index.build(keys.pin_memory(), None)
            chosen.append(values(index.choose_pages(q.cuda(), 1)).sort().values)
    assert torch.equal(*chosen)
    assert chosen[0].shape[-1] == 9
