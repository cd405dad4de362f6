"""NaN and infinity are an error that says so, however short the prompt is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import hybrid_kv as hkv
from hybrid_kv.errors import NonFiniteError
from tests.models.folder import model

TIERED: dict[str, Any] = {
    "page_size": 4,
    "sink_tokens": 4,
    "window_tokens": 8,
    "cold": {"top_k": 3, "index": "flat"},
}


@pytest.fixture
def plain() -> PreTrainedModel:
    return model()


def spoil(module: torch.nn.Module, value: float, at: int, channel: int = 5) -> None:
    """Writes a value into the module's output at its call number `at`."""
    calls = iter(range(1000))

    def hook(_: torch.nn.Module, args: Any, output: Tensor) -> Tensor:
        if next(calls) == at:
            output = output.clone()
            output[0, -1, channel] = value
        return output

    module.register_forward_hook(hook)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("tokens", [1, 2, 7, 61])
@pytest.mark.parametrize("config", [TIERED, "full"], ids=["tiered", "full"])
@pytest.mark.parametrize("where", ["k", "v", "logits"])
@pytest.mark.parametrize("at", [0, 3], ids=["in the prompt", "in the answer"])
def test_what_is_not_finite_is_an_error_at_any_length(
    plain: PreTrainedModel, where: str, config: Any, tokens: int, value: float, at: int
) -> None:
    """Regression: a short prompt had an empty answer, a long one was an error."""
    attention = plain.model.layers[1].self_attn
    modules = {"k": attention.k_proj, "v": attention.v_proj, "logits": plain.lm_head}
    spoil(modules[where], value, at)
    error = pytest.raises(NonFiniteError, match=r"must be finite, got .*; check")
    with hkv.load(plain, config=config) as llm, error:
        llm.generate([3 + idx % 9 for idx in range(tokens)], max_new_tokens=9)


def test_the_layer_is_named(plain: PreTrainedModel) -> None:
    spoil(plain.model.layers[1].self_attn.v_proj, float("nan"), 0)
    error = pytest.raises(NonFiniteError, match=r"^keys and values of layer 1 must be finite, ")
    with hkv.load(plain, config=TIERED) as llm, error:
        llm.context([3, 4, 5])


def test_a_token_that_is_ruled_out_is_no_error(plain: PreTrainedModel) -> None:
    for at in range(9):
        spoil(plain.lm_head, float("-inf"), at)
    with hkv.load(plain, config=TIERED) as llm:
        answer = llm.generate([3, 4, 5], max_new_tokens=9)
    assert len(answer.token_ids) == 9
    assert 5 not in answer.token_ids


@pytest.mark.parametrize("value", [float("inf"), float("-inf")])
@pytest.mark.parametrize("channel", [0, 5, 29])
@pytest.mark.parametrize("tokens", [1, 37])
def test_an_infinite_key_that_no_query_turns_to_is_found_at_once(
    plain: PreTrainedModel, value: float, channel: int, tokens: int
) -> None:
    """Regression: it had no weight, so no logit showed it, and it was found when its page left."""
    attention = plain.model.layers[1].self_attn
    against = torch.zeros(attention.q_proj.out_features).view(-1, attention.head_dim)
    against[:, channel % attention.head_dim] = -9 if value > 0 else 9
    attention.q_proj.register_forward_hook(
        lambda _, args, output: against.flatten().expand_as(output)
    )
    spoil(attention.k_proj, value, 1, channel)  # of the first token behind the prompt
    error = pytest.raises(NonFiniteError, match=r"^keys and values of layer 1 must be finite, ")
    with hkv.load(plain, config=TIERED) as llm, error:
        llm.generate([3 + idx % 9 for idx in range(tokens)], max_new_tokens=3)
