"""Contexts that were never computed."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from transformers import AutoModelForCausalLM

import hybrid_kv as hkv
from hybrid_kv.errors import ConfigError
from hybrid_kv.eval.filling import FilledKV, SyntheticContext, filled_cache
from hybrid_kv.models.cache_state import passing
from hybrid_kv.models.load import load_model
from hybrid_kv.runtime import KVCache
from hybrid_kv.transfer.cuda import CudaExecutor
from hybrid_kv.types import LayerShape, ModelInfo, Needs
from tests.contracts.edges.further_models import further_config
from tests.device import emulated
from tests.kit import held, kept_alive
from tests.tolerances import TOLERANCES

INFO = ModelInfo((LayerShape(0, 6, 2, 16), LayerShape(1, 6, 2, 16)))
TOKENS = 1500


@pytest.fixture(scope="module")
def context() -> SyntheticContext:
    return SyntheticContext(INFO, TOKENS, max_steps=9)


def test_sizes(context: SyntheticContext) -> None:
    k, v = context.kv(1, torch.bfloat16)
    assert k.shape == v.shape == (1, 2, TOKENS, 16)
    assert k.dtype == v.dtype == torch.bfloat16
    assert context.query(1, 8).shape == (1, 6, 1, 16)


def test_heads_are_copies_that_no_score_tells_apart(context: SyntheticContext) -> None:
    k, v = context.kv(0, torch.float32)
    other_k, other_v = context.kv(1, torch.float32)
    # Layer 0's head 0 and layer 1's head 1 have one source.
    assert not torch.equal(k[0, 0], other_k[0, 1])
    scores = context.query(0, 3)[0, :3, 0] @ k[0, 0].T
    others = context.query(1, 3)[0, 3:, 0] @ other_k[0, 1].T
    torch.testing.assert_close(scores, others)
    torch.testing.assert_close(v[0, 0] @ v[0, 0, 0], other_v[0, 1] @ other_v[0, 1, 0])
    assert not torch.allclose(context.query(0, 3)[0, 3:, 0] @ k[0, 1].T, scores)


def test_evidence_is_what_the_index_asks_for(context: SyntheticContext) -> None:
    needs = Needs(sampled_queries=100, last_queries=37)
    evidence = context.evidence(0, needs, torch.float32)
    assert evidence.num_tokens == TOKENS
    assert evidence.sampled_queries is not None
    assert evidence.last_queries is not None
    assert evidence.sampled_queries.shape == (6, 100, 16)
    assert evidence.last_queries.shape == (6, 37, 16)
    everything = context.evidence(0, Needs(last_queries=10**6), torch.float32)
    assert everything.last_queries is not None
    assert everything.sampled_queries is None
    torch.testing.assert_close(everything.last_queries[:, -37:], evidence.last_queries)


def test_equal_seeds_give_equal_contexts(context: SyntheticContext) -> None:
    again, other = (SyntheticContext(INFO, TOKENS, max_steps=9, seed=seed) for seed in (0, 5))
    assert torch.equal(again.kv(1, torch.float32)[0], context.kv(1, torch.float32)[0])
    assert torch.equal(again.query(1, 2), context.query(1, 2))
    assert not torch.equal(other.query(1, 2), context.query(1, 2))


@pytest.mark.parametrize("method", ["full", "flat", "hybrid"])
def test_a_step_asks_with_the_texts_query(context: SyntheticContext, method: str) -> None:
    model = load_model("random:tiny", device="cpu", dtype="float32")
    settings = {} if method == "full" else {"window_tokens": 32, "cold": {"top_k": "all"}}
    with hkv.attach(model, hkv.HybridConfig(method=method, **settings)) as runtime:
        cache = filled_cache(runtime, context)
        new = torch.ones(1, 2, 1, 16)
        got = cache.kv.attend(1, torch.zeros(1, 6, 1, 16), (new, new), None, scale=0.25)
        held(cache, layer=1).check_integrity()  # the other layers take no step
    k, v = context.kv(1, torch.float32)
    k, v = (torch.cat([part, new], 2).repeat_interleave(3, 1) for part in (k, v))
    weights = (0.25 * context.query(1, 0) @ k.transpose(2, 3)).softmax(-1)
    torch.testing.assert_close(got.out, weights @ v, **TOLERANCES[torch.float32])


def test_generation_continues_a_filled_context(context: SyntheticContext) -> None:
    model = load_model("random:tiny", device="cpu", dtype="float32")
    with hkv.attach(model, hkv.HybridConfig(window_tokens=64, cold={"top_k": 50})) as runtime:
        cache = filled_cache(runtime, context)
        ids = torch.randint(2, 500, (1, TOKENS + 1))
        written = model.generate(ids, **passing(cache), max_new_tokens=9, do_sample=False)
        assert written.shape[1] == TOKENS + 10
        assert cache.work.steps == 9 * 2 * 6
        assert cache.work.retrieved == 50 * 9 * 2 * 6
        too_many = pytest.raises(
            ConfigError, match="up to 9 tokens, one at a time, got 1 rows of 1"
        )
        with too_many, torch.inference_mode():
            model(written[:, -1:], **passing(cache))


def test_layers_with_a_state_of_fixed_size_begin_without_one() -> None:
    kinds = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
    config = further_config("qwen3_5_text", num_hidden_layers=4, layer_types=kinds)
    model = AutoModelForCausalLM.from_config(config).eval()
    with hkv.attach(model, hkv.HybridConfig(window_tokens=64, cold={"top_k": 50})) as runtime:
        assert [shape.layer_idx for shape in runtime.info.layers] == [1, 3]
        cache = filled_cache(runtime, SyntheticContext(runtime.info, 300, max_steps=4))
        ids = torch.randint(2, 100, (1, 301))
        model.generate(ids, **passing(cache), max_new_tokens=4, do_sample=False)
        assert cache.get_seq_length() == 304
        assert cache.layers[0].has_previous_state == {0: True}


def test_layers_with_a_window_are_refused() -> None:
    model = AutoModelForCausalLM.from_config(further_config("gemma4_text"))
    with hkv.attach(model, hkv.HybridConfig(window_tokens=64)) as runtime:
        context = SyntheticContext(runtime.info, 100)
        with pytest.raises(ConfigError, match="layer 0 is a SlidingLayer and cannot be filled"):
            filled_cache(runtime, context)


def test_a_dropped_cache_is_gone_at_once(context: SyntheticContext) -> None:
    """It holds gigabytes; a cycle would keep them until Python's collector runs."""
    model = load_model("random:tiny", device="cpu", dtype="float32")
    with hkv.attach(model, hkv.HybridConfig(window_tokens=64, cold={"top_k": 50})) as runtime:
        gc.collect()
        gc.disable()
        try:
            cache = filled_cache(runtime, context)
            kept = weakref.ref(cache.kv), kept_alive(cache)["layer 1"]
            del cache
            assert [one() for one in kept] == [None, None]
        finally:
            gc.enable()


def test_it_copies_as_other_caches_of_the_device_do(context: SyntheticContext) -> None:
    """A GPU was filled with copies that wait, so that its figures were not those of its steps."""
    with emulated(kernels="defined"):
        model = load_model("random:tiny", device="cpu", dtype="float32").to("cuda")
        with hkv.attach(model, hkv.HybridConfig(window_tokens=64, cold={"top_k": 50})) as runtime:
            filled = filled_cache(runtime, context).kv.executor
            assert type(filled) is type(runtime.cache().kv.executor) is CudaExecutor


def test_what_cannot_be_filled_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_tokens must be at least 1, got 0"):
        SyntheticContext(INFO, 0)
    mixed = ModelInfo((LayerShape(0, 6, 2, 16), LayerShape(1, 6, 2, 32)))
    with pytest.raises(ConfigError, match="agree in head_dim and group size"):
        SyntheticContext(mixed, 100)


def test_copies_share_the_best_keys_of_the_prompts_queries() -> None:
    info = ModelInfo((LayerShape(0, 6, 2, 16), LayerShape(1, 6, 2, 16)))
    context = SyntheticContext(info, TOKENS, max_steps=2)
    needs = Needs(sampled_queries=37, nearest_keys=9)
    for layer_idx in (0, 1):
        k = context.kv(layer_idx, torch.float32)[0][0, :, 16:1300]
        samples = context.evidence(layer_idx, needs, torch.float32).sampled_queries
        assert samples is not None
        samples = samples.unflatten(0, (2, 3))
        found = context.nearest(layer_idx, 16, samples, k, 9)
        assert found.shape == (2, 3, 37, 9)
        exact = torch.einsum("hgmd,hnd->hgmn", samples, k).topk(9).values
        scores = torch.einsum("hgmd,hgmkd->hgmk", samples, _rows(k, found))
        assert float((scores >= exact[..., -1:] - 1e-4).float().mean()) > 0.995
    assert len(context._nearest) == 2  # one for each head that was made


def _rows(k: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return torch.stack([k[head][ids[head].long()] for head in range(len(k))])


def test_graphs_of_filled_caches_are_those_that_find_their_own_lists(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = load_model("random:tiny", device="cpu", dtype="float32")
    index = {"kind": "graph", "min_keys": 300, "sampled_queries": 400, "recent_queries": 100}
    index["max_scanned"] = 1
    config = hkv.HybridConfig(
        method="retrieval_attention", window_tokens=64, sink_tokens=16, cold={"index": index}
    )
    reports = []
    with hkv.attach(model, config) as runtime:
        for shared in (True, False):
            if not shared:
                monkeypatch.setattr(FilledKV, "_new_layer", KVCache._new_layer)
            cache = filled_cache(runtime, SyntheticContext(INFO, TOKENS, max_steps=2))
            heads = cache.kv.layers.describe_indexes()
            reports.append([(h["serves"], h["beam"]) for h in heads])
    assert reports[0] == reports[1]
    assert {serves for serves, _ in reports[0]} == {"graph"}
