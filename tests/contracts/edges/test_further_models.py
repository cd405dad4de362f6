"""Models beside the ten of the matrix: served, or refused with the reason.

Each test asks for the result of eager attention or for a refusal that says why. A result that is
silently wrong is the one forbidden outcome.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
)

import hybrid_kv as hkv
from hybrid_kv.errors import UnsupportedModelError
from tests.contracts.architectures import (
    ARCHITECTURES,
    PAD,
    VOCAB,
    scale_weights,
)
from tests.contracts.edges.calls import (
    anatomy,
    config,
    expected,
    fresh,
    greedy,
    prompt,
    refusal_allowed,
)
from tests.device.placement import placed


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


INKLINGS = ("Inkling", "Inkling2", "Inkling2Loop")


def inkling() -> dict[str, Any]:
    return small(
        num_key_value_heads=2,
        head_dim=8,
        swa_num_attention_heads=2,
        swa_num_key_value_heads=2,
        swa_head_dim=8,
        unpadded_vocab_size=VOCAB,
        moe_intermediate_size=24,
        n_routed_experts=4,
        num_experts_per_tok=2,
        layer_types=["hybrid_sliding", "hybrid"],
    )


OF_THE_HOST = pytest.mark.host("refused before anything is computed")
UNSERVED = {
    # name: class of the configuration, its arguments, what the refusal must speak of
    "mla": ("DeepseekV3Config", latent(), "MLA|latent"),
    "dsa": ("DeepseekV32Config", indexed(), "DSA|MLA|sparse|latent"),
    "glm_dsa": ("GlmMoeDsaConfig", indexed(), "DSA|MLA|sparse|latent"),
    "kimi_linear": ("KimiLinearConfig", small(), "MLA"),
    **{name: (f"{name}TextConfig", inkling(), "position_bias") for name in INKLINGS},
    "own_cache": ("MiniMaxConfig", small(num_local_experts=2), "cache of its own class alone"),
    "own_attention": ("BloomConfig", {"vocab_size": VOCAB, "hidden_size": 48, "n_head": 2}, "."),
    "recurrent": ("MambaConfig", {"vocab_size": VOCAB, "hidden_size": 48}, "."),
}


@OF_THE_HOST
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


@OF_THE_HOST
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


def drawn_image() -> Tensor:
    return placed(torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0)))


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
    model = placed(model)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = PAD
    ids = prompt().clamp(max=VOCAB - 2)
    ids[:, 2:6] = VOCAB - 1
    image = drawn_image()
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
    model = placed(model)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = PAD
    ids = prompt().clamp(max=VOCAB - 2)
    ids[:, 8:12] = VOCAB - 1
    inputs = {
        "pixel_values": drawn_image(),
        "token_type_ids": (ids == VOCAB - 1).long(),
    }
    want = greedy(model, ids, DynamicCache(config=model.config), **inputs)
    with refusal_allowed("image"), hkv.attach(model, config()) as runtime:
        assert torch.equal(greedy(model, ids, runtime.cache(), **inputs), want)
