"""The claim of layer-major prefill: little memory beside weights and KV."""

from __future__ import annotations

import gc

import pytest
import torch
from transformers import PreTrainedModel

from benchmarks.prefill_memory.run import LiveBytes, build, layer_major_peak, plain_peak

TOKENS, HIDDEN = 2048, 128
UNIT = TOKENS * HIDDEN * 2  # one hidden-state tensor in bfloat16


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build(layers=4, hidden=HIDDEN)


def test_layer_major_prefill_holds_at_most_four_hidden_states(model: PreTrainedModel) -> None:
    ids = torch.randint(0, 512, (1, TOKENS))
    extra = layer_major_peak(model, ids, chunk=TOKENS // 8) / UNIT
    assert extra <= 4, f"peak is {extra:.2f} hidden-state tensors beside weights and KV"


def test_a_plain_pass_holds_more_than_ten(model: PreTrainedModel) -> None:
    """Else the test above would measure nothing."""
    ids = torch.randint(0, 512, (1, TOKENS))
    assert plain_peak(model, ids) / UNIT > 10


def test_live_bytes_are_counted_until_the_last_reference_goes() -> None:
    weights = torch.zeros(1000)
    gc.collect()
    with LiveBytes() as live:
        kept = torch.zeros(100)  # 400 bytes
        view = weights[:500] + 1  # 2000
        del view
        other = torch.ones(200).view(2, 100)[0]  # 800, alive by its view
        kept += 1
    assert live.peak([]) == 400 + 2000
    assert live.peak([kept]) == 2000
    assert live.peak([weights, other]) == 400 + 2000
