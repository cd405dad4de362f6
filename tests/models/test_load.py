from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import hybrid_kv as hkv
from hybrid_kv.errors import ConfigError, ModelNotFoundError
from hybrid_kv.models import load
from hybrid_kv.models.load import load_model, load_tokenizer, resolve_device, resolve_dtype
from hybrid_kv.models.shapes import SHAPES, random_config
from tests.models.folder import save_model


def test_a_folder_is_loaded_in_its_own_dtype(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", torch.bfloat16)
    model = load_model(folder, device="cpu")
    assert model.dtype == torch.bfloat16
    assert not model.training
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    assert tokenizer("sea sky")["input_ids"] == [3, 4]
    assert load_model(str(folder), dtype="float32").dtype == torch.float32


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"model folder '.*nowhere' does not exist; check"):
        load_model(tmp_path / "nowhere")


def test_a_folder_without_configuration_says_so(tmp_path: Path) -> None:
    with pytest.raises(
        ModelNotFoundError, match=r"has no config\.json; point to a folder saved by"
    ):
        load_model(tmp_path)


MISSING = (
    "model 'nobody/nothing' cannot be loaded: there is no such folder, the hub's cache has no "
    "model of that name, and {}; check the path, or download the model and give its folder"
)


def test_a_name_that_is_no_folder_fails_at_once_where_the_hub_is_forbidden() -> None:
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    with pytest.raises(ModelNotFoundError) as missing:
        hkv.load("nobody/nothing")
    assert str(missing.value) == MISSING.format("HF_HUB_OFFLINE forbids to ask the hub")


def test_a_name_that_is_no_folder_fails_at_once_without_a_network() -> None:
    """Regression: transformers tries six times for each file."""
    code = (
        "import hybrid_kv\n"
        "try:\n"
        "    hybrid_kv.load('nobody/nothing')\n"
        "except hybrid_kv.errors.ModelNotFoundError as error:\n"
        "    print(error)\n"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "0"}
    environment["HF_ENDPOINT"] = "http://127.0.0.1:9"  # nobody listens
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
    )
    assert run.stdout.startswith(MISSING.split("{}", maxsplit=1)[0] + "the hub cannot be reached")
    assert run.stdout.endswith("; check the path, or download the model and give its folder\n")
    assert "Retrying" not in run.stderr


def test_a_name_that_can_be_no_hub_id_is_refused() -> None:
    with pytest.raises(ModelNotFoundError, match="'a/b/c' cannot be loaded: there is no such fold"):
        load_model("a/b/c")


def test_a_cached_model_is_read_without_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "try_to_load_from_cache", lambda *_: str(tmp_path / "config.json"))
    assert load.hub_path("somebody/something") == str(tmp_path)


def test_an_unknown_shape_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="unknown shape 'llama-3-8'; did you mean 'llama-3-8b'"):
        load_model("random:llama-3-8")


@pytest.mark.parametrize("layers", [0, 3])
def test_layers_outside_a_shape_are_refused(layers: int) -> None:
    with pytest.raises(ConfigError, match=rf"layers must be 1\.\.2 for tiny, got {layers}"):
        load_model("random:tiny", layers=layers)


def test_layers_of_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="layers can be set for random:SHAPE models only"):
        load_model(tmp_path, layers=1)


def test_random_weights_follow_their_seed_and_leave_the_global_one_alone() -> None:
    state = torch.random.get_rng_state()
    one, other, third = (load_model("random:tiny", layers=1, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), state)
    first = next(one.parameters())
    assert torch.equal(first, next(other.parameters()))
    assert not torch.equal(first, next(third.parameters()))
    assert first.dtype == torch.bfloat16


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_is_a_model_that_transformers_can_build(shape: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(random_config(shape, layers=1))
    assert model.config.num_hidden_layers == 1


@pytest.mark.parametrize(
    ("device", "text"),
    [
        ("cuda:99", r"device 'cuda:99' is not there, this machine has \d+ CUDA devices; use 'cpu'"),
        ("gpu", "device must be like 'cpu' or 'cuda:0', got 'gpu'"),
        ("meta", "device must be a 'cpu' or 'cuda' device, got 'meta'"),
    ],
)
def test_a_device_that_is_not_there_is_refused(device: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        resolve_device(device)


def test_an_unknown_dtype_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"unknown dtype 'float'; did you mean 'float(16|32)'"):
        resolve_dtype("float")
    assert resolve_dtype("float16") == torch.float16
    assert resolve_dtype(None) is None
