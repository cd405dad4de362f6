"""The claim of layer-major prefill: little memory beside weights and KV."""

from __future__ import annotations

import gc

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    PreTrainedModel,
    Qwen3_5TextConfig,
)

from benchmarks.prefill_memory.run import LiveBytes, build, layer_major_peak, plain_peak
from hybrid_kv.models import prompt_layers
from hybrid_kv.models.cache_state import passing
from hybrid_kv.ops import Ops
from hybrid_kv.planning.plan import ModelFacts, other_layers
from hybrid_kv.planning.traffic import PrefillBytes, prefill_peak_bytes
from hybrid_kv.runtime.sparse_prefill import SampledQueries, SparsePrefill, query_block
from hybrid_kv.types import LayerShape

TOKENS, HIDDEN = 2048, 128
UNIT = TOKENS * HIDDEN * 2  # one hidden-state tensor in bfloat16


@pytest.fixture(autouse=True)
def _as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPUs where a trial finds that pays, layers are widened, which is counted apart."""
    monkeypatch.setattr(prompt_layers, "trial", lambda *_: prompt_layers.WideningTrial(1.0, 1.0))


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


USUAL, WIDE = (256, 896, 8, 2, 32), (256, 2000, 8, 2, 32)
NARROW, MANY_HEADS = (256, 300, 8, 2, 32), (256, 896, 16, 4, 64)


@pytest.mark.parametrize(
    ("hidden", "intermediate", "q_heads", "kv_heads", "head_dim", "tokens", "chunk"),
    [
        *((*shape, 2048, 256) for shape in (USUAL, WIDE, NARROW, MANY_HEADS)),
        *((*shape, 2048, 700) for shape in (USUAL, WIDE, NARROW, MANY_HEADS)),
        *((*shape, 4096, 256) for shape in (NARROW, MANY_HEADS)),
    ],
)
def test_the_planner_bounds_the_measured_peak_closely(
    hidden: int,
    intermediate: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    tokens: int,
    chunk: int,
    monkeypatch: pytest.MonkeyPatch,
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
    ids, predicted = torch.randint(0, 512, (1, tokens)), prefill_peak_bytes(facts, tokens, chunk)
    # Torch's kernels, as on a GPU, leave two parts to be merged; the engine's tiles leave one.
    with monkeypatch.context() as patch:
        patch.setattr("hybrid_kv.ops.dispatch._FEW_PRODUCTS", 0)
        patch.setattr("hybrid_kv.ops.native.prompt.tiles_serve", lambda *_: False)
        measured = layer_major_peak(model, ids, chunk)
    assert measured <= predicted <= 1.15 * measured
    if (tokens, chunk) == (2048, 256):
        assert layer_major_peak(model, ids, chunk) <= measured


@pytest.mark.parametrize(
    ("hidden", "heads", "key_dim", "value_dim"),
    [(5120, 48, 128, 128), (1024, 16, 128, 128), (256, 8, 32, 64), (256, 4, 64, 32)],
)
def test_linear_attention_of_a_chunk_is_bounded_closely(
    hidden: int, heads: int, key_dim: int, value_dim: int
) -> None:
    config = Qwen3_5TextConfig(
        vocab_size=512,
        hidden_size=hidden,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        linear_num_key_heads=heads // 2,
        linear_num_value_heads=heads,
        linear_key_head_dim=key_dim,
        linear_value_head_dim=value_dim,
        layer_types=["linear_attention", "full_attention"],
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        states = torch.empty(1, 1000, hidden, dtype=torch.bfloat16)
    cache = DynamicCache(config=config)
    with torch.inference_mode(), LiveBytes() as live:
        model.model.layers[0](
            states, attention_mask=None, position_embeddings=None, **passing(cache)
        )
    others = other_layers(model, 1)
    facts = ModelFacts("qwen", 0, 0, (), 0, hidden, 96, linear_width=others.linear_width)
    predicted = PrefillBytes.of(facts, 1000, 1000).working
    assert live.peak([]) <= predicted <= 1.3 * live.peak([])


@pytest.mark.parametrize(("q_heads", "kv_heads"), [(8, 2), (8, 8)])
@pytest.mark.parametrize(("tokens", "chunk"), [(16384, 2048), (30000, 1000)])
def test_what_sparse_prefill_chooses_by_is_bounded(
    q_heads: int, kv_heads: int, tokens: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the definitions, which a GPU takes."""
    for module in ("planning.traffic", "ops.reference"):
        monkeypatch.setattr(f"hybrid_kv.{module}.SCORE_BYTES", 2**20)
    facts = ModelFacts("llama", 0, 0, (LayerShape(0, q_heads, kv_heads, 32),), 0, 96, 96)
    exact, sparse = (
        PrefillBytes.of(facts, tokens, chunk, sparse=sparse).working for sparse in (False, True)
    )
    q, k, v = (torch.randn(h, n, 32) for h, n in ((q_heads, chunk), *[(kv_heads, tokens)] * 2))
    ops = Ops("reference")
    with LiveBytes() as live:
        sampled = SampledQueries(
            ops, q, k, v, query_block(q_heads // kv_heads), scale=0.3, softcap=None
        )
        SparsePrefill(0.1, kv_heads, q.device).listed(sampled)
    assert live.peak([]) <= sparse - exact <= 3 * live.peak([])


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
