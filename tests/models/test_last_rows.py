"""The last decoder layer takes the rows of a prompt that are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP

import hybrid_kv as hkv
from hybrid_kv.models.cache_state import passing
from hybrid_kv.models.layer_major import decoder_stacks
from hybrid_kv.ops import Ops
from tests.contracts.architectures import ARCHITECTURES, PAD, VOCAB, build

PROMPT = 70
CLOSE = {"rtol": 0.0, "atol": 5e-4}


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows that each call of a Llama's feed-forward took."""
    seen: list[int] = []
    own = LlamaMLP.forward

    def forward(self: LlamaMLP, x: Tensor) -> Tensor:
        seen.append(x.shape[1])
        return own(self, x)  # type: ignore[no-any-return]

    monkeypatch.setattr(LlamaMLP, "forward", forward)
    return seen


def ids(rows: int = 1) -> Tensor:
    return torch.randint(PAD + 1, VOCAB, (rows, PROMPT))


def asked(model: PreTrainedModel, prompt: Tensor, chunk: int = 30, **more: Any) -> Any:
    config = hkv.HybridConfig(prefill_chunk_tokens=chunk, method="full")
    with hkv.attach(model, config) as runtime:
        return model(prompt, **passing(runtime.cache()), **more)


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize(("keep", "chunk"), [(1, 30), (12, 30), (1, 100)])
def test_logits_that_are_kept_are_those_of_a_whole_pass(name: str, keep: int, chunk: int) -> None:
    model, prompt = build(name), ids(2)
    prompt[1, :9] = PAD
    mask = (prompt != PAD).long()
    whole = model(prompt, attention_mask=mask, use_cache=False).logits
    found = asked(model, prompt, chunk, attention_mask=mask, logits_to_keep=keep).logits
    torch.testing.assert_close(found, whole[:, -keep:], **CLOSE)


@pytest.mark.parametrize(
    ("keep", "chunk", "taken"),
    [(1, 30, [1, 1, 1]), (12, 30, [1, 2, 10]), (99, 30, [30, 30, 10]), (3, 100, [3])],
)
def test_the_last_layer_takes_no_other_rows(
    keep: int, chunk: int, taken: list[int], rows: list[int]
) -> None:
    asked(build("llama"), ids(), chunk, logits_to_keep=keep)
    assert rows[-len(taken) :] == taken
    assert sum(rows[: -len(taken)]) % PROMPT == 0


def _rows_of_linear(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """By name of the last layer's projections the rows that they took, from now on."""
    attention: Any = decoder_stacks(model)[0][1][-1].self_attn
    taken = dict.fromkeys(("q_proj", "k_proj", "o_proj"), 0)
    own = nn.Linear.forward

    def forward(self: nn.Linear, x: Tensor) -> Tensor:
        for name in taken:
            taken[name] += x.shape[1] * (self is getattr(attention, name))
        return own(self, x)

    monkeypatch.setattr(nn.Linear, "forward", forward)
    return taken


@pytest.mark.parametrize(("method", "queries"), [("full", 3), ("hybrid", PROMPT)])
def test_queries_are_made_for_all_rows_only_where_somebody_learns_from_them(
    method: str, queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("llama")
    config = hkv.HybridConfig(prefill_chunk_tokens=30, method=method)
    with hkv.attach(model, config) as runtime:
        cache = runtime.cache()
        taken = _rows_of_linear(model, monkeypatch)
        model(ids(), **passing(cache), logits_to_keep=1)
    assert taken == {"q_proj": queries, "k_proj": PROMPT, "o_proj": 3}


@pytest.mark.parametrize(("keep", "attended"), [(1, [64]), (66, [66]), (70, [70])])
def test_the_last_layer_attends_for_no_more_queries_than_a_tile_has(
    keep: int, attended: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    own = Ops.attend_causal

    def attend(self: Ops, q: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(q.shape[2])
        return own(self, q, *args, **kwargs)

    monkeypatch.setattr(Ops, "attend_causal", attend)
    model = build("llama")
    asked(model, ids(), 100, logits_to_keep=keep)
    assert seen == [PROMPT] * (model.config.num_hidden_layers - 1) + attended


def test_a_generation_asks_for_one_row(rows: list[int]) -> None:
    model, prompt = build("llama"), ids()
    tokens = model.generate(prompt, max_new_tokens=5, do_sample=False)
    rows.clear()
    config = {"method": "hybrid", "cold": {"top_k": "all"}, "window_tokens": 8, "page_size": 4}
    with hkv.load(model, config=config) as llm:
        found = llm.generate(prompt, max_new_tokens=5)
    assert found.token_ids == tokens[0, PROMPT:].tolist()
    layers, first = model.config.num_hidden_layers, rows.index(PROMPT)
    assert rows[first : first + layers] == [PROMPT] * (layers - 1) + [1]


def _hook(model: PreTrainedModel, seen: list[Tensor]) -> None:
    ((owner, _),) = decoder_stacks(model)
    owner.register_forward_hook(lambda *args: seen.append(args[-1].last_hidden_state))


def _hook_inside(model: PreTrainedModel, seen: list[Tensor]) -> None:
    ((_, layers),) = decoder_stacks(model)
    layers[-1].mlp.down_proj.register_forward_hook(lambda *args: seen.append(args[-1]))


@pytest.mark.parametrize("hook", [_hook, _hook_inside])
def test_who_listens_sees_all_rows(hook: Any, rows: list[int]) -> None:
    model, prompt, seen = deepcopy(build("llama")), ids(), list[Tensor]()
    hook(model, seen)
    asked(model, prompt, 100, logits_to_keep=1)
    model(prompt, use_cache=False)
    torch.testing.assert_close(seen[0], seen[1], **CLOSE)
    assert set(rows) == {PROMPT}


def test_hidden_states_and_all_logits_need_all_rows(rows: list[int]) -> None:
    model, prompt = build("llama"), ids()
    states = asked(model, prompt, 100, logits_to_keep=1, output_hidden_states=True).hidden_states
    want = model(prompt, use_cache=False, output_hidden_states=True).hidden_states
    torch.testing.assert_close(states[-1], want[-1], **CLOSE)
    for more in ({}, {"logits_to_keep": 0}, {"logits_to_keep": torch.tensor([3, 5])}):
        asked(model, prompt, 100, **more)
    assert set(rows) == {PROMPT}
    rows.clear()
    asked(model, prompt, 100, logits_to_keep=1)  # transformers' hooks for these states stay
    assert rows[-1] == 1


def test_the_layer_is_as_it_was_afterwards_and_after_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build("llama")
    part: nn.Module = decoder_stacks(model)[0][1][-1].mlp
    asked(model, ids(), logits_to_keep=1)
    assert "forward" not in part.__dict__

    def fail(*_: Any) -> Tensor:
        raise RuntimeError("the lamp went out")

    monkeypatch.setattr(LlamaMLP, "forward", fail)
    with pytest.raises(RuntimeError, match="lamp"):
        asked(model, ids(), logits_to_keep=1)
    assert "forward" not in part.__dict__
