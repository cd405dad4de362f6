"""Saved contexts that a prompt may begin with; vLLM is not needed."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from benchmarks.vllm_tokens.models import VOCAB, save_random
from hybrid_kv.errors import ConfigError, FileFormatError
from hybrid_kv.saved.identity import model_identity
from hybrid_kv.saved.manifest import Manifest, write_manifest
from hybrid_kv.vllm.contexts import SavedPrefixes, checkpoint_identity, saved_layers
from tests.vllm.prefixes import save_prefix

FLOAT = torch.float32


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_random("llama", folder)
    return folder


def ids(count: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(VOCAB) for _ in range(count)]


def prefixes(model: Path, folder: Path, **other: Any) -> SavedPrefixes:
    facts, weights = checkpoint_identity(model, FLOAT, weights=True)
    own = {"facts": facts, "weights": weights, "dtype": "float32"} | other
    return SavedPrefixes(folder, **own)


@pytest.fixture(autouse=True)
def heard(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Where vLLM is, it keeps the messages below its own name to itself."""
    log = logging.getLogger("vllm.hybrid_kv")
    before = log.level, log.propagate
    log.setLevel(logging.WARNING)
    log.propagate = False
    log.addHandler(caplog.handler)
    yield
    log.removeHandler(caplog.handler)
    log.level, log.propagate = before


def said(log: pytest.LogCaptureFixture) -> list[str]:
    return [one.message for one in log.records if one.name == "vllm.hybrid_kv"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_a_checkpoint_is_the_model_that_is_loaded_from_it(
    tmp_path: Path, dtype: torch.dtype, tied: bool
) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 97}
    config = LlamaConfig(
        **sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    loaded = model_identity(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype))
    facts, weights = checkpoint_identity(tmp_path, dtype, weights=True)
    assert facts == loaded.facts
    assert weights == loaded.weights
    assert weights != checkpoint_identity(tmp_path, torch.float16, weights=True)[1]


def test_weights_that_cannot_be_compared_are_told(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((llama / "config.json").read_text())
    assert checkpoint_identity(tmp_path, FLOAT, weights=False)[1] is None
    with pytest.raises(ConfigError, match=r"must be safetensors .* set check_weights to false"):
        checkpoint_identity(tmp_path, FLOAT, weights=True)


def test_the_context_that_shares_most_is_found(llama: Path, tmp_path: Path) -> None:
    base, found = ids(600), prefixes(llama, tmp_path)
    assert found.best(torch.tensor(base)) is None
    save_prefix(llama, tmp_path / "short.hkv", base[:200])
    (tmp_path / "deep").mkdir()
    save_prefix(llama, tmp_path / "deep" / "long.hkv", [*base[:500], (base[500] + 1) % VOCAB])
    one, shared = found.best(torch.tensor(base)) or pytest.fail("contexts may come later")
    assert (one.path.name, shared) == ("long.hkv", 500)
    assert found.best(torch.tensor(ids(300, seed=1))) is None
    alone = prefixes(llama, tmp_path / "short.hkv")
    assert (alone.best(torch.tensor(base)) or pytest.fail("a context itself"))[1] == 200


def test_keys_and_values_of_a_span(llama: Path, tmp_path: Path) -> None:
    base = ids(100)
    path = save_prefix(llama, tmp_path / "a.hkv", base)
    one, _ = prefixes(llama, tmp_path).best(torch.tensor(base)) or pytest.fail("it is there")
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=FLOAT)
    with torch.no_grad():
        cache = model(torch.tensor([base])).past_key_values
    for number, k, v in saved_layers(path, one.manifest.folder, slice(32, 96)):
        own = cache.layers[number]
        torch.testing.assert_close(k, own.keys[0, :, 32:96].transpose(0, 1))
        torch.testing.assert_close(v, own.values[0, :, 32:96].transpose(0, 1))
    assert number == 1


def test_a_context_that_was_replaced_is_not_loaded(llama: Path, tmp_path: Path) -> None:
    path = save_prefix(llama, tmp_path / "a.hkv", ids(100))
    one, _ = prefixes(llama, tmp_path).best(torch.tensor(ids(100))) or pytest.fail("it is there")
    save_prefix(llama, path, ids(100))
    with pytest.raises(FileFormatError, match="was replaced"):
        list(saved_layers(path, one.manifest.folder, slice(0, 64)))


@pytest.mark.parametrize(
    ("settings", "engine", "why"),
    [
        ({}, {"dtype": "bfloat16"}, "dtype float32, the engine has bfloat16"),
        ({}, {"weights": "0" * 64}, "other weights; check_weights: false"),
        ({}, {"facts": {"model_type": "llama"}}, "a model of head_dim 64, this one has None"),
        ({"compress": "int8"}, {}, "not those of full attention"),
        (
            {"method": "streaming_llm", "window_tokens": 64, "sink_tokens": 16},
            {},
            "its method has dropped entries",
        ),
    ],
)
def test_contexts_of_something_else_are_not_taken(
    llama: Path,
    tmp_path: Path,
    settings: Any,
    engine: Any,
    why: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    save_prefix(llama, tmp_path / "a.hkv", ids(300), **settings)
    found = prefixes(llama, tmp_path, **engine)
    for _ in range(2):
        assert found.best(torch.tensor(ids(300))) is None
    (told,) = said(caplog)
    assert why in told


def test_a_model_with_windows_is_not_served(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_random("gemma", tmp_path)
    save_prefix(tmp_path, tmp_path / "a.hkv", ids(300))
    assert prefixes(tmp_path, tmp_path).best(torch.tensor(ids(300))) is None
    assert "newest tokens or a state alone" in said(caplog)[0]


def test_a_context_of_hybrid_is_exact_up_to_its_first_sparse_step(
    llama: Path, tmp_path: Path
) -> None:
    settings = {"method": "hybrid", "window_tokens": 32, "sink_tokens": 16, "page_size": 16}
    base = ids(400)
    path = save_prefix(llama, tmp_path / "a.hkv", base, **settings)
    found = prefixes(llama, tmp_path).best(torch.tensor(base)) or pytest.fail("it keeps all")
    assert found[1] == 400
    assert sum(k.shape[0] for _, k, _ in saved_layers(path, found[0].manifest.folder, slice(400)))
    whole = json.loads((path / "manifest.json").read_text())
    later = Manifest.model_validate(whole["content"] | {"inexact_from": 250})
    (path / "manifest.json").unlink()
    write_manifest(path / "manifest.json", later)
    assert (prefixes(llama, tmp_path).best(torch.tensor(base)) or (None, 0))[1] == 250


def test_weights_need_not_be_compared(llama: Path, tmp_path: Path) -> None:
    save_prefix(llama, tmp_path / "a.hkv", ids(100))
    assert prefixes(llama, tmp_path, weights=None).best(torch.tensor(ids(100))) is not None


@pytest.mark.parametrize("what", ["bytes", "manifest"])
def test_a_damaged_context_is_not_taken(
    llama: Path, tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = save_prefix(llama, tmp_path / "a.hkv", ids(200))
    whole = save_prefix(llama, tmp_path / "b.hkv", ids(150))
    if what == "bytes":
        (block,) = path.glob("blocks-*/layer-0001.safetensors")
        raw = bytearray(block.read_bytes())
        raw[-5] ^= 1
        block.write_bytes(raw)
    else:
        manifest = json.loads((path / "manifest.json").read_text())
        manifest["content"]["num_tokens"] = 999
        (path / "manifest.json").write_text(json.dumps(manifest))
    one, shared = prefixes(llama, tmp_path).best(torch.tensor(ids(200))) or pytest.fail(
        "b is whole"
    )
    assert (one.path, shared) == (whole, 150)
    assert "is damaged" in said(caplog)[0]


def test_a_folder_that_is_not_there(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="contexts must be a folder with saved contexts"):
        prefixes(llama, tmp_path / "none")
