"""Ways of calling a model that cannot be served, or only with care.

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
    Cache,
    DynamicCache,
    PreTrainedModel,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hybrid_kv as hkv
from hybrid_kv.models.cache_state import CACHE_NAMES, passing
from tests.contracts.architectures import (
    ARCHITECTURES,
)
from tests.contracts.edges.calls import (
    CLOSE,
    PROMPT,
    config,
    expected,
    fresh,
    greedy,
    padded,
    prompt,
    refusal_allowed,
    steps,
)
from tests.device.placement import placed


def test_a_mask_of_the_users_own_is_refused_or_honoured(model: PreTrainedModel) -> None:
    ids = prompt()
    mask = placed(torch.ones(PROMPT, PROMPT, dtype=torch.bool)).tril()
    mask[:, 3:9] = False  # not causal alone: six tokens are hidden from everyone
    mask.fill_diagonal_(True)
    hidden = torch.finfo(torch.float32).min
    additive = placed(torch.zeros(1, 1, PROMPT, PROMPT)).masked_fill(~mask, hidden)
    want = model(ids, attention_mask=additive).logits
    with hkv.attach(model, config()) as runtime:
        for own in (additive, mask[None, None]):
            with refusal_allowed("mask"):
                found = model(ids, attention_mask=own, **passing(runtime.cache())).logits
                torch.testing.assert_close(found, want, **CLOSE)


def test_right_padding_is_refused_or_honoured(model: PreTrainedModel) -> None:
    ids, mask = (t.flip(1) for t in padded())
    want = model(ids, attention_mask=mask).logits
    with hkv.attach(model, config()) as runtime, refusal_allowed("pad"):
        found = model(ids, attention_mask=mask, **passing(runtime.cache())).logits
        torch.testing.assert_close(found[mask.bool()], want[mask.bool()], **CLOSE)


@pytest.mark.parametrize("name", CACHE_NAMES)
def test_a_cache_is_taken_under_both_names(model: PreTrainedModel, name: str) -> None:
    """Since transformers 5.24 it is `cache`, a name that models before drop without a word."""
    ids = prompt()
    want = model(ids).logits
    with hkv.attach(model, config()) as runtime:
        cache = runtime.cache()
        whole = torch.cat([model(part, **{name: cache}).logits for part in ids.split(11, 1)], 1)
        assert cache.get_seq_length() == PROMPT
        torch.testing.assert_close(whole, want, **CLOSE)


def test_padded_rows_stay_finite(model: PreTrainedModel) -> None:
    ids, mask = padded()
    with hkv.attach(model, config()) as runtime:
        cache = runtime.cache()
        out = model(ids, attention_mask=mask, **passing(cache))
        assert out.logits.isfinite().all()
        more = torch.cat([mask, mask.new_ones(3, 1)], dim=1)
        out = model(
            out.logits[:, -1:].argmax(-1),
            attention_mask=more,
            position_ids=more.sum(1, keepdim=True) - 1,
            **passing(cache),
        )
        assert out.logits.isfinite().all()


def test_a_wrapper_that_passes_dropout_by_position_changes_nothing(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = expected(model, prompt())
    calls: list[str] = []

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(
            module: nn.Module,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attention_mask: Tensor | None,
            dropout: float,
            **others: Any,
        ) -> Any:
            calls.append(type(module).__name__)
            return function(module, query, key, value, attention_mask, dropout, **others)

        return wrapped

    with hkv.attach(model, config()) as runtime:
        name = "hybrid_kv"
        with monkeypatch.context() as patch:
            patch.setitem(ALL_ATTENTION_FUNCTIONS, name, wrap(ALL_ATTENTION_FUNCTIONS[name]))
            found = greedy(model, prompt(), runtime.cache())
    assert calls
    assert torch.equal(found, tokens)


def test_embeddings_in_place_of_tokens_are_read_and_left_alone(model: PreTrainedModel) -> None:
    embeddings = model.get_input_embeddings()(prompt())
    before = embeddings.clone()
    want = model(inputs_embeds=embeddings).logits
    with hkv.attach(model, config()) as runtime:
        found = model(inputs_embeds=embeddings, **passing(runtime.cache())).logits
    assert torch.equal(embeddings, before)
    torch.testing.assert_close(found, want, **CLOSE)


def test_attention_weights_are_refused_or_right(model: PreTrainedModel) -> None:
    ids = prompt()
    want = model(ids, output_attentions=True).attentions
    with hkv.attach(model, config()) as runtime, refusal_allowed("attention"):
        found = model(ids, output_attentions=True, **passing(runtime.cache())).attentions
        for weights, exact in zip(found or (), want, strict=False):
            assert weights is None or torch.allclose(weights, exact, **CLOSE)


def test_hidden_states_are_those_of_eager_attention(model: PreTrainedModel) -> None:
    ids = prompt()
    want = model(ids, output_hidden_states=True).hidden_states
    with hkv.attach(model, config()) as runtime:
        found = model(ids, output_hidden_states=True, **passing(runtime.cache()))
    for hidden, exact in zip(found.hidden_states, want, strict=True):
        torch.testing.assert_close(hidden, exact, **CLOSE)


@pytest.mark.host("autograd goes backward on devices that torch has opened itself")
@pytest.mark.parametrize("training", [True, False])
def test_gradients_are_refused_or_right(training: bool) -> None:
    model = fresh(ARCHITECTURES["llama"]())
    model.train(training)
    ids = prompt(rows=2)

    @torch.enable_grad()
    def gradients(cache: Cache | None) -> list[Tensor]:
        model.zero_grad()
        model(ids, labels=ids, **passing(cache)).loss.backward()
        return [weight.grad.clone() for weight in model.parameters()]

    want = gradients(None)
    with hkv.attach(model, config()) as runtime:
        for cache in (None, runtime.cache()):
            with refusal_allowed("gradient"):
                for gradient, exact in zip(gradients(cache), want, strict=True):
                    torch.testing.assert_close(gradient, exact, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_eager_attention(dtype: torch.dtype) -> None:
    model = fresh(ARCHITECTURES["llama"]()).to(dtype)
    ids = prompt()
    want = steps(model, ids, DynamicCache(config=model.config))
    with hkv.attach(model, config()) as runtime:
        found = steps(model, ids, runtime.cache())
    assert found.dtype == dtype
    error = (found - want).float().pow(2).mean().sqrt() / want.float().std()
    assert error < 0.05
