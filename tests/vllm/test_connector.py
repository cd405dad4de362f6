"""vLLM itself with saved contexts: what a prompt begins with is loaded, and the tokens stay."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; run scripts/check_engines")

from vllm import LLM

from hybrid_kv.errors import ConfigError
from hybrid_kv.vllm import connector as connector_module
from tests.vllm.prefixes import save_prefix
from tests.vllm.test_engine import engine, folders, layers, prompts, tokens

_ = folders  # a fixture

BASE = 1300  # tokens of the context: ten blocks of 128 and a part


def transfer(folder: Path, **more: Any) -> dict[str, Any]:
    extra = {"contexts": str(folder)} | more
    own = {"kv_connector": "HybridContexts", "kv_role": "kv_both"}
    return {"kv_transfer_config": own | {"kv_connector_extra_config": extra}}


@pytest.fixture(scope="module")
def base() -> list[int]:
    return prompts([BASE], seed=20)[0]["prompt_token_ids"]


@pytest.fixture(scope="module")
def asked(base: list[int]) -> list[dict[str, list[int]]]:
    """Prompts that go on after the context, inside of it, and that have nothing of it."""
    mores = [one["prompt_token_ids"] for one in prompts([40, 300, 7], seed=21)]
    begun = [base + mores[0], base[:700] + mores[1], base, mores[2]]
    return [{"prompt_token_ids": one} for one in begun]


@pytest.fixture(scope="module")
def stock(folders: dict[str, Path], asked: list[Any]) -> list[list[int]]:
    return tokens(engine(folders["llama"], None), asked)


@pytest.fixture
def contexts(folders: dict[str, Path], base: list[int], tmp_path: Path) -> Path:
    save_prefix(folders["llama"], tmp_path / "book.hkv", base)
    return tmp_path


def scheduler(llm: LLM) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler


@pytest.mark.parametrize("settings", [None, {"budget": "all"}])
def test_the_tokens_are_those_without_contexts(
    folders: dict[str, Path],
    contexts: Path,
    asked: list[Any],
    stock: list[list[int]],
    settings: Any,
) -> None:
    llm = engine(folders["llama"], settings, **transfer(contexts))
    loads: list[tuple[int, int]] = []
    own = scheduler(llm).connector
    plain = own.build_connector_meta

    def watched(output: Any) -> Any:
        found = plain(output)
        loads.extend((load.begin, load.end) for load in found.loads)
        return found

    own.build_connector_meta = watched
    assert [tokens(llm, [one])[0] for one in asked] == stock
    assert loads == [(0, 1280)], "the others find their blocks in the prefix cache"
    llm.reset_prefix_cache()
    assert tokens(llm, asked) == stock, "the others share its blocks in the step that loads them"
    assert loads[1:] == [(0, 1280)]
    llm.reset_prefix_cache()
    assert tokens(llm, asked[1:2]) == stock[1:2]
    assert loads[2:] == [(0, 640)]


def test_what_was_loaded_is_searched(folders: dict[str, Path], tmp_path: Path) -> None:
    """A search with a budget of most entries finds what it finds where the prompt was computed."""
    (whole,) = prompts([5600], seed=22)
    ids = whole["prompt_token_ids"]
    save_prefix(folders["llama"], tmp_path / "long.hkv", ids[:5000])
    how: dict[str, Any] = {"budget": "1000", "window_tokens": 128}
    alone = engine(folders["llama"], None, max_model_len=8192)
    stock = tokens(alone, [whole], count=8)[0]
    llm = engine(folders["llama"], how, max_model_len=8192, **transfer(tmp_path))
    ours = tokens(llm, [whole], count=8)[0]
    for one in layers(llm):
        assert one.index is not None
        assert int(one.index.coded.sum()) > 5000
    assert sum(a == b for a, b in zip(ours, stock, strict=True)) >= 4


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_context_that_goes_while_it_is_taken(
    folders: dict[str, Path],
    contexts: Path,
    asked: list[Any],
    stock: list[list[int]],
    policy: str,
) -> None:
    options = transfer(contexts)
    options["kv_transfer_config"]["kv_load_failure_policy"] = policy
    llm = engine(folders["llama"], {"budget": "all"}, **options)
    own = scheduler(llm).connector
    plain = own.build_connector_meta

    def removed(output: Any) -> Any:
        shutil.rmtree(contexts / "book.hkv", ignore_errors=True)
        return plain(output)

    own.build_connector_meta = removed
    found = tokens(llm, asked[:1])
    assert found == (stock[:1] if policy == "recompute" else [[]])
    assert tokens(llm, asked[3:]) == stock[3:], "and the engine goes on"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"contexts": 3}, "must have contexts, a folder"),
        ({"budget": "2%"}, "must have contexts, a folder"),
        ({"contexts": "/nowhere"}, "must be a folder with saved contexts"),
    ],
)
def test_wrong_settings(folders: dict[str, Path], tmp_path: Path, more: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        engine(folders["llama"], None, **transfer(tmp_path, **more))


def test_layers_of_several_kinds_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    off = {"disable_hybrid_kv_cache_manager": False}
    with pytest.raises((ConfigError, ValueError), match="does not support HMA"):
        engine(folders["gemma"], None, **off, **transfer(tmp_path))


def test_the_connector_is_registered_by_name() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    found = KVConnectorFactory.get_connector_class_by_name("HybridContexts")
    assert found is connector_module.HybridContexts
