"""A budget of tokens means about so many attended entries, whatever the method: as counted."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from hybrid_kv.config import HybridConfig
from hybrid_kv.errors import ConfigError
from hybrid_kv.plugins import METHODS, Method
from hybrid_kv.runtime import KVCache
from hybrid_kv.types import LayerShape, ModelInfo
from tests.drive_method import ROTARY

CONTEXT = 601
STEPS = {8: 8, 16: 24}  # by page size: until a page of each layer has left, or more
SHAPES = tuple(LayerShape(idx, 6, 2, 72) for idx in range(4))


def attended(config: HybridConfig) -> float:
    """Entries that a query head attends in a step, on average, after a random prompt."""
    steps = STEPS[config.page_size]
    info = ModelInfo(SHAPES, (ROTARY,) * len(SHAPES))
    kv = KVCache(info, config.replace(index_build="wait"))
    for new in (CONTEXT, *[1] * steps):
        for shape in SHAPES:
            q, k, v = (torch.randn(1, heads, new, shape.head_dim) for heads in (6, 2, 2))
            kv.attend(shape.layer_idx, q, (k, v), None, scale=0.1)
    kv.layers.settle()
    return kv.work.attended / kv.work.steps


def at_budget(name: str, tokens: int, page_size: int, **settings: object) -> HybridConfig:
    config = HybridConfig(method=name, page_size=page_size, **settings)
    params = config.build().at_budget(
        config.params, tokens, context_tokens=CONTEXT, page_size=page_size
    )
    return HybridConfig(method=name, page_size=page_size, params=params)


KEEP_ANSWERS = {"snapkv", "pyramidkv", "ada_snapkv", "ada_pyramid", "headkv", "zipvl"} | {
    *("fastgen", "kvmerger", "look_m", "chain", "share", "locret", "keydiff"),
}
"""Their budget is that of the prompt: a step attends all of the answer beside it."""


SIZES = [(90, 8), (181, 16)], [(90, 16), (181, 8)]
"""Budgets and page sizes: each method meets both of each, and of the pairs every other one."""


@pytest.mark.usefixtures("untrained_heads")
@pytest.mark.parametrize(
    ("name", "tokens", "page_size"),
    [(name, *sizes) for number, name in enumerate(METHODS) for sizes in SIZES[number % 2]],
)
def test_a_step_attends_about_the_budget(name: str, tokens: int, page_size: int) -> None:
    before = HybridConfig(method=name, page_size=page_size)
    config = at_budget(name, tokens, page_size)
    if config.params == before.params:  # attends everything, exactly or in fewer bits
        tokens = CONTEXT + STEPS[page_size] // 2
    if name in KEEP_ANSWERS:
        tokens += (STEPS[page_size] - page_size) // 2
    by_heads = name in (
        "duo_attention",
        "razor_attention",
    )  # keeps whole heads: half a head of eight is as near
    assert attended(config) == pytest.approx(tokens, abs=CONTEXT / 16 if by_heads else page_size)


def test_samples_of_a_large_budget_are_of_what_lies_between_sinks_and_window() -> None:
    """A larger share of that than of the context, of which they take a sixth."""
    assert attended(at_budget("magic_pig", 400, 8)) == pytest.approx(400, abs=8)


@pytest.mark.parametrize("name", [name for name in METHODS if name != "full"])
def test_a_budget_of_one_token_leaves_nothing_or_changes_nothing(name: str) -> None:
    with pytest.raises(ConfigError, match="got 1") if _has_budget(name) else nullcontext():
        at_budget(name, 1, 16)


def _has_budget(name: str) -> bool:
    return at_budget(name, 181, 16).params != HybridConfig(method=name, page_size=16).params


def test_other_parameters_stay_as_they_were_given() -> None:
    cold = {"shared": True, "index": {"kind": "ivf", "nprobe": 5}}
    given = at_budget("retrieval_attention", 100, 8, cold=cold)
    assert (given.cold.shared, given.cold.index.kind, given.cold.index.nprobe) == (True, "ivf", 5)
    assert given.cold.top_k == 100 - 8 - 24 - 4


@pytest.mark.parametrize("page_size", [1, 8, 16])
@pytest.mark.parametrize(
    ("name", "recent"),
    [
        *(("scissorhands", 10), ("keyformer", 0.3 * 181), ("pyramidkv", 8)),
        *(("ada_pyramid", 32), ("snapkv", 32), ("h2o", 181 / 2), ("a2sf", 181 / 2)),
    ],
)
def test_the_window_of_a_budget_is_the_papers_in_pages(
    name: str, recent: float, page_size: int
) -> None:
    window = at_budget(name, 181, page_size).window_tokens
    assert window == max(page_size, int(recent) // page_size * page_size)


@pytest.mark.parametrize("name", ["ada_snapkv", "tova"])
def test_a_budget_is_halved_between_what_is_kept_and_what_is_found(name: str) -> None:
    given = at_budget(name, 181, 16, demote="offload", cold={"index": "flat"})
    assert given.budget_tokens - given.window_tokens >= given.cold.top_k > 60
    extra = (STEPS[16] - 16) // 2 if name in KEEP_ANSWERS else 0
    assert attended(given) == pytest.approx(181 + extra, abs=16)


def test_whole_heads_share_what_sinks_window_and_newest_leave() -> None:
    """Of 601 tokens in pages of 8: a page of sinks, a window of 40, half a page that is newest."""
    rest = 181 - 8 - 40 - 4
    given = at_budget("duo_attention", 181, 8)
    assert (given.sink_tokens, given.window_tokens) == (8, 40)
    assert given.retrieval_ratio == pytest.approx(rest / (601 - 48))
    halved = at_budget("duo_attention", 181, 8, demote="offload", cold={"index": "flat"})
    assert halved.cold.top_k == rest // 2
    assert halved.retrieval_ratio == pytest.approx((rest - rest // 2) / (601 - 48))


def test_a_window_is_given_up_by_pages_where_a_budget_is_small() -> None:
    given = at_budget("snapkv", 40, 16)
    assert (given.window_tokens, given.budget_tokens) == (16, 40 - 8)


def test_a_method_that_knows_no_budget_is_refused() -> None:
    with pytest.raises(ConfigError, match="Method does not say how a budget of tokens sets"):
        Method.at_budget(None, 100, context_tokens=1000, page_size=16)
