"""Heads that evicting methods are tried on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward

import hybrid_kv
from hybrid_kv.eval.needle import make_sample
from tests.drive_method import heads
from tests.methods.eviction import NEW, PROMPT, Heads


@pytest.fixture(scope="session")
def needle_heads() -> list[Heads]:
    """By layer q [Hq, N, D], k, v [Hkv, N, D] of the shipped model, which reads key-value pairs."""
    folder = Path(hybrid_kv.__file__).parent / "assets" / "needle"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found: list[Heads] = []

    def watch(module: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
        found.append((q[0], k[0], v[0]))
        return eager_attention_forward(module, q, k, v, *args, **kwargs)

    ALL_ATTENTION_FUNCTIONS.register("watched", watch)
    model.set_attn_implementation("watched")
    sample = make_sample("key_value", PROMPT + NEW, num_records=6, num_questions=2, seed=5)
    with torch.no_grad():
        model(torch.as_tensor(sample.context)[None, : PROMPT + NEW])
    return found


@pytest.fixture(params=["random", "random_one_head", "needle"])
def given(request: pytest.FixtureRequest) -> Heads:
    """Heads of a prompt and an answer: group 3 and head_dim 72, one KV head, a real model's."""
    if request.param == "needle":
        layers: list[Heads] = request.getfixturevalue("needle_heads")
        return layers[len(layers) // 2]
    groups = {"random": (6, 2), "random_one_head": (3, 1)}[request.param]
    return heads(PROMPT + NEW, num_q_heads=groups[0], num_kv_heads=groups[1], head_dim=72, seed=7)
