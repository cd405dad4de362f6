"""vLLM itself with the plug-in: the tokens are those of vLLM alone where all is attended.

`scripts/check_engines` makes an environment that has vLLM.
"""

from __future__ import annotations

import os
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed; run scripts/check_engines")

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # engine and test in one process
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

from vllm import LLM, SamplingParams

from benchmarks.vllm_tokens.models import RANDOM, VOCAB, save_random
from hybrid_kv.errors import ConfigError
from hybrid_kv.vllm.counters import process_counts
from hybrid_kv.vllm.plugin import register

register()  # as vLLM does where the package is installed


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Small random models, whose weights are saved: vLLM's own random ones say the same token."""
    made = {name: tmp_path_factory.mktemp(name) for name in RANDOM}
    for name, folder in made.items():
        save_random(name, folder)
    return made


def engine(folder: Path, settings: dict[str, Any] | None, **options: Any) -> LLM:
    extra = {} if settings is None else {"additional_config": {"hybrid_kv": settings}}
    defaults = {
        "max_model_len": 4096,
        "max_num_batched_tokens": 512,
        "block_size": 128,
        "enforce_eager": True,
        "dtype": "float32",
    }
    return LLM(model=str(folder), skip_tokenizer_init=True, **defaults | extra | options)


def prompts(lengths: list[int], seed: int = 0) -> list[dict[str, list[int]]]:
    draw = random.Random(seed)
    return [{"prompt_token_ids": [draw.randrange(VOCAB) for _ in range(n)]} for n in lengths]


def tokens(llm: LLM, asked: list[Any], count: int = 16, **sampling: Any) -> list[list[int]]:
    plain = {"temperature": 0, "ignore_eos": True, "detokenize": False}
    params = SamplingParams(max_tokens=count, **plain | sampling)
    torch.manual_seed(0)  # a request's own seed ends vLLM's engine on a CPU
    outputs = llm.generate(asked, params, use_tqdm=False)
    return [list(one.token_ids) for output in outputs for one in output.outputs]


LENGTHS = [5, 31, 32, 300, 513, 1100, 77, 2000]


@pytest.mark.parametrize("name", RANDOM)
def test_tokens_are_vllms_where_all_is_attended(folders: dict[str, Path], name: str) -> None:
    asked = prompts(LENGTHS * 3)
    stock = tokens(engine(folders[name], None), asked)
    assert len({tuple(one) for one in stock}) > len(LENGTHS), "the tokens depend on the prompt"
    ours = tokens(engine(folders[name], {"budget": "all"}), asked)
    assert ours == stock


@pytest.fixture(scope="module")
def llama(folders: dict[str, Path]) -> tuple[LLM, LLM]:
    """Engines alone and with the plug-in, with so few blocks that sequences are preempted."""
    few = {"num_gpu_blocks_override": 40, "max_num_seqs": 16}
    return engine(folders["llama"], None, **few), engine(folders["llama"], {"budget": "all"}, **few)


def test_preempted_sequences_go_on(llama: tuple[LLM, LLM]) -> None:
    asked = prompts([700, 600, 500, 400, 650, 720, 580, 610], seed=1)
    stock, ours = (tokens(llm, asked, count=150) for llm in llama)
    assert ours == stock


def test_prefixes_are_shared(llama: tuple[LLM, LLM]) -> None:
    (base,) = prompts([1500], seed=2)
    more = prompts([40, 300, 7], seed=3)
    asked = [
        {"prompt_token_ids": base["prompt_token_ids"] + one["prompt_token_ids"]} for one in more
    ]
    for llm in llama:
        tokens(llm, [base], count=1)
    stock, ours = (tokens(llm, asked) for llm in llama)
    assert ours == stock


def test_several_sequences_of_a_request(llama: tuple[LLM, LLM]) -> None:
    asked = prompts([900], seed=4)
    stock, ours = (tokens(llm, asked, n=2, temperature=0.7) for llm in llama)
    assert ours == stock


def test_an_aborted_request_leaves_nothing(llama: tuple[LLM, LLM]) -> None:
    params = SamplingParams(max_tokens=64, temperature=0, detokenize=False, ignore_eos=True)
    for llm in llama:
        core = llm.llm_engine
        core.add_request("gone", prompts([1200], seed=5)[0], params)
        for _ in range(6):
            core.step()
        core.abort_request(["gone"])
    asked = prompts([1200, 40], seed=6)
    stock, ours = (tokens(llm, asked) for llm in llama)
    assert ours == stock


def layers(llm: LLM) -> list[Any]:
    """Our layers inside an engine of this process."""
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    forward = runner.compilation_config.static_forward_context.values()
    return [one.impl.hybrid for one in forward if getattr(one.impl, "hybrid", None) is not None]


def test_a_search_serves_long_contexts(folders: dict[str, Path]) -> None:
    """With a budget of most entries the first tokens are those of full attention; all were found
    by searches, whose index was learned from these prompts.
    """
    asked = prompts([5600, 6000, 64], seed=7)
    alone = engine(folders["llama"], None, max_model_len=8192)
    assert layers(alone) == [], "without settings vLLM is as it is"
    stock = tokens(alone, asked, count=8)
    llm = engine(folders["llama"], {"budget": "1000", "window_tokens": 128}, max_model_len=8192)
    ours = tokens(llm, asked, count=8)
    assert len(layers(llm)) == 2
    assert all(one.index is not None and int(one.index.coded.sum()) > 5000 for one in layers(llm))
    assert ours[2] == stock[2]
    same = sum(a == b for a, b in zip(ours[0] + ours[1], stock[0] + stock[1], strict=True))
    assert same >= 4
    searched = process_counts()["searched_decodes"]
    assert searched > 0
    assert tokens(alone, asked, count=8) == stock, "each engine keeps its own settings"
    assert process_counts()["searched_decodes"] == searched


def test_engines_of_one_process_look_in_turns_of_their_own(folders: dict[str, Path]) -> None:
    """20 decode steps each time, one look every 2 or every 5 of them."""
    two = [engine(folders["llama"], {"budget": "all", "audit_every": n}) for n in (2, 5)]
    looks = [process_counts()["audit_looks"]]
    for llm in two * 2:
        tokens(llm, prompts([300]), count=21)
        looks.append(process_counts()["audit_looks"])
    assert [later - one for one, later in pairwise(looks)] == [10, 4, 10, 4]


@pytest.mark.parametrize(
    ("settings", "options", "said"),
    [
        ({"budget": "0%"}, {}, "a budget must be"),
        ({"sinks": 3}, {}, "unknown setting 'sinks'; did you mean 'sink_tokens'"),
        ({"method": "h2o"}, {}, "does not run inside vLLM"),
        ({}, {"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype must be auto"),
        (
            {},
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2,
                                    "prompt_lookup_max": 2}},
            "speculative_config must be None",
        ),
    ],
)  # fmt: skip
def test_refusals(
    folders: dict[str, Path], settings: dict[str, Any], options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        engine(folders["llama"], settings, **options)


def test_vllm_finds_the_plug_in() -> None:
    from vllm.plugins import load_plugins_by_group

    assert load_plugins_by_group("vllm.general_plugins")["hybrid_kv"] is register
