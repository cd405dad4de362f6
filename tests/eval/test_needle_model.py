"""The shipped needle model: its files, its configuration, and that it answers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

import hybrid_kv
from benchmarks.common.dense import DenseReader, sinks_and_window
from hybrid_kv.eval.needle import Sample, is_correct, make_sample
from hybrid_kv.eval.needle.facts import STOP, TOKENS, VOCAB_SIZE

FOLDER = Path(hybrid_kv.__file__).parent / "assets" / "needle"


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    loaded = AutoModelForCausalLM.from_pretrained(FOLDER)
    assert isinstance(loaded, LlamaForCausalLM)
    return loaded.eval()


@pytest.fixture(scope="module")
def in_float32() -> LlamaForCausalLM:
    """The same weights: many CPUs take a third of the time for it."""
    loaded = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    assert isinstance(loaded, LlamaForCausalLM)
    return loaded.eval()


@pytest.fixture(scope="module")
def key_value_sample() -> Sample:
    return make_sample("key_value", 1777, num_records=48, num_questions=40, seed=91)


def test_folder_is_small_and_complete() -> None:
    files = {path.name: path.stat().st_size for path in FOLDER.iterdir()}
    assert {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "training.json",
    } == set(files)
    assert sum(files.values()) <= 15 * 2**20, files


def test_configuration_is_a_plain_llama(model: LlamaForCausalLM) -> None:
    config = model.config
    assert config.model_type == "llama"
    assert config.vocab_size == VOCAB_SIZE
    assert config.max_position_embeddings == 262_144
    assert config.rope_parameters["rope_type"] == "default"
    assert config.rope_parameters["rope_theta"] == 1e12
    assert config.num_attention_heads % config.num_key_value_heads == 0
    assert config.tie_word_embeddings
    assert model.dtype == torch.bfloat16
    assert STOP in model.generation_config.eos_token_id


def test_tokenizer_knows_the_language() -> None:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    assert tokenizer.convert_ids_to_tokens(list(range(VOCAB_SIZE))) == list(TOKENS)
    assert tokenizer.decode(tokenizer.encode("key 3f a0: 11.")) == "key 3f a0: 11."


def test_training_report_is_filled() -> None:
    report = json.loads((FOLDER / "training.json").read_text(encoding="utf-8"))
    assert {"seed", "steps", "tokens", "wall_s", "accuracy"} <= set(report)
    assert report["wall_s"] < 3600


@pytest.mark.parametrize(("tokens", "seed"), [(1024, 11), (1500, 12), (3000, 13)])
def test_key_value_questions_are_answered(model: LlamaForCausalLM, tokens: int, seed: int) -> None:
    sample = make_sample("key_value", tokens, num_records=24, num_questions=24, seed=seed)
    accuracy = DenseReader(model, sample.context).accuracy(sample.questions)
    assert accuracy >= 0.99, f"{accuracy:.3f} of {len(sample.questions)} questions"


@pytest.mark.parametrize(
    ("task", "questions", "least"),
    [
        ("key_value", 64, 0.99),
        ("multi_value", 16, 0.9),
        ("multi_query", 16, 0.9),
        ("variable_tracking", 16, 0.9),
        ("most_frequent", 8, 0.9),
    ],
)
@pytest.mark.parametrize("records", [64, 128])
def test_questions_about_many_records_are_answered(
    model: LlamaForCausalLM,
    in_float32: LlamaForCausalLM,
    task: str,
    questions: int,
    least: float,
    records: int,
) -> None:
    """The most records in bfloat16, as they are shipped; half as many in float32."""
    sample = make_sample(task, 16 * records, num_records=records, num_questions=questions, seed=14)
    reader = DenseReader(model if records == 128 else in_float32, sample.context)
    accuracy = reader.accuracy(sample.questions)
    assert accuracy >= least, f"{accuracy:.3f} of {len(sample.questions)} questions"


def test_pass_code_is_found(model: LlamaForCausalLM, in_float32: LlamaForCausalLM) -> None:
    right = []
    for seed in range(10):
        sample = make_sample("passkey", 1024 + 7 * seed, num_records=24, seed=seed)
        reader = DenseReader(model if seed < 3 else in_float32, sample.context)
        right.append(reader.accuracy(sample.questions))
    assert np.mean(right) >= 0.99, right


def test_questions_need_the_far_context(model: LlamaForCausalLM, key_value_sample: Sample) -> None:
    num_tokens = len(key_value_sample.context)
    visible = sinks_and_window(num_tokens, sink_tokens=4, window_tokens=64)
    accuracy = DenseReader(model, key_value_sample.context).accuracy(
        key_value_sample.questions, visible
    )
    assert accuracy <= 0.15, f"{accuracy:.3f} with 68 of {num_tokens} tokens visible"


def test_own_reader_agrees_with_generate(in_float32: LlamaForCausalLM) -> None:
    sample = make_sample("multi_query", 700, num_records=12, num_questions=2, seed=8)
    reader = DenseReader(in_float32, sample.context, chunk_tokens=192)
    for question, answer in zip(sample.questions, reader.answer(sample.questions), strict=True):
        ids = torch.tensor([[*sample.context.tolist(), *question.ids]])
        new = in_float32.generate(ids, max_new_tokens=len(question.answer), do_sample=False)
        generated = tuple(new[0, ids.shape[1] :].tolist())
        assert generated == answer[: len(generated)]
        assert is_correct(question, generated) == is_correct(question, answer)


def test_generation_stops_by_itself(model: LlamaForCausalLM) -> None:
    sample = make_sample("key_value", 500, num_records=8, seed=2)
    question = sample.questions[0]
    ids = torch.tensor([[*sample.context.tolist(), *question.ids]])
    new = model.generate(ids)[0, ids.shape[1] :].tolist()
    assert tuple(new) == question.answer
