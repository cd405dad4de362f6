"""Weights in 4 bits: `quantization_config` goes through to transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

import hybrid_kv as hkv
from hybrid_kv.models.load import load_model
from scripts.needle.tokenizer import build_tokenizer

bitsandbytes = pytest.importorskip("bitsandbytes", reason="pip install 'hybrid-kv[quant]'")

LINEAR = bitsandbytes.nn.Linear4bit
NF4 = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama whose matrices have the multiples of 32 rows that packed kernels take."""
    path, tokenizer = tmp_path_factory.mktemp("quantised"), build_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        bos_token_id=1,
        eos_token_id=None,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def test_a_quantised_model_generates_alike_with_every_budget_open(folder: Path) -> None:
    settings = {"sink_tokens": 16, "window_tokens": 16, "cold": {"top_k": "all"}}
    configs = (hkv.HybridConfig(method="full"), hkv.HybridConfig(method="hybrid", **settings))
    answers = []
    for config in configs:
        llm = hkv.load(folder, config=config, device="cpu", quantization_config=NF4)
        with llm:
            up = llm.model.get_submodule("model.layers.0.mlp.up_proj")
            assert isinstance(up, bitsandbytes.nn.Linear4bit)
            prompt = torch.arange(2, 102)
            answers.append(llm.generate(prompt, max_new_tokens=12).token_ids)
    assert answers[0] == answers[1]
    assert len(answers[0]) == 12


def test_quantisation_changes_the_weights(folder: Path) -> None:
    """Else the test above would compare the unquantised model with itself."""
    prompt = torch.arange(2, 102)[None]
    logits = []
    for config in (None, NF4):
        with hkv.load(folder, device="cpu", quantization_config=config) as llm, torch.no_grad():
            logits.append(llm.model(prompt).logits)
    assert not torch.allclose(logits[0], logits[1], atol=0.1)


def test_weights_that_were_saved_in_4_bits_are_complete(folder: Path, tmp_path: Path) -> None:
    """Beside each packed matrix lie its scales, which are no tensors that the model does not know.

    The folder says by itself how it is quantised; an argument None overruled that.
    """
    packed = load_model(folder, device="cpu", quantization_config=NF4)
    packed.save_pretrained(tmp_path)
    again = load_model(tmp_path, device="cpu")
    assert isinstance(again.get_submodule("model.layers.0.mlp.up_proj"), LINEAR)
    prompt = torch.arange(2, 102)[None]
    with torch.no_grad():
        assert torch.equal(again(prompt).logits, packed(prompt).logits)
