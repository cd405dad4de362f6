"""The query of a layer, from what enters it: found by trying, in models of every build."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel

import hybrid_kv as hkv
from hybrid_kv.models import early_queries
from hybrid_kv.models.early_queries import EarlyQueries
from hybrid_kv.models.support import entering, find_rotary, inspect_model, run_one_token
from hybrid_kv.types import ModelInfo
from tests.contracts.architectures import VOCAB, build
from tests.contracts.edges.further_models import further_config
from tests.tolerances import TOLERANCES

FIRST = "no layer comes before it"
TOKENS = 37
BUILT = ["llama", "qwen3", "phi3", "gemma2", "glm4", "olmo2"]
FURTHER = ["gpt_neox", "qwen3_next", "stablelm", "opt", "cohere", "persimmon", "lfm2"]


def made(name: str) -> PreTrainedModel:
    """A model in which no two norms are alike, so that none can be taken for another."""
    if name in BUILT:
        model = deepcopy(build(name))
    else:
        model = AutoModelForCausalLM.from_config(further_config(name)).eval()
    with torch.no_grad():
        for path, weight in model.named_parameters():
            if "norm" in path:
                nn.init.uniform_(weight, 0.3, 3.0)
    return model  # type: ignore[no-any-return]


def why(model: PreTrainedModel, info: ModelInfo) -> Mapping[int, str]:
    """By layer why its query cannot be computed early."""
    early = EarlyQueries(model, info)
    early.close()
    return early.unforeseen


def known(model: PreTrainedModel) -> ModelInfo:
    info = inspect_model(model)
    return replace(info, rotary=find_rotary(model, info))


@contextmanager
def watched(model: PreTrainedModel) -> Iterator[tuple[dict[int, Tensor], dict[nn.Module, Tensor]]]:
    """Queries [B, Hq, T, D] by layer, and what entered each module of a list."""
    queries: dict[int, Tensor] = {}
    entered: dict[nn.Module, Tensor] = {}

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any, **kw: Any) -> Any:
        queries[module.layer_idx] = q
        return q.transpose(1, 2).contiguous(), None

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        if (hidden := entering(args, kwargs)) is not None:
            entered[module] = hidden

    AttentionInterface.register("watched", attend)
    config = model.config.get_text_config(decoder=True)
    before, config._attn_implementation = config._attn_implementation, "watched"
    stacks = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    hooks = [m.register_forward_pre_hook(note, with_kwargs=True) for s in stacks for m in s]
    try:
        yield queries, entered
    finally:
        config._attn_implementation = before
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("name", [*BUILT, *FURTHER])
def test_what_was_found_gives_the_model_s_own_query_at_every_position(name: str) -> None:
    model = made(name)
    info, seen = known(model), run_one_token(model)
    last = info.layers[-1]
    _, layer = early_queries._neighbours(seen, last.layer_idx)
    rotary = info.rotary_of(last.layer_idx)
    assert layer is not None
    query = early_queries._find(layer, seen, last, rotary)
    assert query is not None
    with watched(model) as (queries, entered), torch.inference_mode():
        model(torch.randint(3, VOCAB, (1, TOKENS)), use_cache=False)
        early = query(entered[layer])[0].transpose(0, 1).float()  # [Hq, T, D]
    got = rotary.turn(early, torch.arange(TOKENS))
    want = queries[last.layer_idx][0].float()
    factor = (got * want).sum() / got.square().sum()
    torch.testing.assert_close(got * factor, want, **TOLERANCES[torch.float32])


@pytest.mark.parametrize("name", ["llama", "gemma3", "opt"])
def test_all_but_the_first_layer_are_told(name: str) -> None:
    model = build(name) if name != "opt" else made(name)
    info = known(model)
    unforeseen = why(model, info)
    tiered = [shape.layer_idx for shape in info.layers]
    assert unforeseen == {idx: FIRST if idx == 0 else "" for idx in tiered}


class Wrapped(nn.Module):
    """Calls a module, whose kind nobody sees any more."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + x.mean()


def test_a_projection_is_found_whatever_module_it_is() -> None:
    """Libraries that pack weights hold them under names of their own."""
    model = deepcopy(build("llama"))
    for layer in model.model.layers:
        layer.self_attn.q_proj = Wrapped(layer.self_attn.q_proj)
    assert why(model, known(model)) == {0: FIRST, 1: "", 2: ""}


def test_a_model_whose_query_cannot_be_found_says_so_and_serves() -> None:
    model = deepcopy(build("llama"))
    for layer in model.model.layers:
        layer.input_layernorm = Wrapped(layer.input_layernorm)
    config = {"method": "flat", "window_tokens": 16, "sink_tokens": 16}
    cold = {"top_k": 2, "look_ahead": "always"}
    with hkv.load(model, config=hkv.HybridConfig(**config, cold=cold)) as llm:
        got = llm.generate(list(range(3, 80)), max_new_tokens=4)
        states = [(one["state"], one["searches"]) for one in got.look_ahead]
        assert states == [("off", 0)] * 3
        assert got.look_ahead[0]["reason"] == FIRST
        assert "does not follow from the hidden state" in got.look_ahead[1]["reason"]
    never = hkv.HybridConfig(**config, cold={"top_k": 2})
    with hkv.load(model, config=never) as llm:
        assert got.token_ids == llm.generate(list(range(3, 80)), max_new_tokens=4).token_ids


def test_rotations_by_length_are_the_reason_where_they_are() -> None:
    model = build("qwen2")
    info = inspect_model(model)
    rotary = replace(find_rotary(model, info)[0], frequencies=(), reason="depends on the length")
    info = replace(info, rotary=(rotary,) * len(info.layers))
    assert why(model, info)[1] == "depends on the length"


def test_detaching_takes_the_hooks_off() -> None:
    model = build("llama")
    config = hkv.HybridConfig(method="flat", cold={"look_ahead": "always"})
    with hkv.attach(model, config) as runtime:
        assert runtime.info.unforeseen == {0: FIRST, 1: "", 2: ""}
        layers = model.model.layers
        assert sum(len(m._forward_pre_hooks) for m in layers.modules()) == 2
    assert sum(len(m._forward_pre_hooks) for m in model.modules()) == 0


def test_nobody_asks_the_model_where_nothing_would_run_beside_it() -> None:
    with hkv.attach(build("llama"), hkv.HybridConfig(method="flat")) as runtime:
        assert runtime.info.unforeseen is None
        rows = runtime.cache().kv.layers.describe_look_ahead()
        assert {row["state"] for row in rows} == {"off"}
        assert all("the model computes where the search runs" in row["reason"] for row in rows)
