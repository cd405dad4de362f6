"""Whole decode steps as one captured graph, replayed; what a graph owns is undefined before each."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import hybrid_kv as hkv
from hybrid_kv.models.cache_argument import passing
from tests.device import emulated
from tests.device.cuda import values
from tests.device.models import llama, logits_of, small, tokens

ROUNDING = 2e-4
METHODS = ("full", "quest", "streaming_llm")


def captured(method: str) -> hkv.HybridConfig:
    return small(method).replace(capture_decode=True)


@pytest.mark.parametrize("method", METHODS)
def test_200_replayed_steps_are_those_of_eager_ones(method: str) -> None:
    """Pages begin and leave, pool and table are outgrown; a fork and a crop go on."""

    def steps(config: hkv.HybridConfig) -> list[Tensor]:
        model, parts = llama().to("cuda"), []  # type: ignore[arg-type]
        with torch.inference_mode(), hkv.attach(model, config) as runtime:
            cache = runtime.cache()

            def forward(one: hkv.TieredCache, seed: int, count: int = 1) -> None:
                ids = tokens(count, seed).cuda()
                parts.append(values(model(ids, **passing(one)).logits[:, -1]))

            forward(cache, 1, 130)
            for number in range(140):
                forward(cache, 2 + number)
            cache.crop(-7)
            other = cache.fork()
            for number in range(30):
                forward(cache, 200 + number)
                forward(other, 300 + number)
            for one in (cache, other):
                one.check_integrity()
                if config.capture_decode:
                    graph = one.kv.describe_steps()[0]["graph"]
                    assert graph["reason"] == ""
                    replays.append((graph["captures"], graph["replays"]))
        return parts

    replays: list[tuple[int, int]] = []
    with emulated(kernels="defined"):
        expected = steps(small(method))
    with emulated(schedule="late", kernels="defined"):
        found = steps(captured(method))
    print(replays, [(n, float((a - b).abs().max())) for n, (a, b) in enumerate(zip(found, expected)) if not torch.equal(a, b)])
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert sum(count for _, count in replays) > 180
