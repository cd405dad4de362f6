"""Prompts, configurations and calls that the tests of the edges share."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Cache,
    DynamicCache,
    PretrainedConfig,
    PreTrainedModel,
)

import hybrid_kv as hkv
from hybrid_kv.errors import HybridKVError
from hybrid_kv.models.cache_state import passing
from tests.contracts.architectures import (
    PAD,
    VOCAB,
    scale_weights,
)
from tests.device.placement import placed

PROMPT = 37
NEW = 8
CLOSE = {"rtol": 0, "atol": 5e-4}

TIERED = {  # everything is attended, most of it from the cold tier
    "method": "hybrid",
    "page_size": 4,
    "sink_tokens": 4,
    "window_tokens": 8,
    "spare_tokens": 8,
    "page_budget": "all",
    "cold": {"top_k": "all"},
    "prefill_chunk_tokens": 10,
}
LOSSY = {"method": "streaming_llm", "page_size": 4, "sink_tokens": 4, "window_tokens": 8}


def config(**changes: Any) -> hkv.HybridConfig:
    return hkv.HybridConfig(**{**TIERED, **changes})


def prompt(rows: int = 1, length: int = PROMPT, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return placed(torch.randint(PAD + 1, VOCAB, (rows, length), generator=draw))


def greedy(model: PreTrainedModel, ids: Tensor, cache: Cache | None, **extra: Any) -> Tensor:
    settings = {"max_new_tokens": NEW, "do_sample": False, **extra}
    mask = settings.pop("attention_mask", torch.ones_like(ids))
    return model.generate(input_ids=ids, attention_mask=mask, **passing(cache), **settings)


def expected(model: PreTrainedModel, ids: Tensor, **extra: Any) -> Tensor:
    return greedy(model, ids, DynamicCache(config=model.config), **extra)


@contextmanager
def refusal_allowed(words: str) -> Iterator[None]:
    """Swallows an error of ours that speaks of `words`; the block asserts what else must hold."""
    try:
        yield
    except HybridKVError as error:
        if not re.search(words, str(error)):
            raise


def fresh(model_config: PretrainedConfig, attention: str | None = "eager") -> PreTrainedModel:
    """A model that no other test shares, where the test computes."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            model_config, dtype=torch.float32, attn_implementation=attention
        )
        scale_weights(model)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = PAD
    return placed(model.eval())


def padded() -> tuple[Tensor, Tensor]:
    ids = prompt(rows=3)
    mask = torch.ones_like(ids)
    mask[1, :14] = 0
    mask[2, :33] = 0
    return ids.masked_fill(mask == 0, PAD), mask


def steps(model: PreTrainedModel, ids: Tensor, cache: Cache, first: int = 29) -> Tensor:
    """Logits [B, T, vocab] of `ids`: the first ones at once, the others one by one."""
    parts = [ids[:, :first], *ids[:, first:].split(1, dim=1)]
    return torch.cat([model(part, **passing(cache)).logits for part in parts], dim=1)


def anatomy(model: PreTrainedModel) -> dict[str, object]:
    """Everything on a model that attaching might change."""
    found: dict[str, object] = {
        f"{name} config": part.config._attn_implementation
        for name, part in model.named_modules()
        if isinstance(part, PreTrainedModel)
    }
    for name, part in model.named_modules():
        found[name] = (
            type(part),
            part.training,
            sorted(part.__dict__),
            part.__dict__.get("forward"),
            tuple(part._forward_hooks.values()),
            tuple(part._forward_pre_hooks.values()),
        )
    return found
