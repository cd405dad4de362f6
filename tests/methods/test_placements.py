"""What each method says about a layer, as a value: no store and no tensors are needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybrid_kv.config import HybridConfig
from hybrid_kv.plugins import Method, Placement
from hybrid_kv.types import Demotion, Read, TokenBudget

Q = torch.zeros(1, 2, 1, 8)


def method(name: str, **settings: Any) -> Method:
    built: Method = HybridConfig(method=name, **settings).build()
    return built


def test_full_attention_keeps_and_reads_everything() -> None:
    assert method("full").seal(0, []) == Placement()
    assert method("full").read(0, Q) == Read()


def test_streaming_llm_drops_what_is_neither_sink_nor_window() -> None:
    streaming = method("streaming_llm", sink_tokens=32, window_tokens=64)
    assert streaming.seal(0, []) == Placement(32, 64, rest=Demotion.DROP)
    assert streaming.read(0, Q) == Read()


@pytest.mark.parametrize("layer_idx", [0, 1, 2, 3])
def test_quest_is_dense_in_its_first_layers(layer_idx: int) -> None:
    quest = method("quest", page_budget=7, dense_layers=2)
    dense = layer_idx < 2
    assert quest.read(layer_idx, Q) == Read("all" if dense else 7)
    assert quest.seal(layer_idx, []).digests is not dense
    assert quest.seal(layer_idx, []).rest is Demotion.KEEP


@pytest.mark.parametrize(
    ("name", "kind"),
    [("retrieval_attention", "graph"), ("flat", "flat"), ("ivf", "ivf"), ("hnsw", "hnsw")],
)
def test_retrieval_offloads_all_but_sinks_and_window(name: str, kind: str) -> None:
    retrieval = method(name, sink_tokens=32, window_tokens=64, cold={"top_k": 9})
    placement = retrieval.seal(0, [])
    assert placement.rest is Demotion.OFFLOAD
    assert (placement.sink_tokens, placement.window_tokens, placement.spare_tokens) == (32, 64, 0)
    assert placement.index is not None
    assert retrieval.params.cold.index.kind == kind
    assert retrieval.read(0, Q) == Read(cold=TokenBudget(9))


@pytest.mark.parametrize("name", ["retrieval_attention", "flat", "ivf", "hnsw"])
def test_a_budget_of_tokens_reaches_the_cold_tier(name: str) -> None:
    adaptive = method(name, cold={"top_k": 9, "max_tokens": 40, "min_share": 1e-3, "shared": True})
    assert adaptive.read(0, Q).cold == TokenBudget(9, 40, 1e-3, True)
    assert method("hybrid", top_k=9).read(0, Q).cold == TokenBudget(9, estimate="gaussian")
    assert method(name, cold={"top_k": "all"}).read(0, Q).cold == "all"


def test_hybrid_reads_spare_pages_by_budget_only_where_there_are_any() -> None:
    bare, spare = method("hybrid"), method("hybrid", spare_tokens=160, page_budget=3)
    assert bare.read(0, Q).pages == "all"
    assert spare.read(0, Q).pages == 3
    assert (bare.seal(0, []).digests, spare.seal(0, []).digests) == (False, True)
    assert spare.seal(0, []).spare_tokens == 160
