"""The claim of layer-major prefill: little memory beside weights and KV."""

from __future__ import annotations

import gc

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from benchmarks.prefill_memory.run import LiveBytes, build, layer_major_peak, plain_peak
from hybrid_kv.models import widening
from hybrid_kv.planning.plan import ModelFacts
from hybrid_kv.planning.prefill_bytes import prefill_peak_bytes
from hybrid_kv.types import LayerShape

TOKENS, HIDDEN = 2048, 128
UNIT = TOKENS * HIDDEN * 2  # one hidden-state tensor in bfloat16


@pytest.fixture(autouse=True)
def _as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPUs where a trial finds that pays, layers are widened, which is counted apart."""
    monkeypatch.setattr(widening, "trial", lambda _: widening.WideningTrial(1.0, 1.0))


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


@pytest.mark.parametrize(
    ("hidden", "intermediate", "q_heads", "kv_heads", "head_dim"),
    [(256, 896, 8, 2, 32), (256, 2000, 8, 2, 32), (256, 300, 8, 2, 32), (256, 896, 16, 4, 64)],
)
@pytest.mark.parametrize(("tokens", "chunk"), [(2048, 256), (4096, 256), (2048, 700)])
def test_the_planner_bounds_the_measured_peak_closely(
    hidden: int,
    intermediate: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    tokens: int,
    chunk: int,
) -> None:
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=2,
        num_attention_heads=q_heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=2**20,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    layers = tuple(LayerShape(idx, q_heads, kv_heads, head_dim) for idx in range(2))
    facts = ModelFacts("llama", 0, 0, layers, 0, hidden, intermediate)
    measured = layer_major_peak(model, torch.randint(0, 512, (1, tokens)), chunk)
    predicted = prefill_peak_bytes(facts, tokens, chunk)
    assert measured <= predicted <= 1.15 * measured


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
