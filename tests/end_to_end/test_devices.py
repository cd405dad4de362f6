"""The shipped model on each device there is: what the CPU computes in float32 is the reference."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import hybrid_kv as hkv
from hybrid_kv.eval.needle import make_sample
from hybrid_kv.models.cache_state import passing
from hybrid_kv.models.load import NEEDLE_PATH

NEW = 8  # more than a window of 4: pages leave it while tokens are made
TIERED: dict[str, Any] = {
    **{"page_size": 4, "sink_tokens": 4, "window_tokens": 4},
    "index_build": "wait",
}
SMALL: dict[str, Any] = {**TIERED, "prefill_chunk_tokens": 150}
EXACT: dict[str, dict[str, Any]] = {
    "full": {"method": "full"},
    "quest": {"method": "quest", "page_budget": "all", "dense_layers": 0},
    "offloaded": {"method": "retrieval_attention", "cold": {"top_k": "all"}, **TIERED},
    "in chunks": {"method": "retrieval_attention", "cold": {"top_k": "all"}, **SMALL},
    "scanned": {"method": "flat", "cold": {"top_k": 2000}, **TIERED},
    "spare pages": {
        "method": "hybrid",
        "cold": {"top_k": "all"},
        "spare_tokens": 160,
        "page_budget": "all",
        **TIERED,
    },
}
SPARSE: dict[str, dict[str, Any]] = {
    "quest": {"method": "quest", "page_budget": 9, "dense_layers": 1, "page_size": 5},
    "hybrid": {
        "method": "hybrid",
        "cold": {"top_k": 3, "index": "flat", "estimate": "none"},  # with it the text stays
        "spare_tokens": 160,
        "page_budget": 1,
        **TIERED,
    },
}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@cache
def question() -> torch.Tensor:
    """[1, tokens]: a context with its first question."""
    sample = make_sample("key_value", 777, num_records=24, num_questions=1, seed=5)
    return torch.tensor([[*sample.context.tolist(), *sample.questions[0].ids]])


@pytest.fixture
def ids() -> torch.Tensor:
    return question()


def needle(device: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(NEEDLE_PATH, dtype=torch.float32).to(device).eval()


def plain_tokens(model: PreTrainedModel, ids: torch.Tensor, **options: Any) -> list[list[int]]:
    """Greedy tokens, ids included, never ended by an end token."""
    count = {"max_new_tokens": NEW, "min_new_tokens": NEW}
    out = model.generate(ids, do_sample=False, pad_token_id=0, **count, **options)
    return out.tolist()  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def expected() -> list[int]:
    return plain_tokens(needle("cpu"), question())[0][question().shape[1] :]


@cache
def by_the_definitions(method: str) -> list[int]:
    """What a CPU says at a small budget."""
    return tokens_on("cpu", question(), {**SPARSE[method], "backend": "reference"})


def tokens_on(device: str, ids: torch.Tensor, settings: dict[str, Any]) -> list[int]:
    config = hkv.HybridConfig(**settings)
    with hkv.load("needle", device=device, dtype="float32", config=config) as llm:
        assert llm.model.device.type == device
        got = llm.generate(ids[0].tolist(), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
    return got.token_ids


@pytest.mark.parametrize("method", EXACT)
def test_a_full_budget_gives_the_tokens_of_full_attention(
    device: str, ids: torch.Tensor, expected: list[int], method: str
) -> None:
    assert tokens_on(device, ids, EXACT[method]) == expected


@pytest.mark.parametrize("method", SPARSE)
def test_a_small_budget_gives_the_tokens_of_the_definitions(
    device: str, ids: torch.Tensor, expected: list[int], method: str
) -> None:
    defined = by_the_definitions(method)
    assert tokens_on(device, ids, SPARSE[method]) == defined
    assert defined != expected, "the budget must be small enough to change the text"


def test_an_attached_model_answers_as_without(
    device: str, ids: torch.Tensor, expected: list[int]
) -> None:
    model, here = needle(device), ids.to(device)
    with hkv.attach(model, hkv.HybridConfig(**EXACT["spare pages"])) as runtime:
        out = plain_tokens(model, here, **passing(runtime.cache()))
    assert out[0][ids.shape[1] :] == expected
    assert plain_tokens(model, here)[0][ids.shape[1] :] == expected


def padded_rows(device: str, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    rows = torch.cat([ids, ids.roll(101, 1)]).to(device)
    mask = torch.ones_like(rows)
    mask[1, :97] = 0
    return {"ids": rows, "attention_mask": mask}


@pytest.fixture(scope="module")
def rows_without() -> list[list[int]]:
    return plain_tokens(needle("cpu"), **padded_rows("cpu", question()))


def test_rows_of_a_padded_batch_are_as_without(
    device: str, ids: torch.Tensor, rows_without: list[list[int]]
) -> None:
    model = needle(device)
    with hkv.attach(model, hkv.HybridConfig(**EXACT["offloaded"])) as runtime:
        tiered = plain_tokens(model, **padded_rows(device, ids), **passing(runtime.cache()))
    assert tiered == rows_without


def test_a_kept_context_answers_as_a_whole_prompt(
    device: str, ids: torch.Tensor, expected: list[int]
) -> None:
    config = hkv.HybridConfig(**EXACT["spare pages"])
    with hkv.load("needle", device=device, dtype="float32", config=config) as llm:
        kept = llm.context(ids[:, :400])
        for _ in range(2):  # the second question finds the cache as the first one did
            got = kept.ask(ids[:, 400:], max_new_tokens=6, min_new_tokens=6)
            assert got.token_ids == expected[:6]


@pytest.mark.gpu(real=True)
def test_on_a_gpu_the_kernels_serve_and_not_the_definitions(ids: torch.Tensor) -> None:
    """Else the tests above would say nothing about them."""
    pytest.importorskip("triton", reason="Triton is not installed: pip install 'hybrid-kv[triton]'")
    config = hkv.HybridConfig(**SPARSE["hybrid"])
    with hkv.load("needle", device="cuda", dtype="bfloat16", config=config) as llm:
        got = llm.generate(ids[0].tolist(), max_new_tokens=NEW)
    served = {op for op, backend in got.backends.items() if backend == "triton"}
    assert served >= {"append", "attend_pages", "choose_pages", "merge"}
