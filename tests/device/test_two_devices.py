"""Models whose layers lie on two emulated devices, as accelerate places them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from accelerate import dispatch_model
from transformers import LlamaForCausalLM

import hybrid_kv as hkv
from hybrid_kv.errors import ConfigError
from tests.device import emulated
from tests.device.machine import Schedule
from tests.device.models import llama, logits_of, small, tokens

ROUNDING = 2e-4
TURNS = [tokens(203), *(tokens(1, 2 + number) for number in range(6)), tokens(37, 9), tokens(1, 8)]

pytestmark = [
    pytest.mark.filterwarnings("ignore::hybrid_kv.errors.BackendWarning"),
    pytest.mark.filterwarnings("ignore::hybrid_kv.errors.DeviceSelectWarning"),
]


def split(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """The first layer on cuda:0, all behind it on cuda:1."""
    places: dict[str, int | str | torch.device] = {
        "model.embed_tokens": 0,
        "model.rotary_emb": 0,
        "model.layers.0": 0,
        "model.layers.1": 1,
        "model.norm": 1,
        "lm_head": 1,
    }
    made: LlamaForCausalLM = dispatch_model(model, places)
    return made


def config_of(name: str) -> hkv.HybridConfig:
    method, _, select = name.partition(":")
    config = small(method)
    return config.replace(select=select) if select else config


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        *((name, "late") for name in ("full", "quest", "streaming_llm", "snapkv")),
        *((f"hybrid:{select}", one) for select in ("host", "device") for one in ("late", 3)),
    ],
)
def test_a_split_model_gives_what_it_gives_on_the_host(name: str, schedule: Schedule) -> None:
    config = config_of(name)
    with emulated(num_devices=2, schedule=schedule, kernels="defined") as machine:
        model = split(llama())
        assert {one.device for one in model.parameters()} == {
            torch.device("cuda", 0),
            torch.device("cuda", 1),
        }
        found = logits_of(model, config, TURNS)
    for one, other in zip(found, logits_of(llama(), config, TURNS), strict=True):
        torch.testing.assert_close(one, other, atol=ROUNDING, rtol=0)
    if name == "hybrid:device":
        assert machine.counts.replays > 2


def answers(context: hkv.Context) -> list[list[int]]:
    questions = [tokens(3, 5)[0].tolist(), tokens(41, 6)[0].tolist()]
    return [context.ask(question, max_new_tokens=3).token_ids for question in questions]


@pytest.mark.parametrize("select", ["device", "host"])
def test_a_context_of_a_split_model_opens_where_the_model_is_whole(
    select: str, tmp_path: Path
) -> None:
    config = small("hybrid").replace(select=select)
    path, prompt = tmp_path / "a.hkv", tokens(301)[0].tolist()
    with emulated(num_devices=2, schedule="late", kernels="defined"):
        with hkv.load(split(llama()), config=config) as llm:
            context = llm.context(prompt)
            context.append(tokens(70, 9)[0].tolist())
            expected = answers(context)
            context.save(path)
            with pytest.raises(ConfigError, match="for a model on one device, got weights on 2"):
                llm.open(path)
        with hkv.load(llama().to("cuda"), config=config) as llm:  # type: ignore[arg-type]
            assert answers(llm.open(path)) == expected
    with hkv.load(llama(), config=config.replace(select="auto")) as llm:
        assert answers(llm.open(path)) == expected
