"""Decode steps of several caches in one pass: each row gives what it gives alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, Phi3Config, PreTrainedModel

import hybrid_kv as hkv
from hybrid_kv.errors import ConfigError, NonFiniteError, UnsupportedModelError
from hybrid_kv.models import hf_attention
from hybrid_kv.models.attach import Attachment, HybridCache
from hybrid_kv.models.cache_state import passing
from hybrid_kv.models.joined import JoinedCache, why_alone
from hybrid_kv.runtime.engine_plan import EnginePlan
from tests.contracts.architectures import ARCHITECTURES, PAD, VOCAB, build
from tests.contracts.edges.calls import fresh

SLIDING = {"mistral", "gemma2", "gemma3", "gpt_oss"}
"""Some of their layers have windows that are transformers' own."""

NEW = 6
LENGTHS = (5, 40, 173)


def configs(page_size: int) -> list[hkv.HybridConfig]:
    """Of three methods with opened budgets, and one whose budget is not."""
    tiered = {"sink_tokens": page_size, "window_tokens": page_size}
    return [
        hkv.HybridConfig(method="full", page_size=page_size),
        hkv.HybridConfig(method="hybrid", page_size=page_size, **tiered).opened(),
        hkv.HybridConfig(method="quest", page_size=page_size).opened(),
    ]


def prompt(length: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed + length)
    return torch.randint(PAD + 1, VOCAB, (1, length), generator=draw)


def prefilled(model: Any, runtime: Attachment, ids: Tensor, config: Any) -> tuple[HybridCache, int]:
    cache = runtime.cache(config)
    return cache, int(model(ids, **passing(cache)).logits[0, -1].argmax())


def step(model: Any, caches: list[HybridCache], tokens: list[int]) -> tuple[Tensor, JoinedCache]:
    joined = JoinedCache(caches)
    where = torch.tensor(joined.positions)
    return model(
        torch.tensor(tokens)[:, None], position_ids=where, **passing(joined)
    ).logits, joined


def alone(model: Any, runtime: Attachment, ids: Tensor, config: Any) -> list[int]:
    cache = runtime.cache(config)
    out = model.generate(ids, **passing(cache), max_new_tokens=NEW, do_sample=False)
    return list(out[0, ids.shape[1] :].tolist())


@pytest.mark.parametrize("page_size", [16, 37])
@pytest.mark.parametrize("name", sorted(set(ARCHITECTURES) - SLIDING))
@torch.inference_mode()
def test_rows_of_several_methods_answer_as_alone(name: str, page_size: int) -> None:
    model: Any = build(name)
    with hkv.attach(model, configs(page_size)[1]) as runtime:
        prompts = [prompt(length) for length in LENGTHS]
        each = list(zip(prompts, configs(page_size), strict=True))
        want = [alone(model, runtime, *one) for one in each]
        begun = [prefilled(model, runtime, *one) for one in each]
        caches, tokens = [cache for cache, _ in begun], [[token] for _, token in begun]
        for _ in range(NEW - 1):
            logits, joined = step(model, caches, [row[-1] for row in tokens])
            assert joined.errors == [None] * 3
            for row, last in zip(tokens, logits[:, -1].argmax(-1).tolist(), strict=True):
                row.append(last)
        assert tokens == want
        for cache in caches:
            cache.check_integrity()


def test_the_models_that_are_decoded_row_by_row_are_known() -> None:
    reasons = {name: why_alone(build(name)) for name in ARCHITECTURES}
    assert {name for name, reason in reasons.items() if reason} == SLIDING
    assert all("transformers' own" in reasons[name] for name in SLIDING)


def test_positions_that_turn_by_the_longest_row_keep_rows_apart() -> None:
    size: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 2, "head_dim": 16}
    size |= {"num_hidden_layers": 1, "intermediate_size": 32, "vocab_size": 8, "pad_token_id": 0}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16}
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    long = Phi3Config(**size, max_position_embeddings=64, rope_parameters={**rope, **factors})
    assert "rope type longrope" in why_alone(fresh(long))
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    turned = LlamaConfig(**size, max_position_embeddings=64, rope_parameters=dynamic)
    assert "rope type dynamic" in why_alone(fresh(turned))


@pytest.fixture
def llama() -> PreTrainedModel:
    return build("llama")


@torch.inference_mode()
def test_an_error_of_one_row_leaves_the_others_as_they_are(llama: PreTrainedModel) -> None:
    config = configs(16)[1]
    with hkv.attach(llama, config) as runtime:
        begun = [prefilled(llama, runtime, prompt(length), config) for length in LENGTHS]
        again = [prefilled(llama, runtime, prompt(length), config)[0] for length in LENGTHS]
        caches, tokens = [cache for cache, _ in begun], [token for _, token in begun]
        want, _ = step(llama, caches, tokens)
        attend = again[1].kv.attend

        def poisoned(layer_idx: int, *args: Any, **kwargs: Any) -> Any:
            if layer_idx == 1:
                raise NonFiniteError("of this row")
            return attend(layer_idx, *args, **kwargs)

        again[1].kv.attend = poisoned  # type: ignore[method-assign]
        found, joined = step(llama, again, tokens)
        assert [str(error) for error in joined.errors] == ["None", "of this row", "None"]
        assert torch.equal(found[::2], want[::2])
        assert not torch.equal(found[1], want[1])


@torch.inference_mode()
def test_logits_that_are_not_finite_end_their_row_only(llama: Any) -> None:
    config = configs(16)[0]
    with hkv.attach(llama, config) as runtime:
        begun = [prefilled(llama, runtime, prompt(length), config) for length in LENGTHS]
        spoil = llama.lm_head.register_forward_hook(
            lambda _, __, out: out.index_fill(0, torch.tensor([2]), torch.nan)
        )
        try:
            _, joined = step(llama, [cache for cache, _ in begun], [token for _, token in begun])
        finally:
            spoil.remove()
    assert joined.errors[:2] == [None, None]
    assert isinstance(joined.errors[2], NonFiniteError)


@torch.inference_mode()
def test_a_forward_that_fails_as_a_whole_is_taken_back(llama: Any) -> None:
    config = configs(16)[1]
    with hkv.attach(llama, config) as runtime:
        begun = [prefilled(llama, runtime, prompt(length), config) for length in LENGTHS]
        caches, tokens = [cache for cache, _ in begun], [token for _, token in begun]

        def full(*_: Any) -> None:
            raise MemoryError("no more")

        spoil = llama.model.layers[2].mlp.register_forward_hook(full)
        with pytest.raises(MemoryError):
            step(llama, caches, tokens)
        spoil.remove()
        assert [cache.get_seq_length() for cache in caches] == list(LENGTHS)
        for cache in caches:
            cache.check_integrity()
        found, _ = step(llama, caches, tokens)
        fresh_caches = [prefilled(llama, runtime, prompt(n), config)[0] for n in LENGTHS]
        assert torch.equal(found, step(llama, fresh_caches, tokens)[0])


@torch.inference_mode()
def test_several_tokens_of_a_row_are_refused(llama: Any) -> None:
    with hkv.attach(llama, "full") as runtime:
        cache, _ = prefilled(llama, runtime, prompt(9), None)
        with pytest.raises(ConfigError, match=r"one new token for each of their 1 rows, got \[1,"):
            llama(prompt(3), position_ids=torch.arange(3)[None], **passing(JoinedCache([cache])))


@torch.inference_mode()
def test_a_cache_with_windows_of_transformers_own_is_refused() -> None:
    model: Any = build("gemma2")
    with hkv.attach(model, "full") as runtime:
        cache, _ = prefilled(model, runtime, prompt(9), None)
        with pytest.raises(ConfigError, match="decode them one by one"):
            JoinedCache([cache])


@torch.inference_mode()
def test_a_prompt_in_pieces_is_sealed_by_its_owner_alone(llama: Any) -> None:
    """The layer-major prefill cuts a long piece further, but does not end the prompt with it."""
    config = hkv.HybridConfig(**{**configs(16)[1].flat(), "prefill_chunk_tokens": 10})
    ids = prompt(173)
    with hkv.attach(llama, config) as runtime:
        cache, want = runtime.cache(), prefilled(llama, runtime, ids, None)[0]
        cache.kv.more_prompt = True
        for start in range(0, 173, 60):
            llama(ids[:, start : start + 60], **passing(cache))
            assert not any(layer.is_sealed for layer in cache.kv.layers.values())
        cache.kv.more_prompt = False
        whole, piecewise = (llama(prompt(1), **passing(c)).logits for c in (want, cache))
        assert all(layer.is_sealed for layer in cache.kv.layers.values())
        torch.testing.assert_close(piecewise, whole, rtol=0, atol=1e-4)


def running(model: Any, runtime: Attachment) -> list[HybridCache]:
    """Caches whose steps are joint calls by now."""
    tiered: dict[str, Any] = {"page_size": 16, "sink_tokens": 16, "window_tokens": 32}
    own = hkv.HybridConfig(method="hybrid", index_build="wait", cold={"top_k": 7}, **tiered)
    rows = [prefilled(model, runtime, prompt(301 + number), own)[0] for number in range(3)]
    for _ in range(2):
        step(model, rows, [5, 6, 7])
    return rows


def test_a_model_that_is_not_attached_is_told_so(llama: Any) -> None:
    with hkv.attach(llama, "full") as runtime, torch.inference_mode():
        rows = running(llama, runtime)
        with pytest.raises(ConfigError, match="not attached"):
            step(fresh(ARCHITECTURES["llama"]()), rows, [5, 6, 7])
        for row in rows:
            row.check_integrity()


def test_tokens_that_nobody_attends_are_no_step(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hkv.attach(llama, "full") as runtime, torch.inference_mode():
        rows = running(llama, runtime)
        lengths = [row.get_seq_length() for row in rows]
        with monkeypatch.context() as patched:
            patched.setattr(hf_attention, "layer_of", lambda _: None)
            with pytest.raises(UnsupportedModelError, match="attends to other keys"):
                step(llama, rows, [5, 6, 7])
        assert [row.get_seq_length() for row in rows] == lengths
        _, joined = step(llama, rows, [5, 6, 7])
        assert joined.errors == [None] * 3


def test_queries_with_gradients_are_refused_row_by_row() -> None:
    model: Any = fresh(ARCHITECTURES["llama"]())
    with hkv.attach(model, "full") as runtime:
        with torch.inference_mode():
            rows = running(model, runtime)
        _, joined = step(model, rows, [5, 6, 7])
        assert all("serves inference only" in str(error) for error in joined.errors)


@pytest.mark.parametrize("at", [1, 2, 4])
def test_an_interrupt_between_rows_of_a_joint_call_takes_all_back(
    llama: Any, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hkv.attach(llama, "full") as runtime, torch.inference_mode():
        rows, twins = running(llama, runtime), running(llama, runtime)
        calls, end = [0], EnginePlan.end

        def interrupted(plan: EnginePlan, begun: Any) -> Any:
            found = end(plan, begun)
            calls[0] += 1
            if calls[0] == at:
                raise KeyboardInterrupt
            return found

        with monkeypatch.context() as patched:
            patched.setattr(EnginePlan, "end", interrupted)
            with pytest.raises(KeyboardInterrupt):
                step(llama, rows, [5, 6, 7])
        for row in rows:
            row.check_integrity()
        assert torch.equal(step(llama, rows, [8, 9, 10])[0], step(llama, twins, [8, 9, 10])[0])
