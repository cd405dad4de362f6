"""A tiny random model with a tokenizer of single words, as `save_pretrained` writes it."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from tests.contracts.architectures import scale_weights

WORDS = ["<pad>", "<eos>", "<unk>", "sea", "sky", "sun", "ice", "oak", "elm", "bee", "fox", "owl"]
EOS = 1
CONTEXT = 256


def tokenizer() -> PreTrainedTokenizerBase:
    vocabulary = {word: idx for idx, word in enumerate(WORDS)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def model(dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=24,
        max_position_embeddings=CONTEXT,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(7)
        built = LlamaForCausalLM(config)
        scale_weights(built)
        with torch.no_grad():
            built.lm_head.weight[:3] = 0  # only words are answered
    return built.to(dtype).eval()


def save_model(folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    model(dtype).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder
