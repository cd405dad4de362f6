"""A small model on the host and on an emulated device, asked the same."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import hybrid_kv as hkv
from hybrid_kv.errors import ConfigError
from hybrid_kv.models.cache_state import passing
from hybrid_kv.plugins import METHODS
from tests.device.cuda import values

VOCAB = 128


def llama(seed: int = 0, layers: int = 2) -> LlamaForCausalLM:
    """Some layers, four query heads over two KV heads of 16 channels; weights that matter."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
        )
    ).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(3.0)
    return model


def tokens(count: int, seed: int = 1) -> Tensor:
    """[1, count] token ids."""
    return torch.randint(0, VOCAB, (1, count), generator=torch.Generator().manual_seed(seed))


def small(
    method: str, context: int = 300, budget: str = "80", page_size: int = 16
) -> hkv.HybridConfig:
    """A method with small sinks and window at a small budget, where it takes one."""
    sizes = {"sink_tokens": 16, "window_tokens": 32}
    own: dict[str, object] = {
        k: v for k, v in sizes.items() if k in METHODS[method].params.model_fields
    }
    if method == "locret":
        own["heads"] = "drawn"  # see the fixture untrained_heads
    config = hkv.HybridConfig.from_settings(
        {"method": method, "index_build": "wait", "page_size": page_size, **own}
    )
    try:
        return config.at_budget(budget, context)
    except ConfigError:
        return config


def logits_of(
    model: LlamaForCausalLM, config: hkv.HybridConfig, turns: Sequence[Tensor]
) -> list[Tensor]:
    """The last logits behind each of some turns [1, T] on one cache, on the host."""
    found = []
    with torch.inference_mode(), hkv.attach(model, config) as runtime:
        cache = runtime.cache()
        for ids in turns:
            out = model(ids.to(model.device), **passing(cache), use_cache=True)
            found.append(values(out.logits[:, -1]))
        cache.check_integrity()
    return found
