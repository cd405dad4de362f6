"""What a budget leaves exact.

Each test asks for the result of eager attention or for a refusal that says why. A result that is
silently wrong is the one forbidden outcome.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    DynamicCache,
    PreTrainedModel,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hybrid_kv as hkv
from hybrid_kv.models.cache_state import passing
from tests.contracts.architectures import (
    ARCHITECTURES,
    build,
)
from tests.contracts.edges.calls import CLOSE, TIERED, prompt, steps
from tests.kit import held
from tests.pairs import in_pairs

LEAST = {
    "streaming_llm": {},
    "quest": {"page_budget": 1, "dense_layers": 0},
    "retrieval_attention": {"cold": {"top_k": 1}},
    "hybrid": {"cold": {"top_k": 1}, "page_budget": 1, "spare_tokens": 8},
}


@pytest.mark.parametrize("method", LEAST)
@pytest.mark.parametrize("chunk", [10, "auto"])
def test_a_prompt_is_exact_whatever_the_budget(
    model: PreTrainedModel, method: str, chunk: int | str
) -> None:
    want = model(prompt()).logits
    common = {"sink_tokens": 4, "window_tokens": 4, "page_size": 4, "prefill_chunk_tokens": chunk}
    settings = hkv.HybridConfig(method=method, **common, **LEAST[method])
    with hkv.attach(model, settings) as runtime:
        found = model(prompt(), **passing(runtime.cache())).logits
    torch.testing.assert_close(found, want, **CLOSE)


TOP_K = 5
EXACT = {"kind": "flat", "precision": "stored"}
ColdRuns = list[dict[int, tuple[int, int]]]


def top_k_attention(runs: ColdRuns) -> Callable[..., tuple[Tensor, None]]:
    """Eager attention in which each head sees only its best `TOP_K` of the positions in `runs`.

    runs: for each decoding step the first and last + 1 cold position by layer.
    """
    steps_done: dict[int, int] = {}

    def attention(
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor,
        *,
        scaling: float,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        logits = q @ k.transpose(-1, -2) * scaling
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        logits = logits + mask
        layer = module.layer_idx
        if q.shape[2] == 1:
            step = steps_done[layer] = steps_done.get(layer, -1) + 1
            first, last = runs[step].get(layer, (0, 0))
            if last - first > TOP_K:
                cold = logits[..., first:last]
                worst = cold.topk(TOP_K, -1).values[..., -1:]
                logits[..., first:last] = cold.masked_fill(cold < worst, -torch.inf)
        if s_aux is not None:
            sink = s_aux[None, :, None, None].expand(*logits.shape[:3], 1)
            logits = torch.cat([logits, sink], -1)
        weights = logits.softmax(-1)[..., : k.shape[2]]
        return (weights @ v).transpose(1, 2), None

    return attention


@pytest.mark.parametrize(
    ("name", "method", "way"),
    in_pairs(
        [name for name in ARCHITECTURES if name != "mistral"],
        ["flat", "hybrid"],
        ["one call", "op by op"],
    ),
    indirect=["way"],
)
def test_each_head_attends_its_best_cold_tokens_and_everything_resident(
    name: str, method: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids, first = build(name), prompt(length=38), 29
    runs: ColdRuns = []
    settings = {
        **TIERED,
        "cold": {"top_k": TOP_K, "index": EXACT, "estimate": "none", "look_ahead": "never"},
    }
    if method == "flat":
        del settings["spare_tokens"], settings["page_budget"]
    with hkv.attach(model, hkv.HybridConfig(**{**settings, "method": method})) as runtime:
        cache = runtime.cache()
        found = [model(ids[:, :first], **passing(cache)).logits]
        for layer in cache.kv.layers:
            cache.kv.layers.seal_if_open(layer)
        for token in ids[:, first:].split(1, dim=1):
            cold = {idx: held(cache, idx).cold for idx in cache.kv.layers}
            runs.append({idx: (run[0], run[-1] + 1) for idx, run in cold.items() if run})
            found.append(model(token, **passing(cache)).logits)
    assert all(last - start > TOP_K for run in runs for start, last in run.values())
    assert all(runs)
    assert (cache.kv.ops.served["plan_step"] == "native") == (way == "one call")
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "top_k", top_k_attention(runs))
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "top_k", eager_mask)
    monkeypatch.setattr(model.config, "_attn_implementation", "top_k")
    want = steps(model, ids, DynamicCache(config=model.config), first)
    torch.testing.assert_close(torch.cat(found, dim=1), want, **CLOSE)
