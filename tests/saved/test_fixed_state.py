"""Contexts of models whose other layers keep one state for all tokens: linear attention, Mamba."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel, cache_utils

import hybrid_kv as hkv
from hybrid_kv.api.building import build_context
from hybrid_kv.errors import ConfigError, FileFormatError
from hybrid_kv.saved.file_blocks import hash_of
from hybrid_kv.saved.manifest import read_manifest
from hybrid_kv.saved.own_layers import is_own, tensors_of
from tests.contracts.architectures import scale_weights
from tests.contracts.edges.further_models import MAMBA, further_config
from tests.kit import cache_of
from tests.models.folder import WORDS
from tests.saved.scene import SMALL, blocks_of, flip, loaded, rewrite

TEXT = " ".join(["sea sky sun ice oak elm bee fox owl sea", "oak fox bee sky"] * 8)
TOKENS = 14 * 8
LONG = f"{TEXT} {TEXT} {TEXT}"
"""So many tokens that a folder of contexts takes them."""
QUESTIONS = ["oak", "fox sea owl"]
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "qwen3_next": {"layer_types": ["linear_attention", "linear_attention", "full_attention"]},
    "lfm2": {"layer_types": ["full_attention", "conv", "full_attention", "conv"]},
    "bamba": {"attn_layer_indices": [1]},
    "jamba": {"attn_layer_period": 3},
    "granitemoehybrid": {
        **MAMBA,
        "layer_types": ["mamba", "attention", "mamba"],
        "shared_intermediate_size": 24,
    },
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mlp", "mamba"],
        **{"mamba_num_heads": 4, "mamba_head_dim": 24, "ssm_state_size": 8, "n_groups": 1},
        **{"chunk_size": 8, "head_dim": 8},
    },
    "falcon_h1": {},
    "zamba2": {"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]},
}
WHOLE = {"bamba", "jamba", "granitemoehybrid", "nemotron_h", "falcon_h1", "zamba2"}
"""Models of Mamba, whose layers take a prompt whole."""


@pytest.fixture(scope="module", params=MODELS)
def plain(request: pytest.FixtureRequest) -> PreTrainedModel:
    changes = MODELS[request.param]
    config = further_config(
        request.param,
        vocab_size=len(WORDS),
        num_hidden_layers=len(
            changes.get("layer_types", changes.get("layers_block_type", [0, 1, 2]))
        ),
        max_position_embeddings=4096,
        **changes,
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
        scale_weights(model)
    return model.eval()


def answers(context: hkv.Context) -> list[list[int]]:
    return [context.ask(question, max_new_tokens=3).token_ids for question in QUESTIONS]


def states(context: hkv.Context) -> dict[str, torch.Tensor]:
    return {
        f"{number}-{name}": state.clone()
        for number, layer in enumerate(cache_of(context).layers)
        if is_own(layer)
        for name, state in tensors_of(layer).items()
    }


HYBRID: dict[str, Any] = {**SMALL, "cold": {"top_k": 5}}


@pytest.mark.parametrize("method", ["hybrid", "full", "streaming_llm"])
def test_an_opened_context_has_the_states_and_answers(
    plain: PreTrainedModel, method: str, tmp_path: Path
) -> None:
    settings = {"hybrid": HYBRID, "streaming_llm": SMALL}.get(method, {})
    with loaded(plain, method, **settings) as llm:
        context = llm.context(TEXT)
        expected, held = answers(context), states(context)
        assert len(set(map(tuple, expected))) == len(expected), "the model answers differently"
        context.save(tmp_path / "a.hkv")
        opened = llm.open(tmp_path / "a.hkv")
        cache_of(opened).check_integrity()
        assert states(opened).keys() == held.keys()
        assert all(torch.equal(states(opened)[name], state) for name, state in held.items())
        assert answers(opened) == expected
        left = states(opened)
        assert all(torch.equal(left[name], state) for name, state in held.items()), "a trace"
        opened.append("bee fox owl")
        context.append("bee fox owl")
        assert answers(opened) == (grown := answers(context)) != expected
        opened.save(tmp_path / "a.hkv")
        assert answers(llm.open(tmp_path / "a.hkv")) == grown


def test_a_fork_goes_on_alone(plain: PreTrainedModel, tmp_path: Path) -> None:
    with loaded(plain, "hybrid", **HYBRID) as llm:
        llm.context(TEXT).save(tmp_path / "a.hkv")
        opened = llm.open(tmp_path / "a.hkv")
        expected = answers(opened)
        fork = opened.fork()
        fork.append("owl owl bee")
        assert answers(opened) == expected != answers(fork)


def test_a_build_that_was_interrupted_goes_on(plain: PreTrainedModel, tmp_path: Path) -> None:
    if plain.config.model_type in WHOLE:
        pytest.skip("layers of Mamba take a prompt whole")
    with loaded(plain, "hybrid", **HYBRID) as llm:
        expected = answers(llm.context(TEXT))
        last = plain.model.layers[-1]
        undo = last.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyError("end")))
        with pytest.raises(KeyError, match="end"):
            build_context(llm, TEXT, tmp_path / "a.hkv", every_s=0)
        undo.remove()
        built = build_context(llm, TEXT, tmp_path / "a.hkv", every_s=0)
        assert built.found_layers == built.num_layers - 1 == len(plain.model.layers) - 1
        assert answers(llm.open(tmp_path / "a.hkv")) == expected


def test_what_a_state_cannot_follow_is_refused(plain: PreTrainedModel) -> None:
    with loaded(plain, "hybrid", **HYBRID) as llm:
        context = llm.context(TEXT)
        cache, expected = cache_of(context), answers(context)
        assert not cache.can_crop
        with pytest.raises(
            ConfigError, match=r"keeps one state for all its tokens .* fork the cache"
        ):
            cache.crop(-3)
        cache.crop(0)
        cache.check_integrity()
        assert cache.get_seq_length() == TOKENS
        assert answers(context) == expected


def test_a_folder_of_contexts_takes_whole_ones_only(plain: PreTrainedModel, tmp_path: Path) -> None:
    config = hkv.HybridConfig(method="hybrid", index_build="wait", **HYBRID)
    for _ in range(2):
        with loaded(plain, "hybrid", **HYBRID) as other:
            expected = answers(other.context(LONG))
        with hkv.load(plain, tokenizer=other.tokenizer, config=config, cache_dir=tmp_path) as llm:
            assert answers(llm.context(LONG)) == expected
            assert llm.prefixes is not None
            hits = llm.prefixes.registry.counters.hits
    assert hits == 1


def replace_block(path: Path, file: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Writes other tensors to a block of a saved context, with the manifest of these."""
    save_file(tensors, file)
    facts = {"num_bytes": file.stat().st_size, "sha256": hash_of(file)}
    rewrite(path, lambda content: content["blocks"].update({file.name: facts}))


def test_damaged_states_are_refused(plain: PreTrainedModel, tmp_path: Path) -> None:
    with loaded(plain, "hybrid", **HYBRID) as llm:
        path = tmp_path / "a.hkv"
        llm.context(TEXT).save(path)
        block = read_manifest(path).states[0].states
        file = blocks_of(path) / block
        whole = load_file(file)
        flip(file, -1)
        with pytest.raises(FileFormatError, match="checksum"):
            llm.open(path, verify=False)

        name = next(iter(whole))
        for wrong, sentence in (
            ({"conv-7": whole[name]}, r"states must be of conv-0, .*, got conv-7"),
            ({name: whole[name].repeat_interleave(2, 0)}, "states must be of one row"),
            ({}, "states must be of conv-0"),
        ):
            replace_block(path, file, wrong)
            with pytest.raises(FileFormatError, match=sentence):
                llm.open(path)
        rewrite(path, lambda content: content["states"].pop())
        with pytest.raises(FileFormatError, match="other layers than the model"):
            llm.open(path)


def test_damaged_keys_beside_a_state_are_refused(plain: PreTrainedModel, tmp_path: Path) -> None:
    if plain.config.model_type != "falcon_h1":
        pytest.skip("no layer has both, or it is tried with another model")
    with loaded(plain, "hybrid", **HYBRID) as llm:
        path = tmp_path / "a.hkv"
        llm.context(TEXT).save(path)
        block = read_manifest(path).states[1].states
        file = blocks_of(path) / block
        whole = load_file(file)
        for wrong, sentence in (
            ({**whole, "values": whole["values"][:, :, 1:].clone()}, "must be of .* tokens, got"),
            ({**whole, "keys": whole["keys"].half()}, "must be torch.float32, got torch.float16"),
            ({name: x for name, x in whole.items() if name != "keys"}, "it lacks 'keys'"),
        ):
            replace_block(path, file, wrong)
            with pytest.raises(FileFormatError, match=sentence):
                llm.open(path)


def test_older_transformers_have_no_layer_without_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(cache_utils, "DummyLayer", raising=False)
    monkeypatch.delitem(sys.modules, "hybrid_kv.saved.own_layers")  # it is run as if new
    own_layers = runpy.run_module("hybrid_kv.saved.own_layers")
    assert not own_layers["is_own"](cache_utils.DynamicLayer())
