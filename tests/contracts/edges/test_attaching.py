"""Attaching and detaching, and caches in wrong hands.

Each test asks for the result of eager attention or for a refusal that says why. A result that is
silently wrong is the one forbidden outcome.
"""

from __future__ import annotations

import pytest
import torch
from transformers import (
    PreTrainedModel,
)

import hybrid_kv as hkv
from hybrid_kv.errors import HybridKVError
from hybrid_kv.models.cache_state import passing
from tests.contracts.architectures import (
    ARCHITECTURES,
    build,
)
from tests.contracts.edges.calls import (
    CLOSE,
    PROMPT,
    anatomy,
    config,
    expected,
    fresh,
    greedy,
    padded,
    prompt,
    refusal_allowed,
)
from tests.device.placement import placed


@pytest.mark.parametrize(
    ("name", "attention"),
    [("llama", "eager"), ("llama", "sdpa"), ("gemma3", "sdpa"), ("gpt_oss", "eager")],
)
def test_detach_restores_attention_forwards_and_hooks(name: str, attention: str) -> None:
    model = fresh(ARCHITECTURES[name](), attention)
    before, tokens = anatomy(model), expected(model, prompt())
    with hkv.attach(model, config()) as runtime:
        greedy(model, prompt(), runtime.cache())
        assert anatomy(model) != before
    assert anatomy(model) == before
    assert torch.equal(expected(model, prompt()), tokens)


def test_detach_restores_the_model_after_an_error_in_the_block(model: PreTrainedModel) -> None:
    before = anatomy(model)
    with pytest.raises(KeyError), hkv.attach(model, config()):
        raise KeyError("of the user")
    assert anatomy(model) == before


def test_an_interrupted_call_leaves_nothing_behind(model: PreTrainedModel) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before, tokens = anatomy(model), expected(model, prompt())
    with hkv.attach(model, config()) as runtime:
        for again in (True, False):
            hook = model.model.layers[1].register_forward_hook(interrupt)
            with pytest.raises(KeyboardInterrupt):
                greedy(model, prompt(), runtime.cache())
            hook.remove()
            if again:
                assert torch.equal(greedy(model, prompt(), runtime.cache()), tokens)
                assert torch.equal(expected(model, prompt()), tokens)
    assert anatomy(model) == before


def test_detach_restores_the_model_after_a_refused_call(model: PreTrainedModel) -> None:
    before = anatomy(model)
    with hkv.attach(model, config()) as runtime:
        cache = runtime.cache()
        greedy(model, prompt(), cache)
        with pytest.raises(HybridKVError):
            model(prompt(rows=2), **passing(cache))
    assert anatomy(model) == before


def test_attaching_twice_is_refused_or_nests(model: PreTrainedModel) -> None:
    before, tokens = anatomy(model), expected(model, prompt())
    with hkv.attach(model, config()) as outer:
        with refusal_allowed("attach"), hkv.attach(model, hkv.HybridConfig(method="full")) as inner:
            assert torch.equal(greedy(model, prompt(), inner.cache()), tokens)
        assert torch.equal(greedy(model, prompt(), outer.cache()), tokens)
    assert anatomy(model) == before
    assert torch.equal(expected(model, prompt()), tokens)


def test_two_models_can_be_attached_at_once(model: PreTrainedModel) -> None:
    other = build("qwen3")
    want = expected(model, prompt()), expected(other, prompt())
    with hkv.attach(model, config()) as first, hkv.attach(other, config()) as second:
        assert torch.equal(greedy(other, prompt(), second.cache()), want[1])
        assert torch.equal(greedy(model, prompt(), first.cache()), want[0])
    assert torch.equal(expected(model, prompt()), want[0])


def test_an_attached_model_still_works_with_caches_of_transformers(model: PreTrainedModel) -> None:
    tokens = expected(model, prompt())
    logits = model(prompt()).logits
    with hkv.attach(model, config()):
        assert torch.equal(expected(model, prompt()), tokens)
        assert torch.equal(greedy(model, prompt(), None), tokens)
        torch.testing.assert_close(model(prompt(), use_cache=False).logits, logits, **CLOSE)


def test_an_attached_model_is_right_with_a_static_cache_or_refuses(model: PreTrainedModel) -> None:
    tokens = expected(model, prompt())
    with hkv.attach(model, config()), refusal_allowed("cache"):
        assert torch.equal(greedy(model, prompt(), None, cache_implementation="static"), tokens)


def test_packed_sequences_without_a_cache_are_kept_apart_or_refused(model: PreTrainedModel) -> None:
    ids = prompt()
    positions = placed(torch.cat([torch.arange(20), torch.arange(PROMPT - 20)]))[None]
    want = model(ids, position_ids=positions, use_cache=False).logits
    with hkv.attach(model, config()), refusal_allowed("position"):
        found = model(ids, position_ids=positions, use_cache=False).logits
        torch.testing.assert_close(found, want, **CLOSE)


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "gemma2"])
def test_padding_is_honoured_with_caches_of_transformers_too(name: str) -> None:
    model = build(name)
    ids, mask = padded()
    tokens = expected(model, ids, attention_mask=mask)
    with hkv.attach(model, config()):
        assert torch.equal(expected(model, ids, attention_mask=mask), tokens)


# Caches in wrong hands


def test_a_cache_of_another_model_is_refused(model: PreTrainedModel) -> None:
    other = build("qwen3")
    with hkv.attach(model, config()) as first, hkv.attach(other, config()):
        cache = first.cache()
        with pytest.raises(HybridKVError):
            greedy(other, prompt(), cache)


def test_a_cache_is_refused_where_nothing_is_attached(model: PreTrainedModel) -> None:
    tokens = expected(model, prompt())
    with hkv.attach(model, config()) as runtime:
        unused, used = runtime.cache(), runtime.cache()
        greedy(model, prompt(), used)
    with refusal_allowed("attach"):
        assert torch.equal(greedy(model, prompt(), unused), tokens)
    longer = torch.cat([tokens, prompt(length=3, seed=1)], dim=1)
    with refusal_allowed("attach"):
        assert torch.equal(greedy(model, longer, used), expected(model, longer))


def test_a_cache_outlives_its_runtime_or_is_refused(model: PreTrainedModel) -> None:
    tokens = expected(model, prompt())
    longer = torch.cat([tokens, prompt(length=3, seed=1)], dim=1)
    with hkv.attach(model, config()) as runtime:
        cache = runtime.cache()
        greedy(model, prompt(), cache)
    want = expected(model, longer)
    with hkv.attach(model, hkv.HybridConfig(method="full")), refusal_allowed("cache"):
        assert torch.equal(greedy(model, longer, cache), want)


def test_the_decoder_without_its_head_serves_a_cache_too(model: PreTrainedModel) -> None:
    want = model.model(prompt()).last_hidden_state
    with hkv.attach(model, config()) as runtime:
        cache = runtime.cache()
        parts = [prompt()[:, :20], prompt()[:, 20:]]
        found = [model.model(part, **passing(cache)).last_hidden_state for part in parts]
        cache.check_integrity()
    torch.testing.assert_close(torch.cat(found, dim=1), want, **CLOSE)


def test_a_layer_called_by_itself_with_a_cache_is_refused(model: PreTrainedModel) -> None:
    hidden = model.get_input_embeddings()(prompt())
    turns = model.model.rotary_emb(hidden, placed(torch.arange(PROMPT))[None])
    with hkv.attach(model, config()) as runtime:
        cache = runtime.cache()
        with pytest.raises(HybridKVError, match="attached model"):
            model.model.layers[0](hidden, position_embeddings=turns, **passing(cache))


def test_a_batch_of_another_size_is_refused(model: PreTrainedModel) -> None:
    with hkv.attach(model, config()) as runtime:
        cache = runtime.cache()
        greedy(model, prompt(rows=2), cache)
        with pytest.raises(HybridKVError, match="2"):
            model(prompt(rows=3, length=1), **passing(cache))
