"""Decode steps through the kernels give what the definitions give, and use the kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybrid_kv.config import HybridConfig
from hybrid_kv.runtime import KVCache
from hybrid_kv.types import LayerShape, ModelInfo
from tests.ops.triton.where import needs_kernels
from tests.runtime import test_select as select
from tests.tolerances import TOLERANCES

needs_kernels()
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered in log")

SHAPE = LayerShape(0, 6, 2, 24)
SIZES = {"sink_tokens": 5, "window_tokens": 10, "page_size": 5}
METHODS: dict[str, dict[str, Any]] = {
    "full": {"method": "full", "page_size": 5},
    "quest": {"method": "quest", "page_budget": 2, "dense_layers": 0, **SIZES},
    "hybrid": {
        "method": "hybrid",
        "cold": {"top_k": 3, "index": "flat"},
        "spare_tokens": 20,
        "page_budget": 2,
        **SIZES,
    },
}
CHOOSE = {"choose_pages"}
READ = {"append", "attend_pages"}


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize(
    ("method", "served"),
    [
        ("full", READ),
        ("quest", READ | CHOOSE | {"update_digests"}),
        ("hybrid", READ | CHOOSE | {"update_digests", "merge"}),
    ],
)
def test_a_step_is_that_of_the_reference(
    device: str, method: str, served: set[str], softcap: float | None
) -> None:
    def cache(backend: str) -> KVCache:
        return KVCache(ModelInfo((SHAPE,)), HybridConfig(**METHODS[method], backend=backend))

    def attend(kv: KVCache, new: int) -> Any:
        # Drawn on the CPU, whose generator is what the loop below sets back.
        q, k, v = (torch.randn(2, heads, new, 24).to(device) for heads in (6, 2, 2))
        return kv.attend(0, q, (k, v), None, scale=0.3, softcap=softcap)

    fast, exact = cache("triton"), cache("reference")
    for new in (52, 1, 3, 1):
        state = torch.get_rng_state()
        part = attend(fast, new)
        torch.set_rng_state(state)
        torch.testing.assert_close(part, attend(exact, new), **TOLERANCES[torch.float32])
        fast.check_integrity()
    assert fast.work == exact.work
    assert {op for op, name in fast.ops.served.items() if name == "triton"} == served
    assert set(exact.ops.served.values()) == {"reference"}


def test_a_step_that_selects_estimates_what_is_left_by_a_kernel(device: str) -> None:
    """All of the device's part by kernels, with what the host's memory holds as it stands."""
    if device != "cpu":
        pytest.skip("the scene keeps its keys in plain memory")
    scene = select.Scene(400, backend="triton", estimate="gaussian")
    scene.expect_best(*scene.step(), 20, estimates=True)
    served = scene.cache.means.ops.served
    assert {served[op] for op in ("find_by_sketch", "attend_candidates", "attend_unread")} == {
        "triton"
    }
