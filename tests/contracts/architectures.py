"""Ten tiny random models, one per attention layout that the runtime must serve.

Weights are scaled so that attention is selective and greedy tokens differ: a token lost or counted
twice changes the output, while rounding does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from tests.device.placement import placed

VOCAB = 128
SLIDING_WINDOW = 12
HEAD_DIM = 24
PAD = 0

_LOGIT_GAIN = 3.0


def _common(heads: int, kv_heads: int, layers: int = 2) -> dict[str, object]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": heads * HEAD_DIM // 2,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "pad_token_id": PAD,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _llama() -> PretrainedConfig:
    return LlamaConfig(**_common(6, 2, layers=3), head_dim=HEAD_DIM)


def _qwen2() -> PretrainedConfig:  # biased projections
    return Qwen2Config(**{**_common(4, 2), "hidden_size": 4 * HEAD_DIM})


def _qwen3() -> PretrainedConfig:  # normed queries and keys
    return Qwen3Config(**_common(6, 2), head_dim=HEAD_DIM)


def _mistral() -> PretrainedConfig:  # every layer slides: no tier of ours
    return MistralConfig(**_common(4, 2), head_dim=HEAD_DIM, sliding_window=SLIDING_WINDOW)


def _phi3() -> PretrainedConfig:  # one fused projection, no grouping
    return Phi3Config(**{**_common(4, 4), "hidden_size": 4 * HEAD_DIM})


def _gemma2() -> PretrainedConfig:  # soft-capped scores
    return Gemma2Config(
        **_common(6, 3, layers=3),
        head_dim=HEAD_DIM,
        query_pre_attn_scalar=HEAD_DIM,
        attn_logit_softcapping=4.0,
        final_logit_softcapping=30.0,
        sliding_window=SLIDING_WINDOW,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
    )


def _gemma3() -> PretrainedConfig:  # another rotary base in the layers that slide
    return Gemma3TextConfig(
        **_common(6, 2, layers=3),
        head_dim=HEAD_DIM,
        query_pre_attn_scalar=HEAD_DIM,
        sliding_window=SLIDING_WINDOW,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
    )


def _glm4() -> PretrainedConfig:  # rotates half of each head
    return Glm4Config(**_common(6, 2), head_dim=HEAD_DIM, attention_bias=True)


def _olmo2() -> PretrainedConfig:  # norms across heads, after the sublayers
    return Olmo2Config(**{**_common(4, 2), "hidden_size": 4 * HEAD_DIM})


def _gpt_oss() -> PretrainedConfig:  # learned sinks, experts
    return GptOssConfig(
        **_common(6, 2, layers=3),
        head_dim=HEAD_DIM,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=SLIDING_WINDOW,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    )


ARCHITECTURES: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "mistral": _mistral,
    "phi3": _phi3,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "glm4": _glm4,
    "olmo2": _olmo2,
    "gpt_oss": _gpt_oss,
}


def build(name: str) -> PreTrainedModel:
    """The model called `name`, in float32 with eager attention, where the test computes.

    One object per session; on an emulated device one as long as it is there.
    """
    return placed(build_on_host(name))


@cache
def build_on_host(name: str) -> PreTrainedModel:
    config = ARCHITECTURES[name]()
    with torch.random.fork_rng():
        torch.manual_seed(sorted(ARCHITECTURES).index(name))
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="eager"
        )
        scale_weights(model)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = PAD
    return model.eval()


@torch.no_grad()
def scale_weights(model: PreTrainedModel) -> None:
    """Redraws every weight: products of unit size, queries and keys larger, nothing zero."""
    for name, weight in model.named_parameters():
        if name.endswith("sinks"):
            weight.copy_(torch.randn_like(weight) + 1.0)
        elif "norm" in name and weight.ndim == 1:  # Gemma stores gain - 1, so draw a difference
            offset = 0.4 if "q_norm" in name or "k_norm" in name else 0.0
            weight.add_(torch.empty_like(weight).uniform_(-0.3, 0.3) + offset)
        elif weight.ndim == 1:
            weight.add_(torch.randn_like(weight) * 0.3)
        elif "embed" in name:
            weight.copy_(torch.randn_like(weight))
        else:
            weight.copy_(torch.randn_like(weight) * _gain(name) / _inputs(weight) ** 0.5)


def _inputs(weight: Tensor) -> int:
    # Linear layers are [out, in]; stacked experts [expert, in, out]; convolutions [out, ...].
    return weight[0].numel() if weight.ndim > 3 else weight.shape[1]


def _gain(name: str) -> float:
    if "lm_head" in name:
        return _LOGIT_GAIN
    return 1.4 if any(part in name for part in ("q_proj", "k_proj", "qkv_proj")) else 1.0


@contextmanager
def strict_torch() -> Iterator[None]:
    """One thread; memory that nobody wrote holds NaN, so that reading it is seen."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # fills what `torch.empty` returns
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)
