"""Calls of `generate(exact=True)` with budgets at which methods draft wrong tokens now and then."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

import hybrid_kv as hkv
from hybrid_kv.api.generation import Generation
from hybrid_kv.api.turn import Turn
from hybrid_kv.models.exact_steps import ExactWork
from tests.contracts.architectures import build
from tests.contracts.edges.calls import prompt

PROMPT = 90
NEW = 8
_SIZES: dict[str, Any] = {
    "page_size": 4,
    "sink_tokens": 4,
    "window_tokens": 8,
    "dense_layers": 0,
    "selection_layers": [0],
    "cold.top_k": 2,
}


def small(method: str = "hybrid", **more: Any) -> dict[str, Any]:
    """Settings of a method that reads few entries of a context of `PROMPT` tokens."""
    own = hkv.HybridConfig(method=method).flat()
    names = {*own, *(f"cold.{name}" for name in own.get("cold", {}))}
    sizes = {name: size for name, size in _SIZES.items() if name in names}
    if "spare_tokens" not in names and "page_budget" in names:
        sizes["page_budget"] = 3
    if "selection_layers" in names:
        sizes["top_k"] = 3
    return {"method": method, **sizes, **more}


def ids(seed: int = 0, length: int = PROMPT) -> Tensor:
    return prompt(1, length, seed)


def answer(llm: hkv.LLM, given: Tensor, cache: Any = None, **options: Any) -> Generation:
    """What a turn of a cache answers, which is whole behind it."""
    cache = llm.runtime.cache() if cache is None else cache
    found = Turn(llm, cache, given, {"max_new_tokens": NEW, **options}).run()
    cache.check_integrity()
    if options.get("exact"):
        assert cache.exact_tokens == cache.get_seq_length()
        assert cache.get_seq_length() == given.shape[1] + len(found.token_ids) - 1
    return found


def exact_tokens(
    model: PreTrainedModel, config: Any, given: Tensor, **options: Any
) -> tuple[list[int], ExactWork]:
    """What a call with exact=True answers, and what it took."""
    with hkv.load(model, config=config) as llm:
        found = answer(llm, given, **{"exact": True, **options})
    assert found.exact is not None
    return found.token_ids, found.exact


def full_tokens(model: PreTrainedModel, given: Tensor, **options: Any) -> list[int]:
    """What `full` answers."""
    with hkv.load(model, config="full") as llm:
        return answer(llm, given, **options).token_ids


@cache
def want(architecture: str = "llama", seed: int = 0, new: int = NEW) -> list[int]:
    """What `full` answers to `ids(seed)`."""
    return full_tokens(build(architecture), ids(seed), max_new_tokens=new)
