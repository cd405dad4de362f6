"""Searching layers ahead changes nothing where nothing is lost, in every way of generating."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hybrid_kv as hkv
from hybrid_kv.models.cache_state import passing
from tests.contracts.architectures import PAD, VOCAB, build, build_on_host
from tests.device.placement import placed

SIZES: dict[str, Any] = {"page_size": 4, "sink_tokens": 4, "window_tokens": 8}
CALLS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "padded": {"rows": (61, 40, 5)},
    "lookup": {"prompt_lookup_num_tokens": 3},
    "turns": {"later": (5, 36)},
}


def config(method: str, **cold: Any) -> hkv.HybridConfig:
    index = {"kind": "flat", "precision": "stored"}
    cold = {"index": index, **cold}
    return hkv.HybridConfig(method=method, **SIZES, index_build="wait", cold=cold)


def answers(model: Any, how: hkv.HybridConfig, call: dict[str, Any]) -> tuple[Tensor, list[Any]]:
    """Tokens of the last turn, and what came of looking ahead."""
    options = dict(call)
    lengths, later = options.pop("rows", (61,)), options.pop("later", ())
    draw = torch.Generator().manual_seed(3)
    ids = torch.full((len(lengths), max(lengths)), PAD)
    for row, length in enumerate(lengths):
        ids[row, -length:] = torch.randint(3, VOCAB, (length,), generator=draw)
    with hkv.attach(model, how) as runtime:
        cache = runtime.cache()
        for more in (0, *later):
            ids = torch.cat([ids, torch.randint(3, VOCAB, (len(ids), more), generator=draw)], 1)
            mask = (ids != PAD).long()
            ids = model.generate(
                placed(ids),
                attention_mask=placed(mask),
                **passing(cache),
                max_new_tokens=6,
                do_sample=False,
                **options,
            ).cpu()
            ids = ids.masked_fill((ids == PAD) & (torch.arange(ids.shape[1]) >= 61), 3)
        cache.kv.check_integrity()
        return ids, cache.kv.layers.describe_look_ahead()


@pytest.mark.parametrize("name", ["llama", "phi3", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("call", CALLS)
def test_a_search_that_names_everything_changes_no_token(name: str, call: str) -> None:
    model = build(name)
    wide = config("retrieval_attention", top_k=4, look_ahead="always", look_ahead_factor=99)
    plain = config("retrieval_attention", top_k=4, look_ahead="never")
    got, rows = answers(model, wide, CALLS[call])
    want, none = answers(model, plain, CALLS[call])
    assert got.tolist() == want.tolist()
    assert none == []
    assert sum(row["searches"] for row in rows) > 0


@pytest.mark.parametrize("call", CALLS)
def test_with_the_budget_opened_it_is_full_attention(call: str) -> None:
    model = build("llama")
    opened = config("hybrid", look_ahead="always").opened()
    full = hkv.HybridConfig(method="full", page_size=4)
    assert answers(model, opened, CALLS[call])[0].tolist() == (
        answers(model, full, CALLS[call])[0].tolist()
    )


@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3"])
def test_where_layers_add_nothing_the_prediction_is_the_query(name: str) -> None:
    """What enters a layer is then what enters the next: the narrowest search misses nothing."""
    model = deepcopy(build_on_host(name))
    for path, weight in model.named_parameters():
        if "o_proj" in path or "down_proj" in path:
            nn.init.zeros_(weight)
    model = placed(model)
    how = config("retrieval_attention", top_k=4, look_ahead="always", look_ahead_factor=1)
    prompt = torch.randint(3, VOCAB, (91,)).tolist()
    quiet = {"max_output_error": None, "max_missed_mass": None, "action": "widen"}
    with hkv.load(model, config=how.replace(audit_every=1, audit=quiet)) as llm:
        got = llm.generate(prompt, max_new_tokens=24)
    assert got.audit is not None
    looks = {finding.target.layer_idx: finding.recall for finding in got.audit.findings}
    assert len(looks) == len(model.model.layers)
    assert all(finding.recall == 1.0 for finding in got.audit.findings)
    assert got.look_ahead[1]["searches"] > 20


def test_a_forward_that_fails_leaves_no_search_behind() -> None:
    model = placed(deepcopy(build_on_host("llama")))
    how = config("retrieval_attention", top_k=4, look_ahead="always")
    with hkv.attach(model, how) as runtime, torch.inference_mode():
        cache = runtime.cache()
        model(placed(torch.randint(3, VOCAB, (1, 61))), **passing(cache))
        model(placed(torch.tensor([[7]])), **passing(cache))
        ahead = cache.kv.means.look_ahead
        assert ahead is not None
        held = model.model.layers[0].mlp
        model.model.layers[0].mlp = nn.Identity()
        model.model.layers[0].mlp.forward = lambda x: 1 / 0
        with pytest.raises(ZeroDivisionError):
            model(placed(torch.tensor([[8]])), **passing(cache))
        model.model.layers[0].mlp = held
        assert ahead.under_way == {}
