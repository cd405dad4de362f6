"""What learning from a prompt holds on the device, at the sizes of a real one, without values."""

from __future__ import annotations

import pytest
import torch

from benchmarks.prefill_memory.run import LiveBytes
from hybrid_kv.config import HybridConfig
from hybrid_kv.ops.triton import SCRATCH_BYTES
from hybrid_kv.planning.planner import Learning, learning_bytes
from hybrid_kv.rotary import Rotary
from hybrid_kv.runtime.layer_prompt import EvidenceCollector
from hybrid_kv.types import LayerShape, Needs

LLAMA = LayerShape(0, 32, 8, 128)
CHUNK = 4096


@pytest.mark.parametrize("tokens", [2**17, 2**17 - 999, 50_001])
def test_the_queries_of_a_prompt_take_what_is_counted_while_it_runs_and_when_it_ends(
    tokens: int,
) -> None:
    needs = HybridConfig(method="retrieval_attention").build().needs
    assert needs.nearest_keys == 100
    counted = learning_bytes(LLAMA, needs, tokens, 2)
    collector = EvidenceCollector(needs)
    chunk = torch.empty(32, CHUNK, 128, dtype=torch.bfloat16, device="meta")
    with LiveBytes() as live:
        for start in range(0, tokens, CHUNK):
            collector.observe(chunk[:, : tokens - start])
        while_it_runs = live.peak([])
        asked = collector.evidence().samples(8, Rotary(frequencies=(0.1,) * 64))
        assert asked is not None
        queries = asked.ahead(tokens, 4096).queries
        when_it_ends = live.peak([])
    found = 4 * 100 * queries[..., 0].numel()
    before = queries.nbytes + found  # what the layer before has sent may be there still
    assert while_it_runs + before <= counted.collecting
    held = counted.collecting + counted.sealing
    assert when_it_ends + before <= held
    assert 3 * queries.nbytes + found + SCRATCH_BYTES + before <= held
    assert queries.nbytes + found <= counted.kept <= 2**28


def test_who_learns_nothing_holds_nothing() -> None:
    assert learning_bytes(LLAMA, Needs(), 2**17, 2) == Learning()
    some = learning_bytes(LLAMA, Needs(sampled_queries=8), 37, 2)
    assert some.kept == 16 * 32 * 128 * 2, "queries alone"
    assert some.sealing == 6 * some.kept, "and where they are turned ahead"
