"""What users may expect of an attached model beside the tokens of the matrix.

Each test asks for the result of eager attention or for a refusal that says why. A result that is
silently wrong is the one forbidden outcome.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    Cache,
    DynamicCache,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hybrid_kv as hkv
from hybrid_kv.errors import HybridKVError, UnsupportedModelError
from tests.contracts.architectures import (
    ARCHITECTURES,
    PAD,
    VOCAB,
    build,
    scale_weights,
    strict_torch,
)

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
    return torch.randint(PAD + 1, VOCAB, (rows, length), generator=draw)


def greedy(model: PreTrainedModel, ids: Tensor, cache: Cache | None, **extra: Any) -> Tensor:
    settings = {"max_new_tokens": NEW, "do_sample": False, **extra}
    mask = settings.pop("attention_mask", torch.ones_like(ids))
    return model.generate(input_ids=ids, attention_mask=mask, past_key_values=cache, **settings)


def expected(model: PreTrainedModel, ids: Tensor, **extra: Any) -> Tensor:
    return greedy(model, ids, DynamicCache(config=model.config), **extra)


@pytest.fixture(autouse=True)
def _strict() -> Iterator[None]:
    with strict_torch(), torch.no_grad():
        yield


@contextmanager
def refusal_allowed(words: str) -> Iterator[None]:
    """Swallows an error of ours that speaks of `words`; the block asserts what else must hold."""
    try:
        yield
    except HybridKVError as error:
        if not re.search(words, str(error)):
            raise


@pytest.fixture
def model() -> PreTrainedModel:
    return build("llama")


def fresh(model_config: PretrainedConfig, attention: str | None = "eager") -> PreTrainedModel:
    """A model that no other test shares."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            model_config, dtype=torch.float32, attn_implementation=attention
        )
        scale_weights(model)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = PAD
    return model.eval()


# Attaching and detaching


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
            sorted(part.__dict__),
            part.__dict__.get("forward"),
            tuple(part._forward_hooks.values()),
            tuple(part._forward_pre_hooks.values()),
        )
    return found


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
            model(prompt(rows=2), past_key_values=cache)
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
    positions = torch.cat([torch.arange(20), torch.arange(PROMPT - 20)])[None]
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
        found = [model.model(part, past_key_values=cache).last_hidden_state for part in parts]
        cache.check_integrity()
    torch.testing.assert_close(torch.cat(found, dim=1), want, **CLOSE)


def test_a_layer_called_by_itself_with_a_cache_is_refused(model: PreTrainedModel) -> None:
    hidden = model.get_input_embeddings()(prompt())
    turns = model.model.rotary_emb(hidden, torch.arange(PROMPT)[None])
    with hkv.attach(model, config()) as runtime:
        cache = runtime.cache()
        with pytest.raises(HybridKVError, match="attached model"):
            model.model.layers[0](hidden, position_embeddings=turns, past_key_values=cache)


def test_a_batch_of_another_size_is_refused(model: PreTrainedModel) -> None:
    with hkv.attach(model, config()) as runtime:
        cache = runtime.cache()
        greedy(model, prompt(rows=2), cache)
        with pytest.raises(HybridKVError, match="2"):
            model(prompt(rows=3, length=1), past_key_values=cache)


# Models that cannot be served


def small(**changes: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": PAD,
        **changes,
    }


def latent(**changes: Any) -> dict[str, Any]:
    return small(
        kv_lora_rank=16,
        q_lora_rank=24,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        first_k_dense_replace=2,
        **changes,
    )


def indexed() -> dict[str, Any]:
    return latent(index_topk=16, index_head_dim=16, index_n_heads=2)


UNSERVED = {
    # name: class of the configuration, its arguments, what the refusal must speak of
    "mla": ("DeepseekV3Config", latent(), "MLA|latent"),
    "dsa": ("DeepseekV32Config", indexed(), "DSA|MLA|sparse|latent"),
    "glm_dsa": ("GlmMoeDsaConfig", indexed(), "DSA|MLA|sparse|latent"),
    "own_attention": ("BloomConfig", {"vocab_size": VOCAB, "hidden_size": 48, "n_head": 2}, "."),
    "recurrent": ("MambaConfig", {"vocab_size": VOCAB, "hidden_size": 48}, "."),
}


@pytest.mark.parametrize("name", UNSERVED)
def test_a_model_that_cannot_be_served_is_refused_with_the_reason(name: str) -> None:
    kind, arguments, reason = UNSERVED[name]
    if not hasattr(transformers, kind):
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    arguments = {**arguments, "num_hidden_layers": 2}
    model = AutoModelForCausalLM.from_config(getattr(transformers, kind)(**arguments))
    before = anatomy(model)
    with pytest.raises(UnsupportedModelError, match=f"(?i){reason}"), hkv.attach(model, config()):
        pass
    assert anatomy(model) == before


def test_an_encoder_decoder_is_refused() -> None:
    model = transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2
        )
    )
    with pytest.raises(UnsupportedModelError), hkv.attach(model, config()):
        pass


# Models beside the ten of the matrix


FURTHER = {
    "linear_attention_between": (
        "Qwen3NextConfig",
        small(
            num_key_value_heads=2,
            head_dim=16,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
            layer_types=["linear_attention", "full_attention"],
        ),
    ),
    "layers_that_share_keys": (
        "Gemma4TextConfig",
        small(
            num_hidden_layers=4,
            num_key_value_heads=2,
            head_dim=16,
            global_head_dim=16,
            num_kv_shared_layers=2,
            sliding_window=12,
            layer_types=["sliding_attention", "full_attention"] * 2,
            vocab_size_per_layer_input=VOCAB,
            hidden_size_per_layer_input=8,
        ),
    ),
    "attention_in_chunks": (
        "Llama4TextConfig",
        small(
            num_hidden_layers=4,
            num_key_value_heads=2,
            head_dim=16,
            intermediate_size_mlp=64,
            num_local_experts=2,
            attention_chunk_size=8,
            layer_types=["chunked_attention", "full_attention"] * 2,
        ),
    ),
    "a_window_that_attention_is_not_told": (
        "PhimoeConfig",
        small(num_key_value_heads=2, num_local_experts=2, num_experts_per_tok=2, sliding_window=12),
    ),
    "two_attentions_per_layer": ("DiffLlamaConfig", small(num_key_value_heads=2, head_dim=16)),
    "keys_repeated_after_caching": (
        "JetMoeConfig",
        small(num_key_value_heads=2, kv_channels=16, num_local_experts=2, num_experts_per_tok=2),
    ),
    "not_causal": ("BertConfig", {**small(), "is_decoder": False}),
    "learned_positions": (
        "GPT2Config",
        {"vocab_size": VOCAB, "n_embd": 48, "n_layer": 2, "n_head": 2, "eos_token_id": None},
    ),
}


@pytest.mark.parametrize("name", FURTHER)
def test_a_further_architecture_equals_eager_attention_or_is_refused(name: str) -> None:
    kind, arguments = FURTHER[name]
    if not hasattr(transformers, kind):
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    model = fresh(getattr(transformers, kind)(**arguments))
    tokens = expected(model, prompt())
    with refusal_allowed("hybrid_kv|mask"), hkv.attach(model, config()) as runtime:
        cache = runtime.cache()
        assert torch.equal(greedy(model, prompt(), cache), tokens)
        cache.check_integrity()


def test_only_the_text_tower_of_a_multimodal_model_is_attached() -> None:
    model = transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(
            vision_config=transformers.CLIPVisionConfig(
                hidden_size=32,
                intermediate_size=32,
                num_hidden_layers=2,
                num_attention_heads=2,
                image_size=8,
                patch_size=4,
            ),
            text_config=ARCHITECTURES["llama"](),
            image_token_index=VOCAB - 1,
            attn_implementation={"text_config": "eager", "vision_config": "sdpa"},
        )
    ).eval()
    scale_weights(model)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = PAD
    ids = prompt().clamp(max=VOCAB - 2)
    ids[:, 2:6] = VOCAB - 1
    image = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    want = greedy(model, ids, DynamicCache(config=model.config), pixel_values=image)
    before = anatomy(model)
    with hkv.attach(model, config()) as runtime:
        assert model.config.vision_config._attn_implementation == "sdpa"
        cache = runtime.cache()
        assert torch.equal(greedy(model, ids, cache, pixel_values=image), want)
        cache.check_integrity()
    assert anatomy(model) == before


def test_image_tokens_that_see_each_other_are_honoured_or_refused() -> None:
    text = ARCHITECTURES["gemma3"]()
    model = transformers.Gemma3ForConditionalGeneration(
        transformers.Gemma3Config(
            vision_config=transformers.SiglipVisionConfig(
                hidden_size=32,
                intermediate_size=32,
                num_hidden_layers=1,
                num_attention_heads=2,
                image_size=8,
                patch_size=4,
            ),
            text_config=text,
            mm_tokens_per_image=4,
            image_token_id=VOCAB - 1,
            attn_implementation="eager",
        )
    ).eval()
    scale_weights(model)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = PAD
    ids = prompt().clamp(max=VOCAB - 2)
    ids[:, 8:12] = VOCAB - 1
    inputs = {
        "pixel_values": torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0)),
        "token_type_ids": (ids == VOCAB - 1).long(),
    }
    want = greedy(model, ids, DynamicCache(config=model.config), **inputs)
    with refusal_allowed("image"), hkv.attach(model, config()) as runtime:
        assert torch.equal(greedy(model, ids, runtime.cache(), **inputs), want)


# Ways of calling that cannot be served, or only with care


def padded() -> tuple[Tensor, Tensor]:
    ids = prompt(rows=3)
    mask = torch.ones_like(ids)
    mask[1, :14] = 0
    mask[2, :33] = 0
    return ids.masked_fill(mask == 0, PAD), mask


def test_a_mask_of_the_users_own_is_refused_or_honoured(model: PreTrainedModel) -> None:
    ids = prompt()
    mask = torch.tril(torch.ones(PROMPT, PROMPT, dtype=torch.bool))
    mask[:, 3:9] = False  # not causal alone: six tokens are hidden from everyone
    mask.fill_diagonal_(True)
    additive = torch.zeros(1, 1, PROMPT, PROMPT).masked_fill(~mask, torch.finfo(torch.float32).min)
    want = model(ids, attention_mask=additive).logits
    with hkv.attach(model, config()) as runtime:
        for own in (additive, mask[None, None]):
            with refusal_allowed("mask"):
                found = model(ids, attention_mask=own, past_key_values=runtime.cache()).logits
                torch.testing.assert_close(found, want, **CLOSE)


def test_right_padding_is_refused_or_honoured(model: PreTrainedModel) -> None:
    ids, mask = (t.flip(1) for t in padded())
    want = model(ids, attention_mask=mask).logits
    with hkv.attach(model, config()) as runtime, refusal_allowed("pad"):
        found = model(ids, attention_mask=mask, past_key_values=runtime.cache()).logits
        torch.testing.assert_close(found[mask.bool()], want[mask.bool()], **CLOSE)


def test_padded_rows_stay_finite(model: PreTrainedModel) -> None:
    ids, mask = padded()
    with hkv.attach(model, config()) as runtime:
        cache = runtime.cache()
        out = model(ids, attention_mask=mask, past_key_values=cache)
        assert out.logits.isfinite().all()
        more = torch.cat([mask, torch.ones(3, 1, dtype=mask.dtype)], dim=1)
        out = model(
            out.logits[:, -1:].argmax(-1),
            attention_mask=more,
            position_ids=more.sum(1, keepdim=True) - 1,
            past_key_values=cache,
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
        found = model(inputs_embeds=embeddings, past_key_values=runtime.cache()).logits
    assert torch.equal(embeddings, before)
    torch.testing.assert_close(found, want, **CLOSE)


def test_attention_weights_are_refused_or_right(model: PreTrainedModel) -> None:
    ids = prompt()
    want = model(ids, output_attentions=True).attentions
    with hkv.attach(model, config()) as runtime, refusal_allowed("attention"):
        found = model(ids, output_attentions=True, past_key_values=runtime.cache()).attentions
        for weights, exact in zip(found or (), want, strict=False):
            assert weights is None or torch.allclose(weights, exact, **CLOSE)


def test_hidden_states_are_those_of_eager_attention(model: PreTrainedModel) -> None:
    ids = prompt()
    want = model(ids, output_hidden_states=True).hidden_states
    with hkv.attach(model, config()) as runtime:
        found = model(ids, output_hidden_states=True, past_key_values=runtime.cache())
    for hidden, exact in zip(found.hidden_states, want, strict=True):
        torch.testing.assert_close(hidden, exact, **CLOSE)


@pytest.mark.parametrize("training", [True, False])
def test_gradients_are_refused_or_right(training: bool) -> None:
    model = fresh(ARCHITECTURES["llama"]())
    model.train(training)
    ids = prompt(rows=2)

    @torch.enable_grad()
    def gradients(cache: Cache | None) -> list[Tensor]:
        model.zero_grad()
        model(ids, labels=ids, past_key_values=cache).loss.backward()
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


# Below full budget


LEAST = {
    "streaming_llm": {},
    "quest": {"page_budget": 1, "dense_layers": 0},
    "retrieval_attention": {"cold": {"top_k": 1}},
    "hybrid": {"cold": {"top_k": 1}, "page_budget": 1, "spare_tokens": 8},
}


@pytest.mark.parametrize("method", LEAST)
@pytest.mark.parametrize("chunk", [10, "auto"])
def test_a_prompt_is_exact_whatever_the_budget(
    model: PreTrainedModel, method: str, chunk: int | str
) -> None:
    want = model(prompt()).logits
    common = {"sink_tokens": 4, "window_tokens": 4, "page_size": 4, "prefill_chunk_tokens": chunk}
    settings = hkv.HybridConfig(method=method, **common, **LEAST[method])
    with hkv.attach(model, settings) as runtime:
        found = model(prompt(), past_key_values=runtime.cache()).logits
    torch.testing.assert_close(found, want, **CLOSE)


TOP_K = 5
ColdRuns = list[dict[int, tuple[int, int]]]


def top_k_attention(runs: ColdRuns) -> Callable[..., tuple[Tensor, None]]:
    """Eager attention in which each head sees only its best `TOP_K` of the positions in `runs`.

    runs: for each decoding step the first and last + 1 cold position by layer.
    """
    steps_done: dict[int, int] = {}

    def attention(
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor,
        *,
        scaling: float,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        logits = q @ k.transpose(-1, -2) * scaling
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        logits = logits + mask
        layer = module.layer_idx
        if q.shape[2] == 1:
            step = steps_done[layer] = steps_done.get(layer, -1) + 1
            first, last = runs[step].get(layer, (0, 0))
            if last - first > TOP_K:
                cold = logits[..., first:last]
                worst = cold.topk(TOP_K, -1).values[..., -1:]
                logits[..., first:last] = cold.masked_fill(cold < worst, -torch.inf)
        if s_aux is not None:
            sink = s_aux[None, :, None, None].expand(*logits.shape[:3], 1)
            logits = torch.cat([logits, sink], -1)
        weights = logits.softmax(-1)[..., : k.shape[2]]
        return (weights @ v).transpose(1, 2), None

    return attention


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name != "mistral"])
@pytest.mark.parametrize("method", ["flat", "hybrid"])
def test_each_head_attends_its_best_cold_tokens_and_everything_resident(
    name: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids, first = build(name), prompt(length=48), 29
    runs: ColdRuns = []
    settings = {**TIERED, "cold": {"top_k": TOP_K, "index": {"kind": "flat"}}}
    if method == "flat":
        del settings["spare_tokens"], settings["page_budget"]
    with hkv.attach(model, hkv.HybridConfig(**{**settings, "method": method})) as runtime:
        cache = runtime.cache()
        found = [model(ids[:, :first], past_key_values=cache).logits]
        for layer in cache.kv.layers:
            cache.kv.seal_if_open(layer)
        for token in ids[:, first:].split(1, dim=1):
            cold = {idx: layer.cold.positions_of(0) for idx, layer in cache.kv.layers.items()}
            runs.append({idx: (run[0], run[-1] + 1) for idx, run in cold.items() if run})
            found.append(model(token, past_key_values=cache).logits)
    assert all(last - start > TOP_K for run in runs for start, last in run.values())
    assert all(runs)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "top_k", top_k_attention(runs))
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "top_k", eager_mask)
    monkeypatch.setattr(model.config, "_attn_implementation", "top_k")
    want = steps(model, ids, DynamicCache(config=model.config), first)
    torch.testing.assert_close(torch.cat(found, dim=1), want, **CLOSE)


# Caches as transformers sees them


def steps(model: PreTrainedModel, ids: Tensor, cache: Cache, first: int = 29) -> Tensor:
    """Logits [B, T, vocab] of `ids`: the first ones at once, the others one by one."""
    parts = [ids[:, :first], *ids[:, first:].split(1, dim=1)]
    return torch.cat([model(part, past_key_values=cache).logits for part in parts], dim=1)


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "glm4"])
@pytest.mark.parametrize("count", [1, 3, 7])
def test_cropped_tokens_leave_no_trace(name: str, count: int) -> None:
    model, ids = build(name), prompt(length=48)
    with hkv.attach(model, config()) as runtime:
        cache = runtime.cache()
        cache.activate_past_recording()
        plain = DynamicCache(config=model.config)
        plain.activate_past_recording()
        # Rounds of a guess, all of it wrong, and the right tokens instead.
        for at in range(24, 48, count):
            seen = 0 if at == 24 else at
            right = ids[:, seen : at + count]
            wrong = prompt(length=count, seed=at)
            for one in (cache, plain):
                model(torch.cat([right[:, : 24 - seen], wrong], dim=1), past_key_values=one)
                one.crop(-count)
                one.crop(0)
            cache.check_integrity()
            assert cache.get_seq_length() == plain.get_seq_length() == max(at, 24)
            rest = right[:, 24 - seen :] if seen == 0 else right
            found = model(rest, past_key_values=cache).logits
            torch.testing.assert_close(found, model(rest, past_key_values=plain).logits, **CLOSE)
            cache.crop(0)
            plain.crop(0)
            cache.check_integrity()


def test_crop_to_nothing_makes_the_cache_new(model: PreTrainedModel) -> None:
    tokens = expected(model, prompt())
    with hkv.attach(model, config()) as runtime:
        cache = runtime.cache()
        model(prompt(seed=1), past_key_values=cache)
        cache.crop(-PROMPT)
        assert cache.get_seq_length() == 0
        cache.check_integrity()
        assert torch.equal(greedy(model, prompt(), cache), tokens)


def test_reset_makes_the_cache_new(model: PreTrainedModel) -> None:
    tokens = expected(model, prompt())
    with hkv.attach(model, config()) as runtime:
        cache = runtime.cache()
        greedy(model, prompt(seed=1), cache)
        cache.reset()
        assert cache.get_seq_length() == 0
        assert torch.equal(greedy(model, prompt(), cache), tokens)
        cache.check_integrity()


@pytest.mark.parametrize("settings", [TIERED, LOSSY], ids=["tiered", "lossy"])
def test_the_length_is_tokens_seen_not_tokens_kept(
    model: PreTrainedModel, settings: dict[str, Any]
) -> None:
    with hkv.attach(model, hkv.HybridConfig(**settings)) as runtime:
        cache = runtime.cache()
        assert cache.get_seq_length() == 0
        out = greedy(model, prompt(), cache)
        # The last token was chosen, not yet read.
        assert cache.get_seq_length() == out.shape[1] - 1 == PROMPT + NEW - 1
        cache.check_integrity()


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_conversations_do_not_disturb_each_other(name: str) -> None:
    model = build(name)
    seeds = range(3)
    questions = [[prompt(length=9, seed=10 * seed + turn) for turn in range(3)] for seed in seeds]

    def play(histories: list[Tensor], caches: list[Cache]) -> list[Tensor]:
        for turn in range(3):
            for seed in seeds:
                ids = torch.cat([histories[seed], questions[seed][turn]], dim=1)
                histories[seed] = greedy(model, ids, caches[seed])
        return histories

    starts = [prompt(length=20 + 6 * seed, seed=seed) for seed in seeds]
    want = play(list(starts), [DynamicCache(config=model.config) for _ in seeds])
    with hkv.attach(model, config()) as runtime:
        caches = [runtime.cache() for _ in seeds]
        found = play(list(starts), caches)
        for cache in caches:
            cache.check_integrity()
    for tokens, exact in zip(found, want, strict=True):
        assert torch.equal(tokens, exact)


def test_a_prompt_of_inference_mode_continues_without_it(model: PreTrainedModel) -> None:
    tokens = expected(model, prompt())
    with hkv.attach(model, config()) as runtime:
        cache = runtime.cache()
        with torch.inference_mode():
            model(prompt()[:, :-1], past_key_values=cache)
        assert torch.equal(greedy(model, prompt(), cache), tokens)
        cache.check_integrity()


def test_a_prompt_without_inference_mode_continues_in_it(model: PreTrainedModel) -> None:
    tokens = expected(model, prompt())
    with hkv.attach(model, config()) as runtime:
        cache = runtime.cache()
        model(prompt()[:, :-1], past_key_values=cache)
        with torch.inference_mode():
            assert torch.equal(greedy(model, prompt(), cache), tokens)
        cache.check_integrity()


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 16, 17])
def test_short_prompts_equal_eager_attention(model: PreTrainedModel, length: int) -> None:
    ids = prompt(length=length)
    tokens = expected(model, ids, max_new_tokens=24)
    with hkv.attach(model, config()) as runtime:
        cache = runtime.cache()
        assert torch.equal(greedy(model, ids, cache, max_new_tokens=24), tokens)
        cache.check_integrity()


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_a_draft_model_changes_nothing(name: str) -> None:
    model, draft = build(name), build("qwen2")
    tokens = expected(model, prompt(), assistant_model=draft)
    assert torch.equal(tokens, expected(model, prompt()))
    with hkv.attach(model, config()) as runtime:
        for assistant in (draft, model):  # drafting for itself, every guess is right
            cache = runtime.cache()
            assert torch.equal(greedy(model, prompt(), cache, assistant_model=assistant), tokens)
            cache.check_integrity()


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("method", ["hybrid", "retrieval_attention", "full"])
def test_rows_of_a_cache_can_be_repeated_and_selected(name: str, method: str) -> None:
    model = build(name)
    settings = config() if method == "hybrid" else config().replace(method=method)

    def play(cache: Cache) -> Tensor:
        found = [model(prompt(rows=2), past_key_values=cache).logits[:, -1]]
        cache.batch_repeat_interleave(3)
        for turn in range(4):
            found.append(model(prompt(6, 3, seed=turn), past_key_values=cache).logits)
        cache.batch_select_indices(torch.tensor([5, 0, 3]))
        for turn in range(4):
            found.append(model(prompt(3, 3, seed=turn), past_key_values=cache).logits)
        return torch.cat([part.flatten() for part in found])

    want = play(DynamicCache(config=model.config))
    with hkv.attach(model, settings) as runtime:
        cache = runtime.cache()
        torch.testing.assert_close(play(cache), want, **CLOSE)
        cache.check_integrity()


def test_beams_of_a_later_turn_equal_eager_attention(model: PreTrainedModel) -> None:
    # Beam search repeats the prompt before it is computed, so a second turn starts from beams.
    ids = prompt()
    more = prompt(length=6, seed=1)

    def play(cache: Cache) -> Tensor:
        out = greedy(model, ids, cache, num_beams=3, num_return_sequences=3)
        return greedy(model, torch.cat([out, more.repeat(3, 1)], dim=1), cache)

    want = play(DynamicCache(config=model.config))
    with hkv.attach(model, config()) as runtime:
        cache = runtime.cache()
        assert torch.equal(play(cache), want)
        cache.check_integrity()


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize("chunk", [None, 9])
def test_padded_rows_with_beams_chunks_and_a_padded_later_turn(
    name: str, beams: int, chunk: int | None
) -> None:
    model = build(name)
    ids, mask = padded()
    more = torch.ones(3 * beams, 6, dtype=mask.dtype)
    more[0, :4] = 0  # the first row says less than the others: padding in the middle
    way = {"num_beams": beams, "num_return_sequences": beams, "prefill_chunk_size": chunk}

    def play(cache: Cache) -> Tensor:
        out = greedy(model, ids, cache, attention_mask=mask, **way)
        answer = torch.ones(3 * beams, out.shape[1] - PROMPT, dtype=mask.dtype)
        seen = torch.cat([mask.repeat_interleave(beams, 0), answer, more], dim=1)
        said = prompt(3 * beams, 6, seed=1).masked_fill(more == 0, PAD)
        new = slice(-7, None)  # the last token of the answer was not read yet
        logits = model(
            torch.cat([out, said], dim=1)[:, new],
            attention_mask=seen,
            position_ids=(seen.cumsum(1) - 1).clamp_min(0)[:, new],
            past_key_values=cache,
        ).logits
        return logits[seen[:, new].bool()]

    with hkv.attach(model, config()) as runtime:
        cache = runtime.cache()
        found = play(cache)
        cache.check_integrity()
    torch.testing.assert_close(found, play(DynamicCache(config=model.config)), **CLOSE)
