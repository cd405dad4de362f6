"""Weights that do not fit their configuration, or cannot be read, are one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel
from transformers.utils import logging

import hybrid_kv as hkv
from hybrid_kv.api import llm as llm_module
from hybrid_kv.errors import CapacityError, ConfigError, ModelNotFoundError
from hybrid_kv.models import checkpoint, load
from hybrid_kv.models.load import load_model, load_tokenizer
from tests.models.folder import model as tiny
from tests.models.folder import save_model, tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_model(tmp_path / "model")


def set_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Saves the weights again after `change` has worked on them by name."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file, metadata={"format": "pt"})


def refusal(folder: Path) -> str:
    with pytest.raises(ModelNotFoundError) as caught:
        load_model(folder, device="cpu")
    text = str(caught.value)
    assert text.startswith(f"model '{folder}' ")
    assert "\n" not in text
    return text


def test_a_layer_without_weights_is_refused(folder: Path) -> None:
    """A config with one layer too many generated text from random numbers."""
    set_config(folder, num_hidden_layers=3)
    assert (
        "has weights that do not fit its config.json: 9 tensors are missing from the files "
        "(model.layers.2.input_layernorm.weight, model.layers.2.mlp.down_proj.weight, "
        "model.layers.2.mlp.gate_proj.weight and 6 more); get both from one place, or load the "
        "model with transformers and pass it in place of its name"
    ) in refusal(folder)


def test_weights_without_a_layer_are_refused(folder: Path) -> None:
    set_config(folder, num_hidden_layers=1)
    assert (
        "9 tensors are unknown to the model (model.layers.1.input_layernorm.weight, "
        "model.layers.1.mlp.down_proj.weight, model.layers.1.mlp.gate_proj.weight and 6 more)"
    ) in refusal(folder)


def test_weights_of_another_shape_are_refused_with_both_shapes(folder: Path) -> None:
    set_config(folder, intermediate_size=72)
    text = refusal(folder)
    assert (
        "6 tensors are of another shape (model.layers.0.mlp.down_proj.weight is [48, 64] instead "
        "of [48, 72], model.layers.0.mlp.gate_proj.weight is [64, 48] instead of [72, 48], "
    ) in text
    assert "missing" not in text


def test_one_tensor_too_many_and_one_too_few_are_both_named(folder: Path) -> None:
    def move(weights: dict[str, Tensor]) -> None:
        weights["model.layers.0.self_attn.q_norm.weight"] = weights.pop("model.norm.weight")

    rewrite(folder, move)
    assert (
        ": 1 tensor is missing from the files (model.norm.weight); 1 tensor is unknown to the "
        "model (model.layers.0.self_attn.q_norm.weight); get both"
    ) in refusal(folder)


def test_layers_are_named_in_their_order() -> None:
    names = {f"model.layers.{layer}.weight" for layer in (10, 2, 9, 31)}
    told = checkpoint._listed("lost", names)
    assert told.index("layers.2.") < told.index("layers.9.") < told.index("layers.10.")
    assert told.endswith(" and 1 more)")


@pytest.mark.parametrize("kept", [0, 5, 40, 1500, 25_000])
def test_truncated_weights_are_refused(folder: Path, kept: int) -> None:
    file = folder / "model.safetensors"
    assert file.stat().st_size > kept
    file.write_bytes(file.read_bytes()[:kept])
    assert "cannot be loaded: " in refusal(folder)


def test_a_header_that_is_none_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00not a header")
    assert refusal(folder).endswith("; check the folder or the hub id")


def test_missing_weights_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "model.safetensors" in refusal(folder)


def sharded(folder: Path) -> list[Path]:
    tiny().save_pretrained(folder, max_shard_size="20KB")
    (folder / "model.safetensors").unlink(missing_ok=True)
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 2
    return shards


def test_a_missing_shard_is_refused_by_name(folder: Path) -> None:
    shards = sharded(folder)
    assert load_model(folder, device="cpu").num_parameters() == tiny().num_parameters()
    shards[1].unlink()
    assert shards[1].name in refusal(folder)


def test_a_shard_that_lacks_what_the_index_says_is_refused(folder: Path) -> None:
    shards = sharded(folder)
    weights = load_file(shards[1])
    lost = sorted(weights)[0]
    del weights[lost]
    save_file(weights, shards[1], metadata={"format": "pt"})
    assert lost in refusal(folder)


# What may be missing or left over


def test_a_tied_output_needs_no_weights_of_its_own(tmp_path: Path) -> None:
    config = tiny().config
    config.tie_word_embeddings = True
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    model: Any = load_model(tmp_path, device="cpu")
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_an_output_that_is_not_tied_needs_its_weights(folder: Path) -> None:
    rewrite(folder, lambda weights: weights.pop("lm_head.weight"))
    assert "1 tensor is missing from the files (lm_head.weight)" in refusal(folder)


def test_buffers_that_are_computed_may_lie_in_the_file(folder: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"  # as files of 2023 have it
    rewrite(folder, lambda weights: weights.update({name: torch.ones(12)}))
    assert same_weights(load_model(folder, device="cpu"), tiny())


def test_keys_that_a_class_ignores_may_lie_in_the_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewrite(folder, lambda weights: weights.update({"mtp.0.weight": torch.ones(3)}))
    assert "mtp.0.weight" in refusal(folder)
    monkeypatch.setattr(LlamaForCausalLM, "_keys_to_ignore_on_load_unexpected", {r"^mtp\."})
    assert same_weights(load_model(folder, device="cpu"), tiny())


def test_weights_may_be_stored_in_another_dtype(folder: Path) -> None:
    assert load_model(folder, device="cpu", dtype="bfloat16").dtype == torch.bfloat16


def same_weights(one: PreTrainedModel, other: PreTrainedModel) -> bool:
    theirs = other.state_dict()
    return all(torch.equal(weight, theirs[name]) for name, weight in one.state_dict().items())


def test_every_tensor_goes_straight_to_its_device(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 GB went through host memory on their way to a GPU. The meta device stands in for one."""
    monkeypatch.setattr(load, "resolve_device", lambda device: torch.device("meta"))
    moved: list[object] = []
    monkeypatch.setattr(PreTrainedModel, "to", lambda self, *args, **_: moved.append(args) or self)
    model = load_model(folder)
    assert {weight.device.type for weight in model.parameters()} == {"meta"}
    assert not moved


# What is said


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"num_hidden_layers": "two"}, "num_hidden_layers"),
        ({"model_type": "unheard"}, "unheard"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused_with_the_cause(
    folder: Path, changes: dict[str, Any], told: str
) -> None:
    """Messages were cut at their first line: "Validation error for field 'num_hidden_layers':"."""
    set_config(folder, **changes)
    assert told in refusal(folder)
    if "num_hidden_layers" in changes:
        assert "expected int" in refusal(folder)


def test_a_configuration_that_is_no_json_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    assert "config.json" in refusal(folder)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("first\n\n  then the cause.\n"), "first then the cause"),
        (KeyError("model.norm"), "KeyError 'model.norm'"),
        (ValueError(), "ValueError"),
        (ValueError("word " * 200), ("word " * 80).strip() + " ..."),
    ],
)
def test_reasons_are_one_line_with_the_cause(error: Exception, told: str) -> None:
    assert checkpoint.reason(error) == told


def test_memory_that_runs_out_is_no_damage(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(checkpoint.AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(CapacityError, match="host memory ran out at load"):
        load_model(folder, device="cpu")


def test_transformers_is_as_talkative_as_before(folder: Path) -> None:
    set_config(folder, num_hidden_layers=3)
    before = logging.get_verbosity()
    try:
        logging.set_verbosity(logging.INFO)
        refusal(folder)
        assert logging.get_verbosity() == logging.INFO
    finally:
        logging.set_verbosity(before)


# Tokenizers


def without_tokenizer(folder: Path) -> Path:
    for file in folder.glob("*token*"):
        file.unlink()
    return folder


def test_ids_need_no_tokenizer(folder: Path) -> None:
    """`load(folder)` refused a folder of weights alone."""
    with hkv.load(without_tokenizer(folder), device="cpu") as llm:
        assert len(llm.generate([3, 4, 5], max_new_tokens=3).token_ids) == 3
        with pytest.raises(ConfigError, match=r"text needs a tokenizer, and the model has none \("):
            llm.generate("sea sky")


def test_a_tokenizer_that_is_given_is_used_and_no_other_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm_module, "load_tokenizer", lambda _: pytest.fail("read"))
    with hkv.load(folder, device="cpu", tokenizer=tokenizer()) as llm:
        assert llm.encode("sea sky").tolist() == [[3, 4]]


def test_a_tokenizer_that_is_damaged_is_told_when_text_comes(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("broken")
    with pytest.raises(ModelNotFoundError, match="cannot give its tokenizer: "):
        load_tokenizer(folder)
    with hkv.load(folder, device="cpu") as llm:
        assert llm.generate([3, 4, 5], max_new_tokens=3).token_ids
        with pytest.raises(ConfigError, match="cannot give its tokenizer: "):
            llm.conversation().send("sea sky")
