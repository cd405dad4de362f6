"""Where all keys are equal, attention is the mean value, and so is what an estimate gives of it.

What was found, or lay on the device, once counted twice: the unread got the mean value of all.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybrid_kv.config import HybridConfig
from hybrid_kv.ops.native import engine_state
from hybrid_kv.runtime import KVCache
from hybrid_kv.types import LayerShape, ModelInfo
from tests.tolerances import TOLERANCES

SHAPE = LayerShape(0, 6, 2, 40)
PROMPT, STEPS = 203, 21
SIZES = {"sink_tokens": 4, "window_tokens": 8}
FLAT = {"method": "flat", **SIZES}
OFFLOAD = {"method": "snapkv", "demote": "offload", "window_tokens": 8, "budget_tokens": 40}
SETTINGS: dict[str, dict[str, Any]] = {
    "flat": {**FLAT, "cold": {"top_k": 90}},
    "int8": {**FLAT, "cold": {"top_k": 90, "index": {"kind": "flat", "precision": "int8"}}},
    "weighs": {**FLAT, "cold": {"top_k": 30, "max_tokens": 90, "min_share": 0.0}},
    "spare": {"method": "hybrid", **SIZES, "spare_tokens": 4, "page_budget": "all", "top_k": 31},
    "copied": {**OFFLOAD, "cold": {"top_k": 60, "index": "flat"}},
}


@pytest.mark.parametrize("form", ["gaussian", "first_order"])
@pytest.mark.parametrize("one_call", ["0", "1"])
@pytest.mark.parametrize("name", SETTINGS)
def test_an_estimate_is_exact_where_all_keys_are_equal(
    monkeypatch: pytest.MonkeyPatch, name: str, one_call: str, form: str
) -> None:
    if one_call == "1" and engine_state().isa is None:
        pytest.skip("no engine: every op is made by itself")
    monkeypatch.setenv("HYBRID_KV_ONE_CALL", one_call)
    settings = dict(SETTINGS[name])
    cold = {"index": "flat", **settings.pop("cold", {}), "estimate": form}
    if "top_k" in settings:
        cold["top_k"] = settings.pop("top_k")
    kv = KVCache(ModelInfo((SHAPE,)), HybridConfig(page_size=4, cold=cold, **settings))
    key = torch.randn(1, SHAPE.num_kv_heads, 1, SHAPE.head_dim)
    values = torch.randn(1, SHAPE.num_kv_heads, PROMPT + STEPS, SHAPE.head_dim)
    # What goes to the cold tier later does not change its mean: moments are not learned at once.
    values[:, :, PROMPT - 20 :] = values[:, :, 4 : PROMPT - 20].mean(2, keepdim=True)
    at = 0
    for count in [PROMPT] + [1] * (STEPS - 3) + [3]:
        q = torch.randn(1, SHAPE.num_q_heads, count, SHAPE.head_dim)
        v = values[:, :, at : at + count]
        at += count
        out = kv.attend(0, q, (key.expand(-1, -1, count, -1), v), None, scale=0.2).out
        if count == 1:
            mean = values[:, :, :at].mean(2, keepdim=True).repeat_interleave(3, 1)
            torch.testing.assert_close(out, mean, **TOLERANCES[torch.float32])
    kv.check_integrity()
